"""A process with the sanitizers, which launches each kernel of wrong/memory.cu in a separate child.

    python -m tests.native.sanitized FOLDER KERNEL…

FOLDER has the sources. Prints a JSON object: kernel to finding, which is empty for a correct kernel.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from narrowgauge.native.runtime import host, sanitizer, sources


def main(folder: Path, kernels: tuple[str, ...]) -> None:
    """Launch the kernels on 40 elements with 64 threads and two workers."""
    preloaded = os.environ["LD_PRELOAD"]
    sanitizer.settle()
    assert preloaded, "or there is nothing to settle"
    assert "LD_PRELOAD" not in os.environ, "the compiler would run with the sanitizers"
    sources.FOLDER, sources.KERNELS["memory"] = folder, kernels
    host.library("memory")  # compiled once, for all children
    found = {}
    for kernel in kernels:
        child = os.fork()
        if child == 0:
            launch(kernel)
        _, status = os.waitpid(child, 0)
        text = sanitizer.finding(Path(os.environ[sanitizer.FINDINGS]), child)
        found[kernel] = text or (f"status {status}" if status else "")
    print(json.dumps(found))


def launch(kernel: str) -> None:
    """Launch it, and end the process."""
    x, out = np.arange(1, 41, dtype=np.int32), np.zeros(40, np.int32)
    arguments = [np.uintp(x.ctypes.data), np.uintp(out.ctypes.data), np.int32(40)]
    host.launch("memory", kernel, (2, 1, 1), (64, 1, 1), arguments, workers=2)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]))
