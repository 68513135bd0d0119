"""What the cases of modules have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Literal

from narrowgauge.harness.cases.axes import Axis
from narrowgauge.harness.cases.case import SECTION, Case, rotation_problem
from narrowgauge.harness.cases.keys import Autograd, Dtype, Flag, Named, Switch, TrainingName, count
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.cases.methods import Method
from narrowgauge.spec.modules.training import TrainingRecipe, training_recipe
from narrowgauge.spec.recipes import Recipe

MOST_STEPS = 16

Use = Annotated[
    Literal[
        "plain", "unobserved", "no-grad", "frozen-weight", "frozen-input", "reloaded", "pending", "pending-reversed",
        "rewritten", "microbatches",
    ],
    Flag.CHANGED,
]  # fmt: skip
"""How a training uses a module; `harness.backends.module_driver.Plan` has the meaning of each use."""

_WRITTEN_ONCE = ("plain", "unobserved", "frozen-input", "reloaded", "rewritten")
"""Uses with a quantized weight written before every forward."""

OF_BACKWARD, OF_RECOMPUTATION = ("torch.fx.experimental.symbolic_shapes",), ("torch._dynamo",)
"""Modules that the first `Tensor.backward` with a gradient imports, with sympy, for 0.3 s of a core; and that the first
`torch.utils.checkpoint` imports, for 0.6 s."""

_training_recipe = cache(training_recipe)


@dataclass(frozen=True, kw_only=True)
class ModuleCase(Case):
    """Forward and backward of a module under a training recipe, for `steps` steps."""

    module: ClassVar[str]
    """Name of the module of a backend."""
    small: ClassVar[int] = 1 << 27
    """A module has many stages and needs more launches for as much work. Linear layers of 4x128x1024x4096 take a core
    6 to 20 s, and an H200, shared with other processes, 0.3 to 1.3 s."""
    composed: ClassVar[bool] = True
    attends: ClassVar[bool] = False
    """Whether the module has attention."""
    autograd_modes: ClassVar[tuple[Autograd, ...]] = ("plain",)  # the key `use` has such calls of a module

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
    def attention_heads(self) -> int:
        """Heads of the attention; 1 without attention."""
        return 1

    @property
    def outer(self) -> int:
        """Features of the output."""
        return self.shape[-1]

    @property
    def training_recipe(self) -> TrainingRecipe:
        """The training recipe with the name `training`."""
        return _training_recipe(self.training)

    @property
    def recipe_names(self) -> tuple[str, ...]:
        return (str(self.training_recipe),)

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
        if self.training_recipe.quantizes_attention and not self.attends:
            name = str(self.training_recipe)
            return (
                f"training is {name!r}, which quantizes attention, and {self.operation} has none: training can be "
                f"{name.removesuffix('-dpa')!r}"
            )
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
        if self.steps == 1 and self.use in ("reloaded", "pending", "pending-reversed", "microbatches"):
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

    @classmethod
    def all_methods(cls) -> Mapping[str, Method]:
        return {cls.module: Method()}

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return self.training_recipe.input, self.training_recipe.weight, self.training_recipe.grad

    @property
    def chance(self) -> bool:
        return self.training_recipe.input.transform is not None or self.training_recipe.grad.rounding == "stochastic"

    @property
    def constrained(self) -> Mapping[str, tuple[int, ...]]:
        return {"M": (self.rows,), "K": (self.shape[-2],), "N": (self.shape[-1],)}

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {}  # steps and stages follow from all inputs

    @property
    def work(self) -> int:
        # Every layer and step has three products; their operands are quantized in both orientations.
        step = 0
        for layer in self.layers:
            x, w = self.rows * (layer.inner + layer.outer), layer.inner * layer.outer * max(1, layer.groups)
            step += 2 * (x + w) + 3 * self.rows * layer.inner * layer.outer // 32
        return self.steps * step + SECTION * len(self.section_sizes)

    @property
    def memory(self) -> int:
        elements = outputs = 0
        for layer in self.layers:
            weights = max(1, layer.groups) * layer.inner * layer.outer
            elements += self.rows * (layer.inner + layer.outer) + weights
            outputs = max(outputs, self.rows * layer.inner, self.rows * layer.outer, weights)
        # 1.63 GB on an H200 and an H100 with torch 2.11 for linear of 4x128x1024x4096 under MXFP8BlockScaling.
        return 110 * elements * self.steps + 250 * outputs

    @property
    def preloaded(self) -> tuple[str, ...]:
        return (*OF_BACKWARD, *(OF_RECOMPUTATION if self.recompute else ()))
