"""Grouped linear layer: a weight for every section of rows, in launches for all sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.native.gemm.gemm import gemm_grouped
from narrowgauge.native.modules.history import GRAD, INPUT
from narrowgauge.native.modules.layer import Layer, Options, Pass, report_halves
from narrowgauge.native.modules.products import column_sums, product
from narrowgauge.native.modules.saved_operands import Saved, load_operands, save_operands
from narrowgauge.native.quantize.quantize import quantize_grouped
from narrowgauge.native.quantize.sections import pad_sections, unpad_sections
from narrowgauge.spec.modules.arguments import check_groups, check_splits
from narrowgauge.spec.modules.training import TrainingRecipe
from narrowgauge.spec.quantized import GroupedQuantized, Half, Quantized


class GroupedLinear(Layer):
    """`Linear` for `groups` sections of the rows of x, with parameters `weight0`, `bias0`, `weight1` and so on.

    Sections are padded with rows of zeros to the alignment of the recipe of x and quantized separately; the results
    have no padding. Delayed scaling has a common scale of all sections, from their largest amax. An observer gets
    lists with an entry per group of the Quantized, `dw` and `dbias`, and the complete `y` and `dx`. Main gradients
    of quantized parameters are `main_grad0` and so on. Everything else is as in `Linear`. Raises as `Linear` does,
    and ValueError without groups or if m_splits do not add up to the rows."""

    def __init__(
        self, groups: int, in_features: int, out_features: int, bias: bool = True, **options: Unpack[Options]
    ) -> None:
        check_groups(groups)
        super().__init__([f"weight{group}" for group in range(groups)], in_features, out_features, bias, **options)
        self.groups = groups

    def write_weight(self, w: Sequence[torch.Tensor], recipe: TrainingRecipe | str | None = None) -> None:
        """`Linear.write_weight` for the weights of all groups: a sequence of (N, K), or a tensor (G, N, K)."""
        self.write(list(w), recipe)

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """y (…, N) of x (…, K). m_splits: number of rows of every group, in order; may be 0."""
        self.check_input(x)
        check_splits(m_splits, self.groups, x, self.in_features)
        y: torch.Tensor = _Products.apply(  # type: ignore[no-untyped-call]
            self, self.begin(x), list(m_splits), x, *self.anchors(), *self.biases()
        )
        return y

    def report_each(self, name: str, values: Sequence[Any]) -> None:
        """Passes the list of results of all groups to the observer."""
        self.report(name, list(values))

    def section_operands(
        self,
        x: torch.Tensor,
        sizes: torch.Tensor,
        role: int,
        step: Pass,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        offset: int = 0,
    ) -> tuple[GroupedQuantized | None, GroupedQuantized | None]:
        """Rowwise and columnwise halves of padded sections. `sizes`: rows, int64 (G,), on the CPU. None if not
        requested."""
        assert step.recipe is not None
        recipe = step.recipe.input if role == INPUT else step.recipe.grad
        scale, sizes = self.scale_of(role, step.scale), sizes.to(x.device)
        made: dict[Half, GroupedQuantized] = {}
        for half in (half for half, wanted in zip(Half, (rowwise, columnwise), strict=True) if wanted):
            made[half] = q = quantize_grouped(
                x, sizes, half.recipe(recipe), columnwise=half is Half.COLUMN,
                scale=None if scale is None else scale.expand(self.groups).contiguous(),
                random=(self.seed, half.pick((offset, offset + 1))) if recipe.rounding == "stochastic" else None,
            )  # fmt: skip
            if step.scale is not None:
                self.record(role, q.required_amax.amax(0, keepdim=True))
        return made.get(Half.ROW), made.get(Half.COLUMN)

    def forward_sections(
        self, x: torch.Tensor, splits: list[int], bias: torch.Tensor | None, step: Pass
    ) -> tuple[torch.Tensor, list[Saved]]:
        """y of the rows of x under a recipe, and the operands of the backward pass: columnwise halves of x and
        weights."""
        assert step.recipe is not None
        sizes = torch.tensor(splits)
        padded, aligned = pad_sections(x, sizes, step.recipe.input)
        rows, columns = self.section_operands(padded, aligned, INPUT, step, columnwise=step.wgrad)
        _report(self, "x", aligned, rows, columns)
        halves = [self.weight_operands(name, step) for name in self.weights]
        w_rows = [half for half, _ in halves if isinstance(half, Quantized)]
        w_columns = [half for _, half in halves]
        report_halves(self, "w", w_rows, w_columns)
        assert rows is not None
        y = gemm_grouped(rows, w_rows, out_dtype=self.dtype, bias=bias)
        return unpad_sections(y, sizes, step.recipe.input), [columns, *w_columns]

    def backward_sections(
        self, dy: torch.Tensor, splits: list[int], x: Any, weights: list[Any], step: Pass, offset: int
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """dx and dw from the rows of dy and the saved operands. None for gradients that are not required or are
        delayed."""
        assert step.recipe is not None
        sizes = torch.tensor(splits)
        padded, aligned = pad_sections(dy, sizes, step.recipe.input)
        rows, columns = self.section_operands(
            padded, aligned, GRAD, step, rowwise=step.dgrad, columnwise=step.wgrad, offset=offset
        )
        _report(self, "dy", aligned, rows, columns)
        dx: torch.Tensor | None = None
        dw: list[torch.Tensor | None] = [None] * self.groups
        if rows is not None:
            dx = unpad_sections(gemm_grouped(rows, weights, out_dtype=self.dtype), sizes, step.recipe.input)
        if columns is not None:
            dw = self.weight_gradients(_sections(columns, aligned), _sections(x, aligned))
        return dx, dw

    def forward_plain(
        self, x: torch.Tensor, splits: list[int], biases: Sequence[torch.Tensor | None], step: Pass
    ) -> tuple[torch.Tensor, list[Saved]]:
        """`forward_sections` in high precision, without padding."""
        halves = [self.weight_operands(name, step) for name in self.weights]
        parts = zip(torch.split(x, splits), halves, biases, strict=True)
        y = torch.cat([product(part, rows, out_dtype=self.dtype, bias=bias) for part, (rows, _), bias in parts])
        return y, [x if step.wgrad else None, *(columns for _, columns in halves)]

    def backward_plain(
        self, dy: torch.Tensor, splits: list[int], x: Any, weights: list[Any], step: Pass
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """`backward_sections` in high precision."""
        parts = torch.split(dy, splits)
        dx: torch.Tensor | None = None
        dw: list[torch.Tensor | None] = [None] * self.groups
        if step.dgrad:
            dx = torch.cat([product(*pair, out_dtype=self.dtype) for pair in zip(parts, weights, strict=True)])
        if step.wgrad:
            dw = self.weight_gradients([part.T for part in parts], [part.T for part in torch.split(x, splits)])
        return dx, dw


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: GroupedLinear, step: Pass, splits: list[int], x: torch.Tensor, *parameters: torch.Tensor | None
    ) -> torch.Tensor:
        rows, biases = x.reshape(-1, layer.in_features), parameters[layer.groups :]
        if step.recipe is None:
            y, saved = layer.forward_plain(rows, splits, biases, step)
        else:
            added = [bias for bias in biases if bias is not None]
            y, saved = layer.forward_sections(rows, splits, torch.stack(added) if added else None, step)
        layer.report("y", y)
        ctx.layer, ctx.step, ctx.splits, ctx.shape = layer, step, splits, x.shape
        save_operands(ctx, saved)
        return y.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: GroupedLinear = ctx.layer
        step: Pass = ctx.step
        splits: list[int] = ctx.splits
        x, *weights = load_operands(ctx)
        dy = dy.reshape(-1, layer.out_features)
        offset = layer.next_offset()
        if step.recipe is None:
            dx, dw = layer.backward_plain(dy, splits, x, weights, step)
        else:
            dx, dw = layer.backward_sections(dy, splits, x, weights, step, offset)
        if dx is not None:
            layer.report("dx", dx)
            dx = dx.view(ctx.shape)
        dbias: list[torch.Tensor | None] = [None] * layer.groups
        if any(ctx.needs_input_grad[4 + layer.groups :]):
            dbias = [column_sums(part) for part in torch.split(dy, splits)]
            layer.report_each("dbias", dbias)
        if step.scale is not None and step.recipe is not None:
            layer.end_backward(step.recipe)
        return None, None, None, dx, *dw, *dbias


def _sections(q: GroupedQuantized, sizes: torch.Tensor) -> list[Quantized]:
    """Sections by sizes on the CPU: the host does not wait for a GPU."""
    return replace(q, sizes=sizes).sections()


def _report(layer: GroupedLinear, name: str, sizes: torch.Tensor, *halves: GroupedQuantized | None) -> None:
    if layer.observer is not None:
        report_halves(layer, name, *(None if half is None else _sections(half, sizes) for half in halves))
