"""`narrowgauge build`: compile the native kernels for a CPU in advance."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed

import typer

from narrowgauge.harness.cli.options import Workers, stop


def build(workers: Workers = 0) -> None:
    """Compile all native kernels for this CPU in advance.

    The cache of compiled kernels is the folder $NARROWGAUGE_CACHE (default: ~/.cache/narrowgauge). Exit status 2 if a
    kernel does not compile or no compiler is found.
    """
    from rich.console import Console
    from rich.progress import track

    from narrowgauge.harness.machine.processors import cores
    from narrowgauge.native.runtime import host
    from narrowgauge.native.runtime.cache import cache_folder
    from narrowgauge.native.runtime.sources import CPU_SOURCES, ToolchainError, text

    longest_first = sorted(CPU_SOURCES, key=lambda source: -len(text(source)))
    with ThreadPoolExecutor(workers or cores()) as pool:
        try:
            host.check()
            builds = [pool.submit(host.library, source) for source in longest_first]
            done = as_completed(builds)
            for finished in track(done, "compiling", total=len(builds), console=Console(stderr=True)):
                finished.result()
        except ToolchainError as error:
            pool.shutdown(cancel_futures=True)
            stop(str(error))
    typer.echo(f"{len(builds)} kernel sources are compiled: {cache_folder()}")
