"""Attention: what fused and plain kernels compute is inside the bound, and known wrong kernels are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowgauge.reference.high_precision.attention import attention_backward, attention_forward
from narrowgauge.reference.high_precision.bounded import Bounded
from tests.reference.inside import inside, width

Tensors = tuple[torch.Tensor, ...]
LOG2E = math.log2(math.e)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


FAMILIES: dict[str, Callable[[Tensors], Tensors]] = {
    "normal": lambda t: t,
    "peaked": lambda t: (t[0] * 8, *t[1:]),
    "mean": lambda t: (t[0] + 1, t[1] + 1, t[2] + 8, t[3]),
    "outlier": lambda t: (t[0], torch.where(torch.arange(t[1].shape[-1]) == 3, 40.0, t[1]), t[2], t[3] * 100),
    "far above": lambda t: (t[0], torch.where(torch.arange(t[1].shape[2])[:, None] == 5, t[1] * 30, t[1]), *t[2:]),
    "one sign": lambda t: (*t[:2], t[2].abs() + 1, t[3]),
    "one key": lambda t: (t[0], t[1][:, :, :1].expand(t[1].shape), *t[2:]),
    "zeros": lambda t: (t[0] * 0, *t[1:]),
}


def problem(family: str, dtype: torch.dtype, length: int = 40, size: int = 16) -> Tensors:
    """q, k, v and do (1, 2, length, size)."""
    torch.manual_seed(len(family) + length)
    drawn = tuple(torch.randn(1, 2, length, size) for _ in range(4))
    return tuple(t.contiguous().to(dtype) for t in FAMILIES[family](drawn))


def torchs(
    backend: SDPBackend, dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor
) -> Tensors:
    """The output and the gradients dq, dk, dv of torch's own function, computed in `dtype`."""
    given = [t.to(dtype).clone().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(given[0], given[1], given[2], is_causal=True)
        return (out.detach(), *torch.autograd.grad(out, given, do.to(dtype)))


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, block: int = 16) -> Tensors:
    """FlashAttention 2 in float32; P, dS and the output are stored in the dtype of the tensors: out, dq, dk, dv."""
    stored_dtype = q.dtype
    scale = q.shape[-1] ** -0.5
    length = q.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (q.float() @ k.float().mT).masked_fill(~visible, -torch.inf)
    top = torch.full((*q.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros(q.shape)
    for start in range(0, length, block):
        here = scores[..., start : start + block]
        new = torch.maximum(top, here.amax(-1, keepdim=True))
        change = torch.exp2((top - new) * (scale * LOG2E))
        p = torch.exp2(here * (scale * LOG2E) - new * (scale * LOG2E))
        total = total * change + p.sum(-1, keepdim=True)
        out = out * change + p.to(stored_dtype).float() @ v[:, :, start : start + block].float()
        top = new
    out = (out / total).to(stored_dtype)
    logarithm = top * scale + total.log()
    p = torch.exp2(scores * (scale * LOG2E) - logarithm * LOG2E)
    d = (do.float() * out.float()).sum(-1, keepdim=True)
    ds = (p * (do.float() @ v.float().mT - d)).to(stored_dtype).float()
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(q.shape), torch.zeros(q.shape)
    for start in range(0, length, block):
        rows = slice(start, start + block)
        dq += ds[..., rows] @ k[:, :, rows].float()
        dk += ds[:, :, rows].mT @ q[:, :, rows].float()
        dv += p.to(stored_dtype).float()[:, :, rows].mT @ do[:, :, rows].float()
    return out, (dq * scale).to(stored_dtype), (dk * scale).to(stored_dtype), dv.to(stored_dtype)


def online(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int, *, log2: bool) -> torch.Tensor:
    """The output in float32 by an online softmax over `block` keys at a time, from the last key to the first."""
    length, scale = q.shape[2], q.shape[-1] ** -0.5
    scores = (q.float() @ k.float().mT) * (scale * LOG2E if log2 else scale)
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    exp = torch.exp2 if log2 else torch.exp
    top = torch.full((*q.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros(q.shape)
    for keys in reversed(torch.arange(length).split(block)):
        here = scores[..., keys]
        new = torch.maximum(top, here.amax(-1, keepdim=True))
        base = new.masked_fill(new == -torch.inf, 0.0)  # no key of the block is visible
        change, p = exp(top - base), exp(here - base)
        total, out, top = total * change + p.sum(-1, keepdim=True), out * change + p @ v.float()[:, :, keys], new
    return out / total


def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output in float32 of two halves of the keys, merged by the logarithms of their sums."""
    length = q.shape[2]
    scores = (q.float() * q.shape[-1] ** -0.25) @ (k.float() * q.shape[-1] ** -0.25).mT
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    halves = [slice(0, length // 2), slice(length // 2, length)] if length > 1 else [slice(0, 1)]
    logs = torch.cat([scores[..., half].logsumexp(-1, keepdim=True) for half in halves], -1)
    weights = (logs - logs.logsumexp(-1, keepdim=True)).exp()
    outs = [(scores[..., half].softmax(-1) @ v.float()[:, :, half]).nan_to_num() for half in halves]
    return sum((weights[..., n : n + 1] * out for n, out in enumerate(outs)), torch.zeros(q.shape))


def ones_column(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output with P in the dtype of the tensors, and the sum of P as the product with a column of ones."""
    visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp().to(q.dtype).float()
    return p @ v.float() / (p @ torch.ones(q.shape[2], 1))


def bounded(given: Tensors, **options: torch.dtype | torch.Tensor) -> tuple[Bounded, ...]:
    q, k, v, do = given
    stored_dtype = options.get("stored_dtype")
    assert stored_dtype is None or isinstance(stored_dtype, torch.dtype)
    return (attention_forward(q, k, v, stored_dtype=stored_dtype), *attention_backward(do, q, k, v, **options))  # type: ignore[arg-type]


def right(found: Tensors, expected: tuple[Bounded, ...], dtype: torch.dtype) -> list[float]:
    return [float(inside(one, each, dtype).double().mean()) for one, each in zip(found, expected, strict=True)]


class TestSound:
    @pytest.mark.sampled(16)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_torchs_formula_in_float32_is_inside(self, family: str, dtype: torch.dtype) -> None:
        given = problem(family, dtype)
        found = torchs(SDPBackend.MATH, torch.float32, *given)
        assert right(found, bounded(given, stored_dtype=torch.float32), dtype) == [1, 1, 1, 1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_fused_attention_is_inside_with_and_without_output(self, family: str, dtype: torch.dtype) -> None:
        given = problem(family, dtype)
        found = flash(*given)
        assert right(found, bounded(given), dtype) == [1, 1, 1, 1]
        assert right(found, bounded(given, out=found[0]), dtype) == [1, 1, 1, 1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_any_number_of_keys_at_a_time_is_inside(self, family: str, dtype: torch.dtype) -> None:
        q, k, v, _ = problem(family, dtype)
        expected = attention_forward(q, k, v, stored_dtype=torch.float32)
        for block in (1, 3, 16, 40):
            for log2 in (False, True):
                assert bool(inside(online(q, k, v, block, log2=log2), expected, dtype).all()), (block, log2)
        assert bool(inside(merged(q, k, v), expected, dtype).all())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_sum_of_the_rounded_probabilities_is_inside(self, family: str, dtype: torch.dtype) -> None:
        q, k, v, _ = problem(family, dtype)
        assert bool(inside(ones_column(q, k, v), attention_forward(q, k, v), dtype).all())

    def test_the_largest_errors_of_the_exponentials_are_inside(self) -> None:
        """Every weight off by the ulps of its exponential, in the direction that moves the output most."""
        for family in FAMILIES:
            q, k, v, _ = (t.double() for t in problem(family, torch.float32))
            visible = torch.ones(40, 40, dtype=torch.bool).tril()
            p = (q @ k.mT / 4).masked_fill(~visible, -torch.inf).softmax(-1)
            expected = attention_forward(q.float(), k.float(), v.float())
            for column in range(v.shape[-1]):
                away = (v[..., None, :, column] > (p @ v)[..., column, None]).double() * 2 - 1
                moved = p * (1 + away * 40 * 2.0**-24)
                found = (moved @ v / moved.sum(-1, keepdim=True))[..., column]
                assert bool(((found - expected.value[..., column]).abs() <= expected.error[..., column]).all())

    def test_fifty_digits_agree(self) -> None:
        q, k, v, _ = problem("peaked", torch.float32, 6, 2)
        expected = attention_forward(q, k, v)
        with localcontext() as context:
            context.prec = 50
            rows = [[[Decimal(x) for x in row] for row in t[0, 0].tolist()] for t in (q, k, v)]
            for i, query in enumerate(rows[0]):
                scores = [
                    sum(a * b for a, b in zip(query, key, strict=True)) / Decimal(2).sqrt() for key in rows[1][: i + 1]
                ]
                weights = [score.exp() for score in scores]
                for column in range(2):
                    exact = sum(w * row[column] for w, row in zip(weights, rows[2], strict=False)) / sum(weights)
                    off = abs(exact - Decimal(float(expected.value[0, 0, i, column])))
                    assert off < min(Decimal(2) ** -46, Decimal(float(expected.error[0, 0, i, column])))

    @pytest.mark.long
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_torchs_fused_attention_on_a_cpu_is_inside(self, dtype: torch.dtype) -> None:
        given = problem("normal", dtype, 32)
        found = torchs(SDPBackend.FLASH_ATTENTION, dtype, *given)
        assert right(found, bounded(given, out=found[0]), dtype) == [1, 1, 1, 1]

    @pytest.mark.parametrize("length", [1, 2, 17, 150])
    def test_other_lengths(self, length: int) -> None:
        given = problem("normal", torch.bfloat16, length, 16)
        assert right(flash(*given), bounded(given), torch.bfloat16) == [1, 1, 1, 1]

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_values_are_the_gradients(self, family: str) -> None:
        given = problem(family, torch.float32)
        for found, expected in zip(torchs(SDPBackend.MATH, torch.float64, *given), bounded(given), strict=True):
            assert float((found - expected.value).abs().amax()) <= 1e-10 * float(expected.max_magnitude.amax())


def in_bfloat16(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output in float32, but for the step `name`, which is in bfloat16."""

    def kept(x: torch.Tensor, step: str) -> torch.Tensor:
        return x.bfloat16().float() if step == name else x

    visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = kept(q.float() @ k.float().mT * q.shape[-1] ** -0.5, "scores").masked_fill(~visible, -torch.inf)
    weights = kept((scores - scores.amax(-1, keepdim=True)).exp(), "weights")
    total = torch.zeros(*q.shape[:3])
    for weight in weights.unbind(-1):
        total = kept(total + weight, "row sum")
    return kept(weights / total[..., None], "P") @ v.float()


class TestSharp:
    @pytest.mark.parametrize("step", ["scores", "weights", "row sum", "P"])
    def test_a_step_in_bfloat16_is_outside_if_p_is_kept_in_float32(self, step: str) -> None:
        for family in ("normal", "peaked", "one sign"):
            q, k, v, _ = problem(family, torch.bfloat16)
            expected = attention_forward(q, k, v, stored_dtype=torch.float32)
            assert bool(inside(in_bfloat16("", q, k, v), expected, torch.bfloat16).all())
            assert not bool(inside(in_bfloat16(step, q, k, v), expected, torch.bfloat16).all()), family
            expected = attention_forward(q.float(), k.float(), v.float())
            assert float(inside(in_bfloat16(step, q, k, v), expected).double().mean()) < 0.5, family

    def test_scores_and_row_sums_in_bfloat16_are_outside(self) -> None:
        for step, family in (("scores", "peaked"), ("row sum", "one sign")):
            q, k, v, _ = problem(family, torch.bfloat16, 64)
            assert not bool(inside(in_bfloat16(step, q, k, v), attention_forward(q, k, v), torch.bfloat16).all())

    def test_the_error_of_a_float32_softmax(self) -> None:
        """The largest error, as a share of the largest magnitude of v that a query sees."""
        for family, most in (("normal", 2.0**-14), ("peaked", 2.0**-14), ("mean", 2.0**-14), ("zeros", 2.0**-15)):
            q, k, v, _ = problem(family, torch.bfloat16, 128, 64)
            expected = attention_forward(q, k, v, stored_dtype=torch.float32)
            assert float((expected.error / v.double().abs().cummax(2).values).median()) < most, family

    def test_the_bound_in_steps_of_the_output(self) -> None:
        """In bfloat16 half of the elements are known to within about 10 steps, once a kernel's own output is."""
        given = problem("normal", torch.bfloat16, 128, 64)
        own = flash(*given)[0]
        for each in bounded(given, out=own):
            assert float(width(each, torch.bfloat16).median()) <= 12
        for each in bounded(given, out=own, stored_dtype=torch.float32)[:1]:
            assert float(width(each, torch.bfloat16).median()) <= 1

    def test_the_own_output_makes_the_gradients_of_scores_sharper(self) -> None:
        given = problem("normal", torch.bfloat16, 128, 64)
        for name, with_it, without in zip(
            "qkv", bounded(given, out=flash(*given)[0])[1:], bounded(given)[1:], strict=True
        ):
            sharper = float(without.error.mean() / with_it.error.mean())
            assert sharper == 1 if name == "v" else sharper > 4

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_known_wrong_kernels_are_outside(self, dtype: torch.dtype) -> None:
        given = problem("normal", dtype)
        q, k, v, do = (t.float() for t in given)
        out = torchs(SDPBackend.MATH, torch.float32, *given)[0].to(dtype)
        expected = bounded(given, out=out)
        visible = torch.ones(40, 40, dtype=torch.bool).tril()
        scale = 16**-0.5

        def attended(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v

        p = (q @ k.mT * scale).masked_fill(~visible, -torch.inf).softmax(-1)
        dp = do @ v.mT
        d = (p * dp).sum(-1, keepdim=True)
        wrong = {
            "no mask": (attended(q @ k.mT * scale, torch.ones_like(visible)), 0),
            "a mask one key too wide": (attended(q @ k.mT * scale, visible | visible.roll(1, 1)), 0),
            "no 1/√d": (attended(q @ k.mT, visible), 0),
            "1/d": (attended(q @ k.mT / 16, visible), 0),
            "dq without D": (p * dp @ k * scale, 1),
            "dq without 1/√d": (p * (dp - d) @ k, 1),
            "dk without its mask": (((q @ k.mT * scale).softmax(-1) * (dp - d)).mT @ q * scale, 2),
            "dv of scores": ((q @ k.mT * scale).tril().mT @ do, 3),
        }
        for name, (found, which) in wrong.items():
            assert float(inside(found, expected[which], dtype).double().mean()) < 0.5, name

    def test_bfloat16_sums_over_queries_are_outside(self) -> None:
        """Torch's kernel on a CPU: each block of queries adds to dk and dv in bfloat16."""
        q, k, v, do = problem("mean", torch.bfloat16, 200)
        wrong = torch.zeros_like(v)
        p = (
            (q.double() @ k.double().mT * 16**-0.5)
            .masked_fill(~torch.ones(200, 200).bool().tril(), -torch.inf)
            .softmax(-1)
        )
        for rows in torch.arange(200).split(4):
            wrong += (p[:, :, rows].mT @ do[:, :, rows].double()).bfloat16()
        assert not bool(inside(wrong.float(), attention_backward(do, q, k, v)[2], torch.bfloat16).all())

    def test_values_kept_in_bfloat16_are_outside(self) -> None:
        given = problem("normal", torch.bfloat16)
        shares = right(flash(*given), bounded(given, stored_dtype=torch.float32), torch.bfloat16)
        assert max(shares) < 1


class TestSpecialValues:
    def test_an_infinity_or_nan_of_v_reaches_later_queries(self) -> None:
        q, k, v, _ = problem("normal", torch.float32)
        for special in (torch.nan, torch.inf, -torch.inf):
            v[0, 0, 9, 2] = special
            expected = attention_forward(q, k, v)
            scores = (q @ k.mT / 4).masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
            multiplied = scores.softmax(-1) @ v
            skipped = online(q, k, v, 1, log2=False)
            skipped[:, :, :9] = scores[:, :, :9].softmax(-1)[..., :9] @ v[:, :, :9]
            for found in (multiplied, skipped):
                assert bool(inside(found, expected).all())
            assert not bool(inside(torch.zeros_like(v), expected)[0, 0, 9:, 2].any())
            assert not bool(expected.unbounded[..., :2].any())

    def test_scores_that_may_overflow_are_free(self) -> None:
        q, k, v, _ = problem("normal", torch.float32)
        q[0, 0, 3] = 3e38
        expected = attention_forward(q, k, v)
        assert expected.unbounded[0, 0].all(-1).tolist() == [row == 3 for row in range(40)]

    def test_a_nan_reaches_the_queries_behind_it(self) -> None:
        q, k, v, _ = problem("normal", torch.float32)
        k[0, 0, 9, 0] = torch.nan
        value = attention_forward(q, k, v).value
        assert bool(value[0, 0, :9].isfinite().all() & value[0, 0, 9:].isnan().all() & value[0, 1].isfinite().all())

    def test_errors_say_what_does_not_fit(self) -> None:
        q, k, v, do = problem("normal", torch.bfloat16)
        with pytest.raises(
            ValueError, match=r"tensors \(batch, heads, S, d\) of the same shape, not .*'k': \(1, 2, 9, 16\)"
        ):
            attention_forward(q, k[:, :, :9], v)
        with pytest.raises(ValueError, match=r"same shape, not {'q': \(2, 40, 16\)"):
            attention_forward(q[0], k[0], v[0])
        with pytest.raises(ValueError, match=r"same shape, not .*'out': \(1, 2, 3, 16\)"):
            attention_backward(do, q, k, v, out=do[:, :, :3])
        with pytest.raises(TypeError, match=r"same dtype, not .*'do': torch\.float32"):
            attention_backward(do.float(), q, k, v)
