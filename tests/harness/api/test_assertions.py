"""The assertions on results of `quantize`, `dequantize` and `transform`, and `explain`."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.harness.api.default_settings import current_settings
from narrowgauge.harness.api.verdict import Verdict, WrongResult
from narrowgauge.spec.recipes import find_recipe, recipe_names

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture(autouse=True)
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of saved arguments."""
    monkeypatch.setenv("NARROWGAUGE_FAILURES", str(tmp_path / "failures"))
    return tmp_path / "failures"


def matrix(rows: int = 32, columns: int = 64, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Normal random numbers with zeros, large and tiny blocks, bfloat16 (M, K)."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x[0, :32] = 0
    x[1] *= 2.0**-100
    x[2, :16] *= 500
    return x.bfloat16().to(device)


def wrong(assertion: Callable[..., None], *args: Any, **kwargs: Any) -> Verdict:
    """The verdict of a failing assertion."""
    with pytest.raises(WrongResult) as caught:
        assertion(*args, **kwargs)
    assert isinstance(caught.value, AssertionError)
    assert str(caught.value) == str(caught.value.verdict)
    return caught.value.verdict


def options(recipe: str, x: torch.Tensor) -> dict[str, Any]:
    """Arguments that a recipe needs."""
    found = find_recipe(recipe)
    given: dict[str, Any] = {"random": (7, 3)} if found.rounding == "stochastic" else {}
    return given | ({"scale": torch.tensor([3.0], device=x.device)} if found.tensor_scale == "given" else {})


@pytest.mark.parametrize("device", DEVICES)
def test_results_of_the_reference_are_correct_for_every_recipe(device: str) -> None:
    x = matrix(columns=128, device=device)
    for recipe in recipe_names():
        given = options(recipe, x)
        q = ng.quantize(x, recipe, **given)
        packing = find_recipe(recipe).packing
        ng.assert_quantized(x, q.codes, q.scales, recipe, amax=q.amax, nibbles=packing, **given)
        values = ng.dequantize(q, torch.bfloat16)
        encode = {} if q.tensor_scale is None else {"tensor_scale": q.tensor_scale, "tensor_scale_is": "encode"}
        if find_recipe(recipe).tensor_scale == "amax/max":
            encode["tensor_scale_is"] = "decode"
        ng.assert_dequantized(q.codes, q.scales, values, recipe, amax=q.amax, nibbles=packing, **encode)


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_stage_is_named_first_with_its_elements_in_bits(device: str) -> None:
    x = matrix(device=device)
    q = ng.quantize(x, "nvfp4")
    assert q.amax is not None
    assert q.tensor_scale is not None
    codes, scales = q.codes.clone(), q.scales.clone()
    codes[3, 5] ^= 1
    scales[4, 1] += 1
    cases: dict[str, dict[str, Any]] = {
        "amax": {"amax": q.amax * 2},
        "tensor scale": {"amax": q.amax, "tensor_scale": q.tensor_scale / 2, "tensor_scale_is": "encode"},
        "scales": {"scales": scales, "amax": q.amax},
        "codes": {"codes": codes, "amax": q.amax},
    }
    for stage, changed in cases.items():
        verdict = wrong(ng.assert_quantized, **{"x": x, "codes": q.codes, "scales": q.scales} | changed)
        assert verdict.message.startswith(f"{stage}: "), verdict.message
        assert next(entry["stage"] for entry in verdict.stages if entry["sentence"]) == stage
        assert verdict.findings[0]["stage"] == stage
        assert "expected bits" in str(verdict)
    lines = [line.split() for line in str(verdict).splitlines()]
    assert ["row", "3"] in lines
    assert ["column", "10"] in lines
    assert f"on {x.device}" in str(verdict)


def test_the_cause_comes_first_and_the_command_last() -> None:
    x = matrix()
    q = ng.quantize(x, "nvfp4")
    swapped = q.codes >> 4 | q.codes << 4
    ng.assert_quantized(x, swapped, q.scales, amax=q.amax, nibbles="high-first")
    lines = str(wrong(ng.assert_quantized, x, swapped, q.scales, amax=q.amax)).splitlines()
    assert lines[0].startswith("explained exactly by: ")
    assert "codes: " in lines[1]
    assert lines[-1].startswith("python -c ")


def test_a_few_wrong_codes_prove_no_cause() -> None:
    """-0 of three elements: another mistake may give these bytes."""
    x = matrix().clone()
    x[:, :3] = 1.0
    x[0, :3] = -0.0
    q = ng.quantize(x, "nvfp4")
    codes = q.codes.clone()
    codes[0, :2] &= torch.tensor([0x77, 0xF7], dtype=torch.uint8, device=codes.device)
    verdict = wrong(ng.assert_quantized, x, codes, q.scales, amax=q.amax)
    assert "explained exactly" not in str(verdict)
    assert "wrong elements are few" in str(verdict)


def test_layouts_and_conventions_of_other_libraries() -> None:
    x = matrix(130, 80)
    q = ng.quantize(x, "nvfp4")
    assert q.amax is not None
    assert q.tensor_scale is not None
    for layout in ("linear", "padded", "128x4", "8x4", "blackwell-ragged"):
        stored = ng.adapt.stored_as(q, layout=layout, nibbles="high-first")
        given: dict[str, Any] = {"layout": layout, "nibbles": "high-first", "tensor_scale_is": "encode"}
        given["tensor_scale"] = q.tensor_scale
        ng.assert_quantized(x, stored.codes, stored.scales, **given)
        dirty = stored.scales.clone()
        dirty[-1, -1] = 1
        if layout == "8x4":  # its padding may hold any bytes
            ng.assert_quantized(x, stored.codes, dirty, **given)
        if layout in ("128x4", "blackwell-ragged"):
            assert wrong(ng.assert_quantized, x, stored.codes, dirty, **given).message.startswith("layout: ")
    mx = ng.quantize(x, "mxfp8-e4m3")
    stored = ng.adapt.stored_as(mx, transposed=True)
    ng.assert_quantized(x, stored.codes, stored.scales, "mxfp8-e4m3", transposed=True)
    both = ng.quantize_both(x.T.contiguous(), "mxfp8-e4m3")[1]
    assert both is not None
    assert both.transposed
    ng.assert_quantized(x, both.codes, both.scales, "mxfp8-e4m3", transposed=True)
    ng.assert_quantized(
        x.unflatten(0, (2, 65)), mx.codes.view(torch.float8_e4m3fn), mx.scales.view(torch.float8_e8m0fnu), "mxfp8-e4m3"
    )
    ng.assert_quantized(x.float().numpy(), q.codes.numpy(), q.scales.numpy(), amax=q.amax.numpy())
    ng.assert_quantized(x, q.codes.view(torch.float4_e2m1fn_x2), q.scales.view(torch.float8_e4m3fn), amax=float(q.amax))


def test_a_static_scale_is_not_judged_and_used() -> None:
    x = matrix()
    amax = torch.tensor([7.0])
    q = ng.quantize(x, "nvfp4", amax=amax)
    assert q.tensor_scale is not None
    assert wrong(ng.assert_quantized, x, q.codes, q.scales, amax=amax).message.startswith("amax: ")
    ng.assert_quantized(x, q.codes, q.scales, amax=amax, static=True)
    own = {"tensor_scale_is": "encode", "static": True}
    ng.assert_quantized(x, q.codes, q.scales, tensor_scale=q.tensor_scale, **own)
    verdict = wrong(ng.assert_quantized, x, q.codes, q.scales, tensor_scale=q.tensor_scale * 4, **own)
    assert verdict.message.startswith("scales: ")
    with pytest.raises(ValueError, match="static=True"):
        ng.assert_quantized(x, q.codes, q.scales, static=True)


def test_a_rotation_in_any_order_is_correct_unless_declared() -> None:
    x = matrix(64, 128)
    y = ng.transform(x, "nvfp4-rht")
    ng.assert_transformed(x, y)
    ng.assert_transformed(x, y, rotation="butterfly")
    assert wrong(ng.assert_transformed, x, y.flip(0)).message.startswith("output: ")
    moved = y.clone()
    moved[5, 5] = torch.nextafter(moved[5, 5], moved.new_tensor(torch.inf))
    assert wrong(ng.assert_transformed, x, moved, rotation="butterfly").findings[0]["elements"][0]["row"] == 5


ERRORS: list[tuple[str, Callable[[torch.Tensor, Any], None], type[Exception], str]] = [
    ("x", lambda x, q: ng.assert_quantized(x.long(), q.codes, q.scales), TypeError, "x is float32"),
    ("codes", lambda x, q: ng.assert_quantized(x, q.codes[:-1], q.scales), ValueError, "codes"),
    ("scales", lambda x, q: ng.assert_quantized(x, q.codes, q.scales[:, 1:]), ValueError, "scales have"),
    ("recipe", lambda x, q: ng.assert_quantized(x, q.codes, q.scales, "nvfp5"), ValueError, "nvfp5"),
    ("rotation", lambda x, q: ng.assert_quantized(x, q.codes, q.scales, rotation="x"), ValueError, "rotation is 'any'"),
    ("diagnose", lambda x, q: ng.assert_quantized(x, q.codes, q.scales, diagnose="x"), ValueError, "diagnose is"),
    ("random", lambda x, q: ng.assert_quantized(x, q.codes, q.scales, "nvfp4-sr"), ValueError, "assert_stochastic"),
    ("values", lambda x, q: ng.assert_dequantized(q.codes, q.scales, x.int(), amax=q.amax), TypeError, "values is"),
    ("amax", lambda x, q: ng.assert_dequantized(q.codes, q.scales, x), ValueError, "amax"),
    ("actual", lambda x, q: ng.assert_transformed(x, x[:-1]), ValueError, "actual has shape"),
    ("no rotation", lambda x, q: ng.assert_transformed(x, x, "nvfp4"), ValueError, "transform"),
    ("no tensor", lambda x, q: ng.assert_quantized([1.0], q.codes, q.scales), TypeError, "list"),
    ("meta", lambda x, q: ng.assert_quantized(x.to("meta"), q.codes, q.scales), TypeError, "no bytes"),
    ("no code", lambda x, q: ng.assert_dequantized(torch.full((32, 64), 255, dtype=torch.uint8),
     torch.zeros(32, 2, dtype=torch.uint8), x, "mxfp6-e3m2"), ValueError, "no codes of E3M2"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_a_mistake_in_the_arguments_names_the_argument(call: Any, kind: type[Exception], text: str) -> None:
    x = matrix()
    with pytest.raises(kind, match=text) as caught:
        call(x, ng.quantize(x, "nvfp4"))
    assert not isinstance(caught.value, AssertionError)


# ---- settings of the caller ------------------------------------------------------------------------------------------


def _flush() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _low_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def _within(make: Callable[[], Any]) -> Callable[[], Iterator[None]]:
    def context() -> Iterator[None]:
        with make():
            yield

    return context


SETTINGS = {
    "flushed subnormal numbers": _flush, "default dtype": _default_dtype, "deterministic": _deterministic,
    "matmul precision": _low_precision, "autocast": _within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "default device": _within(lambda: torch.device("meta")), "inference": _within(torch.inference_mode),
    "no grad": _within(torch.no_grad),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_caller_change_no_verdict_and_are_kept(name: str) -> None:
    x = matrix().float()
    x[5] *= 2.0**-124
    x.requires_grad_()
    expected = ng.quantize(x.detach(), "mxfp8-e4m3")
    values, y = ng.dequantize(expected), ng.gemm(expected, expected, out_dtype=torch.float32)
    context = SETTINGS[name]()
    next(context)
    try:
        before = current_settings()
        ng.assert_quantized(x, expected.codes, expected.scales, "mxfp8-e4m3")
        ng.assert_dequantized(expected.codes, expected.scales, values, "mxfp8-e4m3")
        ng.assert_gemm(expected, expected, y, out_dtype=torch.float32)
        assert current_settings() == before
        wrong(ng.assert_quantized, x, expected.codes ^ 1, expected.scales, "mxfp8-e4m3")
        assert current_settings() == before
    finally:
        assert next(context, None) is None


@pytest.mark.long
def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = matrix()
    q = ng.quantize(x, "nvfp4")
    with FakeTensorMode() as mode, pytest.raises(TypeError, match="FakeTensorMode"):
        ng.assert_quantized(x, q.codes, q.scales)
    with pytest.raises(TypeError, match="FakeTensor"):
        ng.assert_quantized(mode.from_tensor(x), q.codes, q.scales)


# ---- fake tensors, graphs, custom ops --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # of torch 2.11
def test_an_assertion_in_a_compiled_function_is_outside_it() -> None:
    def function(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ng.assert_quantized(y / 2, codes, scales)
        return y + 1

    x = matrix()
    q = ng.quantize(x, "nvfp4")
    compiled = torch.compile(function, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x, q.codes, q.scales), x * 2 + 1)
    with pytest.raises(WrongResult):
        compiled(x, q.codes ^ 1, q.scales)
    torch._dynamo.reset()


# ---- the verdict -----------------------------------------------------------------------------------------------------


def test_explain_gives_the_verdict_of_right_and_wrong_results() -> None:
    x = matrix()
    q = ng.quantize(x, "nvfp4")
    right = ng.explain(ng.assert_quantized, x, q.codes, q.scales, amax=q.amax)
    assert right.passed
    assert right.message == ""
    assert right.explanations == right.findings == []
    assert [entry["stage"] for entry in right.stages] == ["amax", "scales", "codes"]
    assert str(right).startswith("pass: nvfp4 32x64 bfloat16 on cpu: ")
    failed = ng.explain(ng.assert_quantized, x, q.codes ^ 1, q.scales, amax=q.amax)
    assert not failed.passed
    assert failed.reproduction == ""
    for verdict in (right, failed):
        assert json.loads(json.dumps(verdict.to_dict()))["passed"] is verdict.passed
    with pytest.raises(TypeError, match="assertion"):
        ng.explain(ng.quantize, x, "nvfp4")  # type: ignore[call-arg]


def test_html_is_escaped() -> None:
    html = Verdict("assert_quantized", "<b>&", message="codes: <script>")._repr_html_()
    assert "<script>" not in html
    assert "codes: &lt;script&gt;" in html
    assert "&lt;b&gt;&amp;" in html


def test_an_error_keeps_its_verdict_when_it_is_pickled() -> None:
    x = matrix()
    q = ng.quantize(x, "nvfp4")
    with pytest.raises(WrongResult) as caught:
        ng.assert_quantized(x, q.codes ^ 1, q.scales)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.verdict == caught.value.verdict
    assert str(copied) == str(caught.value)


@pytest.mark.long
def test_a_verdict_does_not_depend_on_earlier_calls() -> None:
    x = matrix()
    q = ng.quantize(x, "nvfp4")
    swapped = q.codes >> 4 | q.codes << 4
    first = ng.explain(ng.assert_quantized, x, swapped, q.scales, amax=q.amax, diagnose="full")
    for _ in range(8):
        ng.explain(ng.assert_quantized, x, q.codes ^ 3, q.scales, amax=q.amax)
    assert ng.explain(ng.assert_quantized, x, swapped, q.scales, amax=q.amax, diagnose="full") == first


# ---- reproduction ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_command_fails_alike_in_another_process() -> None:
    x = matrix()
    q = ng.quantize(x, "nvfp4")
    y = ng.gemm(q, q, out_dtype=torch.bfloat16)
    draw = ng.quantize(x, "nvfp4-sr", random=(0, 0))
    verdicts = [
        wrong(ng.assert_quantized, x.requires_grad_(), (q.codes ^ 1).numpy(), q.scales.view(torch.float8_e4m3fn),
              find_recipe("nvfp4"), amax=q.amax),
        wrong(ng.assert_dequantized, q.codes, q.scales, x, amax=q.amax),
        wrong(ng.assert_gemm, q, q, y.T * 2, out_dtype=torch.bfloat16, bias=torch.ones(32).expand(32)),
        wrong(ng.assert_transformed, x, x, "nvfp4-rht"),
        wrong(ng.assert_stochastic, x, lambda seed: (draw.codes, draw.scales, draw.amax)),
    ]  # fmt: skip
    commands = [shlex.split(str(verdict).splitlines()[-1]) for verdict in verdicts]
    assert all(command[:2] == ["python", "-c"] and len(command) == 3 for command in commands)
    text = """
import sys
for code in sys.argv[1:]:
    try:
        exec(code, {})
    except AssertionError as error:
        print(error, end="|||")
"""
    words = [sys.executable, "-c", text, *(code for _, _, code in commands)]
    printed = subprocess.run(words, text=True, check=True, capture_output=True, timeout=300).stdout.split("|||")
    for verdict, error in zip(verdicts, printed[:-1], strict=True):
        assert verdict.message in error
        assert verdict.subject in error


def command_path(verdict: Verdict) -> Path:
    """The file that a command loads."""
    code = shlex.split(verdict.reproduction)[2]
    return Path(json.loads(code.partition("torch.load(")[2].rstrip(")")))


@pytest.mark.long
def test_saved_arguments_are_plain_and_only_those_of_the_call(failures: Path) -> None:
    x = matrix(64, 64)[:32]
    q = ng.quantize(x, "nvfp4")
    assert q.amax is not None
    codes = (q.codes ^ 1).view(torch.float4_e2m1fn_x2)
    path = command_path(wrong(ng.assert_quantized, x, codes, q.scales, amax=q.amax))
    assert path.parent == failures
    saved = torch.load(path, weights_only=True)
    assert saved.keys() == {"x", "codes", "scales", "amax"}
    assert saved["codes"].dtype == torch.float4_e2m1fn_x2
    assert torch.equal(saved["x"], x)
    assert saved["x"].untyped_storage().nbytes() == x.numel() * 2  # not the whole matrix that x is a part of
    again = wrong(ng.assert_quantized, x=x.clone(), codes=codes, scales=q.scales, amax=q.amax)
    assert command_path(again) == path


def test_the_default_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NARROWGAUGE_FAILURES")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    x = matrix()
    q = ng.quantize(x, "nvfp4")
    path = command_path(wrong(ng.assert_quantized, x, q.codes ^ 1, q.scales))
    assert path.parent.parent == tmp_path / f"narrowgauge-{os.getuid()}"
    assert path.parent.stat().st_mode & 0o777 == path.parent.parent.stat().st_mode & 0o777 == 0o700
    path.parent.parent.chmod(0o777)
    verdict = wrong(ng.assert_quantized, x, q.codes ^ 2, q.scales)
    assert verdict.reproduction.startswith("not saved: ")
    assert "NARROWGAUGE_FAILURES" in verdict.reproduction


@pytest.mark.long
def test_arguments_that_cannot_be_saved_are_named(failures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    x = matrix()
    q = ng.quantize(x, "nvfp4")
    monkeypatch.setattr("narrowgauge.harness.api.judging.save_arguments.LARGEST", 100)
    assert "MiB, more than" in wrong(ng.assert_quantized, x, q.codes ^ 1, q.scales).reproduction
    monkeypatch.undo()
    monkeypatch.setenv("NARROWGAUGE_FAILURES", str(failures))
    wrong(ng.assert_quantized, x, q.codes ^ 1, q.scales)
    monkeypatch.setattr("narrowgauge.harness.api.judging.save_arguments.LARGEST_FOLDER", 100)
    assert "delete files" in wrong(ng.assert_quantized, x, q.codes ^ 2, q.scales).reproduction
    changed = replace(find_recipe("nvfp4"), nan_code=0)
    assert "changed fields" in wrong(ng.assert_quantized, x, q.codes ^ 1, q.scales, changed).reproduction
    monkeypatch.setenv("NARROWGAUGE_FAILURES", "/dev/null/no")
    assert wrong(ng.assert_quantized, x, q.codes ^ 1, q.scales).reproduction.startswith("not saved: NotADirectoryError")
