"""What all quantizing layers share: options, observation, operands by role, and the gradients of weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch

from narrowgauge.native.modules.history import WEIGHT, History
from narrowgauge.native.modules.parallel import sharded_amax
from narrowgauge.native.modules.products import product
from narrowgauge.native.modules.quantized_weight import QuantizedWeight
from narrowgauge.native.modules.saved_operands import Operand
from narrowgauge.native.quantize.quantize import quantize_both
from narrowgauge.spec.autocast import current, remember
from narrowgauge.spec.module_arguments import (
    check_active,
    check_delays,
    check_holds_quantized,
    check_input,
    check_layer,
    check_main_grad,
    check_masters,
    check_written,
)
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.training import TrainingRecipe, training_recipe


class Options(TypedDict, total=False):
    """Options of every layer, see `Layer`."""

    dtype: torch.dtype
    device: torch.device | str | None
    seed: int
    accumulate: bool
    quantized_parameters: bool
    delay_wgrad: bool


@dataclass(frozen=True)
class Pass:
    """What a forward pass decides and its backward pass keeps: that one may run in a thread without the autocast."""

    recipe: TrainingRecipe | None
    dgrad: bool
    wgrad: bool
    scale: torch.Tensor | None
    """Encode scales of delayed scaling, float32 (3,), as they were when the forward pass began; else None."""
    dx: str = "dx"
    """What an observer knows the gradient of the product's input by."""


class Layer(History):
    """A layer of weights (out_features, in_features) whose products are quantized by the recipe of the autocast.

    weights: their names; there is a bias for each. dtype: of parameters, inputs and results: float32, bfloat16 or
    float16. seed: of stochastic rounding; backward pass n, counted from 0, takes the offsets 2n and 2n + 1.
    accumulate: the gradient of a weight is added to its `main_grad`, float32, made where it is missing; its `grad`
    stays None. quantized_parameters: the layer holds the codes and scales of weights, written by `write_weight`, and
    their gradients are its own `main_grad`; needs accumulate. delay_wgrad: backward leaves gradients of weights to
    `backward_dw`. amax_group: a process group over which the amax of every operand is reduced before its scale.

    Raises TypeError for a dtype, ValueError for features, a seed or options that do not fit.
    """

    def __init__(
        self,
        weights: Sequence[str],
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        seed: int = 0,
        accumulate: bool = False,
        quantized_parameters: bool = False,
        delay_wgrad: bool = False,
        amax_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        check_layer(
            kind, in_features, out_features, dtype, seed, accumulate=accumulate,
            quantized_parameters=quantized_parameters,
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype
        self.seed = seed
        self.accumulate = accumulate
        self.quantized_parameters = quantized_parameters
        self.delay_wgrad = delay_wgrad
        self.amax_group = amax_group
        self.weights = tuple(weights)
        self._backward_passes = 0
        self._waiting: deque[Callable[[], None]] = deque()
        shape, bound = (out_features, in_features), in_features**-0.5  # where torch.nn.Linear begins
        for name in weights:
            weight, added = (torch.empty(s, dtype=dtype, device=device) for s in (shape, (out_features,)))
            held = None if quantized_parameters else torch.nn.Parameter(weight.uniform_(-bound, bound))
            self.register_parameter(name, held)
            if quantized_parameters:
                self.add_module(f"quantized_{name}", QuantizedWeight(shape, device))
                setattr(self, name.replace("weight", "main_grad"), None)
            self.register_parameter(
                name.replace("weight", "bias"), torch.nn.Parameter(added.uniform_(-bound, bound)) if bias else None
            )

    def report_each(self, name: str, values: Sequence[Any]) -> None:
        """Tells the observer of a result for each weight."""
        self.report(name, values[0])

    def check_input(self, x: torch.Tensor) -> None:
        """Raises TypeError or ValueError where `x` is no input (…, K) of this layer under the active recipe."""
        recipe = current()
        check_input(type(self).__name__, x, self.in_features, self.dtype, recipe)
        if self.quantized_parameters:
            for name in self.weights:
                check_written(self._held(name).shape, self._held(name).recipe, recipe)
        if self.accumulate and torch.is_grad_enabled():  # here nothing is computed yet that an error would lose
            for name in self.weights:
                self._main_grad(name, x.device)

    def begin(self, x: torch.Tensor, dx: str = "dx") -> Pass:
        """What this forward pass does, `x` being the input of its product. Raises ValueError for another history."""
        recipe, recording = current(), torch.is_grad_enabled()
        learning = any(map(self._learns, self.weights))
        scale = None
        if recipe is not None and recipe.history:
            scale = self.present_scales(recipe, x.device)
            self.end_forward_later(recipe)
        return Pass(recipe, recording and x.requires_grad, recording and learning, scale, dx)

    def next_offset(self) -> int:
        """The offset of the stochastic rounding of a backward pass, another one at each call."""
        offset = 2 * self._backward_passes
        self._backward_passes += 1
        return offset

    # ---- operands ----------------------------------------------------------------------------------------------------

    def operands(
        self, x: torch.Tensor, role: int, step: Pass, *, rowwise: bool = True, columnwise: bool = True, offset: int = 0
    ) -> tuple[Operand | None, Operand | None]:
        """Both halves of a matrix, quantized by its role in one read; in high precision itself and its transpose.

        None for a half that is not wanted. Delayed scaling records the amax.
        """
        if step.recipe is None:
            return (x if rowwise else None), (x.T if columnwise else None)
        if not (rowwise or columnwise):
            return None, None
        recipe = (step.recipe.input, step.recipe.weight, step.recipe.grad)[role]
        amax = None
        if self.amax_group is not None:
            amax = sharded_amax(x, recipe, self.amax_group, rowwise=rowwise, columnwise=columnwise)
        halves = quantize_both(
            x, recipe, rowwise=rowwise, columnwise=columnwise, amax=amax, scale=self.scale_of(role, step.scale),
            random=(self.seed, offset) if recipe.rounding == "stochastic" else None,
        )  # fmt: skip
        if step.scale is not None:
            made = halves[0] if halves[0] is not None else halves[1]
            assert made is not None
            self.record(role, made.required_amax)
        return halves

    def weight_operands(self, name: str, step: Pass) -> tuple[Operand, Operand | None]:
        """The rowwise half of a weight, and where its input wants a gradient the columnwise one.

        A parameter is quantized now. Raises as `QuantizedWeight.halves` does.
        """
        if self.quantized_parameters:
            kept, across = remember(self._held(name).halves(step.recipe))  # it may be written anew before the backward
            return kept, across if step.dgrad else None
        rows, columns = self.operands(getattr(self, name), WEIGHT, step, columnwise=step.dgrad)
        assert rows is not None
        return rows, columns

    def anchors(self) -> list[torch.Tensor]:
        """A tensor for each weight of which autograd is to ask a gradient: parameters, or tensors without elements."""
        if self.quantized_parameters:
            return [self._held(name).place.detach().requires_grad_() for name in self.weights]
        return [getattr(self, name) for name in self.weights]

    def biases(self) -> list[torch.Tensor | None]:
        """The bias of each weight."""
        return [getattr(self, name.replace("weight", "bias")) for name in self.weights]

    def write(self, masters: Sequence[torch.Tensor], recipe: TrainingRecipe | str | None) -> None:
        """Quantizes `masters`, one (N, K) for each weight, by `recipe` or that of the active autocast, to be held.

        Raises RuntimeError for a layer whose parameters are not quantized and where there is no recipe, and TypeError
        or ValueError where a master does not fit: then all that was held stays.
        """
        check_holds_quantized(type(self).__name__, quantized_parameters=self.quantized_parameters)
        found = training_recipe(recipe) if isinstance(recipe, str) else recipe or current()
        found = check_active(found)
        check_masters(masters, len(self.weights), (self.out_features, self.in_features))
        device = self._held(self.weights[0]).place.device
        step = Pass(found, True, True, self.present_scales(found, device) if found.history else None)
        for name, (rows, columns) in zip(
            self.weights, [self.operands(master.detach(), WEIGHT, step) for master in masters], strict=True
        ):
            assert isinstance(rows, Quantized)
            assert isinstance(columns, Quantized)
            self._held(name).hold(rows, columns, found)

    def _held(self, name: str) -> QuantizedWeight:
        held: QuantizedWeight = getattr(self, f"quantized_{name}")
        return held

    # ---- gradients of weights ----------------------------------------------------------------------------------------

    def weight_gradients(self, dy: Sequence[Operand], x: Sequence[Operand]) -> list[torch.Tensor | None]:
        """What autograd is given as the gradients of the weights, of the columnwise halves for each.

        None where they go to main_grad, wait for `backward_dw`, or are not wanted.
        """
        if not self.delay_wgrad:
            return self._gradients(dy, x)
        self._waiting.append(partial(self._gradients_late, dy, x))
        return [None] * len(self.weights)

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes the gradients of weights that wait, the oldest first.

        Raises RuntimeError where the layer does not delay them.
        """
        check_delays(type(self).__name__, delay_wgrad=self.delay_wgrad)
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()  # only now: an error leaves it waiting

    def _gradients(self, dy: Sequence[Operand], x: Sequence[Operand]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for name, left, right in zip(self.weights, dy, x, strict=True):
            if not self._learns(name):
                found.append(None)
            elif self.accumulate:
                main = self._main_grad(name, left.codes.device if isinstance(left, Quantized) else left.device)
                main.copy_(product(left, right, out_dtype=torch.float32, c=main))
                found.append(main if self.observer is None else main.clone())  # which goes on growing
            else:
                found.append(product(left, right, out_dtype=self.dtype))
        self.report_each("dw", found)
        return [None] * len(found) if self.accumulate else found

    def _gradients_late(self, dy: Sequence[Operand], x: Sequence[Operand]) -> None:
        for name, gradient in zip(self.weights, self._gradients(dy, x), strict=True):
            if gradient is not None:
                weight = getattr(self, name)
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def _learns(self, name: str) -> bool:
        return self.quantized_parameters or bool(getattr(self, name).requires_grad)

    def _main_grad(self, name: str, device: torch.device) -> torch.Tensor:
        """The main gradient of a weight, made of zeros where it is missing. Raises TypeError or ValueError for another.

        It is the parameter's, or the layer's where parameters are quantized.
        """
        owner: Any = self if self.quantized_parameters else getattr(self, name)
        place = name.replace("weight", "main_grad") if self.quantized_parameters else "main_grad"
        shape = (self.out_features, self.in_features)
        found: torch.Tensor | None = getattr(owner, place, None)
        if found is None:
            found = torch.zeros(shape, dtype=torch.float32, device=device)
            setattr(owner, place, found)
        check_main_grad(found, name, shape, device, place)
        return found


def report_halves(layer: Layer, name: str, rows: Any, columns: Any) -> None:
    """Tells the observer of the halves of an operand that are made: Quantized, or for each weight one."""
    for found, of in ((rows, name), (columns, f"{name} columnwise")):
        one = found[0] if isinstance(found, list) else found
        if isinstance(one, Quantized):
            layer.report(of, found)
