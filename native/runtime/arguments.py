"""Arguments of kernels: contiguous memory, sizes of launches, and the recipes that the kernels support."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import torch

from narrowgauge.spec import arguments
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP32, Format
from narrowgauge.spec.quantized import Quantized, amax_shape, codes_shape, scales_shape
from narrowgauge.spec.recipes import WHOLE, Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILES

_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

THREADS = 256
GENERAL_THREADS = {
    "amax_blocks": {"cuda": 256, "cpu": 8},
    "quantize_fp8": {"cuda": 256, "cpu": 8},
    "quantize_mx": {"cuda": 128, "cpu": 8},
    "quantize_nvfp4": {"cuda": 256, "cpu": 8},
}
"""Threads of a block of the kernels for any matrix, by source and device type."""
BLOCK, MX_BLOCK = 16, 32
STRIP = 64
"""Rows and columns of the tile of a block of threads."""


def suffix(dtype: torch.dtype) -> str:
    """Suffix of the name of a kernel for this dtype."""
    return _SUFFIX[dtype]


def element_type(dtype: torch.dtype) -> str:
    """Enumerator of the kernels' ElementType (fused/rounded.cuh)."""
    return {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}[dtype]


def blocks_for(items: int, per_block: int) -> int:
    """Blocks of threads for a number of items, at least one."""
    return max(1, -(-items // per_block))


def check_contiguous(**tensors: object) -> None:
    """Raises ValueError if a tensor is not contiguous. Arguments without memory are accepted."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
                f"the kernels read contiguous memory: pass {name}.contiguous()"
            )


def check_tensor(
    tensor: torch.Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None
) -> None:
    """Raises TypeError or ValueError if a tensor has another dtype or shape, or is not contiguous."""
    arguments.check_tensor(tensor, name, dtypes, shape)
    check_contiguous(**{name: tensor})


def check_taken(tensor: torch.Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> None:
    """Raises NotImplementedError for another dtype than `dtypes`, ValueError for another shape than `shape`."""
    if tensor.dtype not in dtypes:
        taken = " or ".join(map(str, dtypes))
        raise NotImplementedError(f"{name} is {tensor.dtype}; the kernel takes {taken}: pass {name}.to({dtypes[0]})")
    arguments.check_tensor(tensor, name, dtypes, shape)


def check_operand(q: Quantized, name: str) -> torch.Tensor | None:
    """Checks the parts of an operand, and returns the amax if its recipe decodes with it, else None.

    Raises TypeError or ValueError if a part of `q` has a wrong shape or dtype, NotImplementedError for a layout of
    scales that the kernels do not read.
    """
    if q.scale_layout not in (LINEAR, TILES):
        raise NotImplementedError(f"{name} has scales in layout {q.scale_layout}; kernels read {LINEAR} and {TILES}")
    check_tensor(q.codes, f"{name}.codes", (torch.uint8,), codes_shape(q.shape, q.recipe, transposed=q.transposed))
    stored = scales_shape(q.shape, q.recipe, transposed=q.transposed, layout=q.scale_layout)
    check_tensor(q.scales, f"{name}.scales", (torch.float32 if q.recipe.scale is FP32 else torch.uint8,), stored)
    if q.recipe.decode == "s":
        return None
    if q.amax is None:
        raise ValueError(f"{name}.amax is None; {q.recipe} has a tensor scale")
    check_tensor(q.amax, f"{name}.amax", (torch.float32,), amax_shape(q.shape, q.recipe))
    return q.amax


Choices = dict[str, tuple[object, ...] | None]
"""Field of a recipe to the choices that kernels support. None: all choices."""

_NAMES: Choices = {"name": None, "dialect": None}
_NVFP4_DIALECTS: Choices = {  # fields in which only dialects of NVFP4 and of FP8 in serving differ
    "approximate": (False,),
    "statistics": ("float32",),
    "zero_block": ("keep",),
    "smallest_scale": ("0",),
    "zero_scale": ("saturate",),
    "negative_zero": ("keep",),
    "packing": ("low-first",),
}
_ONE_LEVEL: Choices = (
    _NAMES
    | _NVFP4_DIALECTS
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
    | _NVFP4_DIALECTS
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
"""Format of the scale to the choices of its kernels, which have fixed element formats and blocks."""

# Choices that depend on the element format.
_FOR_ELEMENT: dict[Format, Choices] = {
    E2M1: {"nan_code": (7,), "columnwise": ("transposed",)},
    E2M3: {"nan_code": (31,)},
    E3M2: {"nan_code": (31,)},
    E4M3: {"nan_code": (127,)},
    E5M2: {"nan_code": (127,)},
}


def choices(recipe: Recipe) -> Choices:
    """Choices of the kernels for the scale and element format of a recipe."""
    family = FAMILIES.get(recipe.scale)
    return {"scale": tuple(FAMILIES)} if family is None else family | _FOR_ELEMENT.get(recipe.element, {})


def supported(name: str | Recipe, **own: tuple[object, ...]) -> Recipe:
    """The recipe of a name. Raises NotImplementedError if the kernels lack it, ValueError for an unknown name.

    `own`: the choices of a kernel in place of those of the quantize kernels, by field.
    """
    if own:
        return _checked(find_recipe(name) if isinstance(name, str) else name, tuple(own.items()))
    return _find_supported(name) if isinstance(name, str) else _checked(name)


@cache
def _find_supported(name: str) -> Recipe:
    return _checked(find_recipe(name))


@lru_cache(maxsize=1024)
def _checked(recipe: Recipe, own: tuple[tuple[str, tuple[object, ...]], ...] = ()) -> Recipe:
    for field, known in (choices(recipe) | dict(own)).items():
        if known is not None and getattr(recipe, field) not in known:
            wanted, kernel_choices = _choice_name(getattr(recipe, field)), ", ".join(map(_choice_name, known))
            raise NotImplementedError(
                f"the native kernels do not have recipe {recipe}: its {field} is {wanted}, and theirs {kernel_choices}"
            )
    return recipe


def _choice_name(choice: object) -> str:
    return choice.name if isinstance(choice, Format) else str(choice).replace(str(WHOLE), "all")
