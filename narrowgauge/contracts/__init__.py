"""Contracts of fused kernels that narrowgauge ships: operations as those of `harness/operations` (docs/contracts.md).

A file for each family of formulas; each formula names its public source. `dialects` has the values of the fields of
libraries. This package does not import torch.
"""

from narrowgauge.contract import Contract
from narrowgauge.contracts import activation, attention, cache, collectives, experts, gemm, norm, rotary, training

CONTRACTS = {
    value.name: value
    for module in (norm, activation, rotary, gemm, cache, attention, experts, training, collectives)
    for value in vars(module).values()
    if isinstance(value, Contract)
}  # fmt: skip
"""All of them by name, in the order of the lists of operations."""
