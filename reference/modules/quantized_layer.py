"""What the layers have in common: options, operands, and gradients of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowgauge.reference.gemm.gemm import gemm
from narrowgauge.reference.modules.amax_history import WEIGHT, AmaxHistory
from narrowgauge.reference.modules.parallel import sharded_amax
from narrowgauge.reference.modules.quantized_weight import QuantizedWeight
from narrowgauge.reference.quantize.quantize import quantize_both
from narrowgauge.spec.autocast import current, remember
from narrowgauge.spec.module_arguments import (
    check_active,
    check_delays,
    check_holds_quantized,
    check_input,
    check_layer,
    check_main_grad,
    check_masters,
)
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.training import TrainingRecipe, training_recipe

Product = Callable[[torch.dtype, torch.Tensor | None], torch.Tensor]
"""The product that is a weight's gradient, in a dtype, plus c (N, K), float32, if given."""


Halves = tuple[Quantized, Quantized]
"""Rowwise and columnwise."""


class QuantizedLayer(AmaxHistory):
    """A layer of products whose operands are quantized by role, as the autocast's training recipe says.

    weights: the names of its weights, each (N, K); the rest as `Linear` has it. Raises TypeError for a dtype,
    ValueError for extents, a seed or options that do not go together.
    """

    def __init__(
        self,
        weights: list[str],
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
        seed: int,
        accumulate: bool,
        quantized_parameters: bool,
        delay_wgrad: bool,
        amax_group: Any = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        check_layer(
            kind, in_features, out_features, dtype, seed, accumulate=accumulate,
            quantized_parameters=quantized_parameters,
        )  # fmt: skip
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.seed, self.accumulate, self.delay_wgrad, self.amax_group = seed, accumulate, delay_wgrad, amax_group
        self.quantized_parameters = quantized_parameters
        self._weights = weights
        self._backwards = 0
        self._waiting: list[Callable[[], None]] = []
        shape = (out_features, in_features)
        bound = in_features**-0.5  # torch.nn.Linear's
        for name in weights:
            if quantized_parameters:
                self.register_parameter(name, None)
                self.add_module(f"quantized_{name}", QuantizedWeight(shape, device))
            else:
                weight = torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound)
                self.register_parameter(name, torch.nn.Parameter(weight))
            added = torch.empty(out_features, dtype=dtype, device=device).uniform_(-bound, bound) if bias else None
            self.register_parameter(
                name.replace("weight", "bias"), None if added is None else torch.nn.Parameter(added)
            )

    def check_input(self, x: torch.Tensor, recipe: TrainingRecipe | None) -> None:
        """Raises TypeError or ValueError where `x` is no input (…, K) of this layer, or none that the recipe takes."""
        check_input(type(self).__name__, x, self.in_features, self.dtype, recipe)

    def check_weights(self, recipe: TrainingRecipe | None) -> None:
        """Raises as `held` and `main_grads` do: in a forward, where nothing is lost yet."""
        if self.quantized_parameters:
            self._read(recipe)
        if self.accumulate and torch.is_grad_enabled():
            self.main_grads()

    def parameters_of(self, kind: str) -> list[torch.Tensor | None]:
        """The layer's weights ("weight") or biases ("bias"), None for those it does not have.

        For quantized weights the same number of tensors without elements, so that autograd asks for a gradient of them.
        """
        if kind == "weight" and self.quantized_parameters:
            return [torch.empty(0, requires_grad=True) for _ in self._weights]
        return [getattr(self, name.replace("weight", kind)) for name in self._weights]

    # ---- operands ----------------------------------------------------------------------------------------------------

    def operand(
        self,
        x: torch.Tensor,
        recipe: Recipe,
        scale: torch.Tensor | None,
        *,
        columnwise: bool = False,
        random: tuple[int, int] | None = None,
    ) -> Quantized:
        """One half of `x` (M, K) quantized; `scale`, float32 (1,), is that of delayed scaling, `random` of both halves.

        The amax is that of the processes of `amax_group`, where there is one.
        """
        wanted = {"rowwise": not columnwise, "columnwise": columnwise}
        amax = None
        if self.amax_group is not None and recipe.tensor_scale != "none":
            amax = sharded_amax(x, recipe, self.amax_group, **wanted)
        drawn = random if recipe.rounding == "stochastic" else None
        made = quantize_both(x, recipe, amax=amax, scale=scale, random=drawn, **wanted)[columnwise]
        assert made is not None
        return made

    def held(self, recipe: TrainingRecipe | None) -> list[Halves | None]:
        """The halves of each weight that is held quantized, as they are at this forward; None for a parameter.

        Raises RuntimeError or ValueError where `QuantizedWeight.read` does.
        """
        return remember(self._read(recipe)) if self.quantized_parameters else [None] * len(self._weights)

    def _read(self, recipe: TrainingRecipe | None) -> list[Halves | None]:
        return [self.get_submodule(f"quantized_{name}").read(recipe) for name in self._weights]  # type: ignore[operator]

    def weight_operand(
        self,
        weight: torch.Tensor,
        held: Halves | None,
        recipe: TrainingRecipe,
        scales: torch.Tensor | None,
        *,
        columnwise: bool = False,
    ) -> Quantized:
        """One half of a weight: quantized now, or as it is held."""
        if held is not None:
            return held[columnwise]
        return self.operand(weight, recipe.weight, column(scales, WEIGHT), columnwise=columnwise)

    def write_weights(self, weights: Sequence[torch.Tensor], recipe: TrainingRecipe | str | None) -> None:
        """Quantizes the weights, each (N, K), both halves, and holds these alone; `recipe` None is the autocast's.

        Delayed scaling quantizes by the present scale and records the amax. Raises RuntimeError where the layer holds
        its weights as parameters, or there is no recipe; ValueError for another number of weights or shape.
        """
        check_holds_quantized(type(self).__name__, quantized_parameters=self.quantized_parameters)
        recipe = training_recipe(recipe) if isinstance(recipe, str) else recipe or current()
        recipe = check_active(recipe)
        check_masters(weights, len(self._weights), (self.out_features, self.in_features))
        scale = column(self.present_scales(recipe, weights[0].device), WEIGHT)
        halves = [
            [self.operand(weight.detach(), recipe.weight, scale, columnwise=half) for half in (False, True)]
            for weight in weights
        ]
        for name, (rowwise, columnwise) in zip(self._weights, halves, strict=True):
            self.get_submodule(f"quantized_{name}").write(rowwise, columnwise, recipe)  # type: ignore[operator]
            if recipe.history:
                self.record(WEIGHT, rowwise.amax)

    def next_random(self) -> tuple[int, int]:
        """Seed and offset of the next backward: its rowwise halves use that offset, columnwise ones the one behind."""
        number, self._backwards = self._backwards, self._backwards + 1
        return self.seed, 2 * number

    # ---- gradients of weights ----------------------------------------------------------------------------------------

    def main_grads(self) -> list[torch.Tensor]:
        """The float32 (N, K) gradient that each weight's accumulates in, zeros where there was none.

        `main_grad` of the parameter; where it is held quantized, the layer's own (main_grad0 of weight0). Raises
        ValueError where one has another shape or dtype.
        """
        return [self._main_grad(name) for name in self._weights]

    def _main_grad(self, name: str) -> torch.Tensor:
        weight = getattr(self, name)
        owner, attribute = (self, name.replace("weight", "main_grad")) if weight is None else (weight, "main_grad")
        shape = (self.out_features, self.in_features)
        device = next(self.buffers() if weight is None else self.parameters()).device
        main: torch.Tensor | None = getattr(owner, attribute, None)
        if main is None:
            main = torch.zeros(shape, device=device)
            setattr(owner, attribute, main)
        check_main_grad(main, name, shape, device, attribute)
        return main

    def weight_gradients(self, products: Sequence[Product | None]) -> list[torch.Tensor | None]:
        """What a backward returns for each weight: the product, or None where it went to the main gradient or waits.

        A product that is None is not wanted.
        """
        if self.delay_wgrad:
            self._waiting.append(lambda: self._add_gradients(products))
            return [None] * len(products)
        return self._gradients(products)

    def _gradients(self, products: Sequence[Product | None]) -> list[torch.Tensor | None]:
        if not self.accumulate:
            found = [None if product is None else product(self.dtype, None) for product in products]
            self.observe_each("dw", found)
            return found
        mains = self.main_grads()
        for product, main in zip(products, mains, strict=True):
            if product is not None:
                main.copy_(product(torch.float32, main))
        self.observe_each("dw", mains)
        return [None] * len(products)

    def _add_gradients(self, products: Sequence[Product | None]) -> None:
        for name, found in zip(self._weights, self._gradients(products), strict=True):
            if found is not None:
                weight = getattr(self, name)
                weight.grad = found if weight.grad is None else weight.grad + found

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes the gradients of weights that the backward passes left waiting, the oldest first, all of them.

        Raises RuntimeError where the layer does not delay them.
        """
        check_delays(type(self).__name__, delay_wgrad=self.delay_wgrad)
        while self._waiting:
            self._waiting[0]()
            del self._waiting[0]

    def observe_each(self, name: str, values: Sequence[Any]) -> None:
        """Tells the observer of what each weight has one of: the value itself where there is one weight."""
        self.observe(name, values[0])


def column(scales: torch.Tensor | None, number: int) -> torch.Tensor | None:
    """Of the scales of delayed scaling one, float32 (1,); None where there are none. A copy: a layer's move on."""
    return None if scales is None else scales[number : number + 1].clone()


def weight_product(grad: Quantized, given: Quantized) -> Product:
    """Of the columnwise halves of an output's gradient and of the input."""
    return lambda dtype, c: gemm(grad, given, out_dtype=dtype, c=c)


def plain_weight_product(grad: torch.Tensor, given: torch.Tensor) -> Product:
    """The same in high precision, of the gradient (M, N) and the input (M, K)."""
    return lambda _, c: grad.T @ given if c is None else c + grad.T.float() @ given.float()
