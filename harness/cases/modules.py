"""Cases of modules, their linear layers, and the names and shapes of the parameters of these layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar, Literal

from narrowgauge.harness.cases.case import Case, rotation_problem
from narrowgauge.harness.cases.keys import (
    Dtype,
    Flag,
    Named,
    Norm,
    SectionsText,
    Shape,
    Switch,
    TrainingName,
    count,
    dims,
)
from narrowgauge.harness.cases.sections import division_problem, section_sizes
from narrowgauge.spec.training import TrainingRecipe, training_recipe

MOST_STEPS = 16

Use = Annotated[
    Literal[
        "plain", "unobserved", "no-grad", "frozen-weight", "frozen-input", "reloaded", "pending", "pending-reversed",
        "rewritten",
    ],
    Flag.CHANGED,
]  # fmt: skip
"""How a training uses a module; `harness.backends.module_driver.Plan` has the meaning of each use."""

_WRITTEN_ONCE = ("plain", "unobserved", "frozen-input", "reloaded", "rewritten")
"""Uses in which a weight that is held quantized is written before every forward."""

_training_recipe = cache(training_recipe)


# ---- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A linear layer: a module, or a child of a transformer layer."""

    prefix: str
    """Prefix of the parameter names: `qkv.` and the like in a transformer layer, else empty."""
    inner: int
    """K: features of the input."""
    outer: int
    """N: features of the output."""
    groups: int = 0
    """Number of weights of a grouped layer, equal to the number of sections. 0: a single weight without a number."""
    norm: str = ""
    """Norm of the input, `layer` or `rms`; empty without a norm."""

    @property
    def weights(self) -> list[str]:
        """Names of the matrices (N, K) that are quantized."""
        return [f"{self.prefix}weight{number}" for number in self._numbers]

    @property
    def biases(self) -> list[str]:
        """Names of the biases (N,), if the module has biases."""
        return [f"{self.prefix}bias{number}" for number in self._numbers]

    @property
    def gamma(self) -> str:
        """Name of the factor (K,) of the norm; empty without a norm."""
        return f"{self.prefix}layer_norm_weight" if self.norm else ""

    @property
    def beta(self) -> str:
        """Name of the addend (K,) of a layer norm; empty for rms and without a norm."""
        return f"{self.prefix}layer_norm_bias" if self.norm == "layer" else ""

    @property
    def _numbers(self) -> list[str]:
        return [str(number) for number in range(self.groups)] if self.groups else [""]

    def shapes(self, *, bias: bool) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by name."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.weights, (self.outer, self.inner))
        shapes |= dict.fromkeys(self.biases if bias else [], (self.outer,))
        return shapes | dict.fromkeys(filter(None, (self.gamma, self.beta)), (self.inner,))


def transformer(hidden: int, ffn: int, norm: str) -> list[Layer]:
    """The linear layers of a transformer layer, in order."""
    return [
        Layer("qkv.", hidden, 3 * hidden, norm=norm),
        Layer("proj.", hidden, hidden),
        Layer("fc1.", hidden, ffn, norm=norm),
        Layer("fc2.", ffn, hidden),
    ]


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModuleCase(Case):
    """Forward and backward of a module under a training recipe, for `steps` steps."""

    module: ClassVar[str]
    """Name of the module of a backend."""

    training: TrainingName
    dtype: Dtype
    """Dtype of inputs, parameters and outputs."""
    steps: Annotated[int, count("steps", MOST_STEPS), Flag.CHANGED] = 1
    accumulate: Switch = False
    """Whether gradients of weights are added to float32 main gradients, which hold numbers before the first step."""
    bias: Switch = False
    quantized_parameters: Annotated[Switch, Named("quantized-parameters")] = False
    """Whether the module holds its weights only quantized."""
    delayed_wgrad: Annotated[Switch, Named("delayed-wgrad")] = False
    """Whether gradients of weights wait for `backward_dw`."""
    recompute: Switch = False
    """Whether the backward runs the forward again."""
    use: Use = "plain"

    @property
    def training_recipe(self) -> TrainingRecipe:
        """The training recipe with the name `training`."""
        return _training_recipe(self.training)

    @property
    def recipe_names(self) -> tuple[str, ...]:
        return (str(self.training_recipe),)

    @property
    def dtype_label(self) -> str:
        return self.dtype

    @property
    def layers(self) -> list[Layer]:
        """The linear layers, in order."""
        inner, outer = self.shape[-2:]
        return [Layer("", inner, outer)]

    @property
    def rows(self) -> int:
        """Rows of the input as a matrix: B·S, or M of a grouped layer."""
        return math.prod(self.shape[:-2])

    def problem(self) -> str | None:
        return self._shape_problem or self._rotation_problem

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Sizes that cannot be 0."""
        return self.shape

    @property
    def _shape_problem(self) -> str | None:
        if 0 in self._sizes:
            shape = list(self.shape)
            return f"shape is {shape}; but for the rows of a grouped-linear, which may be 0, a module has no empty side"
        if self.quantized_parameters and not self.accumulate:
            return (
                "quantized-parameters have no high-precision weight that could hold a gradient: accumulate can be true"
            )
        if self.quantized_parameters and self.use == "frozen-weight":
            return "quantized-parameters have no weight whose requires_grad could be false: use can be 'frozen-input'"
        if self.quantized_parameters and self.training_recipe.history and self.use not in _WRITTEN_ONCE:
            return (
                f"use is {self.use!r}, in which a quantized weight takes part in two forwards, and nothing says if its "
                "amax counts twice under delayed scaling: quantized-parameters can be false"
            )
        if self.steps == 1 and self.use in ("reloaded", "pending", "pending-reversed"):
            return f"use is {self.use!r}, which needs a second step: steps can be 2"
        return None

    @property
    def _rotation_problem(self) -> str | None:
        recipes = (self.training_recipe.input, self.training_recipe.grad)
        wrong = (rotation_problem(recipe, [self.dtype], self._rotated_rows, "B·S") for recipe in recipes)
        return next(filter(None, wrong), None)

    @property
    def _rotated_rows(self) -> int:
        """Rows that have to be whole groups of a rotation."""
        return self.rows


@dataclass(frozen=True, kw_only=True)
class LinearCase(ModuleCase):
    """A linear layer: x (B, S, K), weight (N, K)."""

    operation: ClassVar[str] = "linear"
    module: ClassVar[str] = "Linear"

    shape: Annotated[Shape, dims("[B, S, K, N]", 4, 4)]


@dataclass(frozen=True, kw_only=True)
class LayerNormLinearCase(ModuleCase):
    """A norm and a linear layer: x (B, S, K), weight (N, K)."""

    operation: ClassVar[str] = "layernorm-linear"
    module: ClassVar[str] = "LayerNormLinear"

    shape: Annotated[Shape, dims("[B, S, K, N]", 4, 4)]
    norm: Norm = "layer"

    @property
    def layers(self) -> list[Layer]:
        return [replace(layer, norm=self.norm) for layer in super().layers]


@dataclass(frozen=True, kw_only=True)
class GroupedLinearCase(ModuleCase):
    """A linear layer with a weight (N, K) for each section of x (M, K)."""

    operation: ClassVar[str] = "grouped-linear"
    module: ClassVar[str] = "GroupedLinear"

    shape: Annotated[Shape, dims("[M, K, N]", 3, 3)]
    sections: SectionsText

    @property
    def section_sizes(self) -> tuple[int, ...]:
        return section_sizes(self.sections, self.shape[0])

    @property
    def layers(self) -> list[Layer]:
        return [replace(layer, groups=len(self.section_sizes)) for layer in super().layers]

    def problem(self) -> str | None:
        return super().problem() or division_problem(self.sections, self.shape[0])

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def _rotated_rows(self) -> int:
        return 0  # sections are padded to whole groups


@dataclass(frozen=True, kw_only=True)
class TransformerLayerCase(ModuleCase):
    """A transformer layer: x (B, S, hidden), fc1 (ffn, hidden)."""

    operation: ClassVar[str] = "transformer-layer"
    module: ClassVar[str] = "TransformerLayer"

    shape: Annotated[Shape, dims("[B, S, hidden, ffn]", 4, 4)]
    heads: Annotated[int, count("heads", 1024), Flag.ALWAYS]
    norm: Norm = "layer"

    @property
    def layers(self) -> list[Layer]:
        return transformer(self.shape[2], self.shape[3], self.norm)

    @property
    def _shape_problem(self) -> str | None:
        if wrong := super()._shape_problem:
            return wrong
        hidden = self.shape[2]
        return f"hidden = {hidden} is no multiple of heads = {self.heads}" if hidden % self.heads else None


MODULES = (LinearCase.operation, LayerNormLinearCase.operation, GroupedLinearCase.operation,
           TransformerLayerCase.operation)  # fmt: skip
"""Names of the operations on modules."""
