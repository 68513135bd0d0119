"""Bytes of serving kernels on an H200 lie inside the intervals of their contracts; another dialect's do not.

tests/golden/serving/README.md says where the vectors come from.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.contract import Contract
from narrowgauge.reference.contracts.accepted import Part
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.paths import ROOT
from tests.reference.contracts import contracts

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float8_e4m3fn": torch.uint8}
NAN_IS_448 = {"vllm_rms_norm_static_fp8_quant", "vllm_fused_add_rms_norm_static_fp8_quant", "vllm_silu_and_mul_quant"}
"""Kernels that clamp before the conversion: NaN gives the code of 448, which no recipe of narrowgauge has."""
R = {"rounded": True}
ROWS: list[tuple[str, Contract, dict[str, Any], dict[str, str]]] = [
    ("vllm_rms_norm", contracts.serving_rmsnorm, {}, {}),
    ("torch_rms_norm", contracts.serving_rmsnorm, {}, {}),
    ("conch_rms_norm", contracts.serving_rmsnorm, R, {}),
    ("conch_rms_norm", contracts.serving_add_rmsnorm, R, {"out": "add_out"}),
    ("flashinfer_rmsnorm_cute", contracts.serving_rmsnorm, {}, {}),
    ("flashinfer_rmsnorm_cute", contracts.serving_rmsnorm, {"plus_one": True}, {"w": "gemma_w", "out": "gemma_out"}),
    ("flashinfer_fused_add_rmsnorm_cute", contracts.serving_add_rmsnorm,
     {"sum_of_rounded": False, "product_of_rounded": False}, {}),
    ("vllm_fused_add_rms_norm", contracts.serving_add_rmsnorm, {}, {}),
    ("vllm_activation", contracts.serving_activation, {"act": "silu"}, {}),
    ("vllm_activation", contracts.serving_activation, {"act": "gelu"}, {}),
    ("vllm_activation", contracts.serving_activation, {"act": "gelu_tanh"}, {}),
    ("conch_activation", contracts.serving_activation, {"act": "silu"}, {}),
    ("vllm_rms_norm_static_fp8_quant", contracts.serving_rmsnorm_static, {}, {}),
    ("vllm_fused_add_rms_norm_static_fp8_quant", contracts.serving_add_rmsnorm_static, {}, {}),
    ("vllm_silu_and_mul_quant", contracts.serving_silu_static, {}, {}),
]  # fmt: skip


def vectors(name: str) -> list[dict[str, Any]]:
    """The vectors of a file: tensors by name, and the facts of each."""
    archive = np.load(ROOT / "tests" / "golden" / "serving" / f"{name}.npz")
    facts = json.loads(bytes(archive["_meta"]))["vectors"]
    found = []
    for number, fact in enumerate(facts):
        tensors = {}
        for key, dtype in fact["dtypes"].items():
            if f"v{number:02d}.{key}" in archive:
                array = archive[f"v{number:02d}.{key}"]
                signed = {1: np.uint8, 2: np.int16, 4: np.int32}[array.itemsize]
                tensors[key] = torch.from_numpy(array.view(signed).copy()).view(DTYPES[dtype])
        found.append({**fact, "tensors": tensors})
    return found


def results(
    name: str, contract: Contract, options: dict[str, Any], names: dict[str, str], vector: dict[str, Any]
) -> dict[str, Part]:
    """The judged results of a vector under a contract."""
    tensors = vector["tensors"]
    given = {argument: tensors[names.get(argument, argument)] for argument in contract.tensors}
    dtypes = {argument: str(tensor.dtype).removeprefix("torch.") for argument, tensor in given.items()}
    eps = {"eps": vector["eps"]} if "eps" in contract.options and "eps" in vector else {}
    program = contract.trace(dtypes, {}, {**options, **eps})
    shown: dict[str, Any] = {}
    for output in program.outputs:
        if output == "quantized":
            codes = tensors["codes"]
            if name in NAN_IS_448:
                nan = _is_nan(program, given)
                assert bool((codes[nan] == 0x7E).all())
                codes = codes.masked_fill(nan, 0x7F)
            recipe = find_recipe("fp8-static-e4m3@vllm")
            shown[output] = Quantized(codes, given["scale"].view(1, 1), None, recipe, tuple(codes.shape))
        else:
            shown[output] = tensors[names.get(output, output)]
    return dict(judged(program, given, shown))


def _is_nan(program: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where the quantized numbers are NaN, by the formula in float64."""
    from tests.reference.contracts.random_kernel import RandomKernel

    kernel = RandomKernel(program, given, 0, flavour="float64")
    step = program.steps[program.outputs["quantized"]]
    return kernel.values[step.operands[0]].isnan()


@pytest.mark.parametrize(("name", "contract", "options", "names"), ROWS, ids=lambda value: str(value)[:24])
def test_recorded_bytes_lie_inside(
    name: str, contract: Contract, options: dict[str, Any], names: dict[str, str]
) -> None:
    compared = determined = 0
    for number, vector in enumerate(vectors(name)):
        if not set(names.values()) <= vector["tensors"].keys():
            continue
        for output, part in results(name, contract, options, names, vector).items():
            wrong = part.wrong.nonzero()
            assert not len(wrong), (number, vector["family"], output, len(wrong), wrong[0].tolist())
            compared, determined = compared + part.actual.numel(), determined + part.determined
    assert compared > 1000
    assert determined > 0.9 * compared, (determined, compared)  # a quarter of the rows is special


@pytest.mark.parametrize(
    ("name", "contract", "options", "names"),
    [
        ("vllm_rms_norm", contracts.serving_rmsnorm, R, {}),
        ("vllm_rms_norm", contracts.serving_rmsnorm, {"plus_one": True}, {}),
        ("torch_rms_norm", contracts.serving_rmsnorm, {"weight_first": True}, {}),
        ("conch_rms_norm", contracts.serving_rmsnorm, {}, {}),
        ("flashinfer_fused_add_rmsnorm_cute", contracts.serving_add_rmsnorm, {}, {}),
        ("vllm_activation", contracts.serving_activation, {"act": "silu"}, {"silu": "gelu"}),
        ("vllm_activation", contracts.serving_activation, {"act": "gelu_tanh"}, {"gelu_tanh": "gelu"}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_another_dialect_is_refused(
    name: str, contract: Contract, options: dict[str, Any], names: dict[str, str]
) -> None:
    judgements = [results(name, contract, options, names, vector) for vector in vectors(name)]
    assert sum(int(part.wrong.sum()) for parts in judgements for part in parts.values()) > 10
