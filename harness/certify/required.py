"""A certificate as a condition of the gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from narrowgauge.harness.certify.certificate import CertificateError, read
from narrowgauge.harness.records.journal import RecordedRun

_OF_KERNEL = ("kernels", "backend")
"""Sources of a run, beside the files loaded by the backend, on which the bytes of a kernel depend."""


def problems(path: Path, run: RecordedRun) -> Iterator[str]:
    """Reasons why the certificate in a file does not hold for the kernel of a run.

    Raises CertificateError for a file of another format.
    """
    content = read(path)
    kernel = content.get("kernel")
    if not isinstance(kernel, dict):
        raise CertificateError(f"{path}: has no digests of a kernel; make it again by `narrowgauge certify`")
    if content["verdict"] != "certified":
        yield f"{path}: the kernel is {content['verdict']}"
    if content.get("device") != run.device:
        yield f"{path}: is of device {content.get('device')}, and the run of {run.device}"
    sources = {part: value for part, value in run.sources.items() if part in _OF_KERNEL and value} | run.loaded
    own = {part: value for part, value in kernel.items() if part in _OF_KERNEL or " " in part}
    for part in sorted(sources.keys() | own.keys()):
        if sources.get(part) != own.get(part):
            yield (
                f"{path}: {part} is {own.get(part, 'not there')} in the certificate, and "
                f"{sources.get(part, 'not there')} in the run; make it again by `narrowgauge certify`"
            )
