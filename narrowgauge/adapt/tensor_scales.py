"""The amax and the tensor scale of a `Quantized` from the tensor scale that a library reports."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.adapt.conventions import TensorScaleIs
from narrowgauge.adapt.tensors import tensor
from narrowgauge.spec.quantized import amax_shape
from narrowgauge.spec.recipes import Recipe

_FLT_MAX = torch.finfo(torch.float32).max


def amax_and_tensor_scale(
    recipe: Recipe,
    shape: tuple[int, int],
    device: torch.device,
    *,
    amax: Any,
    tensor_scale: Any,
    tensor_scale_is: TensorScaleIs,
    true_amax: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`Quantized.amax` and `Quantized.tensor_scale`, float32 of `amax_shape`, or None without a number.

    A scale of the recipe's own kind, encode or decode, is taken over unchanged. A scale of the other kind is a rounded
    number, from which the recipe's own factor cannot be computed: if it is a documented rounding of the scale of the
    known amax (`amax`, else `true_amax`), the result has the known amax. Else the result has the rounded reciprocal as
    tensor scale, or, with an amax for every row, the amax nearest to the scale in the rows that no rounding explains.

    A rotation may add in any order, so the amax of a rotated matrix depends on the kernel; it is a bfloat16 number, and
    a scale has 24 bits. For a recipe with a rotation, the result also has the bfloat16 amax of which the scale is a
    documented rounding, and the amax is judged by its interval.

    Raises ValueError if the recipe has no tensor scale, for amax given twice, and for a scale of the other kind without
    a known amax; TypeError and ValueError for a value of another dtype or shape.
    """
    given = {"amax": amax, "tensor_scale": tensor_scale}
    for name, value in given.items():
        if value is not None and recipe.tensor_scale == "none":
            raise ValueError(f"recipe {recipe} has no tensor scale; omit {name}")
    reported = None if amax is None else _numbers(amax, "amax", recipe, shape, device)
    if tensor_scale is None:
        return reported, None
    shown = _numbers(tensor_scale, "tensor_scale", recipe, shape, device)
    if tensor_scale_is == "amax":
        if reported is not None:
            raise ValueError("amax and tensor_scale with tensor_scale_is='amax' are the same number; give one of them")
        return shown, None
    own = tensor_scale_is == _own_kind(recipe)
    nearest = shown * recipe.max_product if tensor_scale_is == "decode" else _divide(recipe.max_product, shown)
    if recipe.transform is not None and reported is None:
        rotated = nearest.bfloat16().float()
        if bool(_explained(shown, rotated, recipe, tensor_scale_is).all()):
            return rotated, shown if own else None
    if own:
        return reported, shown
    unknown = reported is None and true_amax is None
    if recipe.tensor_scale == "given" or (recipe.whole and unknown):
        raise ValueError(
            f"recipe {recipe} computes with an encode scale and stores its rounded inverse in scales; omit "
            "tensor_scale, or give the encode scale"
        )
    if unknown:
        raise ValueError(
            f"recipe {recipe} computes with {_own_kind(recipe)} scales, and {_article(tensor_scale_is)} scale is a "
            "rounded number that several of them share; give amax too, or a recipe of a dialect with "
            f"{tensor_scale_is} scales, such as nvfp4@{'modelopt' if tensor_scale_is == 'decode' else 'trtllm'}"
        )
    known = _numbers(true_amax, "true_amax", recipe, shape, device) if reported is None else reported
    explained = _explained(shown, known, recipe, tensor_scale_is)
    if recipe.granularity == "row":
        return torch.where(explained, known, nearest), None
    return (known, None) if bool(explained.all()) else (reported, _divide(1.0, shown))


def _own_kind(recipe: Recipe) -> str:
    """Kind of `Quantized.tensor_scale` of a recipe."""
    return "decode" if recipe.tensor_scale == "amax/max" else "encode"


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "encode" else f"a {kind}"


def _numbers(value: Any, name: str, recipe: Recipe, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A number for the tensor, or for each row, as float32 of `amax_shape`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        numbers = torch.tensor(value, dtype=torch.float64)
    else:
        numbers = tensor(value)
    if not numbers.is_floating_point() or numbers.element_size() < 2:
        raise TypeError(f"{name} is float32, not {str(numbers.dtype).removeprefix('torch.')}")
    expected = amax_shape(shape, recipe)
    if numbers.numel() != expected[0]:
        raise ValueError(f"{name} has shape {expected} for recipe {recipe} of {shape}, not {tuple(numbers.shape)}")
    return numbers.reshape(expected).to(device=device, dtype=torch.float32)


def _explained(shown: torch.Tensor, amax: torch.Tensor, recipe: Recipe, kind: str) -> torch.Tensor:
    """bool: whether a shown scale is a documented rounding of the scale of `amax`.

    Sources: docs/dialects.md#the-choices, tensor_scale and tensor_limit; docs/numerics.md#nvfp4, step 2. With M for
    `Recipe.max_product`, encode scales are fl(M/amax) and fl(fl(1/amax)·M), decode scales fl(amax/M) and
    fl(amax·fl(1/M)). A scale may also be the rounded reciprocal of a scale of the other kind.
    """
    clamp = max(recipe.smallest_amax, 1e-12 if recipe.tensor_limit == "amax>=1e-12" else 0.0)
    amax = amax.clamp(min=clamp) if clamp else amax
    most = recipe.max_product
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if recipe.statistics == "input" else (torch.float32,)
    encode = [_divide(most, amax)]
    encode += [(_divide(1.0, amax).to(dtype).float() * most).to(dtype).float() for dtype in dtypes]
    if recipe.scale_rounding == "down":
        encode = [scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32) for scale in encode]
        decode = []
    else:
        decode = [amax / torch.full_like(amax, most), amax * _divide(1.0, torch.full_like(amax, most))]
    encode += [scale.clamp(max=_FLT_MAX) for scale in encode]
    # An amax without a scale: libraries show 1, 0 or 2^-23.
    without = (amax == 0) | ~amax.isfinite()
    encode.append(torch.where(without, 1.0, encode[0]))
    encode.append(torch.where(amax == 0, 0.0, encode[0]))
    decode += [torch.where(amax == 0, 2.0**-23, scale) for scale in decode[:1] if recipe.tensor_limit == "2^-23"]
    one, other = (encode, decode) if kind == "encode" else (decode, encode)
    known = torch.stack([*one, *(_divide(1.0, scale) for scale in other)])
    return ((known == shown) | (known.isnan() & shown.isnan())).any(0)


def _divide(number: float, by: torch.Tensor) -> torch.Tensor:
    """fl(number/by). Both operands are tensors: on CUDA, PyTorch multiplies by the reciprocal of a number."""
    return by.new_full((), number) / by
