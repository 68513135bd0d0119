"""Base of the quantizing layers: options, observer, operands by role, and gradients of weights."""

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
from narrowgauge.spec.modules.arguments import (
    check_active,
    check_delays,
    check_holds_quantized,
    check_input,
    check_layer,
    check_main_grad,
    check_masters,
    check_written,
)
from narrowgauge.spec.modules.autocast import current, remember
from narrowgauge.spec.modules.training import TrainingRecipe, training_recipe
from narrowgauge.spec.quantized import Half, Quantized

_PASSES = "backward_passes"
"""Name of the number of backward passes in a state dict, int64 (); absent before the first pass."""


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
    """Decisions of a forward pass for its backward pass, which may run in a thread without the autocast."""

    recipe: TrainingRecipe | None
    dgrad: bool
    wgrad: bool
    scale: torch.Tensor | None
    """Encode scales of delayed scaling, float32 (3,), at the start of the forward pass; else None."""
    dx: str = "dx"
    """Name of the gradient of the GEMM's input for an observer."""


class Layer(History):
    """A layer with weights (out_features, in_features). The recipe of the autocast quantizes the operands of its GEMMs.

    weights: names of the weights; every weight has a bias. dtype: of parameters, inputs and results: float32, bfloat16
    or float16. seed: of stochastic rounding; backward pass n, counted from 0, takes the offsets 2n and 2n + 1.
    accumulate: the gradient of a weight is added to its `main_grad`, float32, created if missing; `grad` stays None.
    quantized_parameters: the layer holds codes and scales of its weights, written by `write_weight`, and the gradients
    are the layer's `main_grad`; needs accumulate. delay_wgrad: `backward_dw` computes the gradients of weights.
    amax_group: a process group over which the amax of every operand is reduced before its scale is computed.

    Raises TypeError for a wrong dtype, ValueError for wrong features, seed or options.
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
        shape, bound = (out_features, in_features), in_features**-0.5  # as torch.nn.Linear initializes
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

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._backward_passes:  # stochastic rounding continues with the next offset
            destination[prefix + _PASSES] = torch.tensor(self._backward_passes)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        name = prefix + _PASSES
        super()._load_from_state_dict({key: t for key, t in state_dict.items() if key != name}, prefix, *arguments)
        if name in state_dict:
            self._backward_passes = int(state_dict[name])

    def report_each(self, name: str, values: Sequence[Any]) -> None:
        """Passes the results of all weights to the observer."""
        self.report(name, values[0])

    def check_input(self, x: torch.Tensor) -> None:
        """Raises TypeError or ValueError if `x` is no input (…, K) of this layer under the active recipe."""
        recipe = current()
        check_input(type(self).__name__, x, self.in_features, self.dtype, recipe)
        if self.quantized_parameters:
            for name in self.weights:
                check_written(self._held(name).shape, self._held(name).recipe, recipe)
        if self.accumulate and torch.is_grad_enabled():  # before any computation that an error would lose
            for name in self.weights:
                self._main_grad(name, x.device)

    def begin(self, x: torch.Tensor, dx: str = "dx") -> Pass:
        """Decisions of a forward pass with the GEMM input `x`. Raises ValueError for a history of another length."""
        recipe, recording = current(), torch.is_grad_enabled()
        learning = any(map(self._learns, self.weights))
        scale = None
        if recipe is not None and recipe.history:
            scale = self.present_scales(recipe, x.device)
            self.end_forward_later(recipe)
        return Pass(recipe, recording and x.requires_grad, recording and learning, scale, dx)

    def next_offset(self) -> int:
        """Offset of the stochastic rounding of the next backward pass."""
        offset = 2 * self._backward_passes
        self._backward_passes += 1
        return offset

    # ---- operands ----------------------------------------------------------------------------------------------------

    def operands(
        self, x: torch.Tensor, role: int, step: Pass, *, rowwise: bool = True, columnwise: bool = True, offset: int = 0
    ) -> tuple[Operand | None, Operand | None]:
        """Rowwise and columnwise half of a matrix, quantized by its role in one read; without recipe x and its
        transpose.

        A half is None if its flag is False. Delayed scaling records the amax.
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
        """The rowwise half of a weight, and the columnwise half if the input needs a gradient.

        A parameter is quantized by this call. Raises as `QuantizedWeight.halves` does.
        """
        if self.quantized_parameters:
            # remember: the weight may be written again before the backward pass.
            rowwise, columnwise = remember(self._held(name).halves(step.recipe))
            return rowwise, columnwise if step.dgrad else None
        rows, columns = self.operands(getattr(self, name), WEIGHT, step, columnwise=step.dgrad)
        assert rows is not None
        return rows, columns

    def anchors(self) -> list[torch.Tensor]:
        """The weights as inputs of the autograd function: parameters, or tensors without elements."""
        if self.quantized_parameters:
            return [self._held(name).place.detach().requires_grad_() for name in self.weights]
        return [getattr(self, name) for name in self.weights]

    def biases(self) -> list[torch.Tensor | None]:
        """The biases in the order of the weights."""
        return [getattr(self, name.replace("weight", "bias")) for name in self.weights]

    def write(self, masters: Sequence[torch.Tensor], recipe: TrainingRecipe | str | None) -> None:
        """Quantizes `masters`, a matrix (N, K) for every weight, by `recipe` or the active autocast, and holds the
        result.

        Raises RuntimeError if parameters are not quantized or no recipe is given or active, and TypeError or ValueError
        for a wrong master. After an error the held weights are unchanged.
        """
        check_holds_quantized(type(self).__name__, quantized_parameters=self.quantized_parameters)
        wanted = training_recipe(recipe) if isinstance(recipe, str) else recipe or current()
        active = check_active(wanted)
        check_masters(masters, len(self.weights), (self.out_features, self.in_features))
        device = self._held(self.weights[0]).place.device
        step = Pass(active, True, True, self.present_scales(active, device) if active.history else None)
        for name, (rows, columns) in zip(
            self.weights, [self.operands(master.detach(), WEIGHT, step) for master in masters], strict=True
        ):
            assert isinstance(rows, Quantized)
            assert isinstance(columns, Quantized)
            self._held(name).hold(rows, columns, active)

    def _held(self, name: str) -> QuantizedWeight:
        held: QuantizedWeight = getattr(self, f"quantized_{name}")
        return held

    # ---- gradients of weights ----------------------------------------------------------------------------------------

    def weight_gradients(self, dy: Sequence[Operand], x: Sequence[Operand]) -> list[torch.Tensor | None]:
        """Gradients of the weights for autograd, from the columnwise halves of dy and x of every weight.

        None if the gradient is added to main_grad, is delayed to `backward_dw`, or is not required.
        """
        if not self.delay_wgrad:
            return self._gradients(dy, x)
        self._waiting.append(partial(self._gradients_late, dy, x))
        return [None] * len(self.weights)

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes the delayed gradients of weights, the oldest first.

        Raises RuntimeError if the layer does not delay gradients.
        """
        check_delays(type(self).__name__, delay_wgrad=self.delay_wgrad)
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()  # after the call: an error keeps the entry

    def _gradients(self, dy: Sequence[Operand], x: Sequence[Operand]) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = []
        for name, left, right in zip(self.weights, dy, x, strict=True):
            if not self._learns(name):
                gradients.append(None)
            elif self.accumulate:
                main = self._main_grad(name, left.codes.device if isinstance(left, Quantized) else left.device)
                main.copy_(product(left, right, out_dtype=torch.float32, c=main))
                gradients.append(main if self.observer is None else main.clone())  # main_grad changes later
            else:
                gradients.append(product(left, right, out_dtype=self.dtype))
        self.report_each("dw", gradients)
        return [None] * len(gradients) if self.accumulate else gradients

    def _gradients_late(self, dy: Sequence[Operand], x: Sequence[Operand]) -> None:
        for name, gradient in zip(self.weights, self._gradients(dy, x), strict=True):
            if gradient is not None:
                weight = getattr(self, name)
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def _learns(self, name: str) -> bool:
        return self.quantized_parameters or bool(getattr(self, name).requires_grad)

    def _main_grad(self, name: str, device: torch.device) -> torch.Tensor:
        """The main gradient of a weight, of the layer if parameters are quantized, else of the parameter.

        A missing main gradient is created with zeros. Raises TypeError or ValueError for a wrong main gradient.
        """
        owner: Any = self if self.quantized_parameters else getattr(self, name)
        place = name.replace("weight", "main_grad") if self.quantized_parameters else "main_grad"
        shape = (self.out_features, self.in_features)
        main_grad: torch.Tensor | None = getattr(owner, place, None)
        if main_grad is None:
            main_grad = torch.zeros(shape, dtype=torch.float32, device=device)
            setattr(owner, place, main_grad)
        check_main_grad(main_grad, name, shape, device, place)
        return main_grad


def report_halves(layer: Layer, name: str, rows: Any, columns: Any) -> None:
    """Passes the quantized halves of an operand to the observer: a Quantized, or a list with a Quantized per weight."""
    for half, given in zip(Half, (rows, columns), strict=True):
        first = given[0] if isinstance(given, list) else given
        if isinstance(first, Quantized):
            layer.report(half.operand(name), given)
