"""Recorded products of serving kernels on an H200 lie inside their dialects, and outside of wrong ones.

tests/golden/serving/README.md says where the vectors come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import torch

from narrowgauge import contract as c
from narrowgauge.contract import Contract
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.backends.adapters.conch import packed_words
from narrowgauge.reference.contracts.accepted import Part
from narrowgauge.reference.contracts.evaluate import judged, parts_of
from narrowgauge.spec.modules.routing import arrange
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.reference.contracts.golden_serving import Vector, vectors

Operand = torch.Tensor | Quantized
_WEIGHT_ONLY, _SCALED = CONTRACTS["weight-only-gemm"], CONTRACTS["scaled-gemm"]
_NVFP4 = "nvfp4@modelopt"
"""Its scale of the tensor is a factor that a kernel is given."""


@c.contract
def plain_gemm(
    a: c.Matrix, b: Annotated[c.Matrix, ("N", "K")], *, accumulator: Literal["fraction-25-16", "sequential"]
    = "fraction-25-16",
):  # fmt: skip
    """A product of two matrices in 16 bits."""
    return c.cast(c.gemm(a, b, accumulator), a.dtype)


def quantized(
    codes: torch.Tensor, scales: torch.Tensor, recipe: str, scale: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> Quantized:  # fmt: skip
    rule = find_recipe(recipe)
    columns = codes.shape[1]
    if rule.element.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    if rule.spans_k:
        scales = scales.float().reshape(-1, 1)
    amax = None if scale is None else scale * 2688
    return Quantized(codes, scales, amax, rule, (codes.shape[0], columns), scale, zeros=zeros)


def four_bits(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Quantized:
    """Codes from 0 to 15, of which the zero point is subtracted: 8 without one."""
    group, scales = codes.shape[1] // scales.shape[1], scales.float().contiguous()
    if zeros is None:
        return quantized(codes ^ 8, scales, f"int4-g{group}")
    return quantized(codes, scales, f"int4-g{group}-zp", zeros=zeros.to(torch.uint8).contiguous())


def rows(vector: Vector) -> Iterator[tuple[Operand, Operand, torch.Tensor]]:
    t = vector["tensors"]
    b = t["b"].T.contiguous() if t["b"].shape[0] != t["b_scales"].numel() else t["b"]
    yield *(quantized(t[x] if x == "a" else b, t[f"{x}_scales"], "fp8-row-e4m3") for x in "ab"), t["out"]


def blocks(vector: Vector) -> Iterator[tuple[Operand, Operand, torch.Tensor]]:
    t, width = vector["tensors"], 1 if vector.get("b_block") == 1 else 128
    names = ("fp8-block-1x128-e4m3-fp32", f"fp8-block-{width}x128-e4m3-fp32")
    yield *(quantized(t[x], t[f"{x}_scales"], name) for x, name in zip("ab", names, strict=True)), t["out"]


def sections(vector: Vector) -> Iterator[tuple[Operand, Operand, torch.Tensor]]:
    t, start = vector["tensors"], 0
    for number, size in enumerate(vector["sizes"]):
        some = slice(start, start + size)
        a, b = t["a"][some], t["b"][number]
        if "a_scales" in t:
            a = quantized(a, t["a_scales"][some], "fp8-row-e4m3")
            b = quantized(b, t["b_scales"][number], "fp8-row-e4m3")
        start += size
        if size:
            yield a, b, t["out"][some]


_FORMATS = {
    "nvfp4": _NVFP4,
    "mxfp4": "mxfp4",
    "fp8-channel": "fp8-row-e4m3",
    "fp8-block": "fp8-block-128x128-e4m3-fp32",
}


def conch(vector: Vector) -> Iterator[tuple[Operand, Operand, torch.Tensor]]:
    t = vector["tensors"]
    yield (
        t["x"],
        four_bits(*(None if name not in t else t[name].T for name in ("weights", "scales", "zeros"))),
        t["out"],
    )


def humming(vector: Vector) -> Iterator[tuple[Operand, Operand, torch.Tensor]]:
    t = vector["tensors"]
    if vector["format"].startswith("int4"):
        yield t["x"], four_bits(t["w_codes"], t["w_scales"], t.get("w_zeros")), t["out"]
        return
    b = quantized(t["w_codes"], t["w_scales"], _FORMATS[vector["format"]], t.get("w_scale_2"))
    a = quantized(t["x_codes"], t["x_scales"], "fp8-row-e4m3") if "x_codes" in t else t["x"]
    yield a, b, t["out"]


def humming_experts(vector: Vector) -> Iterator[tuple[Operand, Operand, torch.Tensor]]:
    t, sizes = vector["tensors"], vector["counts"]
    masked = vector["gemm"] == "grouped_masked"
    place = arrange("masked" if masked else "indptr", sizes, len(t["x"]) // len(sizes) if masked else 1)
    rows = iter(place.rows)
    for number, size in enumerate(sizes):
        own = [next(rows) for _ in range(size)]
        b = quantized(t["w_codes"][number], t["w_scales"][number], _FORMATS[vector["format"]], t.get("w_scale_2"))
        if own:
            yield t["x"][own], b, t["out"][own]


@dataclass(frozen=True)
class Product:
    """The vectors of a kernel, and the contract and the fields that hold for it."""

    file: str
    operands: Callable[[Vector], Iterator[tuple[Operand, Operand, torch.Tensor]]]
    contract: Contract
    dialect: str = ""
    when: Mapping[str, Any] = field(default_factory=dict)
    wrong: tuple[Mapping[str, Any], ...] = ()
    """Values of fields refused by the bytes."""

    def __str__(self) -> str:
        return "/".join([self.file, *map(str, self.when.values())])

    def judged(self, fields: Mapping[str, Any] | None = None) -> Iterator[Part]:
        for vector in vectors(self.file):
            if all(vector.get(name) == value for name, value in self.when.items()):
                for a, b, out in self.operands(vector):
                    yield self._judged(a, b, out, fields or {})

    def _judged(self, a: Operand, b: Operand, out: torch.Tensor, fields: Mapping[str, Any]) -> Part:
        given = {"a": a, "b": b}
        codes = {name: q for name, q in given.items() if isinstance(q, Quantized)}
        plain = {name: x for name, x in given.items() if not isinstance(x, Quantized)}
        dtypes = {n: str(x.dtype).removeprefix("torch.") for n, x in plain.items()} | dict.fromkeys(codes, "codes")
        options = {**self.contract.dialects.get(self.dialect, {}), **fields}
        if "out_dtype" in self.contract.options:
            options["out_dtype"] = str(out.dtype).removeprefix("torch.")
        recipes = {f"{name}_recipe": str(q.recipe) for name, q in codes.items()}
        program = self.contract.trace(dtypes, recipes, options)
        ((_, part),) = judged(program, plain | parts_of(program, codes), {"output": out})
        return part


_ORDER = {"accumulator": "aligned-13-32"}
PRODUCTS = (
    Product("torch_scaled_mm_rowwise", rows, _SCALED, "torch-rowwise", {"fast_accum": False}, (_ORDER,)),
    Product("torch_scaled_mm_rowwise", rows, _SCALED, "torch-rowwise-fast", {"fast_accum": True},
            ({"accumulator": "aligned-13-32-128"},)),
    Product("conch_scaled_gemm", rows, _SCALED, "conch-scaled", {},
            ({"accumulator": "aligned-13-32-128"}, {"epilogue": "rounded-between"})),
    Product("torch_scaled_mm_blockwise", blocks, _SCALED, "torch-blockwise", {"b_block": 128}),
    Product("torch_scaled_mm_blockwise", blocks, _SCALED, "torch-blockwise-1x128", {"b_block": 1},
            ({"promotion": "scales-first"},)),
    Product("vllm_triton_w8a8_block_fp8_matmul", blocks, _SCALED, "vllm-triton-block"),
    Product("torch_grouped_mm", sections, plain_gemm, "", {"op": "_grouped_mm"}),
    Product("torch_grouped_mm", sections, _SCALED, "torch-rowwise", {"op": "_scaled_grouped_mm", "fast_accum": False}),
    Product("torch_grouped_mm", sections, _SCALED, "torch-rowwise-fast",
            {"op": "_scaled_grouped_mm", "fast_accum": True}),
    Product("humming_weight_only_gemm", humming, _WEIGHT_ONLY, "humming-weight-only", {"format": "nvfp4"}),
    Product("humming_weight_only_gemm", humming, _WEIGHT_ONLY, "humming-weight-only", {"format": "mxfp4"}),
    Product("humming_weight_only_gemm", humming, _WEIGHT_ONLY, "humming-channel", {"format": "fp8-channel"}),
    Product("humming_weight_only_gemm", humming, _WEIGHT_ONLY, "humming-weight-only", {"format": "fp8-block"},
            ({"decode": "rounded"},)),
    Product("humming_weight_only_gemm", humming, _WEIGHT_ONLY, "humming-weight-only", {"format": "int4-g128"},
            ({"decode": "exact"},)),
    Product("humming_weight_only_gemm", humming, _WEIGHT_ONLY, "humming-weight-only", {"format": "int4-g64-zp"},
            ({"decode": "exact"}, {"decode": "zero-apart"})),
    Product("humming_grouped_masked_gemm", humming_experts, _WEIGHT_ONLY, "humming-weight-only", {"format": "nvfp4"}),
    Product("humming_grouped_masked_gemm", humming_experts, _WEIGHT_ONLY, "humming-weight-only", {"format": "mxfp4"}),
    Product("conch_mixed_precision_gemm", conch, _WEIGHT_ONLY, "conch-mixed", {"zero_points": False},
            ({"decode": "exact"},)),
    Product("conch_mixed_precision_gemm", conch, _WEIGHT_ONLY, "conch-mixed", {"zero_points": True},
            ({"decode": "exact"}, {"decode": "zero-apart"})),
    Product("humming_fp8_gemm", humming, _SCALED, "humming-fp8", {"format": "fp8-channel"},
            ({"epilogue": "scales-first"},)),
    Product("humming_fp8_gemm", humming, _SCALED, "humming-fp8", {"format": "mxfp4"}),
)  # fmt: skip


def test_an_adapter_packs_the_recorded_words_of_conch() -> None:
    for vector in vectors("conch_mixed_precision_gemm"):
        for _, b, _ in conch(vector):
            assert isinstance(b, Quantized)
            words, offset = packed_words(b)
            assert torch.equal(words, vector["tensors"]["packed"].view(torch.int32))
            assert offset == (0 if vector["zero_points"] else 8)


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_recorded_products_lie_inside(product: Product) -> None:
    parts = list(product.judged())
    assert parts
    assert not any(bool(part.wrong.any()) for part in parts)
    elements = sum(part.actual.numel() for part in parts)
    assert sum(part.determined for part in parts) > 0.6 * elements


@pytest.mark.parametrize("product", [p for p in PRODUCTS if p.contract is not plain_gemm], ids=str)
def test_undeclared_fields_accept_the_recorded_products(product: Product) -> None:
    kept = {name: value for name, value in product.contract.dialects[product.dialect].items() if name == "epilogue"
            and value in ("rounded-between", "sum-first")}  # fmt: skip
    kept |= {n: v for n, v in product.contract.dialects[product.dialect].items() if n == "decode"}
    plain = {name: product.contract.options[name] for name in product.contract.choices if name != "out_dtype"}
    assert not any(bool(part.wrong.any()) for part in product.judged(plain | kept))


@pytest.mark.parametrize("product", [p for p in PRODUCTS if p.wrong], ids=str)
def test_other_fields_are_refused(product: Product) -> None:
    for fields in product.wrong:
        assert any(bool(part.wrong.any()) for part in product.judged(fields)), fields
