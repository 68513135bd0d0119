"""Dtypes of inputs and outputs, by their names in case files."""

from __future__ import annotations

from collections.abc import Mapping

import torch

TORCH_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INPUT_DTYPES = tuple(TORCH_DTYPES.values())
