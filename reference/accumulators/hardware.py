"""Models of the accumulators of GPUs, as data: one for every generation and operand format.

Sources: MMA-Sim, arXiv 2511.10909v2, for all models; arXiv 2512.07004 agrees for NVIDIA. docs/accumulators.md defines
the parameters and has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["aligned", "scaled-groups", "pairwise", "rounded-down", "rounded-down-halves"]
"""The arithmetic of a step, defined in docs/accumulators.md#a-step."""

_PAPER = "arXiv 2511.10909v2"
_NOT_RUN = "published, not run here"
_H100 = "H100"
_BOTH = "H100 and H200"
_SMALLEST_EXPONENT = {
    "tf32": -126, "bf16": -126, "fp16": -14, "e5m2": -14, "e4m3": -6, "e2m1": 0, "e2m3": 0, "e3m2": -2,
    "e5m2fnuz": -15, "e4m3fnuz": -7,
}  # fmt: skip
"""Exponent of the smallest normal number of each operand format; a subnormal number counts as this exponent."""
FP8 = ("e4m3", "e5m2")
FP8_FNUZ = ("e4m3fnuz", "e5m2fnuz")
FP8_FP6_FP4 = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


@dataclass(frozen=True)
class HardwareModel:
    """The accumulator of a matrix instruction."""

    name: str
    operands: tuple[str, ...]
    """Formats of a and b; the two may differ."""
    width: int
    """L: products of a step."""
    fraction: int = 0
    """F: fraction bits of a term behind the leading bit of the largest exponent; 0 for "pairwise"."""
    kind: Kind = "aligned"
    kept: int = 23
    """Fraction bits of the result of a step: 23 of float32, 13 of E8M13, 10 of float16."""
    nearest: bool = False
    """Whether the result of a step rounds to nearest even; otherwise toward zero."""
    zero_exponent: int = -133
    """e0: exponent of a term that is zero, in "aligned" and "scaled-groups"."""
    flushes: bool = False
    """Whether subnormal operands and sums become zero, in "pairwise"."""
    block: int | None = None
    """Products that share two block scales; None: the instruction has no scales."""
    scale: Literal["e8m0", "e4m3"] = "e8m0"
    """Format of the block scales."""
    source: str = _PAPER
    run: str = _NOT_RUN
    """The GPUs on which this project compared the model with the instruction."""

    @property
    def half(self) -> bool:
        """Whether the accumulator is float16."""
        return self.kept == 10

    def smallest_exponent(self, operand: str) -> int:
        """Exponent that a subnormal number of a format has. Raises ValueError if the model has no such operand."""
        if operand not in self.operands:
            raise ValueError(f"{self.name} multiplies {', '.join(self.operands)}; not {operand!r}")
        return _SMALLEST_EXPONENT[operand]


def _nvidia() -> list[HardwareModel]:
    models = [
        HardwareModel("volta-fp16", ("fp16",), 4, 23, zero_exponent=-131),
        HardwareModel("turing-fp16", ("fp16",), 8, 24, zero_exponent=-132),
    ]
    for generation in ("ampere", "ada"):
        models.append(HardwareModel(f"{generation}-tf32", ("tf32",), 4, 24, zero_exponent=-132))
        models += [HardwareModel(f"{generation}-{x}", (x,), 8, 24, zero_exponent=-132) for x in ("bf16", "fp16")]
    models += [
        HardwareModel("ada-fp8", FP8, 16, 13, kept=13, zero_exponent=-132),
        HardwareModel("ada-fp8-fp16", FP8, 16, 13, kept=10, nearest=True, zero_exponent=-21),
    ]
    for generation in ("hopper", "blackwell"):
        both, h100 = (_BOTH, _H100) if generation == "hopper" else (_NOT_RUN, _NOT_RUN)
        models += [
            HardwareModel(f"{generation}-tf32", ("tf32",), 8, 25, run=h100),
            HardwareModel(f"{generation}-bf16", ("bf16",), 16, 25, run=both),
            HardwareModel(f"{generation}-fp16", ("fp16",), 16, 25, run=both),
            HardwareModel(
                f"{generation}-fp16-fp16", ("fp16",), 16, 25, kept=10, nearest=True, zero_exponent=-22, run=h100
            ),
        ]
    return [
        *models,
        HardwareModel("hopper-fp8", FP8, 32, 13, kept=13, run=_BOTH),
        HardwareModel("hopper-fp8-fp16", FP8, 32, 13, kept=10, nearest=True, run=_H100),
        HardwareModel("blackwell-fp8", FP8_FP6_FP4, 32, 25),
        HardwareModel("blackwell-fp8-fp16", FP8_FP6_FP4, 32, 25, kept=10, nearest=True, zero_exponent=-22),
        HardwareModel("blackwell-mxfp8", FP8_FP6_FP4, 32, 25, block=32),
        HardwareModel("blackwell-mxfp4", ("e2m1",), 64, 35, kind="scaled-groups", zero_exponent=-139, block=32),
        HardwareModel(
            "blackwell-nvfp4", ("e2m1",), 64, 35, kind="scaled-groups", zero_exponent=-139, block=16, scale="e4m3"
        ),
    ]


def _amd() -> list[HardwareModel]:
    return [
        HardwareModel("cdna1-fp16", ("fp16",), 4, kind="pairwise", nearest=True),
        HardwareModel("cdna1-bf16", ("bf16",), 2, kind="pairwise", nearest=True),
        HardwareModel("cdna2-fp16", ("fp16",), 4, kind="pairwise", nearest=True, flushes=True),
        HardwareModel("cdna2-bf16", ("bf16",), 2, kind="pairwise", nearest=True, flushes=True),
        HardwareModel("cdna2-bf16-1k", ("bf16",), 4, kind="pairwise", nearest=True, flushes=True),
        HardwareModel("cdna3-tf32", ("tf32",), 4, 24, kind="rounded-down", nearest=True),
        HardwareModel("cdna3-bf16", ("bf16",), 8, 24, kind="rounded-down", nearest=True),
        HardwareModel("cdna3-fp16", ("fp16",), 8, 24, kind="rounded-down", nearest=True),
        HardwareModel("cdna3-fp8", FP8_FNUZ, 16, 24, kind="rounded-down-halves", nearest=True),
    ]


HARDWARE = {model.name: model for model in (*_nvidia(), *_amd())}
"""Every model by its name: the generation, the operands, and "-fp16" for a float16 accumulator."""


def find_hardware(name: str) -> HardwareModel:
    """The model of a name. Raises ValueError, with all names, for an unknown name."""
    if name not in HARDWARE:
        raise ValueError(f"{name!r} is no hardware model; the models are {', '.join(HARDWARE)}")
    return HARDWARE[name]
