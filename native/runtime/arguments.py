"""Arguments of kernels: contiguous memory, sizes of launches, and the recipes that the kernels support."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from narrowgauge.spec import arguments
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP32, Format
from narrowgauge.spec.quantized import Quantized, amax_shape, codes_shape, scales_shape, swizzled_shape
from narrowgauge.spec.recipes import WHOLE, Recipe, find_recipe

_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

THREADS = 256
ANY_THREADS = {
    "amax_blocks": {"cuda": 256, "cpu": 8},
    "quantize_fp8": {"cuda": 256, "cpu": 8},
    "quantize_mx": {"cuda": 128, "cpu": 8},
    "quantize_nvfp4": {"cuda": 256, "cpu": 8},
}
"""Of the kernels that take any matrix, by source and device."""
BLOCK, MX_BLOCK = 16, 32
STRIP = 64
"""Rows and columns of the tile that a block of threads quantizes."""


def suffix(dtype: torch.dtype) -> str:
    """What the name of a kernel for this dtype ends in."""
    return _SUFFIX[dtype]


def type_code(dtype: torch.dtype) -> int:
    """The number by which the GEMM kernels know a dtype."""
    return INPUT_DTYPES.index(dtype)


def blocks_for(items: int, each: int) -> int:
    """Blocks of threads for so many items; at least one."""
    return max(1, -(-items // each))


def check_contiguous(**tensors: object) -> None:
    """Raises ValueError for a tensor with gaps between its elements; arguments of other types pass."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
                f"the kernels read contiguous memory: pass {name}.contiguous()"
            )


def check_tensor(
    tensor: torch.Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None
) -> None:
    """Raises TypeError or ValueError unless a tensor has the dtype and the shape, and is contiguous."""
    arguments.check_tensor(tensor, name, dtypes, shape)
    check_contiguous(**{name: tensor})


def check_operand(q: Quantized, name: str) -> torch.Tensor | None:
    """The amax that `q` is decoded by, None where its recipe decodes by scales alone.

    Raises TypeError or ValueError where a part of `q` has not its shape or dtype.
    """
    check_tensor(q.codes, f"{name}.codes", (torch.uint8,), codes_shape(q.shape, q.recipe, transposed=q.transposed))
    stored = (
        swizzled_shape(q.shape, q.recipe) if q.swizzled else scales_shape(q.shape, q.recipe, transposed=q.transposed)
    )
    check_tensor(q.scales, f"{name}.scales", (torch.float32 if q.recipe.scale is FP32 else torch.uint8,), stored)
    if q.recipe.decode == "s":
        return None
    if q.amax is None:
        raise ValueError(f"{name}.amax is None; {q.recipe} has a tensor scale")
    check_tensor(q.amax, f"{name}.amax", (torch.float32,), amax_shape(q.shape, q.recipe))
    return q.amax


Choices = dict[str, tuple[object, ...] | None]
"""What kernels can do of what a recipe can ask for, by its fields; None where they take whatever is asked."""

_NAMES: Choices = {"name": None, "dialect": None}
_ONE_RULE: Choices = {  # fields in which libraries differ about NVFP4 alone
    "statistics": ("float32",),
    "zero_block": ("keep",),
    "smallest_scale": ("0",),
    "zero_scale": ("saturate",),
    "negative_zero": ("keep",),
    "packing": ("low-first",),
}
_ONE_LEVEL: Choices = (
    _NAMES
    | _ONE_RULE
    | {
        "scale_max": None,
        "granularity": ("tensor",),
        "transform": (None,),
        "candidates": ("6",),
        "decode": ("s",),
    }
)
_NVFP4: Choices = (
    _NAMES
    | _ONE_RULE
    | {
        "element": (E2M1,),
        "block": ((1, BLOCK), (BLOCK, BLOCK)),
        "scale": (E4M3,),
        "scale_max": None,
        "granularity": ("tensor", "row"),
        "transform": None,
        "tensor_scale": ("max/amax",),
        "tensor_limit": ("finite",),
        "block_scale": ("amax*(enc*(1/6))", "(amax/6)*enc"),
        "smallest_amax": (0.0,),
        "largest_scale": ("float32",),
        "scale_rounding": ("nearest-even",),
        "candidates": ("6", "4-or-6-mae", "4-or-6-mse"),
        "element_scale": ("x*min(1/(s*(1/enc)),FLT_MAX)",),
        "rounding": ("nearest-even", "stochastic"),
        "nan_code": (7,),
        "nan": ("ignore", "propagate"),
        "decode": ("(s*amax)*(1/max)",),
        "alpha": ("(a*b)/d", "(b*a)*(1/d)"),
        "columnwise": ("transposed",),
        "delayed": (None,),
    }
)
_MX: Choices = _ONE_LEVEL | {
    "element": (E2M1, E2M3, E3M2, E4M3, E5M2),
    "block": ((1, MX_BLOCK), (MX_BLOCK, MX_BLOCK)),
    "scale": (E8M0,),
    "tensor_scale": ("none",),
    "tensor_limit": ("none",),
    "block_scale": ("amax*(1/max)", "amax/max", "amax*2^-emax"),
    "smallest_amax": (0.0,),
    "largest_scale": ("float32",),
    "scale_rounding": ("up", "down", "as-element", "up-from-1.75", "nearest-log2"),
    "element_scale": ("x*(1/s)",),
    "rounding": ("nearest-even", "stochastic"),
    "nan_code": (7, 31, 127),
    "nan": ("ignore", "propagate"),
    "alpha": ("1",),
    "columnwise": ("transposed", "in-place"),
    "delayed": (None,),
}
_FP8: Choices = _ONE_LEVEL | {
    "element": (E4M3, E5M2),
    "block": ((1, 128), (128, 128), (WHOLE, WHOLE)),
    "scale": (FP32,),
    "tensor_scale": ("none", "max/amax", "given"),
    "tensor_limit": ("none", "1-for-nan"),
    "block_scale": ("1/(max/amax)", "1/enc"),
    "smallest_amax": None,
    "largest_scale": ("float32", "input"),
    "scale_rounding": ("none", "down"),
    "element_scale": ("x*(max/amax)", "x*enc"),
    "rounding": ("nearest-even",),
    "nan_code": (127,),
    "nan": ("ignore", "propagate"),
    "alpha": ("1", "s_a*s_b"),
    "columnwise": ("transposed",),
    "delayed": None,
}
FAMILIES: dict[Format, Choices] = {E4M3: _NVFP4, E8M0: _MX, FP32: _FP8}
"""By the format of the scale: each has kernels of its own, which know formats and blocks by heart."""

# What they have with some elements alone.
_FOR_ELEMENT: dict[Format, Choices] = {
    E2M1: {"nan_code": (7,), "columnwise": ("transposed",)},
    E2M3: {"nan_code": (31,)},
    E3M2: {"nan_code": (31,)},
    E4M3: {"nan_code": (127,)},
    E5M2: {"nan_code": (127,)},
}


def choices(r: Recipe) -> Choices:
    """What the kernels for recipes like `r` can do."""
    family = FAMILIES.get(r.scale)
    return {"scale": tuple(FAMILIES)} if family is None else family | _FOR_ELEMENT.get(r.element, {})


def supported(name: str | Recipe) -> Recipe:
    """The recipe called so. Raises NotImplementedError where the kernels lack it, ValueError where everybody does."""
    return _named_one(name) if isinstance(name, str) else _checked(name)


@cache
def _named_one(name: str) -> Recipe:
    return _checked(find_recipe(name))


def _checked(r: Recipe) -> Recipe:
    for field, known in choices(r).items():
        if known is not None and getattr(r, field) not in known:
            asked, can = _named(getattr(r, field)), ", ".join(map(_named, known))
            raise NotImplementedError(
                f"the native kernels do not have recipe {r}: its {field} is {asked}, and theirs {can}"
            )
    return r


def _named(choice: object) -> str:
    return choice.name if isinstance(choice, Format) else str(choice)
