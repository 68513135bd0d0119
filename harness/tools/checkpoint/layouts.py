"""Layouts of quantized weights in checkpoints, recognised by the names and the dtypes of tensors.

| layout | tensors |
|---|---|
| compressed-tensors | `weight_packed`, `weight_scale`, `weight_global_scale` (2688/amax) |
| ModelOpt | `weight` (U8), `weight_scale`, `weight_scale_2` (amax/2688) |
| DeepSeek | `weight` (F8_E4M3), `weight_scale_inv`, a number or power of two for each block of `weight_block_size` |
| DeepSeek-V4 | `weight` (F8_E4M3), `scale` (F8_E8M0) for each block; experts `weight` (I8, two codes), `scale` for 32 |
| FP8 | `weight` (F8_E4M3 or F8_E5M2), `weight_scale`: a number for the tensor or for each row |
| ComfyUI | `weight` (F8_E4M3 or F8_E5M2), `scale_weight`: a number for the tensor |
| fused experts | a name without `.weight` (E, N, K), and `…_scale_inv`, `…_scale` or `…_weight_scale` |
| gpt-oss | `…blocks` (…, blocks, 16), `…scales` (…, blocks), U8 |
| GGUF | types MXFP4 (17 bytes for 32 elements) and NVFP4 (36 bytes for 64 elements) |

Sources: docs/checkpoints.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.tools.checkpoint.files import Checkpoint, StoredTensor
from narrowgauge.harness.tools.checkpoint.integers import in_bytes
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.spec.formats import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP32, Format
from narrowgauge.spec.scale_layouts import TILED, TILES

LAYOUTS = (
    "compressed-tensors", "ModelOpt", "DeepSeek", "DeepSeek-V4", "FP8", "ComfyUI", "fused experts", "gpt-oss", "GGUF",
    "GPTQ", "AWQ", "pack-quantized",
)  # fmt: skip
_SCALE_NAMES = {
    "weight_scale_inv": "DeepSeek",
    "weight_scale": "FP8",
    "scale": "DeepSeek-V4",
    "scale_weight": "ComfyUI",
}
"""Last part of the name of the scales of FP8 codes, and the layout."""
_FUSED_NAMES = ("_scale_inv", "_scale", "_weight_scale")
"""Ends of the names of scales of fused experts."""
_OWN = "own names"
"""Layout of scales that a pattern of the user names."""


@dataclass(frozen=True)
class Layer:
    """A quantized matrix (M, K) of a checkpoint: all dimensions but the last are rows."""

    name: str
    """Name without the last part: `model.layers.0.mlp.up_proj`."""
    layout: str
    element: Format
    scale: Format
    block: tuple[int, int]
    """Rows and columns that share a scale; 0 for all rows, or all columns."""
    shape: tuple[int, int]
    codes: StoredTensor
    scales: StoredTensor | None
    """None: the scales are missing, or lie between the codes (GGUF)."""
    tensor_scale: StoredTensor | None = None
    tensor_scale_is: str = ""
    """`encode`, `decode`, or empty if the layout has no tensor scale."""
    expert: int | None = None
    """Number of the expert in a tensor of three dimensions whose experts have scales of their own shape."""

    @property
    def recipe(self) -> str:
        """Name of the recipe of the format."""
        if self.element is E2M1:
            return "nvfp4" if self.scale is E4M3 else "mxfp4"
        kind = self.element.name.lower()
        if self.scale is E8M0:
            return f"mxfp8-{kind}"
        rows, columns = self.block
        return f"fp8 {kind}, " + (
            f"block {rows}x{columns}" if columns else "scale for each row" if rows else "scale for the tensor"
        )

    @property
    def scales_shape(self) -> tuple[int, int]:
        """Shape of the scales (R, C) that the layout stores for the matrix."""
        (rows, columns), (height, width) = self.shape, self.block
        return -(-rows // height) if height else 1, -(-columns // width) if width else 1

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of rows `start` to `stop`, `start` being a multiple of the block rows.

        Codes: uint8 (rows, K/2), the first of two in the low nibble, or (rows, K). Scales: uint8 codes or float32.
        """
        if self.layout == "GGUF":
            return _from_ggml(self.codes.read(start, stop), self)
        codes = self.codes.read(start, stop)
        if self.layout == "gpt-oss":
            codes = self.codes.read(start * self.scales_shape[1], stop * self.scales_shape[1]).view(stop - start, -1)
        assert self.scales is not None
        height = self.block[0]
        first, last = (start // height, -(-stop // height)) if height else (0, 1)
        if self.scale is not FP32:
            return codes, self.scales.read(first, last)
        # A scale for each row may be stored as (M,) or (M, 1), a single scale as (), (1,) or (1, 1).
        flat = self._numbers().reshape(self.scales_shape) if 1 in self.scales_shape else None
        return codes, self._numbers(first, last) if flat is None else flat[first:last]

    def _numbers(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of float32 scales. Exponents are read as powers of two."""
        assert self.scales is not None
        if self.scales.dtype in _EXPONENTS:
            return decode(self.scales.read(start, stop), E8M0)
        return self.scales.numbers(start, stop).float()


def _from_ggml(blocks: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes, first of two elements low, and scales of GGML blocks: element i low and i + half high in a byte."""
    rows = blocks.shape[0]
    count, width, half = (1, 17, 16) if layer.scale is E8M0 else (4, 36, 8)
    parts = blocks.view(rows, -1, width)
    stored = parts[:, :, count:].reshape(rows, -1, half)
    single = torch.cat([stored & 0xF, stored >> 4], 2).view(rows, -1, 2)
    return single[:, :, 0] | (single[:, :, 1] << 4), parts[:, :, :count].reshape(rows, -1)


@dataclass(frozen=True)
class Missing:
    """A tensor of the layout missing in the checkpoint, or without a matching tensor."""

    layer: str
    tensor: str
    sentence: str
    kind: str


_BYTES = ("U8", "I8", "F4")
_FP8 = {"F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E4M3FNUZ": E4M3FNUZ, "F8_E5M2FNUZ": E5M2FNUZ}
_EXPONENTS = ("U8", "F8_E8M0")
_NUMBERS = ("F32", "BF16", "F16")


def recognise(checkpoint: Checkpoint) -> tuple[list[Layer], list[Missing]]:
    """The quantized matrices of a checkpoint in order of its tensors, and the tensors that are missing."""
    layers: list[Layer] = []
    missing: list[Missing] = []
    tensors = checkpoint.tensors
    for name, tensor in tensors.items():
        for pattern, make in _MAKERS:
            if match := pattern.fullmatch(name):
                found = make(checkpoint, match[1], tensor)
                if isinstance(found, Layer):
                    layers += _experts(found)
                elif found is not None:
                    missing.append(found)
                break
    known = used_names(layers) | {entry.tensor for entry in missing}
    for name in tensors:
        match = re.fullmatch(r"(.+)\.(?:weight_(?:scale|scale_inv|scale_2|global_scale)|scale_weight)", name)
        if name in known or match is None:
            continue
        others = [f"{match[1]}.weight", f"{match[1]}.weight_packed"]
        if not any(other in tensors for other in others):
            missing.append(
                Missing(match[1], name, f"{name} is the scale of no tensor: {others[0]} is missing", "codes")
            )
    return layers, missing


def used_names(layers: Iterable[Layer]) -> set[str]:
    """Names of the tensors of quantized matrices."""
    parts = (tensor for layer in layers for tensor in (layer.codes, layer.scales, layer.tensor_scale) if tensor)
    return {tensor.name.partition("[")[0] for tensor in parts}


def stray_scales(checkpoint: Checkpoint) -> Iterator[tuple[StoredTensor, StoredTensor]]:
    """Weights of floating-point numbers with a scale tensor."""
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".weight") and tensor.is_float and len(tensor.shape) > 1:
            found = _scales_of(checkpoint, name.removesuffix(".weight"))
            # Another library may call the weight of a norm `scale`.
            if found is not None and (found[0] != "DeepSeek-V4" or found[1].dtype in _EXPONENTS):
                yield tensor, found[1]


def _experts(layer: Layer) -> list[Layer]:
    """The matrices of a tensor (E, N, K) whose scales have a part for each expert that is no range of its rows."""
    codes, scales = layer.codes, layer.scales
    if len(codes.shape) != 3 or scales is None or layer.layout == "gpt-oss":
        return [layer]
    experts, (rows, columns) = codes.shape[0], layer.shape
    second = layer.tensor_scale
    own = [tensor.shape[:1] == (experts,) and experts > 1 for tensor in (scales, second) if tensor is not None]
    if not all(own) or (shape_problem(layer) == ("", "") and second is None):
        return [layer]
    return [
        replace(
            layer, name=f"{layer.name}[{number}]", shape=(rows // experts, columns), codes=codes.part(number),
            scales=scales.part(number), tensor_scale=None if second is None else second.part(number), expert=number,
        )
        for number in range(experts)
    ]  # fmt: skip


def _scales_of(checkpoint: Checkpoint, base: str) -> tuple[str, StoredTensor] | None:
    """Layout and scales of the matrix `base`: of the user's pattern, else of the first known name."""
    names = {checkpoint.scale_names.replace("{weight}", base): _OWN} if checkpoint.scale_names else {}
    names |= {f"{base}.{end}": layout for end, layout in _SCALE_NAMES.items()}
    return next(
        ((layout, checkpoint.tensors[name]) for name, layout in names.items() if name in checkpoint.tensors), None
    )


def _no_scales(base: str, codes: StoredTensor, expected: str) -> Missing:
    return Missing(base, codes.name, f"{codes.name} ({codes.dtype}) has no scales: {expected} is missing", "scales")


def _packed(checkpoint: Checkpoint, base: str, codes: StoredTensor) -> Layer | Missing | None:
    """compressed-tensors: `weight_packed`. A tensor of integers (`I32`) is another format."""
    if codes.dtype not in _BYTES or len(codes.shape) < 2:
        return None
    return _four_bits(checkpoint, base, codes, "compressed-tensors", "weight_global_scale", "encode")


def _weight(checkpoint: Checkpoint, base: str, codes: StoredTensor) -> Layer | Missing | None:
    """`weight` of ModelOpt (U8), DeepSeek or FP8; None for an unquantized tensor."""
    if codes.dtype.startswith("GGML_"):
        return _ggml(checkpoint, base, codes)
    if len(codes.shape) < 2 or in_bytes(checkpoint, base, codes):
        return None
    tensors = checkpoint.tensors
    if codes.dtype in _BYTES:
        named = _scales_of(checkpoint, base)
        if named is None and f"{base}.weight_scale_2" not in tensors and not _is_four_bit(checkpoint):
            return None
        return _four_bits(checkpoint, base, codes, "ModelOpt", "weight_scale_2", "decode")
    if codes.dtype not in _FP8:
        return None
    if (found := _scales_of(checkpoint, base)) is None:
        expected = "weight_scale_inv" if checkpoint.config.get("weight_block_size") else "weight_scale"
        return _no_scales(base, codes, f"{base}.{expected}")
    return _fp8(checkpoint, base, codes, *found)


def _fp8(checkpoint: Checkpoint, base: str, codes: StoredTensor, layout: str, scales: StoredTensor) -> Layer:
    """FP8 codes with a scale for the tensor or the expert, for each row, for each block, or for 32 elements (MXFP8)."""
    element, (rows, columns) = _FP8[codes.dtype], (codes.rows, codes.columns)
    block = _block_size(checkpoint)
    experts = codes.shape[0] if len(codes.shape) == 3 else 1
    height, width = -(-(rows // experts) // block[0]), -(-columns // block[1])
    tiles = scales.columns == width and scales.rows in (experts * height, -(-rows // block[0]))
    if scales.dtype in _EXPONENTS and layout == "FP8" and not tiles:
        return Layer(base, "ModelOpt", element, E8M0, (1, 32), (rows, columns), codes, scales)
    if scales.dtype in _EXPONENTS and (scales.rows, scales.columns) == (rows, -(-columns // 32)) and not tiles:
        return Layer(base, layout, element, E8M0, (1, 32), (rows, columns), codes, scales)
    count = math.prod(scales.shape)
    if layout != "DeepSeek":
        if count in (1, experts):
            block = (0, 0)
        elif count == rows and not tiles and 1 in (scales.columns, scales.rows // max(1, experts), scales.rows):
            block = (1, 0)
    return Layer(base, layout, element, FP32, block, (rows, columns), codes, scales)


def _fused(checkpoint: Checkpoint, base: str, codes: StoredTensor) -> Layer | None:
    """Codes (E, N, K) of experts under a name without `.weight`, whose scales have a longer name."""
    if len(codes.shape) != 3:
        return None
    tensors = checkpoint.tensors
    scales = next((tensors[f"{base}{end}"] for end in _FUSED_NAMES if f"{base}{end}" in tensors), None)
    if scales is None:
        return None
    if codes.dtype in _FP8:
        return _fp8(checkpoint, base, codes, "fused experts", scales)
    second = tensors.get(f"{base}_weight_scale_2")
    if codes.dtype not in _BYTES or second is None:
        return None
    shape = codes.rows, codes.columns if codes.dtype == "F4" else 2 * codes.columns
    return Layer(base, "fused experts", E2M1, E4M3, (1, 16), shape, codes, scales, second, "decode")


def _four_bits(
    checkpoint: Checkpoint, base: str, codes: StoredTensor, layout: str, second: str, kind: str
) -> Layer | Missing:
    """Packed E2M1 codes with scales in `weight_scale`: E4M3 for 16 elements, or E8M0 for 32 without a tensor scale."""
    if (named := _scales_of(checkpoint, base)) is None:
        return _no_scales(base, codes, f"{base}.weight_scale")
    scales = named[1]
    layout = named[0] if named[0] in ("DeepSeek-V4", _OWN) else layout
    shape = codes.rows, codes.columns if codes.dtype == "F4" else 2 * codes.columns
    tensor_scale = checkpoint.tensors.get(f"{base}.{second}")
    if scales.dtype == "F8_E4M3" or tensor_scale is not None:  # MXFP4 has no tensor scale
        return Layer(base, layout, E2M1, E4M3, (1, 16), shape, codes, scales, tensor_scale, kind)
    return Layer(base, layout, E2M1, E8M0, (1, 32), shape, codes, scales)


def _blocks(checkpoint: Checkpoint, base: str, codes: StoredTensor) -> Layer | Missing | None:
    """gpt-oss: `…blocks` with `…scales`."""
    if codes.dtype not in _BYTES or len(codes.shape) < 2 or codes.columns != 16:
        return None
    name = f"{base}scales"
    if (scales := checkpoint.tensors.get(name)) is None:
        return _no_scales(base.rstrip("._"), codes, name)
    blocks = codes.shape[-2]
    shape = codes.rows // max(1, blocks), 32 * blocks
    return Layer(base.rstrip("._"), "gpt-oss", E2M1, E8M0, (1, 32), shape, codes, scales)


def _ggml(checkpoint: Checkpoint, stem: str, codes: StoredTensor) -> Layer | None:
    if codes.dtype == "GGML_MXFP4":
        return Layer(stem, "GGUF", E2M1, E8M0, (1, 32), (codes.rows, codes.columns), codes, None)
    if codes.dtype != "GGML_NVFP4":
        return None
    names = (f"{stem}.scale", f"{stem}.weight.scale")
    tensor_scale = next((found for name in names if (found := checkpoint.tensors.get(name))), None)
    shape = codes.rows, codes.columns
    return Layer(stem, "GGUF", E2M1, E4M3, (1, 16), shape, codes, None, tensor_scale, "decode" if tensor_scale else "")


def _is_four_bit(checkpoint: Checkpoint) -> bool:
    """Whether the configuration names a format of 4 bits."""
    return bool(re.search(r"fp4", str(checkpoint.config), re.IGNORECASE))


def _block_size(checkpoint: Checkpoint) -> tuple[int, int]:
    size = checkpoint.config.get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(type(part) is int and 0 < part <= 1 << 20 for part in size):
        return size[0], size[1]
    return 128, 128


_Maker = Callable[[Checkpoint, str, StoredTensor], "Layer | Missing | None"]
_MAKERS: tuple[tuple[re.Pattern[str], _Maker], ...] = (
    (re.compile(r"(.+)\.weight_packed"), _packed),
    (re.compile(r"(.+[._])blocks"), _blocks),
    (re.compile(r"(.+)\.weight"), _weight),
    (re.compile(r"(.+)"), _fused),
)


def shape_problem(layer: Layer) -> tuple[str, str]:
    """A sentence about scales of a wrong shape or dtype, and the kind of the mistake; empty strings if they fit."""
    if layer.scales is None:
        return "", ""
    scales, expected = layer.scales, layer.scales_shape
    numbers = (*_NUMBERS, *(_EXPONENTS if layer.layout != "FP8" else ("F8_E8M0",)))
    allowed = {E4M3.name: ("F8_E4M3",), E8M0.name: _EXPONENTS, FP32.name: numbers}[layer.scale.name]
    if scales.dtype not in allowed:
        return (
            f"{scales.name} has dtype {scales.dtype}; a scale of {layer.scale.name} has {' or '.join(allowed)}",
            "shape",
        )
    if layer.scale is FP32 and 1 in expected:
        fits = scales.rows * scales.columns == expected[0] * expected[1]
    else:
        fits = (scales.rows, scales.columns) == expected
    if fits:
        return "", ""
    found = "x".join(map(str, scales.shape)) or "()"
    text = (
        f"{scales.name} has shape {found}; codes of {layer.shape[0]}x{layer.shape[1]} have {expected[0]}x{expected[1]}"
    )
    width = layer.block[1]
    if layer.element is E2M1 and (scales.rows, scales.columns) == (layer.shape[0], -(-layer.shape[1] // 2 // width)):
        return (
            f"{text}: the blocks were counted on packed bytes, so the scales were computed from packed data",
            "packed",
        )
    tiles = TILED[TILES].padded_shape(expected)
    if (scales.rows, scales.columns) == tiles:
        return f"{text}: this is the shape of the 128x4 layout; the layout {layer.layout} stores linear scales", "shape"
    return text, "shape"
