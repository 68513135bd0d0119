"""`narrowgauge certify`: prove a quantizer on every number under every scale."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import BackendArgument, Device, Rules, Seed, stop
from narrowgauge.harness.cli.selection import require_device


class Operation(StrEnum):
    """Operations with a proof."""

    QUANTIZE = "quantize"
    GEMM = "gemm"


def certify_backend(
    backend: BackendArgument,
    name: Annotated[str, typer.Option("--recipe", help="Recipe of the quantizer.")] = "nvfp4",
    operation: Annotated[Operation, typer.Option("--operation", help="quantize, or gemm: products of codes.")] = (
        Operation.QUANTIZE
    ),
    dtype: Annotated[str, typer.Option("--dtype", help="bf16, fp16 or fp32, of the inputs.")] = "bf16",
    device: Device = "cpu",
    seed: Seed = 0,
    tensor_scales: Annotated[
        int, typer.Option("--tensor-scales", min=0, help="Tensor amaxes; 0: 64 on a CPU, all on a GPU.")
    ] = 0,
    places: Annotated[
        int,
        typer.Option(
            "--places", min=0, help="Places of a number in a block, of a product in K; 0: some, on a GPU all."
        ),
    ] = 0,
    folder: Annotated[Path, typer.Option("--report-dir", help="Folder of certificate.md and certificate.json.")] = Path(
        "reports/certificate"
    ),
    rules: Rules = None,
) -> None:
    """Prove a quantizer on all numbers, or a GEMM on products of codes.

    Exit status 0 if the kernel is certified, 1 if the certificate names wrong inputs.
    """
    from narrowgauge.spec.dtypes import TORCH_DTYPES

    if dtype not in TORCH_DTYPES:
        stop(f"--dtype is {dtype!r}; it can be {', '.join(TORCH_DTYPES)}")
    require_device(device)
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.certify.certificate import CertificateError
    from narrowgauge.harness.certify.certify import Effort, certificate_of, numbers_of
    from narrowgauge.harness.certify.products import COLUMNS, certificate_of_products
    from narrowgauge.harness.hosts.remote_host import RemoteHost, hosted_backend
    from narrowgauge.harness.machine.process import one_thread
    from narrowgauge.harness.records.environment import describe_run, source_hashes
    from narrowgauge.harness.records.loaded_sources import LoadedSources
    from narrowgauge.spec.recipes import find_recipe

    try:
        recipe = find_recipe(name)
        if operation is Operation.QUANTIZE:
            numbers = numbers_of(recipe, TORCH_DTYPES[dtype], device)
        with one_thread(), hosted_backend(backend, device, seconds=3600.0) as loaded:
            if operation is Operation.GEMM:
                columns = places or (COLUMNS if device == "cuda" else 2)
                certificate = certificate_of_products(loaded, backend, recipe, device, columns, seed)
            else:
                effort = Effort.of(device, tensor_scales, places)
                certificate = certificate_of(loaded, backend, recipe, numbers, effort, seed)
            sources = LoadedSources()
            host = loaded.host
            assert isinstance(host, RemoteHost)
            host.end_case()
            for news in host.loaded:
                sources.add(news | {"declared": loaded.named})
        certificate.kernel = {part: value for part, value in source_hashes(backend).items() if value} | sources.entries
        certificate.environment = describe_run(backend=backend, device=device, seed=seed)
        page, data = certificate.write(folder)
    except (BackendError, CertificateError, ValueError) as error:
        stop(str(error))
    typer.echo("\n".join(certificate.summary()))
    typer.echo(f"{page}, {data}", err=True)
    raise typer.Exit(0 if certificate.passed else 1)
