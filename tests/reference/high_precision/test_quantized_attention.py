"""The steps of attention with quantized operands are those of autograd in float64."""

from __future__ import annotations

import torch

from narrowgauge.reference.high_precision import quantized_attention as steps
from narrowgauge.reference.high_precision.bounded import exactly


def test_steps_are_autograds() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 3, 8, 4, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(4))
    scores = (q @ k.mT / 2).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
    scores.retain_grad()
    s = scores.softmax(-1)
    (s @ v).backward(do)
    one = {name: exactly(tensor.detach()) for name, tensor in (("q", q), ("k", k), ("v", v), ("do", do), ("s", s))}
    dp = steps.scores_gradient(one["do"], one["v"], one["s"], torch.float32)
    found = {
        "s": steps.softmax(one["q"], one["k"]), "out": steps.weighted_values(one["s"], one["v"]), "dp": dp,
        "dq": steps.query_gradient(dp, one["k"]), "dk": steps.key_gradient(dp, one["q"]),
        "dv": steps.value_gradient(one["s"], one["do"]),
    }  # fmt: skip
    right = {"s": s, "out": s @ v, "dp": scores.grad, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for name, bounded in found.items():
        assert right[name] is not None
        torch.testing.assert_close(bounded.value, right[name].detach(), rtol=1e-12, atol=1e-13)
        assert bool((bounded.error < 1e-3).all())
        # Numbers rounded to float32 lie inside.
        assert bool(((right[name].float().double() - bounded.value).abs() <= bounded.error).all()), name


def test_the_future_has_no_weight_and_no_gradient() -> None:
    x = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    s = steps.softmax(exactly(x), exactly(x))
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    assert not bool(s.max_magnitude[0, 0][future].any())
    gradient = steps.scores_gradient(exactly(x), exactly(x), exactly(s.value.float()), torch.float32)
    assert not bool(gradient.value[0, 0][future].any())
