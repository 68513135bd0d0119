"""What the doors take: checks with one clear error each, and how kernels are told of it."""

from __future__ import annotations

import torch

from reference.formats import E2M1, E4M3, Format
from reference.quantized import Quantized, amax_shape, codes_shape, scales_shape, swizzled_shape, words_shape
from reference.recipes import Recipe, recipe

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

THREADS = 256
BLOCK = 16
STRIP = 64
"""Rows and columns of the tile that a block of threads quantizes."""


def suffix(dtype: torch.dtype) -> str:
    """What the name of a kernel for this dtype ends in."""
    return _SUFFIX[dtype]


def type_code(dtype: torch.dtype) -> int:
    """The number by which the GEMM kernels know a dtype."""
    return DTYPES.index(dtype)


def blocks_for(items: int, each: int) -> int:
    """Blocks of threads for so many items; at least one."""
    return max(1, -(-items // each))


def check_tensor(
    tensor: torch.Tensor,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...] | None = None,
    *,
    contiguous: bool = True,
) -> None:
    """Raises TypeError or ValueError where a tensor has another dtype, shape or memory layout."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} is {allowed}, not {str(tensor.dtype).removeprefix('torch.')}")
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {shape}, not {tuple(tensor.shape)}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
            f"the kernels read contiguous memory: pass {name}.contiguous()"
        )


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """`x` (…, K) as a matrix (M, K), any strides. Raises TypeError or ValueError where it is none."""
    check_tensor(x, "x", DTYPES, contiguous=False)
    if x.dim() < 2:
        raise ValueError(f"quantize takes a matrix (M, K) or (…, K), not shape {tuple(x.shape)}; reshape it first")
    return x.flatten(0, -2)


def check_rotated(x: torch.Tensor, extent: int, r: Recipe) -> None:
    """Raises TypeError or ValueError where a recipe cannot rotate `x` along a dimension of `extent` elements."""
    if r.transform is None:
        return
    if x.dtype != torch.bfloat16:
        found = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"recipe {r} rotates bfloat16, not {found}; convert it first")
    if extent % r.transform.group:
        raise ValueError(
            f"recipe {r} rotates whole groups of {r.transform.group}, and {extent} elements of x {tuple(x.shape)} are "
            "none; pad it first"
        )


def check_random(random: object, shape: tuple[int, int], r: Recipe) -> None:
    """Raises ValueError or TypeError where `random` is not what the rounding of a matrix (M, K) takes."""
    if r.rounding != "stochastic":
        if random is not None:
            raise ValueError(f"recipe {r} rounds {r.rounding}; it takes no random bits")
    elif isinstance(random, torch.Tensor):
        check_tensor(random, "random", (torch.int32,), words_shape(shape))
    elif random is None:
        raise ValueError(
            f"recipe {r} rounds stochastically; give random=(seed, offset), or words, int32 {words_shape(shape)}"
        )
    elif not (isinstance(random, tuple) and len(random) == 2 and all(type(n) is int for n in random)):
        raise TypeError(f"random is a tensor of words or (seed, offset), not {random!r}")


def check_operand(q: Quantized, name: str) -> torch.Tensor:
    """The amax of `q`. Raises TypeError or ValueError where a part of it has not its shape or dtype."""
    check_tensor(q.codes, f"{name}.codes", (torch.uint8,), codes_shape(q.shape, q.recipe))
    scales = swizzled_shape if q.swizzled else scales_shape
    check_tensor(q.scales, f"{name}.scales", (torch.uint8,), scales(q.shape, q.recipe))
    if q.amax is None:
        raise ValueError(f"{name}.amax is None; {q.recipe} has a tensor scale")
    check_tensor(q.amax, f"{name}.amax", (torch.float32,), amax_shape(q.shape, q.recipe))
    return q.amax


# What the kernels can do of what a recipe can ask for. They know formats and blocks by heart, so those are here, too.
_CHOICES: dict[str, tuple[object, ...]] = {
    "element": (E2M1,),
    "block": ((1, BLOCK), (BLOCK, BLOCK)),
    "scale": (E4M3,),
    "statistics": ("float32",),
    "granularity": ("tensor", "row"),
    "tensor_scale": ("max/amax",),
    "tensor_limit": ("finite",),
    "block_scale": ("amax*(enc*(1/6))", "(amax/6)*enc"),
    "zero_block": ("keep",),
    "smallest_scale": ("0",),
    "scale_rounding": ("nearest-even",),
    "candidates": ("6", "4-or-6-mae", "4-or-6-mse"),
    "zero_scale": ("saturate",),
    "element_scale": ("x*min(1/(s*(1/enc)),FLT_MAX)",),
    "rounding": ("nearest-even", "stochastic"),
    "negative_zero": ("keep",),
    "nan_code": (7,),
    "packing": ("low-first",),
    "nan": ("ignore", "propagate"),
    "decode": ("(s*amax)*(1/max)",),
    "alpha": ("(a*b)/d", "(b*a)*(1/d)"),
}


def supported(name: str | Recipe) -> Recipe:
    """The recipe called so. Raises NotImplementedError where the kernels lack it, ValueError where everybody does."""
    r = recipe(name)
    for field, known in _CHOICES.items():
        if getattr(r, field) not in known:
            asked, can = _named(getattr(r, field)), ", ".join(map(_named, known))
            raise NotImplementedError(
                f"the native kernels do not have recipe {r}: its {field} is {asked}, and theirs {can}"
            )
    return r


def _named(choice: object) -> str:
    return choice.name if isinstance(choice, Format) else str(choice)
