"""Common base of the layers: options, quantized operands, and gradients of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowgauge.reference.gemm.gemm import gemm
from narrowgauge.reference.modules.amax_history import WEIGHT, AmaxHistory
from narrowgauge.reference.modules.parallel import sharded_amax
from narrowgauge.reference.modules.quantized_weight import QuantizedWeight
from narrowgauge.reference.quantize.quantize import quantize_both
from narrowgauge.spec.modules.arguments import (
    check_active,
    check_delays,
    check_holds_quantized,
    check_input,
    check_layer,
    check_main_grad,
    check_masters,
)
from narrowgauge.spec.modules.autocast import current, remember
from narrowgauge.spec.modules.training import TrainingRecipe, training_recipe
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe

Product = Callable[[torch.dtype, torch.Tensor | None], torch.Tensor]
"""Computes the gradient of a weight in a dtype, plus c (N, K), float32, if given."""

Halves = tuple[Quantized, Quantized]
"""The rowwise and the columnwise half."""


class QuantizedLayer(AmaxHistory):
    """A layer that quantizes the operands of its products by role, by the training recipe of the autocast.

    weights: names of the weights, each (N, K). Other options: `Linear`. Raises TypeError for another dtype, ValueError
    for invalid extents, an invalid seed or options that exclude each other.
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
        bound = in_features**-0.5  # as in torch.nn.Linear
        for name in weights:
            if quantized_parameters:
                self.register_parameter(name, None)
                self.add_module(f"quantized_{name}", QuantizedWeight(shape, device))
            else:
                weight = torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound)
                self.register_parameter(name, torch.nn.Parameter(weight))
            initial = torch.empty(out_features, dtype=dtype, device=device).uniform_(-bound, bound) if bias else None
            self.register_parameter(
                name.replace("weight", "bias"), None if initial is None else torch.nn.Parameter(initial)
            )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._backwards:
            destination[f"{prefix}backward_passes"] = torch.tensor(self._backwards)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # The number of backwards is no buffer: it stays on the host, where it makes the offsets of stochastic rounding.
        backwards = state_dict.get(f"{prefix}backward_passes")
        given = {name: value for name, value in state_dict.items() if name != f"{prefix}backward_passes"}
        super()._load_from_state_dict(given, prefix, *rest)
        if backwards is not None:
            self._backwards = int(backwards)

    def check_input(self, x: torch.Tensor, recipe: TrainingRecipe | None) -> None:
        """Raises TypeError or ValueError if the layer or the recipe does not accept the input `x` (…, K)."""
        check_input(type(self).__name__, x, self.in_features, self.dtype, recipe)

    def check_weights(self, recipe: TrainingRecipe | None) -> None:
        """Raises the errors of `held_halves` and `main_grads` already in the forward, before any state changes."""
        if self.quantized_parameters:
            self._read(recipe)
        if self.accumulate and torch.is_grad_enabled():
            self.main_grads()

    def parameters_of(self, kind: str) -> list[torch.Tensor | None]:
        """The weights ("weight") or the biases ("bias") of the layer; without biases None for every weight.

        Quantized weights are represented by tensors without elements, so that autograd computes their gradients.
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
        half: Half = Half.ROW,
        random: tuple[int, int] | None = None,
    ) -> Quantized:
        """A half of `x` (M, K), quantized. `scale`, float32 (1,): of delayed scaling. `random`: of both halves.

        With an `amax_group` the amax is reduced over its processes.
        """
        row, column = (each is half for each in Half)
        amax = None
        if self.amax_group is not None and recipe.tensor_scale != "none":
            amax = sharded_amax(x, recipe, self.amax_group, rowwise=row, columnwise=column)
        random = random if recipe.rounding == "stochastic" else None
        halves = quantize_both(x, recipe, rowwise=row, columnwise=column, amax=amax, scale=scale, random=random)
        q = half.pick(halves)
        assert q is not None
        return q

    def held_halves(self, recipe: TrainingRecipe | None) -> list[Halves | None]:
        """The halves of each quantized weight at the time of this forward; None for a weight that is a parameter.

        Raises the errors of `QuantizedWeight.read`.
        """
        return remember(self._read(recipe)) if self.quantized_parameters else [None] * len(self._weights)

    def _read(self, recipe: TrainingRecipe | None) -> list[Halves | None]:
        return [self.get_submodule(f"quantized_{name}").read(recipe) for name in self._weights]  # type: ignore[operator]

    def weight_operand(
        self,
        weight: torch.Tensor,
        halves: Halves | None,
        recipe: TrainingRecipe,
        scales: torch.Tensor | None,
        *,
        half: Half = Half.ROW,
    ) -> Quantized:
        """A half of a weight: from `halves` if the weight is stored quantized, else quantized now."""
        if halves is not None:
            return half.pick(halves)
        return self.operand(weight, recipe.weight, column(scales, WEIGHT), half=half)

    def write_weights(self, weights: Sequence[torch.Tensor], recipe: TrainingRecipe | str | None) -> None:
        """Quantizes both halves of the weights (N, K) and stores only the halves. `recipe` None: of the autocast.

        Delayed scaling quantizes by the current scale and records the amax. Raises RuntimeError if the weights of the
        layer are parameters, or without a recipe; ValueError for another number of weights or another shape.
        """
        check_holds_quantized(type(self).__name__, quantized_parameters=self.quantized_parameters)
        recipe = training_recipe(recipe) if isinstance(recipe, str) else recipe or current()
        recipe = check_active(recipe)
        check_masters(weights, len(self._weights), (self.out_features, self.in_features))
        scale = column(self.present_scales(recipe, weights[0].device), WEIGHT)
        halves = [
            [self.operand(weight.detach(), recipe.weight, scale, half=half) for half in Half] for weight in weights
        ]
        for name, (rowwise, columnwise) in zip(self._weights, halves, strict=True):
            self.get_submodule(f"quantized_{name}").write(rowwise, columnwise, recipe)  # type: ignore[operator]
            if recipe.history:
                self.record(WEIGHT, rowwise.required_amax)

    def next_random(self) -> tuple[int, int]:
        """Seed and offset of the next backward: rowwise halves use this offset, columnwise halves offset + 1."""
        number, self._backwards = self._backwards, self._backwards + 1
        return self.seed, 2 * number

    # ---- gradients of weights ----------------------------------------------------------------------------------------

    def main_grads(self) -> list[torch.Tensor]:
        """The main gradient of each weight, float32 (N, K), created as zeros if missing.

        It is the attribute `main_grad` of the parameter or, for a quantized weight, of the layer (main_grad0 for
        weight0). Raises TypeError for another dtype, ValueError for another shape or device.
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
        """The gradients that a backward returns: None if a gradient was accumulated, is delayed or is not wanted.

        A product None: this gradient is not wanted.
        """
        if self.delay_wgrad:
            self._waiting.append(lambda: self._add_gradients(products))
            return [None] * len(products)
        return self._gradients(products)

    def _gradients(self, products: Sequence[Product | None]) -> list[torch.Tensor | None]:
        if not self.accumulate:
            gradients = [None if product is None else product(self.dtype, None) for product in products]
            self.observe_each("dw", gradients)
            return gradients
        mains = self.main_grads()
        for product, main in zip(products, mains, strict=True):
            if product is not None:
                main.copy_(product(torch.float32, main))
        self.observe_each("dw", mains)
        return [None] * len(products)

    def _add_gradients(self, products: Sequence[Product | None]) -> None:
        for name, gradient in zip(self._weights, self._gradients(products), strict=True):
            if gradient is not None:
                weight = getattr(self, name)
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes all delayed gradients of weights, in the order of the backward passes.

        Raises RuntimeError if the layer does not delay gradients.
        """
        check_delays(type(self).__name__, delay_wgrad=self.delay_wgrad)
        while self._waiting:
            self._waiting[0]()
            del self._waiting[0]

    def observe_each(self, name: str, values: Sequence[Any]) -> None:
        """Calls the observer with the value of each weight; here the layer has a single weight."""
        self.observe(name, values[0])


def column(scales: torch.Tensor | None, number: int) -> torch.Tensor | None:
    """A copy of a scale of delayed scaling, float32 (1,), or None without scales. A layer overwrites its scales."""
    return None if scales is None else scales[number : number + 1].clone()


def weight_product(grad: Quantized, x: Quantized) -> Product:
    """The gradient of a weight from the columnwise halves of the output gradient and of the input."""
    return lambda dtype, c: gemm(grad, x, out_dtype=dtype, c=c)


def plain_weight_product(grad: torch.Tensor, x: torch.Tensor) -> Product:
    """The gradient of a weight in high precision, from the output gradient (M, N) and the input (M, K)."""
    return lambda _, c: grad.T @ x if c is None else c + grad.T.float() @ x.float()
