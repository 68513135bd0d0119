"""`narrowgauge dialect`: find the dialect of a quantizer."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowgauge.harness.cli.options import Device, Seed, stop
from narrowgauge.harness.cli.selection import require_device


def which_dialect(
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="native, reference, or package.module:Name.")],
    name: Annotated[str, typer.Option("--recipe", help="What its quantize is asked for.")] = "nvfp4",
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Say which library's bytes a quantizer gives. Exit status 0 only if it is one's on every input."""
    require_device(device)
    from rich.console import Console

    from narrowgauge.harness.backends.backend import BackendError, Unsupported
    from narrowgauge.harness.backends.host import HostLost
    from narrowgauge.harness.hosts.remote_host import hosted_backend
    from narrowgauge.harness.tools.dialect import sentence, survey, table

    try:
        with hosted_backend(backend, device) as loaded:
            result = survey(loaded, name, device=device, seed=seed)
    except (BackendError, Unsupported, HostLost, ValueError) as error:
        stop(str(error))
    console = Console(highlight=False)
    console.print(f"{result.recipe}   backend {backend}, device {device}, seed {seed}", markup=False)
    console.print(table(result))
    console.print(sentence(result), markup=False, soft_wrap=True)
    raise typer.Exit(0 if result.matching else 1)
