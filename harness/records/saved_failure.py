"""Saved failures: inputs of a case, results of the kernel and expected results, in one safetensors file.

Tensors have the names of the inputs (`harness.inputs.inputs`): x, w, c, bias, random.x, scale.x, given.dy. actual.codes
and the like are results of the kernel; expected.codes and the like are results of the reference for the same inputs.
The metadata name the case; labels of a contract have its steps: no file of a user is imported.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from narrowgauge.harness.backends.results import QUANTIZED_PARTS
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.contracts.traces import from_saved
from narrowgauge.harness.cases.contracts.traces import saved as saved_contract
from narrowgauge.harness.cases.cost import shortage
from narrowgauge.harness.cases.keys import keys_of, shown
from narrowgauge.harness.cases.operations import case_from_labels, hold_declared
from narrowgauge.harness.inputs.capture import LARGEST_DIRECTORY, safetensors_header
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.operations.stages.outcome import Outcome

FORMAT = "1"
"""Version of the metadata, under the key `narrowgauge_saved`."""
LARGEST = 64 << 20
"""Largest number of bytes of tensors in a file."""
_KEY = "narrowgauge_saved"
_TEXTS = ("operation", "recipe", "dtype", "inputs", "tier", "file")
"""Text labels of a case."""


class SavedFailureError(ValueError):
    """A saved failure cannot be used. The message names the file and the problem."""


@dataclass(frozen=True)
class SavedFailure:
    """Contents of a file."""

    id: str
    """Id of the failed case."""
    case: Case
    """The case in the file. Its shape and its sections may be smaller than in the failed case."""
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
    tensors = saved.inputs.tensors | _actual(outcome) | _expected(outcome)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > LARGEST:
        raise SavedFailureError(f"{size / 2**20:.0f} MiB of tensors, more than {LARGEST >> 20}")
    pairs = {name: list(bits) for name, bits in saved.inputs.counters.items()}
    metadata = {
        "id": saved.id, "case": saved.case.labels(), "random": pairs, "seed": saved.seed, "backend": saved.backend,
        "stage": saved.stage,
    }  # fmt: skip
    if isinstance(saved.case, ContractCase):
        metadata["contract"] = saved_contract(saved.case.declared, saved.case.request)
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
    """The failure in a file. Raises SavedFailureError if the file is missing, is no saved failure, holds a case that
    cannot be or does not fit into memory, or other tensors than the case has."""
    if not path.is_file():
        raise SavedFailureError(f"{path}: there is no such file")
    try:
        safetensors_header(path)
        if (size := path.stat().st_size) > LARGEST + LARGEST_DIRECTORY:
            raise ValueError(f"it has {size} bytes; a saved failure has at most {LARGEST} bytes of tensors")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get(_KEY) != FORMAT:
                raise SavedFailureError(f"{path}: is no failure that narrowgauge saved; --input takes captured tensors")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        return _checked(json.loads(metadata["about"]), tensors)
    except SavedFailureError:
        raise
    except Exception as error:  # a damaged file raises any exception
        reason = str(error).partition("\n")[0][:500]
        raise SavedFailureError(f"{path}: cannot be read: {type(error).__name__}: {reason}") from error


def _checked(about: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> SavedFailure:
    """The failure described by the metadata and the tensors. Raises any exception if metadata and tensors
    contradict."""
    labels, pairs, seed = about["case"], about["random"], about["seed"]
    texts = [about["id"], about["backend"], about["stage"], *(labels[name] for name in _TEXTS), *labels["flags"]]
    numbers = [seed, *labels["shape"], *itertools.chain.from_iterable(pairs.values())]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"the metadata have {shown(wrong[0])} instead of a text")
    if odd := [number for number in numbers if type(number) is not int or not -(2**63) <= number < 2**64]:
        raise TypeError(f"the metadata have {shown(odd[0])} instead of a whole number of 64 bits")
    if "contract" in about:
        hold_declared(from_saved(about["contract"]))
    case = case_from_labels(**labels)
    # Only shapes and dtypes of the made inputs are used, and every family of an operation has the same.
    example = replace(case, inputs=next(iter(case.families())))
    for key in keys_of(type(case)):
        value = getattr(example, key.field)
        if value != key.default and (problem := key.check(list(value) if key.field == "shape" else value)):
            raise ValueError(f"the case: {key.name} {problem}")
    if problem := case.problem() or shortage(case, "cpu"):
        raise ValueError(f"the case: {problem}")
    results = ("actual.", "expected.")
    named = {name: tensor for name, tensor in tensors.items() if not name.startswith(results)}
    inputs = Inputs(named, {name: (bits[0], bits[1]) for name, bits in pairs.items()})
    right = make_inputs(example)
    made, given = _kinds(right), _kinds(inputs)
    if made != given:
        name = min(name for name in made.keys() | given.keys() if made.get(name) != given.get(name))
        raise ValueError(f"the tensor {name} is {given.get(name)}; the case has {made.get(name)}")
    inputs.tensors = {name: named[name] for name in right.tensors}  # a file has its tensors in the order of their names
    return SavedFailure(about["id"], case, inputs, seed, about["backend"], about["stage"])


def _kinds(inputs: Inputs) -> dict[str, str]:
    """Shape and dtype of each tensor, and `seed and offset` of other random bits."""
    tensors = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in inputs.tensors.items()}
    return tensors | {f"random.{name}": "seed and offset" for name in inputs.counters}


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
