"""`narrowgauge doctor` tries the sanitizers and Triton, and says what has run on which GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.running.sanitizer import Sanitizer
from narrowgauge.harness.tools.doctor import facts as doctor
from narrowgauge.native.runtime import cuda, host
from tests.paths import ROOT


def guard(name):
    (fact_,) = (f for f in doctor.tool_facts() if f.name == name)
    return fact_


@pytest.mark.long
def test_what_the_guards_need_is_tried():
    fact_ = guard("sanitizers of the compiler")
    try:
        Sanitizer().close()
    except BackendError:
        assert not fact_.ok
    else:
        assert (fact_.value, fact_.ok) == ("address and undefined link and run, for --sanitize", True)


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 3.9.1 64.0", (True, "3.9.1", "TRITON_INTERPRET=1", "127.6 to E4M3 is 64.0, not 128")),
        ("echo 3.9.1 128.0", (True, "3.9.1", "TRITON_INTERPRET=1", "127.6 to E4M3 is 128")),
        ("echo \"ModuleNotFoundError: No module named 'triton'\" >&2; exit 1", (False, "missing")),
        ("echo AttributeError: jit >&2; exit 1", (False, "interpreter fails", "AttributeError: jit")),
    ],
)
def test_triton_is_tried_by_its_interpreter(monkeypatch, tmp_path, script, expected):
    """An interpreter of Python that answers for Triton's."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$TRITON_INTERPRET" = 1 ] && [ -f "$1" ] || exit 2\n{script}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    fact_ = doctor._triton()
    ok, *texts = expected
    assert fact_.ok == ok
    assert all(text in fact_.value for text in texts), fact_.value
    assert ok or "pip install 'narrowgauge[triton]'" in fact_.remedy


@pytest.mark.parametrize(
    ("capability", "ok", "text"),
    [
        (None, True, "sm_90 (H100 and H200)"),
        ((9, 0), True, "this GPU is sm_90"),
        ((10, 0), False, "this GPU is sm_100, which has run no test"),
    ],
)
def test_what_was_verified_is_said_of_the_gpu_at_hand(monkeypatch, capability, ok, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    kernels, oracle = doctor._verified()
    assert (kernels.name, oracle.name) == ("native kernels", "reference")
    for fact_ in (kernels, oracle):
        assert fact_.ok == ok
        assert text in fact_.value
        assert ok or "make test DEVICE=cuda" in fact_.remedy
    assert kernels.value.endswith("compiled alone for sm_80, sm_100a, sm_120a")


def test_an_architecture_that_has_run_the_tests_has_a_baseline():
    assert {path.stem for path in (ROOT / "reports" / "baselines").glob("sm_*.json")} == set(cuda.RUN_ON)
