"""What a backend's doors give, brought into shape: Quantized, and the sections of a grouped one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized, amax_shape, codes_shape, scales_shape, swizzled_shape
from narrowgauge.spec.recipes import Recipe

if TYPE_CHECKING:
    import torch


class BackendError(Exception):
    """A backend cannot be loaded, raised, or gave something that is no result. The sentence says which."""


def dtype_name(dtype: Any) -> str:
    """`float32` of torch.float32."""
    return str(dtype).removeprefix("torch.")


def matrix_shape(x: torch.Tensor) -> tuple[int, int]:
    """(M, K) of a tensor (…, K)."""
    return math.prod(x.shape[:-1]), x.shape[-1]


PARTS = ("codes", "scales", "amax", "tensor_scale")


def as_quantized(
    result: Any,
    x: torch.Tensor,
    recipe: Recipe,
    *,
    shape: tuple[int, int] | None = None,
    swizzled: bool = False,
    transposed: bool = False,
    door: str = "quantize",
) -> Quantized:
    """A backend's result as a Quantized of `x`, or of a matrix `shape` where that is another, on the device of `x`.

    Takes an object with codes, scales and amax, a mapping of them, or a tuple in that order; amax may be None where a
    kernel does not show it. float4 and float8 dtypes of torch are seen as their bytes. `transposed` codes and linear
    scales are stored as a Quantized says. Raises BackendError where a part is missing or has another shape, dtype or
    device.
    """
    import torch

    shape = shape or matrix_shape(x)
    each = amax_shape(shape, recipe)
    wanted = {
        "codes": (torch.uint8, codes_shape(shape, recipe, transposed=transposed)),
        "scales": (
            scale_dtype(recipe),
            swizzled_shape(shape, recipe) if swizzled else scales_shape(shape, recipe, transposed=transposed),
        ),
        "amax": (torch.float32, each),
        "tensor_scale": (torch.float32, each),
    }
    subject = f"{recipe} of {shape}" + (", swizzled," if swizzled else "")
    found = _checked(_parts(result, door), wanted, x.device, subject, door)
    return Quantized(
        found["codes"], found["scales"], found["amax"], recipe, shape, found["tensor_scale"], swizzled, transposed
    )


def scale_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of stored block scales: float32 where they are such numbers, else uint8, their codes."""
    import torch

    return torch.float32 if recipe.scale is FP32 else torch.uint8


def padded_rows(sizes: list[int], recipe: Recipe) -> list[int]:
    """Rows of each section, up to the multiple that the recipe's grouped GEMM takes."""
    return [-(-size // recipe.row_alignment) * recipe.row_alignment for size in sizes]


def as_sections(
    result: Any, x: torch.Tensor, sizes: list[int], recipe: Recipe, *, columnwise: bool = False
) -> list[Quantized]:
    """A backend's result as the Quantized of every section of `x` (M, K): of its transpose where `columnwise`.

    Takes a list or tuple of what `as_quantized` takes, one for each section, or the parts of a GroupedQuantized as an
    object, mapping or tuple. Raises BackendError as `as_quantized` does.
    """
    import torch

    rows, columns = matrix_shape(x)
    transposed = columnwise and recipe.columnwise == "in-place"
    shapes = [(columns, size) if columnwise else (size, columns) for size in sizes]
    door = "quantize_grouped"
    if isinstance(result, tuple | list) and not any(isinstance(part, torch.Tensor) for part in result):
        if len(result) != len(sizes):
            raise BackendError(f"{door} gave {len(result)} sections; sizes has {len(sizes)}")
        return [
            as_quantized(part, x, recipe, shape=shape, transposed=transposed, door=f"section {number} of {door}")
            for number, (part, shape) in enumerate(zip(result, shapes, strict=True))
        ]
    wanted: dict[str, Any] = {name: (torch.float32, (len(sizes),)) for name in ("amax", "tensor_scale")}
    parts = _parts(result, door)
    for name, shape_of in (("codes", codes_shape), ("scales", scales_shape)):
        stored = [shape_of(shape, recipe, transposed=transposed) for shape in shapes]
        whole: tuple[int, ...] = (sum(height for height, _ in stored), shape_of((rows, columns), recipe)[1])
        if columnwise:
            whole = (sum(map(math.prod, stored)),)
        # Flat, or a row for each tile of sections whose sizes no host knows: what is left at the end is not used.
        part = parts.get(name)
        room = columnwise or (name == "scales" and recipe.stored_rows > 1 and not recipe.whole)
        if room and isinstance(part, torch.Tensor) and part.dim() == len(whole) and part.shape[1:] == whole[1:]:
            parts[name] = part[: whole[0]]
        wanted[name] = (torch.uint8 if name == "codes" else scale_dtype(recipe), whole)
    found = _checked(parts, wanted, x.device, f"{recipe} of {(rows, columns)} in sections {sizes}", door)
    return split_sections(found, sizes, columns, recipe, columnwise=columnwise)


def split_sections(
    parts: Mapping[str, torch.Tensor | None],
    sizes: list[int],
    columns: int,
    recipe: Recipe,
    *,
    columnwise: bool = False,
) -> list[Quantized]:
    """The Quantized of each section, from codes, scales, amax and tensor_scale as a GroupedQuantized holds them."""
    import torch

    shapes = [(columns, size) if columnwise else (size, columns) for size in sizes]
    transposed = columnwise and recipe.columnwise == "in-place"
    stored = {
        "codes": [codes_shape(shape, recipe, transposed=transposed) for shape in shapes],
        "scales": [scales_shape(shape, recipe, transposed=transposed) for shape in shapes],
    }

    # One split of a part, not a slice a section: between guard zones each call of torch costs ten times as much.
    def split(name: str) -> Sequence[torch.Tensor | None]:
        part = parts[name]
        if part is None:
            return [None] * len(sizes)
        if name not in stored:
            return torch.split(part[: len(sizes)], 1)
        counts = [math.prod(shape) if columnwise else shape[0] for shape in stored[name]]
        pieces = torch.split(part[: sum(counts)], counts)
        return [piece.view(shape) for piece, shape in zip(pieces, stored[name], strict=True)] if columnwise else pieces

    found = []
    for shape, codes, scales, amax, encode in zip(shapes, *map(split, PARTS), strict=True):
        assert codes is not None
        assert scales is not None
        found.append(Quantized(codes, scales, amax, recipe, shape, encode, transposed=transposed))
    return found


def join_sections(sections: list[Quantized], *, columnwise: bool = False) -> dict[str, torch.Tensor | None]:
    """The inverse of `split_sections`: codes, scales, amax and tensor_scale as a GroupedQuantized holds them."""
    import torch

    joined: dict[str, torch.Tensor | None] = {}
    for name in PARTS:
        parts = [getattr(section, name) for section in sections]
        if any(part is None for part in parts):
            joined[name] = None
        else:
            joined[name] = torch.cat([part.flatten() for part in parts] if columnwise else parts)
    return joined


def _parts(result: Any, door: str) -> dict[str, Any]:
    """What a result holds, by name."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, tuple | list):
        if len(result) > 3:
            raise BackendError(f"{door} gave {len(result)} things; it gives codes, scales and amax")
        return dict(zip(PARTS, result, strict=False))
    if not hasattr(result, "codes"):
        raise BackendError(f"{door} gave {type(result).__name__}; it gives codes, scales and amax")
    return {name: getattr(result, name, None) for name in PARTS}


def _checked(
    parts: Mapping[str, Any],
    wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    device: torch.device,
    subject: str,
    door: str,
) -> dict[str, Any]:
    """The parts as contiguous tensors of the wanted dtypes and shapes. amax and tensor_scale may be None."""
    import torch

    checked: dict[str, Any] = {}
    for name in PARTS:
        dtype, expected = wanted[name]
        part = parts.get(name)
        if part is None and name in ("amax", "tensor_scale"):
            checked[name] = None
            continue
        if not isinstance(part, torch.Tensor):
            raise BackendError(
                f"{door} gave {name} as {type(part).__name__}, not a tensor; it gives codes, scales and amax"
            )
        if dtype == torch.uint8 and part.dtype != dtype and part.element_size() == 1:
            part = part.view(torch.uint8)
        if part.dtype != dtype or tuple(part.shape) != tuple(expected):
            raise BackendError(
                f"{door} gave {name} as {dtype_name(part.dtype)} of shape {tuple(part.shape)}; "
                f"{subject} has {dtype_name(dtype)} of shape {tuple(expected)}"
            )
        if part.device != device:
            raise BackendError(f"{door} gave {name} on {part.device}; its input is on {device}")
        checked[name] = part.detach().contiguous()
    return checked
