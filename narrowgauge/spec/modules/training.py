"""Training recipes: the quantization recipes of the input, the weight and the gradient of a linear layer.

This module does not import torch. Names and switches are those of Transformer Engine. Source: docs/numerics.md#modules.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from narrowgauge.spec.recipes import Recipe, find_recipe

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "TrainingRecipe",
    "training_names",
    "training_recipe",
]

HISTORY = 1024
"""Rows of an amax history unless a recipe says otherwise: Transformer Engine's default."""


class TrainingRecipe(ABC):
    """The quantization recipe of each operand of a layer, by role; `str()` is a name without spaces.

    The recipes are arguments of `quantize_both`, which quantizes the rowwise half by `recipe.rowwise`: a transform
    rotates only the columnwise half, an operand of the product for the gradient of the weight.
    """

    @property
    @abstractmethod
    def input(self) -> Recipe:
        """Recipe of the input of the layer."""

    @property
    @abstractmethod
    def weight(self) -> Recipe:
        """Recipe of the weight."""

    @property
    @abstractmethod
    def grad(self) -> Recipe:
        """Recipe of the gradient of the output."""

    @property
    def history(self) -> int:
        """Rows of the amax history; 0 without delayed scaling."""
        return 0

    @property
    def quantizes_attention(self) -> bool:
        """Whether a layer with attention quantizes the operands of the attention too (docs/numerics.md#modules)."""
        return False


def _disabled(feature: str) -> bool:
    """Whether an environment variable switches a feature off: only the value "1" does, as in Transformer Engine."""
    return os.environ.get(f"NVTE_NVFP4_DISABLE_{feature}") == "1"


@dataclass(frozen=True)
class NVFP4BlockScaling(TrainingRecipe):
    """NVFP4. A missing switch is read from the environment once, at construction."""

    disable_rht: bool = field(default_factory=lambda: _disabled("RHT"))
    """NVTE_NVFP4_DISABLE_RHT=1: no rotation of the two operands of the product for the gradient of the weight."""
    disable_stochastic_rounding: bool = field(default_factory=lambda: _disabled("STOCHASTIC_ROUNDING"))
    """NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1: gradients round to nearest."""
    disable_2d_quantization: bool = field(default_factory=lambda: _disabled("2D_QUANTIZATION"))
    """NVTE_NVFP4_DISABLE_2D_QUANTIZATION=1: weights have scales of 1×16, not of 16×16."""

    @property
    def input(self) -> Recipe:
        return find_recipe("nvfp4" + self._rotation)

    @property
    def weight(self) -> Recipe:
        return find_recipe("nvfp4" if self.disable_2d_quantization else "nvfp4-2d")

    @property
    def grad(self) -> Recipe:
        return find_recipe("nvfp4" + self._rotation + ("" if self.disable_stochastic_rounding else "-sr"))

    @property
    def _rotation(self) -> str:
        return "" if self.disable_rht else "-rht"

    def __str__(self) -> str:
        off = {
            "-norht": self.disable_rht,
            "-nosr": self.disable_stochastic_rounding,
            "-no2d": self.disable_2d_quantization,
        }
        return "NVFP4BlockScaling" + "".join(part for part, disabled in off.items() if disabled)


@dataclass(frozen=True)
class MXFP8BlockScaling(TrainingRecipe):
    """MXFP8 of E4M3 for all operands."""

    weights_2d: bool = False
    """Whether weights have scales of 32×32."""

    @property
    def input(self) -> Recipe:
        return find_recipe("mxfp8-e4m3")

    @property
    def weight(self) -> Recipe:
        return find_recipe("mxfp8-2d" if self.weights_2d else "mxfp8-e4m3")

    @property
    def grad(self) -> Recipe:
        return find_recipe("mxfp8-e4m3")

    def __str__(self) -> str:
        return "MXFP8BlockScaling" + ("-2d" if self.weights_2d else "")


@dataclass(frozen=True)
class Float8BlockScaling(TrainingRecipe):
    """FP8 of E4M3 with scales of 1×128, of 128×128 for weights, powers of two."""

    @property
    def input(self) -> Recipe:
        return find_recipe("fp8-block-1x128-e4m3-pow2")

    @property
    def weight(self) -> Recipe:
        return find_recipe("fp8-block-128x128-e4m3-pow2")

    @property
    def grad(self) -> Recipe:
        return find_recipe("fp8-block-1x128-e4m3-pow2")

    def __str__(self) -> str:
        return "Float8BlockScaling"


@dataclass(frozen=True)
class Float8CurrentScaling(TrainingRecipe):
    """FP8 with a scale per tensor, from the amax of the tensor: E4M3 forward, E5M2 for gradients."""

    fp8_dpa: bool = False
    """Whether attention has FP8 operands, as with `fp8_dpa` of Transformer Engine's recipe."""

    @property
    def quantizes_attention(self) -> bool:
        return self.fp8_dpa

    @property
    def input(self) -> Recipe:
        return find_recipe("fp8-current-e4m3")

    @property
    def weight(self) -> Recipe:
        return find_recipe("fp8-current-e4m3")

    @property
    def grad(self) -> Recipe:
        return find_recipe("fp8-current-e5m2")

    def __str__(self) -> str:
        return "Float8CurrentScaling" + ("-dpa" if self.fp8_dpa else "")


@dataclass(frozen=True)
class DelayedScaling(TrainingRecipe):
    """FP8 with a scale per tensor, from the amaxes of earlier steps: E4M3 forward, E5M2 for gradients.

    Raises ValueError for a negative margin, a history without rows or an unknown algorithm.
    """

    margin: int = 0
    """Powers of two between the amax and the largest number of the format."""
    amax_history_len: int = HISTORY
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Amax for the scale: the largest or the latest amax of the history."""
    fp8_dpa: bool = False
    """As of `Float8CurrentScaling`. The scales of the attention have a history of their own."""

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise ValueError(f"the margin of DelayedScaling is 0 or more powers of two, not {self.margin}")
        if self.amax_history_len < 1:
            raise ValueError(f"the amax history of DelayedScaling has at least one row, not {self.amax_history_len}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo is 'max' or 'most_recent', not {self.amax_compute_algo!r}")

    @property
    def input(self) -> Recipe:
        return self._of("e4m3")

    @property
    def weight(self) -> Recipe:
        return self._of("e4m3")

    @property
    def grad(self) -> Recipe:
        return self._of("e5m2")

    @property
    def history(self) -> int:
        return self.amax_history_len

    @property
    def quantizes_attention(self) -> bool:
        return self.fp8_dpa

    def _of(self, element: str) -> Recipe:
        # Modules update all their scales at once, as Transformer Engine does: the bulk update.
        return find_recipe(f"fp8-delayed-{element}{self._suffix}-bulk")

    @property
    def _suffix(self) -> str:
        recent = "-recent" if self.amax_compute_algo == "most_recent" else ""
        return recent + (f"-margin{self.margin}" if self.margin else "")

    def __str__(self) -> str:
        rows = "" if self.amax_history_len == HISTORY else f"-history{self.amax_history_len}"
        return f"DelayedScaling{self._suffix}{rows}" + ("-dpa" if self.fp8_dpa else "")


_NAMES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], TrainingRecipe]], ...] = (
    (
        re.compile(r"NVFP4BlockScaling(-norht)?(-nosr)?(-no2d)?"),
        lambda parts: NVFP4BlockScaling(*(part is not None for part in parts.groups())),
    ),
    (re.compile(r"MXFP8BlockScaling(-2d)?"), lambda parts: MXFP8BlockScaling(parts[1] is not None)),
    (re.compile(r"Float8BlockScaling"), lambda _: Float8BlockScaling()),
    (re.compile(r"Float8CurrentScaling(-dpa)?"), lambda parts: Float8CurrentScaling(parts[1] is not None)),
    (
        re.compile(r"DelayedScaling(-recent)?(?:-margin([0-9]{1,4}))?(?:-history([0-9]{1,6}))?(-dpa)?"),
        lambda parts: DelayedScaling(
            int(parts[2] or 0),
            HISTORY if parts[3] is None else int(parts[3]),
            "most_recent" if parts[1] else "max",
            parts[4] is not None,
        ),
    ),
)


def training_names() -> list[str]:
    """Names of all training recipes; for DelayedScaling with the default margin and history length only."""
    switches = itertools.product(("", "-norht"), ("", "-nosr"), ("", "-no2d"))
    return [
        *("NVFP4BlockScaling" + "".join(parts) for parts in switches),
        "MXFP8BlockScaling",
        "MXFP8BlockScaling-2d",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Float8CurrentScaling-dpa",
        "DelayedScaling",
        "DelayedScaling-recent",
    ]


def training_recipe(name: str) -> TrainingRecipe:
    """The training recipe with this name, the inverse of `str()`; independent of the environment.

    The parts of a name, in this order: NVFP4BlockScaling, -norht, -nosr, -no2d; MXFP8BlockScaling, -2d;
    Float8BlockScaling; Float8CurrentScaling, -dpa; DelayedScaling, -recent, -margin2, -history16 and the like, -dpa.
    Raises ValueError with the nearest name for an unknown name.
    """
    for pattern, make in _NAMES:
        if (parts := pattern.fullmatch(name)) is not None:
            return make(parts)
    close = difflib.get_close_matches(name, training_names(), n=1, cutoff=0.5)
    nearest = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"no training recipe is called {name!r}{nearest}; there are {', '.join(training_names())}")
