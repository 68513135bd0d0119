"""Contracts of fused kernels that narrowgauge ships: operations as those of `harness/operations` (docs/contracts.md).

A file for each family of formulas; each formula names its public source. This package does not import torch.
"""

from narrowgauge.contracts.activation import gelu_mul_quantize, silu_mul_quantize
from narrowgauge.contracts.norm import add_rmsnorm_quantize, layernorm_quantize, rmsnorm_quantize
from narrowgauge.contracts.rotary import rope_quantize

_ALL = (
    rmsnorm_quantize, add_rmsnorm_quantize, layernorm_quantize, silu_mul_quantize, gelu_mul_quantize, rope_quantize,
)  # fmt: skip
CONTRACTS = {contract.name: contract for contract in _ALL}
"""All of them by name, in the order of the lists of operations."""
