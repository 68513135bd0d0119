"""Recorded bytes of attention kernels and of merges on an H200 lie inside their dialects, and outside of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from narrowgauge.contracts.attention import attention, merge_attention
from narrowgauge.contracts.dialects import ATTENTION
from narrowgauge.reference.contracts.accepted import Part
from narrowgauge.reference.contracts.evaluate import Evaluation, judged
from narrowgauge.spec.program import Program
from tests.reference.contracts.golden_serving import vectors

RECIPE = "fp8-static-e4m3@vllm"


@dataclass(frozen=True)
class Kernel:
    """Vectors of a kernel: results by name, the dialect, and other dialects that these bytes do not tell apart."""

    file: str
    results: Mapping[str, str]
    dialect: str
    kinds: tuple[str, ...] = ("one-hot", "two-level", "geometric", "equal", "normal", "pinned")
    same: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}/{self.dialect or 'any'}"

    def judged(self, dialect: str) -> Iterator[Part]:
        for vector in vectors(self.file):
            if vector["kind"] not in self.kinds or vector.get("mode", "1") not in ("1", "3d"):
                continue
            given = _given(vector["tensors"], vector)
            program = _program(vector, given, **attention.dialects.get(dialect, {}))
            shown = {name: vector["tensors"][of] for name, of in self.results.items()}
            yield from dict(judged(program, given, shown)).values()


def _program(vector: Mapping[str, Any], given: Mapping[str, torch.Tensor], **fields: str) -> Program:
    recipe = "fp8-row-e4m3@vllm-kv" if "cache.key_scales" in given else RECIPE
    scale = vector["softmax_scale"] * vector.get("q_scale", 1.0)
    return attention.trace(_dtypes(attention, given), {"recipe": recipe}, {**fields, "scale": scale})


def _given(tensors: Mapping[str, torch.Tensor], vector: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = {"q": tensors["q"], "cache.keys": tensors["k_cache"], "cache.values": tensors["v_cache"]}
    names = {"pages": "block_table", "lengths": "lens", "q_lengths": "q_lens"}
    found |= {name: tensors[of].long() for name, of in names.items()}
    if "q8" in tensors:  # codes of E4M3, which are exact in bfloat16
        found["q"] = tensors["q8"].view(torch.float8_e4m3fn).to(torch.bfloat16)
    if "k_scales" in tensors:
        of = {"cache.key_scales": "k_scales", "cache.value_scales": "v_scales"}
        return found | {name: tensors[scales].unsqueeze(-1) for name, scales in of.items()}
    return found | {name: torch.tensor([vector[name]]) for name in ("k_scale", "v_scale")}


def _dtypes(contract: Any, given: Mapping[str, torch.Tensor]) -> dict[str, str]:
    known = {name: kind.dtypes[0] for name, (kind, _) in contract.tensors.items()}
    return {name: str(given[name].dtype).removeprefix("torch.") if name in given else known[name] for name in known}


KERNELS = (
    Kernel("vllm_triton_unified_attention", {"output": "out"}, "vllm-attention",
           same=("flashinfer-fa2", "flash-attention-3")),
    Kernel("flashinfer_batch_decode_fp8_kv", {"output": "out", "lse": "lse"}, "flashinfer-decode",
           same=("flashinfer-fa2",)),
    Kernel("flashinfer_batch_decode_fp8_kv", {"output": "out_tc", "lse": "lse_tc"}, "flashinfer-fa2"),
    Kernel("flashinfer_batch_prefill_fp8_kv", {"output": "out", "lse": "lse"}, "flashinfer-fa2"),
    # Its logits, weights and sums are bfloat16, which no field says. Five elements of `geometric` round on the way.
    Kernel("conch_paged_attention", {"output": "out"}, "", ("one-hot", "two-level"), tuple(ATTENTION)),
)  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_recorded_bytes_lie_inside(kernel: Kernel) -> None:
    parts = list(kernel.judged(kernel.dialect))
    assert sum(part.actual.numel() for part in parts) > 2000
    assert not sum(int(part.wrong.sum()) for part in parts)
    assert not sum(part.undetermined for part in parts if part.actual.dim() == 3)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_other_dialects_are_refused_or_named(kernel: Kernel) -> None:
    others = [name for name in ATTENTION if name != kernel.dialect]
    same = [name for name in others if not any(bool(part.wrong.any()) for part in kernel.judged(name))]
    assert same == list(kernel.same)


def _vector(mode: str) -> Mapping[str, Any]:
    return next(v for v in vectors("vllm_triton_unified_attention") if v.get("mode") == mode)


def test_recorded_bytes_with_scales_of_tokens() -> None:
    """The scales multiply logits, and weights before they are rounded; scales of wrong tokens are refused."""
    vector = _vector("3")
    given, shown = _given(vector["tensors"], vector), {"output": vector["tensors"]["out"]}
    program = _program(vector, given, p="input", l="exact", exponential="accurate")
    ((_, part),) = judged(program, given, shown)
    assert not part.wrong.any()
    assert not part.undetermined
    for scales in ("cache.key_scales", "cache.value_scales"):
        for other in (given[scales].roll(1, 1), given[scales].roll(1, 2), torch.ones_like(given[scales])):
            ((_, part),) = judged(program, {**given, scales: other}, shown)
            assert part.wrong.sum() > 100


def test_recorded_bytes_with_weights_of_8_bits_lie_inside() -> None:
    """Queries are codes of E4M3, and so are the weights; normal inputs leave them wide intervals."""
    vector = _vector("q8")
    given, shown = _given(vector["tensors"], vector), {"output": vector["tensors"]["out"]}
    for p, wrong in (("e4m3", False), ("input", True), ("e5m2", False)):
        program = _program(vector, given, p=p, l="exact", exponential="accurate")
        ((_, part),) = judged(program, given, shown)
        assert bool(part.wrong.any()) == wrong


def test_recorded_codes_of_a_result_lie_inside() -> None:
    """Codes of O·fl(1/s), without a cast of O to bfloat16 before."""
    vector = _vector("out8")
    given = _given(vector["tensors"], vector)
    program = _program(vector, given, **ATTENTION["vllm-attention"])
    cast = program.steps[program.outputs["output"]]
    o = Evaluation(program, given).values[cast.operands[0]]
    factor = 1 / torch.tensor(vector["out_scale"])
    codes = [(end.float() * factor).clamp(-448, 448).to(torch.float8_e4m3fn).float() for end in (o.low, o.high)]
    found = vector["tensors"]["out"].view(torch.float8_e4m3fn).float()
    for shown, inside in ((found, True), (found.roll(1, 1), False), (found * 2, False)):
        assert bool(((codes[0] <= shown) & (shown <= codes[1])).all()) == inside


MERGES = {
    "vllm_merge_attn_states": ("e", ("prefix", "prefix_lse", "suffix", "suffix_lse"), ("out", "lse")),
    "flashinfer_merge_state": ("2", ("v_a", "s_a", "v_b", "s_b"), ("v", "s")),
}  # fmt: skip


def merges(file: str, base: str) -> Iterator[Part]:
    _, names, results = MERGES[file]
    for vector in vectors(file):
        tensors = vector["tensors"]
        given = dict(zip(("o_a", "lse_a", "o_b", "lse_b"), (tensors[name] for name in names), strict=True))
        output, lse = (tensors[name] for name in results)
        if file.startswith("vllm"):  # (heads, queries)
            given |= {name: given[name].T.contiguous() for name in ("lse_a", "lse_b")}
            lse = lse.T.contiguous()
        known = given["lse_a"].isfinite().all(1) & given["lse_b"].isfinite().all(1)
        given = {name: tensor[known] for name, tensor in given.items()}
        program = merge_attention.trace(_dtypes(merge_attention, given), {}, {"base": base})
        yield from dict(judged(program, given, {"output": output[known], "lse": lse[known]})).values()


@pytest.mark.parametrize("file", MERGES)
def test_recorded_merges_lie_inside(file: str) -> None:
    base = MERGES[file][0]
    parts = list(merges(file, base))
    assert not sum(int(part.wrong.sum()) for part in parts)
    assert any(bool(part.wrong.any()) for part in merges(file, "2" if base == "e" else "e"))
