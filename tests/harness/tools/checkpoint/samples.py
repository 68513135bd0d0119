"""Small checkpoints of every layout, made by the reference, and defects in them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from narrowgauge.reference import ops
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import unpack
from narrowgauge.spec.formats import E4M3

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
Tensors = dict[str, torch.Tensor]


def weights(rows: int = 96, columns: int = 256, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Weights of two layers: columns of different size, as the channels of a model have."""
    generator = torch.Generator().manual_seed(7)
    channels = torch.rand(columns, generator=generator) + 0.1
    return {
        f"{name}.weight": (torch.randn(rows, columns, generator=generator) * channels * 0.02).to(dtype)
        for name in LAYERS
    }


def nvfp4(layout: str, dialect: str = "") -> Tensors:
    """`compressed-tensors` or `ModelOpt` NVFP4."""
    packed, second, dialect = {
        "compressed-tensors": ("weight_packed", "weight_global_scale", dialect or "compressed-tensors"),
        "ModelOpt": ("weight", "weight_scale_2", dialect or "modelopt"),
    }[layout]
    tensors = {}
    for name, weight in weights().items():
        base = name.removesuffix(".weight")
        q = ops.quantize(weight, f"nvfp4@{dialect}")
        high_first = q.recipe.packing == "high-first"  # files hold the first element in the low nibble
        tensors[f"{base}.{packed}"] = (q.codes << 4) | (q.codes >> 4) if high_first else q.codes
        tensors[f"{base}.weight_scale"] = q.scales.view(torch.float8_e4m3fn)
        tensors[f"{base}.{second}"] = q.tensor_scale
    tensors["model.norm.weight"] = torch.ones(256, dtype=torch.bfloat16)
    return tensors


def deepseek() -> Tensors:
    """FP8 with a float32 scale amax/448 for 128x128 elements."""
    tensors = {}
    for name, weight in weights(200, 300).items():
        x = torch.nn.functional.pad(weight.float(), (0, 84, 0, 56)).view(2, 128, 3, 128)
        scales = x.abs().amax((1, 3)) / torch.tensor(448.0)
        codes = encode((x / scales.view(2, 1, 3, 1)).view(256, 384)[:200, :300].contiguous(), E4M3)
        tensors[name] = codes.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    return tensors


def fp8_rows() -> Tensors:
    """FP8 with a scale for each row."""
    tensors = {}
    for name, weight in weights().items():
        scales = weight.float().abs().amax(1, keepdim=True) / torch.tensor(448.0)
        tensors[name] = encode(weight.float() / scales, E4M3).view(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scales
    return tensors


def gpt_oss() -> tuple[Tensors, Tensors]:
    """MXFP4 experts (E, M, K/32, 16) with scales (E, M, K/32), and their weights (E, K, M)."""
    original = torch.stack(list(weights().values()))
    q = ops.quantize(original, "mxfp4@ocp")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = {f"{name}_blocks": q.codes.view(2, 96, 8, 16), f"{name}_scales": q.scales.view(2, 96, 8)}
    return stored, {name: original.transpose(1, 2).contiguous()}


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A .safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def gguf_blocks(recipe: str, weight: torch.Tensor) -> bytes:
    """GGML blocks of a matrix: element i low and i + half high."""
    q = ops.quantize(weight, recipe)
    single = unpack(q.codes, weight.shape[1]).numpy()
    width, count = (32, 1) if recipe.startswith("mxfp4") else (16, 4)
    halves = single.reshape(-1, 2, width // 2)
    packed = (halves[:, 0] | (halves[:, 1] << 4)).reshape(-1, count * width // 2)
    return np.concatenate([q.scales.numpy().reshape(-1, count), packed], 1).tobytes()


def save_gguf(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]]) -> Path:
    """A .gguf file of tensors: shape, GGML type, bytes."""
    header = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), 2)]
    header += [_text("general.architecture"), struct.pack("<I", 8), _text("llama")]
    header += [_text("tokens"), struct.pack("<IIQ", 9, 8, 2), _text("a"), _text("b")]
    data = b""
    for name, (shape, kind, content) in tensors.items():
        header += [_text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])]
        header += [struct.pack("<IQ", kind, len(data))]
        data += content + b"\0" * (-len(content) % 32)
    head = b"".join(header)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()
