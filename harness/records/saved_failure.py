"""Saved failures: inputs of a case, results of the kernel and expected results, in one safetensors file.

Tensors are called x, w, c, bias, random.x, scale.x, given.dy as in `harness.inputs.inputs`. actual.codes and the like
are results of the kernel; expected.codes and the like are results of the reference for the same inputs. The metadata
name the case.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from narrowgauge.harness.backends.results import QUANTIZED_PARTS
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.gemm import ProductCase
from narrowgauge.harness.cases.modules import ModuleCase
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.inputs.inputs import Inputs, ModuleInputs, ProductInputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.spec.arguments import Random

FORMAT = "1"
"""Version of the metadata, under the key `narrowgauge_saved`."""
LARGEST = 64 << 20
"""Largest number of bytes of tensors in a file."""
_KEY = "narrowgauge_saved"
_MAIN = ".main_grad"


class SavedFailureError(ValueError):
    """A saved failure cannot be used. The message names the file and the problem."""


@dataclass(frozen=True)
class SavedFailure:
    """Contents of a file."""

    id: str
    """Id of the case that failed."""
    case: Case
    """The case in the file. Its shape and its sections may be smaller than those of the failed case."""
    inputs: Inputs
    seed: int
    backend: str
    stage: str
    """First wrong stage."""


def failure_path(directory: Path, case: Case, *, backend: str, device: str, seed: int) -> Path:
    """Path of a failure: a readable name, and a hash that differs between cases, backends, devices and seeds."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", case.id)[:100].strip("-")
    key = "|".join((case.id, backend, device, str(seed)))
    return directory / f"{readable}-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}.safetensors"


def save(path: Path, saved: SavedFailure, outcome: Outcome) -> None:
    """Write a failure. The file is replaced atomically, so processes may write the same failure at once.

    Raises SavedFailureError if the tensors have more than `LARGEST` bytes, OSError if the file cannot be written.
    """
    tensors = saved.inputs.named() | _actual(outcome) | _expected(outcome)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > LARGEST:
        raise SavedFailureError(f"{size / 2**20:.0f} MiB of tensors, more than {LARGEST >> 20}")
    pairs = {name: list(bits) for name, bits in saved.inputs.random.items() if not isinstance(bits, torch.Tensor)}
    metadata = {
        "id": saved.id, "case": saved.case.labels(), "random": pairs, "seed": saved.seed, "backend": saved.backend,
        "stage": saved.stage,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    # clone: safetensors refuses tensors that share memory.
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, temporary, metadata={_KEY: FORMAT, "about": json.dumps(metadata)})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> SavedFailure:
    """The failure in a file. Raises SavedFailureError if the file is missing or is no saved failure."""
    if not path.is_file():
        raise SavedFailureError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get(_KEY) != FORMAT:
                raise SavedFailureError(f"{path}: is no failure that narrowgauge saved; --input takes captured tensors")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        about = json.loads(metadata["about"])
        case = case_from_labels(**about["case"])
        inputs = _inputs(case, tensors, about["random"])
        return SavedFailure(about["id"], case, inputs, about["seed"], about["backend"], about["stage"])
    except SavedFailureError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SavedFailureError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _inputs(case: Case, tensors: Mapping[str, torch.Tensor], pairs: Mapping[str, list[int]]) -> Inputs:
    """The inputs with these tensors, named as in `Inputs.named`, and these pairs of seed and offset."""

    def group(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    random: dict[str, Random] = {**group("random."), **{name: (bits[0], bits[1]) for name, bits in pairs.items()}}
    x, scale = tensors["x"], group("scale.")
    if isinstance(case, ProductCase):
        return ProductInputs(x, random, scale, w=tensors["w"], c=tensors.get("c"), bias=tensors.get("bias"))
    if isinstance(case, ModuleCase):
        given = group("given.")
        main_grads = {name.removesuffix(_MAIN): t for name, t in given.items() if name.endswith(_MAIN)}
        parameters = {name: t for name, t in given.items() if name != "dy" and not name.endswith(_MAIN)}
        return ModuleInputs(x, random, scale, dy=given["dy"], parameters=parameters, main_grads=main_grads)
    return Inputs(x, random, scale)


def _actual(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {f"actual.{name}": tensor for name, tensor in outcome.outputs.items()}


def _expected(outcome: Outcome) -> dict[str, torch.Tensor]:
    """The results of the reference. Results under the same prefix (sections, matrices) are numbered."""
    expected: dict[str, torch.Tensor] = {}
    several = Counter(judged.prefix for judged in outcome.judged)
    seen: Counter[str] = Counter()
    for judged in outcome.judged:
        number = f"{seen[judged.prefix]}." if several[judged.prefix] > 1 else ""
        seen[judged.prefix] += 1
        for part in QUANTIZED_PARTS:
            tensor: Any = getattr(judged.oracle, part)
            if tensor is not None:
                expected[f"expected.{judged.prefix}{number}{part}"] = tensor
    if outcome.limits is not None:
        limits = outcome.limits
        ends = {"output": limits.expected, "output.lower": limits.lower, "output.upper": limits.upper}
        expected |= {f"expected.{name}": tensor for name, tensor in ends.items()}
    elif outcome.expected is not None:
        expected["expected.values"] = outcome.expected
    return expected
