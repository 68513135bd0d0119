"""`narrowgauge certify`: prove a quantizer on every number under every scale."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import BackendArgument, Device, Rules, Seed, Workers, stop
from narrowgauge.harness.cli.selection import default_workers, require_device

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case


class Operation(StrEnum):
    """Operations with a proof."""

    QUANTIZE = "quantize"
    GEMM = "gemm"


def certify_backend(
    backend: BackendArgument,
    name: Annotated[str, typer.Option("--recipe", help="Recipe of the quantizer, nvfp4 by default, or contract.")] = "",
    contract: Annotated[
        str, typer.Option("--contract", help="A contract that quantizes an activation: its name, or a file of one.")
    ] = "",
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
    workers: Workers = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the proof of a quantizer that was ended, in --report-dir.")
    ] = False,
    rules: Rules = None,
) -> None:
    """Prove a quantizer, activation or GEMM on all numbers or codes.

    Exit status 0 if the kernel is certified, 1 if the certificate names wrong inputs.
    """
    from narrowgauge.spec.dtypes import TORCH_DTYPES

    if dtype not in TORCH_DTYPES:
        stop(f"--dtype is {dtype!r}; it can be {', '.join(TORCH_DTYPES)}")
    if (contract or operation is Operation.GEMM) and (workers or resume):
        stop("-n and --resume are for the proof of a recipe of quantize, which has shards; leave them out")
    if contract and operation is Operation.GEMM:
        stop("--contract is a contract that quantizes; leave --operation gemm out")
    require_device(device)
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.certify.activations import certificate_of_contract
    from narrowgauge.harness.certify.certificate import CertificateError
    from narrowgauge.harness.certify.certify import certificate_of, numbers_of
    from narrowgauge.harness.certify.inputs.space import Effort, Numbers
    from narrowgauge.harness.certify.products import COLUMNS, certificate_of_products
    from narrowgauge.harness.certify.shards import SECONDS, Journal, Task, prove, sources_of
    from narrowgauge.harness.hosts.remote_host import hosted_backend
    from narrowgauge.harness.machine.process import one_thread
    from narrowgauge.harness.records.environment import describe_run
    from narrowgauge.spec.recipes import find_recipe

    if TYPE_CHECKING:
        from narrowgauge.harness.certify.proof import Proof, Prover

    try:
        case = _case_of(contract, name, dtype) if contract else None
        recipe = find_recipe(name or "nvfp4")
        if case is None and operation is Operation.QUANTIZE:
            numbers = numbers_of(recipe, TORCH_DTYPES[dtype], device)
        with one_thread(), hosted_backend(backend, device, seconds=SECONDS) as loaded:
            effort = Effort.of(device, tensor_scales, places, contract=case is not None)
            if case is not None:
                numbers = Numbers(TORCH_DTYPES[dtype], device)
                certificate = certificate_of_contract(loaded, backend, case, numbers, effort, seed)
            elif operation is Operation.GEMM:
                columns = places or (COLUMNS if device == "cuda" else 2)
                certificate = certificate_of_products(loaded, backend, recipe, device, columns, seed)
            else:
                task = Task(backend, str(recipe), dtype, device, seed, **asdict(effort))

                def proved_by(prover: Prover) -> Proof:
                    journal = Journal(folder / "proof.jsonl", task, sources_of(loaded, backend), resume=resume)
                    return prove(task, prover, journal, workers or default_workers(device))

                certificate = certificate_of(loaded, backend, recipe, numbers, effort, seed, proved_by)
            certificate.kernel = sources_of(loaded, backend)
        certificate.environment = describe_run(backend=backend, device=device, seed=seed)
        page, data = certificate.write(folder)
    except (BackendError, CertificateError, OSError, ValueError) as error:
        stop(str(error))
    typer.echo("\n".join(certificate.summary()))
    typer.echo(f"{page}, {data}", err=True)
    raise typer.Exit(0 if certificate.passed else 1)


def _case_of(contract: str, recipe: str, dtype: str) -> Case:
    """A case of a contract, given by name or by file."""
    from narrowgauge.harness.certify.activations import SHAPE
    from narrowgauge.harness.cli.check import selected
    from narrowgauge.spec.dtypes import TORCH_DTYPES

    chosen = {"families": None, "shapes": [SHAPE], "dtypes": (TORCH_DTYPES[dtype],)}
    (_, ((case, _), *_)) = selected("", recipe, contract, "", chosen)
    return case
