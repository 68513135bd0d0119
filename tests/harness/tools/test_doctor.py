"""`narrowgauge doctor` tries the sanitizers."""

from __future__ import annotations

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.records.environment import Fact
from narrowgauge.harness.running.sanitizer import Sanitizer
from narrowgauge.harness.tools import doctor
from narrowgauge.harness.tools.sanitize import compute_sanitizer
from narrowgauge.native.runtime import host


def guard(name):
    (found,) = (f for f in doctor.guards() if f.name == name)
    return found


def test_what_the_guards_need_is_tried():
    found = guard("sanitizers of the compiler")
    try:
        Sanitizer().close()
    except BackendError:
        assert not found.ok
    else:
        assert (found.value, found.ok) == ("address and undefined link and run, for --sanitize", True)


def test_a_compiler_without_sanitizers_says_what_to_install(monkeypatch, fresh_compiler, tmp_path):
    """A compiler that does not link with the sanitizers, and a missing compiler."""
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\ncat >&2 <<END\ncannot find libasan.so\nEND\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    found = guard("sanitizers of the compiler")
    assert (found.value, found.ok) == ("do not link: cannot find libasan.so", False)
    assert "dnf install libasan libubsan" in found.remedy
    host.compiler.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = guard("sanitizers of the compiler")
    assert (found.value, found.ok) == ("missing", False)
    assert "CXX" in found.remedy


def test_compute_sanitizer_is_a_path_or_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(compute_sanitizer, "_PLACES", (str(tmp_path),))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    found = doctor._compute_sanitizer()
    assert (found.value, found.ok) == ("missing", False)
    assert found.remedy.startswith("only `narrowgauge sanitize` needs it: compute-sanitizer is neither on the PATH")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert doctor._compute_sanitizer() == Fact("compute-sanitizer", str(tool))
