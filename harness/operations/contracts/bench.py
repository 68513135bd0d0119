"""Timing of the kernels of shipped contracts: norms, activations and rotary embedding, quantized; products; caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.contracts import CONTRACTS, activation, norm, rotary
from narrowgauge.contracts.attention import attention
from narrowgauge.contracts.cache import kv_write
from narrowgauge.contracts.gemm import weight_only_gemm
from narrowgauge.harness.operations.contracts.judge import judge_contract
from narrowgauge.harness.operations.contracts.results import named_results
from narrowgauge.harness.operations.timing.judge_outputs import CONTRACT, Verdict
from narrowgauge.harness.operations.timing.operation_bench import (
    COMPILED,
    COPY,
    DEQUANTIZED,
    MATMUL,
    BenchInputs,
    BenchTask,
    OperationBench,
    Peer,
    PreparedTask,
    nbytes,
)
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.reference.contracts.evaluate import parts_of
from narrowgauge.spec.kv_cache import Cache
from narrowgauge.spec.program import CODES
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

Tensor = torch.Tensor

_RECIPES = ("fp8-row-e4m3", "fp8-block-1x128-e4m3", "mxfp8-e4m3", "mxfp4")
_COMPILED = "fp8-row-e4m3"
_JUDGED = 64
"""Judged rows of both matrices of a product, at equal distances: rows are independent."""


def _rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    z = x.float()
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6) * weight.float()


def _add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return _rmsnorm(x + residual, weight)


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float())


def _gated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return activation(gate) * up


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (first, second), c, s = x.float().chunk(2, dim=-1), cos.float(), sin.float()
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


_FORMULAS: dict[str, Callable[..., Tensor]] = {
    norm.rmsnorm_quantize.name: _rmsnorm,
    norm.add_rmsnorm_quantize.name: _add_rmsnorm,
    norm.layernorm_quantize.name: _layernorm,
    activation.silu_mul_quantize.name: partial(_gated, torch.nn.functional.silu),
    activation.gelu_mul_quantize.name: partial(_gated, partial(torch.nn.functional.gelu, approximate="tanh")),
    rotary.rope_quantize.name: _rope,
}
"""The contracts in plain torch."""


def _arguments(task: BenchTask, inputs: BenchInputs) -> tuple[Tensor, ...]:
    """The tensors of the contract. The size is the size of x."""
    x = inputs.matrix(task.shape)
    rows, columns = task.shape
    further = {"residual": (rows, columns), "weight": (columns,), "bias": (columns,),
               "cos": (rows, columns // 2), "sin": (rows, columns // 2)}  # fmt: skip
    names = list(CONTRACTS[task.operation].tensors)[1:]
    return x, *(inputs.new_matrix(further[name]) for name in names)


def _prepare(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    arguments = _arguments(task, inputs)
    method = getattr(native, task.operation.replace("-", "_"))
    formula = _FORMULAS[task.operation]

    def plain() -> Quantized:
        return reference.quantize(formula(*arguments).to(torch.bfloat16), task.recipe)

    copy, copied = inputs.copy(arguments[0])
    return PreparedTask(
        native=[partial(method, *several, task.recipe) for several in inputs.copies(*arguments)],
        reference=[plain], judge=partial(_judge, task, arguments), read=sum(tensor.nbytes for tensor in arguments),
        ceilings={COPY: copy}, elements=arguments[0].numel(), copied=copied,
    )  # fmt: skip


def _judge(task: BenchTask, arguments: tuple[Tensor, ...], result: Any) -> Verdict:
    contract = CONTRACTS[task.operation]
    tensors = dict(zip(contract.tensors, arguments, strict=True))
    rows = torch.arange(0, task.shape[0], max(1, task.shape[0] // _JUDGED), device=arguments[0].device)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    program = contract.trace(dtypes, {"recipe": task.recipe}, {})
    parts = {name: tensor[rows] if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    shown = {"quantized": result} if isinstance(result, Quantized) else result
    some = {name: _rows_of(value, rows) for name, value in shown.items()}
    verdict = Verdict(rule=CONTRACT)
    for stage in judge_contract(program, parts, named_results(program, parts, some)).stages:
        verdict.add(stage)
    return verdict


def _rows_of(value: Tensor | Quantized, rows: Tensor) -> Tensor | Quantized:
    if isinstance(value, Tensor):
        return value[rows]
    return Quantized(value.codes[rows], value.scales[rows], None, value.recipe, (len(rows), value.shape[1]))


def _compiled(task: BenchTask, inputs: BenchInputs) -> Peer | None:
    """torch.compile of the formula and of FP8 with a scale for each row, for the first size only."""
    if task.recipe != _COMPILED or task.shape != inputs.first:
        return None
    arguments, formula = _arguments(task, inputs), _FORMULAS[task.operation]

    adds = "residual" in CONTRACTS[task.operation].tensors

    def fused(*tensors: Tensor) -> tuple[Tensor, ...]:
        y = formula(*tensors).to(torch.bfloat16).float()
        scale = 448.0 / y.abs().amax(-1, keepdim=True)
        codes = (y * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes, 1.0 / scale, *([tensors[0] + tensors[1]] if adds else [])

    def judge(result: Any) -> Verdict:
        codes, scales, *total = result
        q = Quantized(codes, scales, None, reference.find_recipe(task.recipe), (codes.shape[0], codes.shape[1]))
        return _judge(task, arguments, {"residual": total[0], "quantized": q} if adds else q)

    call = torch.compile(fused, dynamic=False)
    return Peer([partial(call, *several) for several in inputs.copies(*arguments)], judge)


def _launches(x: Tensor) -> dict[tuple[str, str], Callable[[], Any]]:
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    return {("mxfp8-e4m3", norm.rmsnorm_quantize.name): lambda: native.rmsnorm_quantize(x, weight, "mxfp8-e4m3")}


BENCH = OperationBench(
    rank=1.5,
    rows=[(name, recipe, "") for name in _FORMULAS for recipe in _RECIPES],
    prepare=_prepare,
    further={"8192x8192": ("*",)},
    peers={COMPILED: _compiled},
    launches=_launches,
)


# Products.

_PRODUCT_RECIPES = ("nvfp4", "mxfp4", "mxfp8-e4m3", "fp8-current", "int4-g128")
"""Of the second matrix."""


def _prepare_product(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    m, k, n = task.shape
    a, w = inputs.new_matrix((m, k)), inputs.new_matrix((n, k))
    integer = find_recipe(task.recipe).integer  # no native kernel quantizes to whole numbers, or decodes them to memory
    b = (reference if integer else native).quantize(w, task.recipe)
    decode = (reference if integer else native).dequantize
    weights = [replace(b, codes=codes, scales=scales) for codes, scales in inputs.copies(b.codes, b.scales)]
    return PreparedTask(
        native=[partial(native.weight_only_gemm, a, copied) for copied in weights],
        reference=[lambda: a @ reference.dequantize(b, a.dtype).T],
        judge=partial(_judge_product, a, b),
        ceilings={
            MATMUL: [partial(_matmul, x, y) for x, y in inputs.copies(a, w)],
            DEQUANTIZED: [partial(_dequantize_and_multiply, decode, a, copied) for copied in weights],
        },
        read=nbytes((a, b)), elements=m * n, flop=2 * m * n * k,
    )  # fmt: skip


def _matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return a @ w.T


def _dequantize_and_multiply(decode: Callable[..., torch.Tensor], a: torch.Tensor, b: Quantized) -> torch.Tensor:
    return a @ decode(b, a.dtype).T


def _judge_product(a: torch.Tensor, b: Quantized, y: Any) -> Verdict:
    rows, columns = (
        torch.arange(0, size, max(1, size // _JUDGED), device=a.device) for size in (a.shape[0], b.shape[0])
    )
    scales = b.scales if b.recipe.whole else b.scales[columns]
    part = replace(b, codes=b.codes[columns], scales=scales, shape=(len(columns), b.shape[1]))
    dtype = str(a.dtype).removeprefix("torch.")
    fields = native.declares[weight_only_gemm.name]
    program = weight_only_gemm.trace({"a": dtype, "b": CODES}, {"b_recipe": b.recipe.name}, fields)
    tensors = {"a": a[rows], **parts_of(program, {"b": part})}
    verdict = Verdict(rule=CONTRACT)
    for stage in judge_contract(program, tensors, {"output": y[rows][:, columns]}).stages:
        verdict.add(stage)
    return verdict


PRODUCT_BENCH = OperationBench(
    rank=4.5,
    rows=[(weight_only_gemm.name, recipe, "") for recipe in _PRODUCT_RECIPES],
    prepare=_prepare_product,
    product=True,
)


# Caches. A size is tokens of a request, and columns of all heads: of the cache for a write, of q for attention.

_CACHE_RECIPE = "fp8-static-e4m3@vllm"
_REQUESTS, _DIM, _GROUP, _PAGE = 32, 128, 8, 64
_JUDGED_TOKENS, _JUDGED_PREFILL = 1024, 128
_PREFILL = "prefill"
_SDPA = "attention of torch to a bfloat16 cache"


def _prepare_cache(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    tokens, heads = task.shape[0], max(1, task.shape[1] // _DIM)
    scale = torch.full((1,), 0.5, device=inputs.device)
    if task.operation == kv_write.name:
        return _prepare_write(tokens, heads, scale, inputs)
    return _prepare_attention(tokens, heads, scale, inputs, prefill=task.variant == _PREFILL)


def _new_cache(pages: int, heads: int, inputs: BenchInputs) -> Cache:
    """Numbers are integers from 1 to 8, with exact sums."""
    keys, values = (
        inputs.new_matrix((pages, _PAGE, heads, _DIM)).abs().mul(3).ceil().clamp(1, 8).to(torch.float8_e4m3fn)
        .view(torch.uint8) for _ in range(2)
    )  # fmt: skip
    return Cache(keys, values, None, None, reference.find_recipe(_CACHE_RECIPE), "nhd", _PAGE)


def _prepare_write(tokens: int, heads: int, scale: Tensor, inputs: BenchInputs) -> PreparedTask:
    k, v = (inputs.new_matrix((tokens, heads, _DIM)) for _ in range(2))
    cache, slots = _new_cache(-(-tokens // _PAGE), heads, inputs), torch.arange(tokens, device=inputs.device)

    def plain() -> list[Quantized]:
        return [reference.quantize(x.flatten(0, 1), cache.recipe, scale=scale) for x in (k, v)]

    def judge(found: Cache) -> Verdict:
        verdict = Verdict()
        for half, q in zip((found.keys, found.values), plain(), strict=True):
            verdict.bytes("codes", half.view(-1, _DIM)[: len(q.codes)], q.codes)
        return verdict

    copy, copied = inputs.copy(k)
    write = partial(native.kv_write, cache=cache, slots=slots, recipe=cache.recipe, k_scale=scale, v_scale=scale)
    return PreparedTask(
        native=[partial(write, *several) for several in inputs.copies(k, v)], reference=[plain], judge=judge,
        read=nbytes((k, v)), ceilings={COPY: copy}, elements=2 * k.numel(), copied=copied,
    )  # fmt: skip


def _prepare_attention(
    tokens: int, q_heads: int, scale: Tensor, inputs: BenchInputs, *, prefill: bool
) -> PreparedTask:  # fmt: skip
    """Decode of `_REQUESTS` requests with a single row, or prefill of a request; `_GROUP` heads of q share a head.

    q is 0: then the contract allows a single result, the mean of the values. On random numbers the contract allows
    almost any result (docs/contracts.md). The first request is short, and the judge takes this request.
    """
    heads, of_request, device = max(1, q_heads // _GROUP), -(-tokens // _PAGE), inputs.device
    requests, judged = (2, _JUDGED_PREFILL) if prefill else (_REQUESTS, _JUDGED_TOKENS)
    lengths = torch.full((requests,), tokens, device=device)
    lengths[0] = min(tokens, judged)
    rows = lengths.clone() if prefill else torch.ones_like(lengths)
    first = int(rows[0])
    q = torch.zeros(int(rows.sum()), heads * _GROUP, _DIM, dtype=torch.bfloat16, device=device)
    cache = _new_cache(requests * of_request, heads, inputs)
    pages = torch.randperm(requests * of_request, device=device).view(requests, of_request)

    def judge(found: tuple[Tensor, Tensor]) -> Verdict:
        named = {name: part[pages[0]] for name, part in cache.parts().items()}
        given = {"q": q[:first], "pages": torch.arange(of_request, device=device)[None], "lengths": lengths[:1],
                 "q_lengths": rows[:1], "k_scale": scale, "v_scale": scale,
                 **{f"cache.{name}": part for name, part in named.items()}}  # fmt: skip
        dtypes = {name: kind.dtypes[0] for name, (kind, _) in attention.tensors.items()}
        program = attention.trace({**dtypes, "q": "bfloat16"}, {"recipe": _CACHE_RECIPE}, {})
        verdict = Verdict(rule=CONTRACT)
        results = dict(zip(("output", "lse"), (part[:first] for part in found), strict=True))
        for stage in judge_contract(program, given, named_results(program, given, results)).stages:
            verdict.add(stage)
        return verdict

    timed = pages[1:] if prefill else pages
    k, v = (
        part.view(torch.float8_e4m3fn).bfloat16()[timed].flatten(1, 2).transpose(1, 2).contiguous()
        for part in (cache.keys, cache.values)
    )
    queries = q[first:].transpose(0, 1).unsqueeze(0) if prefill else q.unsqueeze(2)
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, queries, k, v, is_causal=prefill, enable_gqa=True)
    copy, copied = inputs.copy(cache.keys)
    call = partial(native.attention, q, cache, pages, lengths, rows, cache.recipe, k_scale=scale, v_scale=scale)
    return PreparedTask(
        native=[call], reference=[sdpa], judge=judge,
        read=nbytes((cache.keys, cache.values)) * int(lengths.sum()) // (requests * tokens),
        ceilings={_SDPA: [sdpa]} if prefill else {COPY: copy, _SDPA: [sdpa]}, elements=q.numel(), copied=copied,
    )  # fmt: skip


CACHE_BENCH = OperationBench(
    rank=4.75,
    rows=[(kv_write.name, _CACHE_RECIPE, ""), (attention.name, _CACHE_RECIPE, "")],
    prepare=_prepare_cache,
    further={"8192x8192": ("*",)},
)
PREFILL_BENCH = replace(CACHE_BENCH, rank=4.76, rows=[(attention.name, _CACHE_RECIPE, _PREFILL)], fewest_rows=2048)
"""Prefill, of sizes that a GPU takes alone: a CPU needs minutes."""
