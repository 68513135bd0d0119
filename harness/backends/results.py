"""Converting results of a backend to Quantized, and to the sections of a grouped operand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import PARTS, GroupedQuantized, Half, Quantized, amax_shape, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

if TYPE_CHECKING:
    import torch


class BackendError(Exception):
    """A backend cannot be loaded, raised an exception, or returned an invalid result."""


class Unsupported(Exception):
    """The backend does not support the case."""


@dataclass(frozen=True)
class Foreign:
    """A result of a kernel host of a type unknown to the checks."""

    type_name: str


def type_name(value: Any) -> str:
    """Name of the type of a result, for messages."""
    return value.type_name if isinstance(value, Foreign) else type(value).__name__


def dtype_name(dtype: Any) -> str:
    """`float32` of torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorForm:
    """A tensor on the device of the arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def checked(self, result: Any, method: str, device: torch.device, name: str = "") -> torch.Tensor:
        """`result`, checked. If uint8 is expected, other dtypes of one byte, and words of int32, are viewed as uint8.
        `name`: of the result, if the method gives several. Raises BackendError for another type, shape, dtype, device.
        """
        import torch

        subject = f"{method} gave {name} as" if name else f"{method} gave"
        if not isinstance(result, torch.Tensor):
            raise BackendError(f"{subject} {type_name(result)}, not a tensor")
        if self.dtype == torch.uint8 and result.element_size() == 1:
            result = result.view(torch.uint8)
        if self.dtype == torch.uint8 and result.dtype == torch.int32 and result.dim() and result.is_contiguous():
            result = result.view(torch.uint8)
        if tuple(result.shape) != self.shape or result.dtype != self.dtype:
            expected = f"{dtype_name(self.dtype)} of shape {self.shape}"
            raise BackendError(f"{subject} {dtype_name(result.dtype)} of shape {tuple(result.shape)}, not {expected}")
        if result.device != device:
            raise BackendError(f"{method} gave {name or 'its result'} on {result.device}; its input is on {device}")
        tensor: torch.Tensor = result
        return tensor


def matrix_shape(x: torch.Tensor) -> tuple[int, int]:
    """(M, K) of a tensor (…, K)."""
    return math.prod(x.shape[:-1]), x.shape[-1]


_NARROW_DTYPES = {
    "E2M1": "float4_e2m1fn_x2", "E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "E8M0": "float8_e8m0fnu",
    "E4M3FNUZ": "float8_e4m3fnuz", "E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""Dtypes of torch with the codes of a format, by the name of the format."""
QUANTIZED_PARTS = PARTS


def as_quantized(
    result: Any,
    x: torch.Tensor,
    recipe: Recipe,
    *,
    shape: tuple[int, int] | None = None,
    layout: ScaleLayout = LINEAR,
    transposed: bool = False,
    method: str,
) -> Quantized:
    """A backend's result as a Quantized of `x`, or of a matrix of another `shape`, on the device of `x`.

    The result is an object with codes, scales and amax, a mapping with these keys, or a tuple in that order. amax may
    be None if the kernel returns no amax. Codes and block scales may be uint8, int8 or the dtype of torch of their
    format, and are viewed as bytes. Strides are kept. `layout`, `transposed`: as in the Quantized. Raises
    BackendError if a part is missing or has another shape, dtype or device.
    """
    import torch

    shape = shape or matrix_shape(x)
    per_tensor_shape = amax_shape(shape, recipe)
    expected = {
        "codes": (torch.uint8, codes_shape(shape, recipe, transposed=transposed)),
        "scales": (scale_dtype(recipe), scales_shape(shape, recipe, transposed=transposed, layout=layout)),
        "amax": (torch.float32, per_tensor_shape),
        "tensor_scale": (torch.float32, per_tensor_shape),
    }
    subject = f"{recipe} of {shape}" + (f", scales {layout}," if layout != LINEAR else "")
    parts = _checked(_parts(result, method), expected, recipe, x.device, subject, method)
    return Quantized(
        parts["codes"], parts["scales"], parts.get("amax"), recipe, shape, parts.get("tensor_scale"), layout, transposed
    )


CONVENTIONS = ("nibbles", "layout", "transposed", "tensor_scale_is")
"""Keys of the attribute `conventions` of a backend: arguments of `narrowgauge.adapt.quantized`."""


def checked_conventions(name: str, given: Any) -> dict[str, Any]:
    """The attribute `conventions` of the backend `name`. Raises BackendError for an unknown key or value."""
    from narrowgauge.adapt.conventions import check_choice

    if not isinstance(given, Mapping) or not set(given) <= set(CONVENTIONS):
        raise BackendError(
            f"backend {name}: conventions is {given!r}; it maps {', '.join(CONVENTIONS)} to values of "
            "narrowgauge.adapt.CONVENTIONS"
        )
    try:
        for key in set(given) - {"transposed"}:
            check_choice(key, given[key])
    except ValueError as error:
        raise BackendError(f"backend {name}: conventions: {error}") from None
    return dict(given)


def read_conventions(
    result: Any, shape: Sequence[int], recipe: Recipe, conventions: Mapping[str, Any], *, true_amax: Any = None
) -> Quantized:
    """A result of `quantize` for an input of `shape`, stored in the conventions of a library.

    The result is a mapping with keys among codes, scales, amax and tensor_scale, a tuple in that order, or a Quantized,
    which is returned unchanged. Raises TypeError and ValueError as `narrowgauge.adapt.quantized` does.
    """
    from narrowgauge import adapt

    if isinstance(result, Quantized):
        return result
    if isinstance(result, tuple | list) and 2 <= len(result) <= len(QUANTIZED_PARTS):
        result = dict(zip(QUANTIZED_PARTS, result, strict=False))
    if not isinstance(result, Mapping) or not {"codes", "scales"} <= result.keys() <= set(QUANTIZED_PARTS):
        raise TypeError(
            f"{type_name(result)}; give (codes, scales), (codes, scales, amax), a mapping with keys among "
            f"{', '.join(QUANTIZED_PARTS)}, or a Quantized"
        )
    return adapt.quantized(**result, recipe=recipe, shape=shape, true_amax=true_amax, **conventions)


def scale_dtype(recipe: Recipe) -> torch.dtype:
    """Dtype of stored block scales: float32 for float32 scales, else uint8."""
    import torch

    return torch.float32 if recipe.scale is FP32 else torch.uint8


def padded_rows(sizes: list[int], recipe: Recipe) -> list[int]:
    """Rows of each section, rounded up to the multiple required by the recipe's grouped GEMM."""
    return [-(-size // recipe.row_alignment) * recipe.row_alignment for size in sizes]


def as_sections(
    result: Any, x: torch.Tensor, sizes: list[int], recipe: Recipe, half: Half = Half.ROW
) -> list[Quantized]:
    """A backend's result as the Quantized of a half of every section of `x` (M, K).

    The result is a list or tuple with a result of `as_quantized` for each section, or the parts of a GroupedQuantized
    as an object, mapping or tuple. Raises BackendError as `as_quantized` does.
    """
    import torch

    rows, columns = matrix_shape(x)
    flat, transposed = half is Half.COLUMN, half.transposed(recipe)
    shapes = [half.shape((size, columns)) for size in sizes]
    method = "quantize_grouped"
    if isinstance(result, tuple | list) and not any(isinstance(part, torch.Tensor) for part in result):
        if len(result) != len(sizes):
            raise BackendError(f"{method} gave {len(result)} sections; sizes has {len(sizes)}")
        return [
            as_quantized(part, x, recipe, shape=shape, transposed=transposed, method=f"section {number} of {method}")
            for number, (part, shape) in enumerate(zip(result, shapes, strict=True))
        ]
    expected: dict[str, Any] = {name: (torch.float32, (len(sizes),)) for name in ("amax", "tensor_scale")}
    parts = _parts(result, method)
    for name, shape_of in (("codes", codes_shape), ("scales", scales_shape)):
        stored = [shape_of(shape, recipe, transposed=transposed) for shape in shapes]
        stored_shape: tuple[int, ...] = (sum(height for height, _ in stored), shape_of((rows, columns), recipe)[1])
        if flat:
            stored_shape = (sum(map(math.prod, stored)),)
        # Flat, or with spare tile rows if the host does not know the sizes of the sections: the spare end is not used.
        part = parts.get(name)
        room = flat or (name == "scales" and recipe.stored_rows > 1 and not recipe.whole)
        if (
            room
            and isinstance(part, torch.Tensor)
            and part.dim() == len(stored_shape)
            and part.shape[1:] == stored_shape[1:]
        ):
            parts[name] = part[: stored_shape[0]]
        expected[name] = (torch.uint8 if name == "codes" else scale_dtype(recipe), stored_shape)
    checked = _checked(parts, expected, recipe, x.device, f"{recipe} of {(rows, columns)} in sections {sizes}", method)
    return split_sections(checked, sizes, columns, recipe, half)


def split_sections(
    parts: Mapping[str, torch.Tensor],
    sizes: list[int],
    columns: int,
    recipe: Recipe,
    half: Half = Half.ROW,
) -> list[Quantized]:
    """The Quantized of each section, from codes, scales, amax and tensor_scale stored as in a GroupedQuantized."""
    import torch

    return GroupedQuantized(
        parts["codes"], parts["scales"], parts.get("amax"), recipe, (sum(sizes), columns), torch.tensor(sizes),
        parts.get("tensor_scale"), half is Half.COLUMN,
    ).sections()  # fmt: skip


def _parts(result: Any, method: str) -> dict[str, Any]:
    """Parts of a result by name."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, tuple | list):
        if len(result) > 3:
            raise BackendError(f"{method} gave {len(result)} things; it gives codes, scales and amax")
        return dict(zip(QUANTIZED_PARTS, result, strict=False))
    if not hasattr(result, "codes"):
        raise BackendError(f"{method} gave {type_name(result)}; it gives codes, scales and amax")
    return {name: getattr(result, name, None) for name in QUANTIZED_PARTS}


def _checked(
    parts: Mapping[str, Any],
    wanted_parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    recipe: Recipe,
    device: torch.device,
    subject: str,
    method: str,
) -> dict[str, torch.Tensor]:
    """The parts as tensors of the wanted dtypes and shapes, with their strides. amax and tensor_scale are optional."""
    import torch

    formats = {"codes": recipe.element, "scales": recipe.scale}
    checked: dict[str, torch.Tensor] = {}
    for name in QUANTIZED_PARTS:
        dtype, expected = wanted_parts[name]
        part = parts.get(name)
        if part is None and name in ("amax", "tensor_scale"):
            continue
        if not isinstance(part, torch.Tensor):
            raise BackendError(
                f"{method} gave {name} as {type_name(part)}, not a tensor; it gives codes, scales and amax"
            )
        if name == "scales" and dtype == torch.uint8 and part.dtype == torch.int32 and part.is_contiguous():
            part = part.view(torch.uint8)
        if dtype == torch.uint8 and part.dtype != dtype and part.element_size() == 1:
            fmt = formats[name].name
            narrow = _NARROW_DTYPES.get(fmt, "")
            if dtype_name(part.dtype) not in ("int8", narrow):
                known = ", ".join(filter(None, ("uint8", "int8", narrow)))
                raise BackendError(
                    f"{method} gave {name} as {dtype_name(part.dtype)}; {recipe} has {name} of {fmt}: return {known}"
                )
            part = part.view(torch.uint8)
        if part.dtype != dtype or tuple(part.shape) != tuple(expected):
            raise BackendError(
                f"{method} gave {name} as {dtype_name(part.dtype)} of shape {tuple(part.shape)}; "
                f"{subject} has {dtype_name(dtype)} of shape {tuple(expected)}"
            )
        if part.device != device:
            raise BackendError(f"{method} gave {name} on {part.device}; its input is on {device}")
        checked[name] = part.detach()
    return checked
