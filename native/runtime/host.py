"""Kernels on a CPU: the C++ compiler compiles the same .cu files against kernels/cpu/simt.h."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.native.runtime.cache import cache_key, cached
from narrowgauge.native.runtime.sources import FOLDER, KERNELS, ToolchainError, scratch_of, text

if TYPE_CHECKING:
    import numpy as np

OPTIMIZATION = "-O2"
"""Compilation takes about half the time of -O3. Quantize nvfp4-rht then takes twice as long, and a GEMM of NVFP4 about
half as long; the times of 13 other calls do not differ by more than their spread."""

# -ffp-contract=off: a fused multiply-add rounds once, but the kernels declare two roundings. The next two flags change
# no result, and allow vectorized comparisons and conversions. -fvisibility=hidden: otherwise GCC makes static variables
# of inline functions and templates, among them __shared__ variables, unique in the process, and two kernels with the
# same name would share them.
FLAGS = (
    "-std=c++17", OPTIMIZATION, "-ftree-vectorize", "-march=native", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread",
)  # fmt: skip

OPENMP = "-fopenmp"
"""For g++ only: Clang comes without the library. If torch has loaded the OpenMP library of g++, the kernels run on
torch's threads, which spin for some milliseconds after each operation. Threads started for each launch compete with
spinning threads for the cores: on two cores quantize then took 1.5 to 2 times as long (2^21 elements), as long as on
one."""

REPLACED = (*(flag for flag in FLAGS if flag != OPTIMIZATION), "-O1", "-DNARROWGAUGE_PORTABLE")
"""Flags of kernels with a replaced file. The cases are few and small: compilation dominates the cost. The portable
forms are compiled, because a replacement in a scalar form must take effect on a CPU with a SIMD form (simd.cuh)."""

SANITIZED = (
    *(flag for flag in FLAGS if flag != OPTIMIZATION), "-O1", "-g", "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DSIMT_SANITIZE",
)  # fmt: skip
"""Flags in a process with sanitizers: findings name source lines, and the first finding ends the process."""
SANITIZE = "NARROWGAUGE_SANITIZE"
"""Environment variable of a process with sanitizers. Set by `native.runtime.sanitizer.environment`."""

ORDERS = ("forward", "reverse", "shuffled")

MAX_THREADS = 1024  # of a block, as in simt.h

_STANDARD_HEADER = re.compile(r"^#include <.+>$", re.MULTILINE)

_order: ContextVar[str] = ContextVar("thread_order", default="forward")
_shuffle: ContextVar[int] = ContextVar("shuffle", default=1)


@contextlib.contextmanager
def thread_order(order: str, seed: int = 1) -> Iterator[None]:
    """Within the context, threads of a block and blocks of a grid run in forward, reverse or shuffled order.

    `seed`, from 1 on, selects a shuffle. Raises ValueError for an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"threads can run {', '.join(ORDERS)}, not {order!r}")
    tokens = _order.set(order), _shuffle.set(seed)
    try:
        yield
    finally:
        _order.reset(tokens[0])
        _shuffle.reset(tokens[1])


def sanitized() -> bool:
    """Whether this process has the runtime of the sanitizers and builds kernels with them."""
    return bool(os.environ.get(SANITIZE))


@cache
def compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, clang++ or c++. Raises ToolchainError if no compiler is found."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in wanted:
        if path := shutil.which(name):
            return path
    raise ToolchainError(
        f"native kernels on a CPU need a C++ compiler, and {' or '.join(wanted)} is not on the PATH; "
        "install g++ (Debian: apt install g++) or set CXX"
    )


def check() -> None:
    """Raises ToolchainError if no C++ compiler is found, or the compiler does not run."""
    _compiler_identity()


@cache
def _compiler_identity() -> str:
    # The predefined macros name the compiler's version and, with -march=native, this CPU's instruction sets.
    command = [compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"{shlex.join(command)} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _program(source: str, kernels: str) -> str:
    launchers = "".join(
        f"""
SIMT_EXPORT long long launch_{kernel}(void** arguments, const unsigned* shape, int order, unsigned long long seed,
                                      int workers) {{
    simt::Launch launch{{{{shape[0], shape[1], shape[2]}}, {{shape[3], shape[4], shape[5]}}, order, seed, workers,
                        "{kernel}"}};
    return simt::run_grid(launch, simt::Entry<{kernel}>::run, arguments);
}}
SIMT_EXPORT int parameters_{kernel}() {{ return simt::Entry<{kernel}>::parameters; }}
"""
        for kernel in KERNELS[source]
    )
    # Kernels of tests have no namespace.
    kernels = f"{kernels}\nnamespace narrowgauge {{}}\nusing namespace narrowgauge;"
    if sanitized():
        # Static variables of templates have no redzones, because another library could define the same variable. In an
        # unnamed namespace they have redzones. Headers of the C++ library come first: they are guarded.
        headers = "\n".join(_STANDARD_HEADER.findall(kernels))
        kernels = f"{headers}\nnamespace {{\n{kernels}\n}}"
    simt = (FOLDER / "cpu" / "simt.h").read_text(encoding="utf-8").replace("#pragma once\n", "\n")
    return f'#line 1 "simt.h"\n{simt}\n{kernels}\n{launchers}'


def library(source: str, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Library of the compiled kernels of `source`, from the cache if possible.

    The key of the cache is the text, the flags and the compiler with its target, so a stale library is never loaded.
    Processes that need the same library wait for the first. Raises ToolchainError with the compiler's output if the
    source does not compile.
    """
    return _library(source, text(source), (*_flags(source), *extra_flags))


@cache
def is_clang() -> bool:
    """Whether the compiler is Clang or derived from Clang."""
    return "#define __clang__ " in _compiler_identity()


def _flags(source: str) -> tuple[str, ...]:
    if sanitized():
        return _sanitized_flags()
    flags = FLAGS if scratch_of(source) is None else REPLACED
    return flags if is_clang() else (*flags, OPENMP)


def _sanitized_flags() -> tuple[str, ...]:
    return (*SANITIZED, "-shared-libasan") if is_clang() else SANITIZED  # the default of g++


@cache
def _library(source: str, kernels: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    program = _program(source, kernels)
    key = cache_key(program, *flags, compiler(), _compiler_identity())
    built = cached(f"{source}-{key}.so", lambda path: _compile(source, program, flags, path), folder=scratch_of(source))
    return ctypes.CDLL(str(built))


def _compile(source: str, program: str, flags: tuple[str, ...], built: Path) -> None:
    code = built.with_suffix(".cpp")
    code.write_text(program, encoding="utf-8")
    command = [compiler(), *flags, "-o", str(built), str(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"{source}.cu does not compile: {done.stderr.strip()[:2000]}")


def launch(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[np.generic | int | bytes],
    *,
    workers: int,
    extra_flags: tuple[str, ...] = (),
) -> None:
    """Runs a kernel to its end on `workers` OS threads; with sanitizers, on one thread.

    Arguments are numpy scalars of the parameters' types, addresses as int, and structs as bytes. Raises ToolchainError
    if the kernel does not compile, TypeError for a wrong number of arguments, ValueError for a block larger than a
    GPU's, RuntimeError if the threads of a block are deadlocked.
    """
    if not 1 <= math.prod(block) <= MAX_THREADS:
        raise ValueError(f"kernel {kernel}: a block has 1 to {MAX_THREADS} threads, not {tuple(block)}")
    compiled = library(source, extra_flags)
    expected = getattr(compiled, f"parameters_{kernel}")()
    if expected != len(arguments):
        raise TypeError(f"kernel {kernel} has {expected} parameters, but {len(arguments)} arguments were given")
    cells = [_cell(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
    shape = (ctypes.c_uint * 6)(*grid, *block)
    run = getattr(compiled, f"launch_{kernel}")
    run.restype = ctypes.c_longlong
    workers = 1 if sanitized() else workers
    stuck = run(pointers, shape, ORDERS.index(_order.get()), ctypes.c_ulonglong(_shuffle.get()), workers)
    if stuck >= 0:
        raise RuntimeError(
            f"kernel {kernel}: the threads of block {stuck} of grid {tuple(grid)} wait for each other forever; "
            "a barrier or warp operation is not reached by all of them"
        )


def _cell(argument: np.generic | int | bytes) -> ctypes.c_size_t | ctypes.Array[ctypes.c_char]:
    """The memory of an argument: a scalar, an address, or the bytes of a struct."""
    if isinstance(argument, int):
        return ctypes.c_size_t(argument)
    content = argument if isinstance(argument, bytes) else argument.tobytes()
    return (ctypes.c_char * len(content)).from_buffer_copy(content)
