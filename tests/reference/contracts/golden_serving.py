"""The recorded vectors of tests/golden/serving, and the dialect of each kernel."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from narrowgauge import contract as c
from narrowgauge.contract import Contract
from narrowgauge.contracts import CONTRACTS, norm
from narrowgauge.reference.contracts.accepted import Part
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.paths import ROOT

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
Vector = Mapping[str, Any]


@c.contract
def quantized(x: c.Matrix, recipe: c.Recipe, *, ub: float = math.inf, subnormals: Literal["kept", "flushed"] = "kept"):
    """A quantizer alone. ub: upper bound of the amaxes."""
    return norm.bounded(x, recipe, ub)


@c.contract
def quantized_static(x: c.Matrix, scale: c.Scale, recipe: c.Recipe, *, subnormals: Literal["kept", "flushed"] = "kept"):
    """A quantizer with a given scale."""
    return c.quantize(x, recipe, scale)


@dataclass(frozen=True)
class Kernel:
    """The vectors of a kernel, and the contract and the dialect that hold for it."""

    file: str
    contract: Contract
    dialect: str = ""
    recipe: str = ""
    """Its name without the dialect; {group} is the group of a vector."""
    when: Callable[[Vector], bool] = lambda vector: True
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of arguments in the file, and of results behind `>`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    known: int = 0
    """Elements outside of the dialect, for a reason of docs/contracts.md."""

    def __str__(self) -> str:
        kind = self.recipe.rpartition("-")[2] if self.recipe else self.names.get(">output", "")
        return "/".join(filter(None, [self.file, self.contract.name, kind, self.dialect]))

    @property
    def others(self) -> list[str]:
        """The further dialects of the contract for the recipe."""
        names = self.contract.dialects or dict.fromkeys(kernel.dialect for kernel in KERNELS)
        return [name for name in names if name != self.dialect and self._has(name)]

    def _has(self, dialect: str) -> bool:
        try:
            return not self.recipe or bool(find_recipe(f"{self.recipe.format(group=128)}@{dialect}"))
        except ValueError:
            return False

    def judged(self, dialect: str | None = None, **fields: Any) -> Iterator[tuple[str, Part]]:
        """Judges the results of the vectors under the dialect of the row, or under a second dialect."""
        dialect = self.dialect if dialect is None else dialect
        for vector in vectors(self.file):
            needed = {self._name(argument) for argument in self.contract.tensors}
            if self.when(vector) and needed <= vector["tensors"].keys():
                yield from self._judged(vector, dialect, fields)

    def wrong(self, dialect: str) -> int:
        """Elements outside of a dialect."""
        return sum(int(part.wrong.sum()) for _, part in self.judged(dialect))

    def _name(self, argument: str) -> str:
        return self.names.get(argument, {"weight": "w"}.get(argument, argument))

    def _judged(self, vector: Vector, dialect: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part]]:
        tensors, contract = vector["tensors"], self.contract
        given = {argument: tensors[self._name(argument)] for argument in contract.tensors}
        given = {name: tensor.view(1) if name == "scale" else tensor for name, tensor in given.items()}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in given.items()}
        options = {**contract.dialects.get(dialect, {}), **self.options, **fields}
        if "eps" in contract.options:
            options["eps"] = vector["eps"]
        if vector.get("scale_ub"):
            options |= {name: vector["scale_ub"] for name in ("ub", "scale_ub") if name in contract.options}
        recipe = f"{self.recipe.format(**vector)}@{dialect}" if self.recipe else ""
        program = contract.trace(dtypes, {"recipe": recipe} if recipe else {}, options)
        shown: dict[str, Any] = {}
        for output in program.outputs:
            if output == "quantized":
                shown[output] = self._quantized(tensors, recipe, given)
            else:
                default = {"residual": "residual_out", "output": "out"}.get(output, output)
                shown[output] = tensors[self.names.get(f">{output}", default)]
        return judged(program, given, shown)

    def _quantized(self, tensors: Mapping[str, torch.Tensor], recipe: str, given: Vector) -> Quantized:
        codes, rule = tensors["codes"], find_recipe(recipe)
        stored = next((tensors[n] for n in ("scales", "token_scales", "group_scales") if n in tensors), None)
        scales = given["scale"].view(1, 1) if rule.tensor_scale == "given" else stored
        assert scales is not None
        if scales.dim() == 2 and scales.shape[0] == codes.shape[1] // 128 and self.dialect == "flashinfer-block":
            scales = scales.T[: codes.shape[0]].contiguous()  # a column of scales for each block, and padding
        scales = scales if rule.whole else scales.reshape(codes.shape[0], -1)
        return Quantized(codes, scales, None, rule, tuple(codes.shape))


@cache
def vectors(name: str) -> list[dict[str, Any]]:
    """The vectors of a file: tensors by name, and the facts of each."""
    archive = np.load(ROOT / "tests" / "golden" / "serving" / f"{name}.npz")
    found = []
    for number, fact in enumerate(json.loads(bytes(archive["_meta"]))["vectors"]):
        tensors = {}
        for key, dtype in fact["dtypes"].items():
            if f"v{number:02d}.{key}" in archive:
                array = archive[f"v{number:02d}.{key}"]
                tensor = torch.from_numpy(array.view(_SIGNED[array.itemsize]).copy())
                tensors[key] = tensor.view(_DTYPES[dtype]) if dtype in _DTYPES else tensor
        found.append({**fact, "tensors": _valid_rows(tensors)})
    return found


def _valid_rows(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of the experts of `masked_m`, (rows, …) in place of (experts, rows, …); the others are padding."""
    counts = tensors.pop("masked_m", None)
    if counts is None:
        return tensors
    return {
        name: torch.cat([rows[:count] for rows, count in zip(tensor, counts.tolist(), strict=True)])
        for name, tensor in tensors.items()
    }


_STATIC, _ROW = "fp8-static-e4m3", "fp8-row-e4m3"
_FP32, _POW2 = "fp8-block-1x{group}-e4m3-fp32", "fp8-block-1x{group}-e4m3-pow2"
_NORM, _ADD = CONTRACTS["rmsnorm"], CONTRACTS["add-rmsnorm"]
_NORM_Q, _ADD_Q = CONTRACTS["rmsnorm-quantize"], CONTRACTS["add-rmsnorm-quantize"]
_NORM_S, _ADD_S = CONTRACTS["rmsnorm-quantize-static"], CONTRACTS["add-rmsnorm-quantize-static"]
_SILU, _SILU_Q, _SILU_S = (CONTRACTS[name] for name in ("silu-mul", "silu-mul-quantize", "silu-mul-quantize-static"))
_GELU = CONTRACTS["gelu-mul"]
_GEMMA = {"weight": "gemma_w", ">output": "gemma_out"}
_CENTRED = {"zero_centered": True}
_FLUSHED = {"subnormals": "flushed"}


def _is(**facts: Any) -> Callable[[Vector], bool]:
    return lambda vector: all(vector.get(name) == value for name, value in facts.items())


KERNELS = (
    # norms
    Kernel("vllm_rms_norm", _NORM, "vllm-static"),
    Kernel("vllm_fused_add_rms_norm", _ADD, "vllm-static"),
    Kernel("torch_rms_norm", _NORM, "torch"),
    Kernel("conch_rms_norm", _NORM, "conch"),
    Kernel("conch_rms_norm", _ADD, "conch", names={">output": "add_out"}),
    Kernel("flashinfer_rmsnorm", _NORM, "flashinfer-norm-cuda"),
    Kernel("flashinfer_rmsnorm", _NORM, "flashinfer-norm-cuda", names=_GEMMA, options=_CENTRED),
    Kernel("flashinfer_rmsnorm_cute", _NORM, "flashinfer-norm"),
    Kernel("flashinfer_rmsnorm_cute", _NORM, "flashinfer-norm", names=_GEMMA, options=_CENTRED),
    Kernel("flashinfer_fused_add_rmsnorm", _ADD, "flashinfer-norm-cuda"),
    Kernel("flashinfer_fused_add_rmsnorm_cute", _ADD, "flashinfer-norm"),
    Kernel("sglang_triton_rmsnorm_fp8_e8m0_quant", _NORM, "sglang-e8m0", names={">output": "normalized"}),
    Kernel("sglang_fused_add_rmsnorm", _ADD, "sglang-add", when=_is(cast_x_before_out_mul=False)),
    Kernel("sglang_fused_add_rmsnorm", _ADD, "sglang-add-cast", when=_is(cast_x_before_out_mul=True)),
    # norms with a given scale
    Kernel("vllm_rms_norm_static_fp8_quant", _NORM_S, "vllm-static", _STATIC),
    Kernel("vllm_fused_add_rms_norm_static_fp8_quant", _ADD_S, "vllm-static", _STATIC),
    Kernel("flashinfer_rmsnorm_quant", _NORM_S, "flashinfer-cuda", _STATIC),
    Kernel("flashinfer_fused_add_rmsnorm_quant", _ADD_S, "flashinfer-cuda", _STATIC),
    Kernel("flashinfer_rmsnorm_quant_cute", _NORM_S, "flashinfer", _STATIC),
    Kernel("flashinfer_fused_add_rmsnorm_quant_cute", _ADD_S, "flashinfer", _STATIC),
    # norms that make scales
    Kernel("vllm_rms_norm_dynamic_per_token_quant", _NORM_Q, "vllm-row", _ROW, _is(residual=False)),
    Kernel("vllm_rms_norm_dynamic_per_token_quant", _ADD_Q, "vllm-row", _ROW, _is(residual=True)),
    Kernel("vllm_rms_norm_per_block_quant", _NORM_Q, "vllm-block", _FP32, _is(residual=False)),
    Kernel("vllm_rms_norm_per_block_quant", _ADD_Q, "vllm-block", _FP32, _is(residual=True)),
    Kernel("flashinfer_fused_add_rmsnorm_fp8_block_quant", _ADD_Q, "flashinfer-block", "fp8-block-1x128-e4m3-fp32"),
    # activations
    Kernel("vllm_activation", _SILU, "vllm-activation", names={">output": "silu"}),
    Kernel("conch_activation", _SILU, "conch-activation", names={">output": "silu"}),
    Kernel("flashinfer_activation", _SILU, "flashinfer-activation", names={">output": "silu"}),
    *(
        Kernel(f"{library}_activation", _GELU, f"{library}-activation", names={">output": name},
               options={"approximate": form})
        for library in ("vllm", "flashinfer") for name, form in (("gelu", "erf"), ("gelu_tanh", "tanh"))
    ),
    Kernel("vllm_silu_and_mul_quant", _SILU_S, "vllm-silu-static", _STATIC),
    Kernel("vllm_silu_and_mul_per_block_quant", _SILU_Q, "vllm-silu-block", _FP32),
    Kernel("vllm_triton_silu_mul_group_quant_fp8", _SILU_Q, "vllm-triton-silu", _FP32, _is(scales="float32")),
    Kernel("vllm_triton_silu_mul_group_quant_fp8", _SILU_Q, "vllm-triton-silu", _POW2,
           _is(scales="float32 power of two"), known=4),
    Kernel("sglang_silu_and_mul_group_quant", _SILU_Q, "sglang-silu", _FP32,
           _is(mode="legacy", scales="float32 rows", dtype="torch.bfloat16")),
    Kernel("sglang_silu_and_mul_group_quant", _SILU_Q, "sglang-silu-fp16", _FP32,
           _is(mode="legacy", scales="float32 rows", dtype="torch.float16")),
    Kernel("sglang_silu_and_mul_group_quant", _SILU_Q, "sglang-silu-dense", _FP32,
           _is(mode="dense", scales="float32 rows")),
    *(
        Kernel("sglang_triton_silu_and_mul_masked_post_quant", _SILU_Q, "sglang-triton-silu",
               f"fp8-block-1x128-e4m3-{scales}", _is(ue8m0=scales == "pow2"))
        for scales in ("fp32", "pow2")
    ),
    # quantizers
    Kernel("vllm_static_scaled_fp8_quant", quantized_static, "vllm-static", _STATIC, _is(kind="tensor")),
    Kernel("conch_static_scaled_fp8_quant", quantized_static, "flashinfer", _STATIC),
    Kernel("vllm_dynamic_per_token_scaled_fp8_quant", quantized, "vllm-row", _ROW),
    Kernel("vllm_per_token_group_fp8_quant", quantized, "vllm-group", _FP32, _is(scales="float32")),
    Kernel("vllm_per_token_group_fp8_quant", quantized, "vllm-group", _POW2, _is(scales="float32 power of two")),
    Kernel("vllm_triton_per_token_group_quant_fp8", quantized, "vllm-triton", _FP32, _is(ue8m0=False)),
    Kernel("vllm_triton_per_token_group_quant_fp8", quantized, "vllm-triton", _POW2, _is(ue8m0=True), known=2),
    Kernel("sglang_triton_per_token_group_quant_8bit", quantized, "sglang-triton", _FP32, _is(scales="float32 rows")),
    Kernel("sglang_per_token_group_quant", quantized, "sglang-group", _FP32,
           _is(scales="float32 rows", dtype="torch.bfloat16"), options=_FLUSHED),
    Kernel("sglang_per_token_group_quant", quantized, "sglang-group-fp16", _FP32,
           _is(scales="float32 rows", dtype="torch.float16"), options=_FLUSHED),
    Kernel("sglang_per_token_quant_fp8", quantized, "sglang-row", _ROW, options=_FLUSHED),
    Kernel("humming_process_input", quantized, "humming", _ROW,
           _is(quant_mode="dynamic_token", activation="none")),
    Kernel("humming_process_input", CONTRACTS["silu-mul-quantize"], "humming", _ROW,
           _is(quant_mode="dynamic_token", activation="silu")),
)  # fmt: skip
INDISTINGUISHABLE: Mapping[str, Sequence[str]] = {
    "vllm_rms_norm/rmsnorm/vllm-static": (
        "vllm-cpu", "flashinfer", "flashinfer-cuda", "flashinfer-norm", "flashinfer-norm-cuda", "flashinfer-block",
        "trtllm", "sglang-e8m0", "sglang-add", "liger-gemma", "torch",
    ),
    "vllm_fused_add_rms_norm/add-rmsnorm/vllm-static": (
        "trtllm", "liger-gemma",
    ),
    "torch_rms_norm/rmsnorm/torch": (
        "vllm-static", "vllm-cpu", "flashinfer", "flashinfer-cuda", "flashinfer-norm", "flashinfer-norm-cuda",
        "flashinfer-block", "trtllm", "sglang-e8m0", "sglang-add", "liger-gemma",
    ),
    "conch_rms_norm/rmsnorm/conch": (
        "vllm-static-before-0.33", "vllm-row", "vllm-block", "sglang-add-cast", "liger",
    ),
    "conch_rms_norm/add-rmsnorm/add_out/conch": (
        "vllm-static-before-0.33", "liger",
    ),
    "flashinfer_rmsnorm/rmsnorm/flashinfer-norm-cuda": (
        "flashinfer-cuda", "flashinfer-block",
    ),
    "flashinfer_rmsnorm/rmsnorm/gemma_out/flashinfer-norm-cuda": (
        "flashinfer-cuda", "flashinfer-block",
    ),
    "flashinfer_rmsnorm_cute/rmsnorm/flashinfer-norm": (
        "vllm-static", "vllm-cpu", "flashinfer", "flashinfer-cuda", "flashinfer-norm-cuda", "flashinfer-block",
        "trtllm", "sglang-e8m0", "sglang-add", "liger-gemma", "torch",
    ),
    "flashinfer_rmsnorm_cute/rmsnorm/gemma_out/flashinfer-norm": (
        "vllm-static", "vllm-cpu", "flashinfer", "flashinfer-cuda", "flashinfer-norm-cuda", "flashinfer-block",
        "trtllm", "sglang-e8m0", "sglang-add", "liger-gemma", "torch",
    ),
    "flashinfer_fused_add_rmsnorm/add-rmsnorm/flashinfer-norm-cuda": (
        "flashinfer-cuda", "flashinfer-block",
    ),
    "flashinfer_fused_add_rmsnorm_cute/add-rmsnorm/flashinfer-norm": (
        "flashinfer", "flashinfer-cuda", "flashinfer-norm-cuda", "flashinfer-block", "sglang-e8m0", "torch",
    ),
    "sglang_triton_rmsnorm_fp8_e8m0_quant/rmsnorm/normalized/sglang-e8m0": (
        "vllm-static", "vllm-cpu", "flashinfer", "flashinfer-cuda", "flashinfer-norm", "flashinfer-norm-cuda",
        "flashinfer-block", "trtllm", "sglang-add", "liger-gemma", "torch",
    ),
    "sglang_fused_add_rmsnorm/add-rmsnorm/sglang-add-cast": (
        "vllm-row", "vllm-block",
    ),
    "vllm_activation/silu-mul/silu/vllm-activation": (
        "vllm-silu-static", "vllm-triton-silu", "sglang-silu", "sglang-silu-fp16", "sglang-triton-silu",
        "conch-activation", "liger",
    ),
    "conch_activation/silu-mul/silu/conch-activation": (
        "vllm-silu-static", "vllm-activation", "vllm-triton-silu", "sglang-silu", "sglang-silu-fp16",
        "sglang-triton-silu", "liger",
    ),
    "flashinfer_activation/silu-mul/silu/flashinfer-activation": (
        "vllm-silu-block", "vllm-cpu", "vllm-triton-silu-packed", "sglang-silu-dense", "humming",
    ),
    "vllm_activation/gelu-mul/gelu/vllm-activation": (
        "vllm-silu-static", "vllm-triton-silu", "sglang-silu", "sglang-silu-fp16", "sglang-triton-silu",
        "conch-activation", "liger",
    ),
    "vllm_activation/gelu-mul/gelu_tanh/vllm-activation": (
        "vllm-silu-static", "vllm-triton-silu", "sglang-silu", "sglang-silu-fp16", "sglang-triton-silu",
        "conch-activation", "liger",
    ),
    "flashinfer_activation/gelu-mul/gelu/flashinfer-activation": (
        "vllm-silu-block", "vllm-cpu", "vllm-triton-silu-packed", "sglang-silu-dense", "humming",
    ),
    "vllm_triton_silu_mul_group_quant_fp8/silu-mul-quantize/fp32/vllm-triton-silu": (
        "sglang-silu-fp16",
    ),
    "sglang_silu_and_mul_group_quant/silu-mul-quantize/fp32/sglang-silu": (
        "vllm-triton-silu", "sglang-silu-fp16", "sglang-triton-silu",
    ),
    "sglang_silu_and_mul_group_quant/silu-mul-quantize/fp32/sglang-silu-fp16": (
        "vllm-triton-silu",
    ),
    "vllm_static_scaled_fp8_quant/quantized-static/e4m3/vllm-static": (
        "flashinfer-cuda", "flashinfer", "vllm-silu-static",
    ),
    "vllm_per_token_group_fp8_quant/quantized/pow2/vllm-group": (
        "vllm-block", "vllm-silu-block", "vllm-triton-silu", "sglang-triton-silu", "vllm-triton", "sglang-triton",
        "humming",
    ),
    "vllm_triton_per_token_group_quant_fp8/quantized/fp32/vllm-triton": (
        "vllm-triton-silu", "sglang-silu-fp16", "sglang-group-fp16",
    ),
    "vllm_triton_per_token_group_quant_fp8/quantized/pow2/vllm-triton": (
        "vllm-triton-silu",
    ),
    "sglang_triton_per_token_group_quant_8bit/quantized/fp32/sglang-triton": (
        "sglang-triton-silu",
    ),
    "sglang_per_token_group_quant/quantized/fp32/sglang-group": (
        "sglang-silu", "sglang-silu-dense",
    ),
    "sglang_per_token_group_quant/quantized/fp32/sglang-group-fp16": (
        "sglang-silu-fp16",
    ),
    "sglang_triton_silu_and_mul_masked_post_quant/silu-mul-quantize/fp32/sglang-triton-silu": (
        "vllm-triton-silu", "sglang-silu", "sglang-silu-fp16",
    ),
    "sglang_triton_silu_and_mul_masked_post_quant/silu-mul-quantize/pow2/sglang-triton-silu": (
        "vllm-triton-silu",
    ),
    "sglang_fused_add_rmsnorm/add-rmsnorm/sglang-add": (
        "vllm-cpu",
    ),
}  # fmt: skip
"""Further dialects with all recorded bytes of a kernel inside of their intervals. Fields of the sum differ beside a
residual alone, and a result of 16 bits is rounded in every dialect."""
