"""Operands of products in the form of a kernel: transposed, with scales in a layout, and in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from narrowgauge.harness.cases.contracts.case import ContractCase, ProductCase
from narrowgauge.harness.inputs.inputs import laid_out
from narrowgauge.spec.quantized import PARTS, BatchedQuantized, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, Packing

Tensors = dict[str, torch.Tensor]


def batch_of(case: ContractCase) -> int:
    """Number of products of a batch, or 0."""
    return case.batch if isinstance(case, ProductCase) else 0


def products_of(case: ContractCase, tensors: Tensors) -> Sequence[Tensors]:
    """The tensors of the products of a batch, or of the only product. Raises ValueError for a tensor without the
    axis."""
    count = batch_of(case)
    if not count:
        return [tensors]
    for name, tensor in tensors.items():
        if not tensor.dim() or len(tensor) != count:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; that of {count} products is ({count}, …)")
    return [{name: tensor[number] for name, tensor in tensors.items()} for number in range(count)]


def stored_inputs(case: ContractCase, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors of the arguments in the requested memory of the case."""
    codes = {argument.name: argument.of_codes for argument in case.program.arguments if argument.of_codes}
    caches = {argument.name for argument in case.program.arguments if argument.of_cache}
    found = {}
    for name, tensor in tensors.items():
        if name in caches:
            found[name] = tensor
            continue
        of = codes.get(name, name)
        transposed = isinstance(case, ProductCase) and case.is_transposed(of)
        if name not in codes:
            found[name] = tensor.mT.contiguous().mT if transposed else laid_out(tensor, case.view)
            continue
        part, recipe = name.removeprefix(f"{of}."), case.recipe_of(of)
        if part == "scales" and isinstance(case, ProductCase) and case.layout_of(recipe) != LINEAR:
            found[name] = Packing(LAYOUTS[case.scales], tuple(tensor.shape)).pack(tensor)
        else:
            found[name] = tensor.mT.contiguous() if transposed and _is_matrix(part, recipe) else tensor
    return found


def stored_operand(case: ContractCase, given: Mapping[str, torch.Tensor], name: str) -> Quantized | BatchedQuantized:
    """A quantized argument of its tensors, which `stored_inputs` has made."""
    recipe = case.recipe_of(name)
    parts = {part: given.get(f"{name}.{part}") for part in (*PARTS, "zeros")}
    columns = case.sizes[case.declared.tensors[name][1][1]]
    transposed = isinstance(case, ProductCase) and case.is_transposed(name)
    layout = case.layout_of(recipe) if isinstance(case, ProductCase) else LINEAR
    codes = given[f"{name}.codes"]
    shape = (*codes.shape[:-2], codes.shape[-1 if transposed else -2], columns)
    cls = BatchedQuantized if len(shape) == 3 else Quantized
    return cls(**parts, recipe=recipe, shape=shape, scale_layout=layout, transposed=transposed)  # type: ignore[arg-type]


def _is_matrix(part: str, recipe: Recipe) -> bool:
    """Whether a part of a transposed operand is transposed with it."""
    return part == "codes" or (part == "scales" and not recipe.whole)
