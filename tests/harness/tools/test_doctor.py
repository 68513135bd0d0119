"""`narrowgauge doctor` tries the sanitizers."""

from __future__ import annotations

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.running.sanitizer import Sanitizer
from narrowgauge.harness.tools import doctor
from narrowgauge.native.runtime import host


def guard(name):
    (fact_,) = (f for f in doctor.sanitizer_facts() if f.name == name)
    return fact_


def test_what_the_guards_need_is_tried():
    fact_ = guard("sanitizers of the compiler")
    try:
        Sanitizer().close()
    except BackendError:
        assert not fact_.ok
    else:
        assert (fact_.value, fact_.ok) == ("address and undefined link and run, for --sanitize", True)


def test_a_compiler_without_sanitizers_says_what_to_install(monkeypatch, fresh_compiler, tmp_path):
    """A compiler that does not link with the sanitizers, and a missing compiler."""
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\ncat >&2 <<END\ncannot find libasan.so\nEND\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    fact_ = guard("sanitizers of the compiler")
    assert (fact_.value, fact_.ok) == ("do not link: cannot find libasan.so", False)
    assert "dnf install libasan libubsan" in fact_.remedy
    host.compiler.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    fact_ = guard("sanitizers of the compiler")
    assert (fact_.value, fact_.ok) == ("missing", False)
    assert "CXX" in fact_.remedy
