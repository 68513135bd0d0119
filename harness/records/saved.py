"""Saved failures: the inputs of a case, what the kernel made of them and what is right, in one file of safetensors.

Tensors are called x, w, c, bias, random.x, scale.x, given.dy as in `harness.inputs.inputs`; actual.codes and the like
are what the kernel gave, expected.codes what the reference gives for the same inputs. The metadata say which case they
are of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from narrowgauge.harness.backends.results import PARTS
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.spec.arguments import Random

FORMAT = "1"
"""Version of the metadata, under the key `narrowgauge_saved`."""
LARGEST = 64 << 20
"""Bytes of tensors that a file may hold."""
_KEY = "narrowgauge_saved"


class SavedError(ValueError):
    """A file of a saved failure that cannot be used: which file, what is wrong."""


@dataclass(frozen=True)
class Saved:
    """What a file holds of a failure."""

    id: str
    """Of the case that failed."""
    case: Case
    """The case as it is in the file: its shape, and its sections, may be smaller."""
    inputs: Inputs
    seed: int
    backend: str
    stage: str
    """The first wrong stage."""


def path_of(directory: Path, case: Case, *, backend: str, device: str, seed: int) -> Path:
    """Where the failure of a case lies: a name for people, and one that two cases, backends or seeds never share."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", case.id)[:100].strip("-")
    key = "|".join((case.id, backend, device, str(seed)))
    return directory / f"{words}-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}.safetensors"


def save(path: Path, saved: Saved, outcome: Outcome) -> None:
    """Write a failure. Another process may do the same: a reader finds all of the one or of the other.

    Raises SavedError where the tensors are more than `LARGEST` bytes, OSError where nothing can be written.
    """
    tensors = _tensors(saved.inputs) | _actual(outcome) | _expected(outcome)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > LARGEST:
        raise SavedError(f"{size / 2**20:.0f} MiB of tensors, more than {LARGEST >> 20}")
    pairs = {name: list(bits) for name, bits in saved.inputs.random.items() if not isinstance(bits, torch.Tensor)}
    about = {
        "id": saved.id, "case": asdict(saved.case), "random": pairs, "seed": saved.seed, "backend": saved.backend,
        "stage": saved.stage,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    # clone: safetensors refuses tensors that share memory.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(plain, fresh, metadata={_KEY: FORMAT, "about": json.dumps(about)})
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def load(path: Path) -> Saved:
    """The failure of a file. Raises SavedError where there is none, or the file is no saved failure."""
    if not path.is_file():
        raise SavedError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get(_KEY) != FORMAT:
                raise SavedError(f"{path}: is no failure that narrowgauge saved; --input takes captured tensors")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        about = json.loads(metadata["about"])
        fields = about["case"]
        case = Case(**{**fields, "shape": tuple(fields["shape"]), "flags": tuple(fields["flags"])})
        return Saved(
            about["id"], case, _inputs(tensors, about["random"]), about["seed"], about["backend"], about["stage"]
        )
    except SavedError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SavedError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    found = {"x": inputs.x, "w": inputs.w, "c": inputs.c, "bias": inputs.bias}
    found |= {f"random.{name}": bits for name, bits in inputs.random.items() if isinstance(bits, torch.Tensor)}
    found |= {f"scale.{name}": numbers for name, numbers in inputs.scale.items()}
    found |= {f"given.{name}": tensor for name, tensor in inputs.given.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _inputs(tensors: Mapping[str, torch.Tensor], pairs: Mapping[str, list[int]]) -> Inputs:
    """The inverse of `_tensors`."""
    below = {
        group: {name.removeprefix(group): t for name, t in tensors.items() if name.startswith(group)}
        for group in ("random.", "scale.", "given.")
    }
    random: dict[str, Random] = {**below["random."]}
    random |= {name: (bits[0], bits[1]) for name, bits in pairs.items()}
    w, c, bias = (tensors.get(name) for name in ("w", "c", "bias"))
    return Inputs(tensors["x"], w, c, bias, random, below["scale."], below["given."])


def _actual(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {f"actual.{name}": tensor for name, tensor in outcome.outputs.items() if tensor is not None}


def _expected(outcome: Outcome) -> dict[str, torch.Tensor]:
    """The reference's own result: of several sections or matrices under one prefix each has a number."""
    found: dict[str, torch.Tensor] = {}
    several = Counter(judged.prefix for judged in outcome.judged)
    seen: Counter[str] = Counter()
    for judged in outcome.judged:
        number = f"{seen[judged.prefix]}." if several[judged.prefix] > 1 else ""
        seen[judged.prefix] += 1
        for part in PARTS:
            tensor: Any = getattr(judged.oracle, part)
            if tensor is not None:
                found[f"expected.{judged.prefix}{number}{part}"] = tensor
    if outcome.limits is not None:
        limits = outcome.limits
        ends = {"output": limits.expected, "output.lower": limits.lower, "output.upper": limits.upper}
        found |= {f"expected.{name}": tensor for name, tensor in ends.items()}
    elif outcome.expected is not None:
        found["expected.values"] = outcome.expected
    return found
