"""Which kernels make a product, and the order in which each adds."""

from __future__ import annotations

import torch

PORTABLE = "portable"

ORDERS = {PORTABLE: "blocks"}
"""The order of sums of each path, as `reference.summation.Summation` names it."""


def path_of(m: int, n: int, k: int, rule: str, device: torch.device) -> str:
    """The path of a product (M, K) by (N, K) of a rule (`native.operands.rule_of`) on a device: a key of `ORDERS`."""
    return PORTABLE
