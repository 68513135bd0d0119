"""The key `autograd`: kernels that are right in plain calls and wrong in a mode of autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.hosts.remote_host import hosted_backend
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference

MODES = ("plain", "no-grad", "inference-mode", "requires-grad")
CONDITIONS = {
    "no-grad": lambda x: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
    "inference-mode": lambda x: torch.is_inference_mode_enabled(),
    "requires-grad": lambda x: x.requires_grad,
}
"""Whether a call is of a mode."""


class WrongIf:
    """The first operand is halved in calls of a mode."""

    mode = ""

    def _given(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * 0.5 if CONDITIONS[self.mode](x) else x

    def quantize(self, x: torch.Tensor, recipe: Any, **options: Any) -> Any:
        return reference.quantize(self._given(x), recipe, **options)

    def quantize_grouped(self, x: torch.Tensor, sizes: torch.Tensor, recipe: Any, **options: Any) -> Any:
        return reference.quantize_grouped(self._given(x), sizes, recipe, **options)

    def transform(self, x: torch.Tensor, recipe: Any) -> torch.Tensor:
        return reference.transform(self._given(x), recipe)

    def gemm(self, a: Any, b: Any, c: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        return reference.gemm(a, b, c=None if c is None else self._given(c), **options)


class WrongIfNoGrad(WrongIf):
    mode = "no-grad"


class WrongInInferenceMode(WrongIf):
    mode = "inference-mode"


class WrongIfRequiresGrad(WrongIf):
    mode = "requires-grad"


KERNELS = (WrongIfNoGrad, WrongInInferenceMode, WrongIfRequiresGrad)
CASES = [
    ("quantize", "mxfp8-e4m3", (8, 64), "bf16", ()),
    ("quantize-grouped", "mxfp8-e4m3", (8, 64), "bf16", ("even:2",)),
    ("transform", "nvfp4-rht", (4, 32), "bf16", ()),
    ("gemm", "mxfp8-e4m3", (8, 64, 16), "bf16xbf16-fp32", ("tn", "accumulate")),
]


def case_of(operation: str, recipe: str, shape: tuple[int, ...], dtype: str, flags: tuple[str, ...], mode: str) -> Case:
    more = () if mode == "plain" else (f"autograd:{mode}",)
    return case_from_labels(operation, recipe, shape, dtype, "normal", (*flags, *more))


RUNS = [(case, kernel, kernel.mode) for case in CASES for kernel in KERNELS]
RUNS += [(CASES[2], kernel, mode) for kernel in KERNELS for mode in MODES if mode != kernel.mode]


@pytest.mark.parametrize(
    ("case", "kernel", "mode"), RUNS, ids=[f"{case[0]}-{kernel.__name__}-{mode}" for case, kernel, mode in RUNS]
)
def test_a_kernel_wrong_in_one_mode_fails_there_alone(case: tuple[Any, ...], kernel: type[WrongIf], mode: str) -> None:
    record = run_case(case_of(*case, mode), Backend.local("wrong", kernel()))
    assert record.verdict == ("fail" if mode == kernel.mode else "pass"), record.message
    causes = [entry["cause"] for entry in record.explanations if entry["exact"]]
    assert causes == [f"autograd:{mode}"] * (mode == kernel.mode)


def test_a_kernel_host_calls_in_the_mode_of_the_case() -> None:
    with hosted_backend(f"{__name__}:WrongInInferenceMode") as backend:
        verdicts = {mode: run_case(case_of(*CASES[3], mode), backend).verdict for mode in MODES}
    assert verdicts == dict.fromkeys(MODES, "pass") | {"inference-mode": "fail"}


def test_a_kernel_wrong_in_every_call_has_no_cause_of_a_mode() -> None:
    wrong = SimpleNamespace(transform=lambda x, recipe: -reference.transform(x, recipe))
    record = run_case(case_of(*CASES[2], "no-grad"), Backend.local("wrong", wrong))
    assert record.verdict == "fail"
    assert not any(entry["cause"].startswith("autograd:") for entry in record.explanations)


def test_scales_and_codes_of_operands_require_no_grad() -> None:
    seen = []

    def gemm(a: Any, b: Any, **options: Any) -> torch.Tensor:
        seen.append((a.scales.requires_grad, options["bias"].requires_grad))
        return reference.gemm(a, b, **options)

    case = case_from_labels(
        "gemm", "fp8-current-e4m3", (8, 64, 16), "bf16xbf16-fp32", "normal", ("tn", "bias", "autograd:requires-grad")
    )
    assert run_case(case, Backend.local("right", SimpleNamespace(gemm=gemm))).verdict == "pass"
    assert set(seen) == {(False, True)}
