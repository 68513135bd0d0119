"""`narrowgauge.watch` judges calls of running functions and ops, and changes nothing for the program."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge
from tests.paths import ROOT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
OPS = torch.ops.narrowgauge_watched


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = narrowgauge.quantize(x, "nvfp4")
    assert q.amax is not None
    return q.codes, q.scales, q.amax


def wrong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, amax = quantize(x)
    return codes ^ 1, scales, amax


def into(out: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """Overwrites its input too."""
    codes, found, _ = quantize(x)
    out.copy_(codes)
    scales.copy_(found)
    x.zero_()


class Layer:
    @staticmethod
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return quantize(x)

    @classmethod
    def of_class(cls, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return quantize(x)

    def method(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return quantize(x)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """Ops registered in each way."""
    with torch.library._scoped_library("narrowgauge_watched", "DEF") as library:
        three = "(Tensor x) -> (Tensor, Tensor, Tensor)"
        for name, keys in (
            ("per_device", ("CPU", "CUDA")),
            ("explicit", ("CompositeExplicitAutograd",)),
            ("implicit", ("CompositeImplicitAutograd",)),
        ):
            library.define(name + three)
            for key in keys:
                library.impl(name, quantize, key)
        library.define("wrong" + three)
        library.impl("wrong", wrong, "CompositeExplicitAutograd")
        library.define("into(Tensor(a!) out, Tensor(b!) scales, Tensor(c!) x) -> ()")
        library.impl("into", into, "CompositeExplicitAutograd")
        library.define("smooth(Tensor x) -> Tensor")
        library.impl("smooth", torch.sin, "CompositeImplicitAutograd")
        yield


@torch.library.custom_op("narrowgauge_decorated::quantize", mutates_args=())
def decorated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return quantize(x)


@decorated.register_fake
def fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    byte = torch.uint8
    return (
        x.new_empty(rows, columns // 2, dtype=byte), x.new_empty(rows, columns // 16, dtype=byte), x.new_empty(1),
    )  # fmt: skip


def table(op: Any) -> str:
    """The registered kernels of an op."""
    return torch._C._dispatch_dump(op.default.name())


def registered(op: Any) -> set[str]:
    """Entries of an op in torch's list of kernels of Python code."""
    return {name for name in torch.library._impls if name.startswith(op.default.name().replace("::", "/") + "/")}


def skip(result: Any, *args: Any) -> None:
    """An adapter that judges no call."""


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NARROWGAUGE_FAILURES", str(tmp_path))
    return tmp_path


@pytest.mark.sampled(0)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["per_device", "decorated", "explicit", "implicit"])
def test_ops_of_each_registration_are_judged_and_restored(name: str, device: str, x: torch.Tensor) -> None:
    op = torch.ops.narrowgauge_decorated.quantize if name == "decorated" else getattr(OPS, name)
    before, listed, x = table(op), registered(op), x.to(device)
    expected = op(x)
    with narrowgauge.watch(decorated if name == "decorated" else op, every=2) as watched:
        assert table(op) != before
        results = [op(x) for _ in range(4)]
        assert op(x.to("meta"))[0].device.type == "meta" if name == "decorated" else True
    assert (watched.calls, watched.judged, watched.failed) == (4, 2, 0)
    assert "error" not in watched.summary()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))
    assert table(op) == before
    assert registered(op) == listed


@pytest.mark.sampled(0)
@pytest.mark.parametrize("device", DEVICES)
def test_a_failure_has_the_report_and_a_command(device: str, x: torch.Tensor, capsys: Any) -> None:
    with narrowgauge.watch(OPS.wrong, every=2, recipe="nvfp4", wait=120) as watched:
        for _ in range(3):
            OPS.wrong(x.to(device))
    assert [failure.call for failure in watched.failures] == [1, 3]
    failure = watched.failures[0]
    assert "512 of 1 024 codes differ" in failure.report
    assert failure.report in capsys.readouterr().err
    program, option, code = shlex.split(failure.reproduction)
    assert (program, option) == ("python", "-c")
    with pytest.raises(narrowgauge.WrongResult, match="512 of 1 024 codes differ"):
        exec(code, {})


@pytest.mark.long
def test_arguments_that_the_op_changes(x: torch.Tensor) -> None:
    """The adapter gets inputs of before the call, and the outputs of after it as the result."""

    def adapter(result: Any, out: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
        assert not out.any()
        assert not result["x"].any()
        return {"x": x, "codes": result["out"], "scales": result["scales"]}

    out, scales = torch.zeros(16, 32, dtype=torch.uint8), torch.zeros(16, 4, dtype=torch.uint8)
    with narrowgauge.watch(OPS.into, adapter) as watched:
        OPS.into(out, scales, x)
    assert (watched.judged, watched.failed) == (1, 0), watched.summary()


@pytest.mark.parametrize("name", ["quantize", "of_class", "method"])
def test_methods_are_watched_and_restored(name: str, x: torch.Tensor) -> None:
    before = Layer.__dict__[name]
    with narrowgauge.watch(getattr(Layer, name), skip) as watched:
        getattr(Layer(), name)(x)
        assert type(Layer.__dict__[name]) is type(before)
    assert watched.calls == 1
    assert Layer.__dict__[name] is before


def test_every_name_of_a_function_in_a_module(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "another_name", quantize, raising=False)
    original = quantize
    with narrowgauge.watch(quantize, skip) as watched:
        sys.modules[__name__].another_name(x)  # type: ignore[attr-defined]
        original(x)  # a reference that no module holds
    assert watched.calls == 1
    assert quantize is original


@pytest.mark.long
def test_errors_of_the_watcher_stay_inside(x: torch.Tensor, capsys: Any) -> None:
    def adapter(result: Any, x: torch.Tensor) -> dict[str, Any]:
        raise KeyError("of the adapter")

    with narrowgauge.watch(quantize, adapter, pending=1, every=1):
        for _ in range(3):
            quantize(x)
    assert "3 with an error: KeyError: 'of the adapter'" in capsys.readouterr().err
    with narrowgauge.watch(
        quantize, lambda result, x: {"x": x, "codes": result[0], "scales": result[1][:3]}
    ) as watched:
        quantize(x)
    assert (watched.judged, watched.failed) == (0, 0)
    assert "ValueError: scales" in watched.summary()


def test_exceptions_of_the_function_pass(x: torch.Tensor) -> None:
    with narrowgauge.watch(OPS.explicit, skip, every=1, pending=1) as watched:
        for _ in range(2):
            with pytest.raises(TypeError, match="int64"):
                OPS.explicit(x.long())
        OPS.explicit(x)
    assert watched.calls == 3
    assert "1 not judged: the adapter returned None" in watched.summary()
    assert "2 not judged: the function raised an exception" in watched.summary()


def test_gradients_and_modes_stay(x: torch.Tensor) -> None:
    with narrowgauge.watch(OPS.smooth, skip, every=1) as watched, torch.autocast("cpu"):
        given = x.clone().requires_grad_()
        OPS.smooth(given).sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert given.grad is not None
    assert torch.equal(given.grad, x.cos())
    assert "1 not judged: the adapter returned None" in watched.summary()


@pytest.mark.long
def test_calls_without_numbers_are_not_judged(x: torch.Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def identity(x: torch.Tensor) -> torch.Tensor:
        return x

    sys.modules[__name__].identity = identity  # type: ignore[attr-defined]
    with narrowgauge.watch(identity, every=1) as watched:
        found = sys.modules[__name__].identity  # type: ignore[attr-defined]
        with FakeTensorMode() as mode:
            found(x)
        found(mode.from_tensor(x))
        found(x.to("meta"))
    assert (watched.calls, watched.judged) == (3, 0)
    assert "error" not in watched.summary()


@pytest.mark.long
def test_compiled_code_sees_no_watcher(x: torch.Tensor) -> None:
    with narrowgauge.watch(doubled, skip) as watched:
        compiled = torch.compile(lambda x: sys.modules[__name__].doubled(x) + 1, backend="eager", fullgraph=True)  # type: ignore[attr-defined]
        assert torch.equal(compiled(x), 2 * x + 1)
    assert watched.calls == 0


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.long
def test_calls_are_dropped_when_the_judge_is_behind(x: torch.Tensor) -> None:
    with narrowgauge.watch(quantize, every=1, pending=2) as watched:
        for _ in range(50):
            quantize(x)
    assert watched.judged + watched.dropped == 50
    assert watched.dropped > 0
    assert "dropped: the judge was behind" in watched.summary()


def test_the_first_call_and_every_nth_after_it_are_judged() -> None:
    watched = narrowgauge.watch(quantize, every=3)
    assert [watched.counted() for _ in range(7)] == [1, 0, 0, 4, 0, 0, 7]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="every is 0"):
        narrowgauge.watch(quantize, every=0)
    with pytest.raises(TypeError, match="no argument layuot"):
        narrowgauge.watch(quantize, layuot="128x4")
    with pytest.raises(TypeError, match="needs an adapter"):
        narrowgauge.watch(quantize, assertion=narrowgauge.assert_gemm)
    with pytest.raises(ValueError, match="no module or class"):
        narrowgauge.watch(lambda x: x).start()
    with pytest.raises(TypeError, match="Python function; not Linear"):
        narrowgauge.watch(torch.nn.Linear(2, 2)).start()


VARIABLE = """
import narrowgauge, vq
watched = narrowgauge.watch(vq.quantize, every=2)
"""
PROGRAM = """
import torch
import narrowgauge
import vq
for _ in range(3):
    vq.quantize(torch.ones(16, 32))
"""
QUANTIZER = """
def quantize(x):
    import narrowgauge
    q = narrowgauge.quantize(x, "nvfp4")
    return q.codes ^ 1, q.scales
"""


@pytest.mark.long
def test_the_variable(tmp_path: Path) -> None:
    for name, text in (("vw", VARIABLE), ("program", PROGRAM), ("vq", QUANTIZER)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    environment = os.environ | {"NARROWGAUGE_WATCH": "vw:watched,vw:missing", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "vw:missing: not started" in done.stderr
    assert "3 calls, 2 judged, 2 failed" in done.stderr
    assert "narrowgauge.assert_quantized(" in done.stderr


@pytest.mark.long
def test_the_example() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    done = subprocess.run(
        [sys.executable, "examples/watch_torchao.py"], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "watch nvfp4_quantize: 8 calls, 2 judged, 0 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_attention_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    from narrowgauge.examples import cached_attention

    cached_attention.main()
    assert "watch paged_attention: 4 calls, 2 judged, 0 failed" in capsys.readouterr().out


@pytest.mark.long
def test_wrong_attention_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from narrowgauge.examples import cached_attention

    right = cached_attention.paged_attention

    def paged_attention(q, keys, values, pages, lengths, *others):
        return right(q, keys, values, pages.flip(1), lengths, *others)

    monkeypatch.setattr(cached_attention, "paged_attention", paged_attention)
    cached_attention.main()
    assert "watch paged_attention: 4 calls, 2 judged, 2 failed" in capsys.readouterr().out
