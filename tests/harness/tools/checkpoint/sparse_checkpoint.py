"""Write a sparse NVFP4 checkpoint of any size: a file whose data are a hole.

python -m tests.harness.tools.checkpoint.sparse_checkpoint PATH --gigabytes 70
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROWS, COLUMNS = 16384, 16384


def write(path: Path, size: int) -> int:
    """Write compressed-tensors NVFP4 matrices of about `size` bytes. Returns the number of matrices."""
    matrix = ROWS * COLUMNS // 2 + ROWS * COLUMNS // 16 + 4
    header: dict[str, object] = {}
    at = 0
    for number in range(max(1, size // matrix)):
        for part, dtype, shape, length in (
            ("weight_packed", "U8", [ROWS, COLUMNS // 2], ROWS * COLUMNS // 2),
            ("weight_scale", "F8_E4M3", [ROWS, COLUMNS // 16], ROWS * COLUMNS // 16),
            ("weight_global_scale", "F32", [1], 4),
        ):
            name = f"model.layers.{number}.mlp.up_proj.{part}"
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + length]}
            at += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return max(1, size // matrix)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--gigabytes", type=float, default=70)
    options = parser.parse_args()
    print(write(options.path, int(options.gigabytes * 1e9)), "matrices")
