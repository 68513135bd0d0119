"""Attention: what fused and plain kernels compute is inside the bound, and known wrong kernels are not."""

from __future__ import annotations

import math
from collections.abc import Callable

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


def bounded(given: Tensors, **options: torch.dtype | torch.Tensor) -> tuple[Bounded, ...]:
    q, k, v, do = given
    stored_dtype = options.get("stored_dtype")
    assert stored_dtype is None or isinstance(stored_dtype, torch.dtype)
    return (attention_forward(q, k, v, stored_dtype=stored_dtype), *attention_backward(do, q, k, v, **options))  # type: ignore[arg-type]


def right(found: Tensors, expected: tuple[Bounded, ...], dtype: torch.dtype) -> list[float]:
    return [float(inside(one, each, dtype).double().mean()) for one, each in zip(found, expected, strict=True)]


class TestSound:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_torchs_formula_in_float32_is_inside(self, family: str, dtype: torch.dtype) -> None:
        given = problem(family, dtype)
        found = torchs(SDPBackend.MATH, torch.float32, *given)
        assert right(found, bounded(given, stored_dtype=torch.float32), dtype) == [1, 1, 1, 1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_fused_attention_is_inside_with_and_without_its_own_output(self, family: str, dtype: torch.dtype) -> None:
        given = problem(family, dtype)
        found = flash(*given)
        assert right(found, bounded(given), dtype) == [1, 1, 1, 1]
        assert right(found, bounded(given, out=found[0]), dtype) == [1, 1, 1, 1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_torchs_fused_kernel_of_cpus_is_inside_where_one_block_has_all_queries(self, dtype: torch.dtype) -> None:
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


class TestSharp:
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
        """What torch's kernel of CPUs does: each block of queries adds to dk and dv in bfloat16."""
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

    def test_what_is_kept_in_bfloat16_is_outside_the_bound_of_float32(self) -> None:
        given = problem("normal", torch.bfloat16)
        shares = right(flash(*given), bounded(given, stored_dtype=torch.float32), torch.bfloat16)
        assert max(shares) < 1


class TestSpecialValues:
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
