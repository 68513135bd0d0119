"""The public names work with torch and numpy alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import narrowgauge as ng

REFUSED = ("pandas", "pyarrow", "jinja2", "msgspec", "typer", "rich", "safetensors", "pytest", "_pytest", "cupy")
"""Packages that a user of the public names need not have."""
PREAMBLE = f"""
import json
import struct
import sys
from pathlib import Path

sys.modules.update(dict.fromkeys({REFUSED!r}))  # importing them raises ModuleNotFoundError
import torch
import narrowgauge as ng

x = torch.randn(32, 64).bfloat16()
sizes = torch.tensor([16, 16])
q = ng.quantize(x, "nvfp4")
y = ng.gemm(q, q, out_dtype=torch.bfloat16)
rotated = ng.transform(x, "nvfp4-rht")


def draw(seed):
    r = ng.quantize(x, "nvfp4-sr", random=(seed, 0))
    return r.codes, r.scales, r.amax


def fp8_checkpoint():
    w = ng.quantize(torch.randn(128, 128), "fp8-block-128x128-e4m3-fp32")
    header = {{
        "a.weight": {{"dtype": "F8_E4M3", "shape": [128, 128], "data_offsets": [0, 16384]}},
        "a.weight_scale_inv": {{"dtype": "F32", "shape": [1, 1], "data_offsets": [16384, 16388]}},
    }}
    text = json.dumps(header).encode()
    body = w.codes.numpy().tobytes() + w.scales.numpy().tobytes()
    Path("w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return "w.safetensors"


def own_contract():
    text = "def square(x: c.Matrix):\\n    return c.cast(c.float32(x) * c.float32(x), x.dtype)\\n"
    Path("own_contract.py").write_text("from narrowgauge import contract as c\\n\\n\\n@c.contract\\n" + text)
    import own_contract

    return own_contract.square


def fails(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except ng.WrongResult as error:
        verdict = error.verdict
        assert not verdict.passed and str(verdict) and verdict._repr_html_() and verdict.to_dict()
        assert "python -c" in str(error), error
        return
    raise RuntimeError("a wrong result passed")


"""
CALLS = {
    "BatchedQuantized": "ng.BatchedQuantized",
    "assert_rows_independent": "ng.assert_rows_independent(torch.neg, x)",
    "certify": "assert callable(ng.certify)",
    "parity": "assert callable(ng.parity)",
    "power": "assert callable(ng.power)",
    "Order": "ng.Order",
    "GroupedQuantized": "repr(ng.quantize_grouped(x, sizes, 'nvfp4')); ng.GroupedQuantized",
    "Quantized": "repr(q); q.to('cpu')",
    "Recipe": "ng.recipe(ng.Recipe is not None and 'nvfp4')",
    "Verdict": "assert isinstance(ng.explain(ng.assert_transformed, x, x), ng.Verdict)",
    "WrongResult": "import pickle; assert pickle.loads(pickle.dumps(ng.WrongResult)) is ng.WrongResult",
    "__version__": "ng.__version__",
    "adapt": "ng.adapt.quantized(q.codes, q.scales, 'nvfp4', q.shape, amax=q.amax)",
    "accumulation_order": "assert isinstance(ng.accumulation_order(lambda a, b: a @ b.T, 16, 32, 16), ng.Order)",
    "assert_checkpoint": "ng.assert_checkpoint(fp8_checkpoint())",
    "assert_dequantized": "ng.assert_dequantized(q.codes, q.scales, ng.dequantize(q), amax=q.amax); "
    "fails(ng.assert_dequantized, q.codes, q.scales, x, amax=q.amax)",
    "assert_gemm": "ng.assert_gemm(q, q, y, out_dtype=y.dtype); fails(ng.assert_gemm, q, q, y * 2, out_dtype=y.dtype)",
    "assert_quantized": "ng.assert_quantized(x, q.codes, q.scales, amax=q.amax); "
    "fails(ng.assert_quantized, x, q.codes ^ 1, q.scales)",
    "assert_result": "ng.assert_result(own_contract(), x * x, x); fails(ng.assert_result, own_contract(), x, x)",
    "assert_stochastic": "ng.assert_stochastic(x, draw); fails(ng.assert_stochastic, x, lambda seed: draw(0))",
    "assert_transformed": "ng.assert_transformed(x, rotated); fails(ng.assert_transformed, x, x)",
    "bounds": "ng.bounds(q, q, out_dtype=torch.float32)",
    "cases": "assert list(ng.cases.glob('*.toml'))",
    "check": "ng.check(lambda x: ng.quantize(x, 'nvfp4'), 'nvfp4', families=['normal'])",
    "dequantize": "ng.dequantize(q)",
    "explain": "assert ng.explain(ng.assert_transformed, x, rotated).passed",
    "gemm": "ng.gemm(q, q, out_dtype=torch.float32)",
    "gemm_grouped": "ng.gemm_grouped(ng.quantize_grouped(x, sizes, 'nvfp4'), [q, q], out_dtype=torch.float32)",
    "gemm_quantized": "ng.gemm_quantized(q, q, 'nvfp4', out_dtype=torch.bfloat16)",
    "inputs": "ng.inputs('nvfp4', (32, 64), 'normal')",
    "matrix": "assert ng.matrix('nvfp4')",
    "metrics": "ng.metrics(y, y)",
    "pack_scales": "ng.pack_scales(q.scales, '8x4')",
    "quantize": "ng.quantize(x, 'mxfp8-e4m3')",
    "quantize_both": "ng.quantize_both(x, 'nvfp4')",
    "quantize_grouped": "ng.quantize_grouped(x, sizes, 'nvfp4')",
    "recipe": "ng.recipe('nvfp4@modelopt')",
    "recipes": "assert ng.recipes()",
    "save_rule": "ng.save_rule(ng.recipe('nvfp4@modelopt'), 'own.toml')",
    "swizzle": "ng.swizzle(q.scales)",
    "tolerance": "assert ng.tolerance((8, 64, 8), 'nvfp4').sqnr_db > 0",
    "transform": "ng.transform(x, 'nvfp4-rht')",
    "unpack_scales": "ng.unpack_scales(ng.pack_scales(q.scales, '8x4'), q.scales.shape, '8x4')",
    "unswizzle": "ng.unswizzle(ng.swizzle(q.scales), q.scales.shape)",
    "update_scale": "ng.update_scale(torch.ones(4, 1), torch.ones(1), 'fp8-delayed-e4m3')",
    "use_rules": "ng.use_rules(['own.toml'])",
    "watch": "assert callable(ng.watch)",
}
"""A call of each public name."""


@pytest.mark.long
def test_public_names_need_torch_and_numpy_alone(tmp_path: Path) -> None:
    assert CALLS.keys() == {*ng.__all__}
    (tmp_path / "calls.py").write_text(PREAMBLE + "\n".join(CALLS.values()) + "\n", encoding="utf-8")
    environment = {"NARROWGAUGE_FAILURES": str(tmp_path), "OMP_NUM_THREADS": "1"}
    root = str(Path(ng.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "calls.py"], cwd=tmp_path, env=environment | {"PYTHONPATH": root}, check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    code = textwrap.dedent("""
        import sys
        import narrowgauge
        assert not {"torch", "numpy", "narrowgauge.harness"} & sys.modules.keys()
        dir(narrowgauge)
        assert "torch" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
