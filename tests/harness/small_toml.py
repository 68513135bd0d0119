"""Small case files and ledgers for the tests of the harness, as text."""

from __future__ import annotations

import json
from typing import Any

ISSUE = "https://github.com/me/kernels/issues/12"


def matrix(**keys: Any) -> str:
    """A [[matrix]] of four quick quantizes of nvfp4; `keys` add or replace keys. None removes a key."""
    given = {
        "operation": "quantize", "tier": "quick", "recipe": "nvfp4", "shape": [[16, 32], [16, 48]],
        "dtype": ["fp32", "bf16"], "inputs": "normal", **keys,
    }  # fmt: skip
    return _table("matrix", given)


def known(**keys: str | None) -> str:
    """A [[known]] of every quantize of the native kernels; `keys` add or replace keys. None removes a key."""
    return _table("known", {"case": "quantize/*", "backend": "native", "issue": ISSUE, "reason": "ties", **keys})


def _table(name: str, keys: dict[str, Any]) -> str:
    given = {key: value for key, value in keys.items() if value is not None}
    return f"\n[[{name}]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
