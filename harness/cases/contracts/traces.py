"""The contracts of a file, as data: their arguments, and their steps for dtypes, recipes and options.

A process of its own imports the file (`narrowgauge.contract.traced_file`). Its answers are kept for the processes of a
run, in the folder of the environment variable NARROWGAUGE_TRACES, until an imported file changes. The first process in
need of an answer makes the folder, and removes the folder at its end.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from narrowgauge.spec.program import ContractError, Program, request_key

VARIABLE = "NARROWGAUGE_TRACES"
"""Environment variable with the folder of the answers of a run."""
_PACKAGE = Path(__file__).parents[3]
_SECONDS = 120.0
"""Largest number of seconds of the import of a file, with torch and compiled extensions."""


@dataclass(frozen=True)
class Request:
    """The arguments of a contract with an influence on its steps."""

    dtypes: Mapping[str, str]
    """Dtype of each tensor."""
    recipes: Mapping[str, str]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The request as text, the same for equal requests."""
        return request_key(vars(self))


Answer = Mapping[str, str]
"""The steps of a request as JSON, under `program`, or the reason for no steps, under `error`."""
Tracer = Callable[[list[Request]], Mapping[str, Answer]]
"""Function from requests to answers by the keys of the requests, with all further known answers; without a request: the
usual answers."""


@dataclass(frozen=True, eq=False)
class Declared:
    """A contract: its arguments, as of `narrowgauge.contract.Contract.description`."""

    name: str
    file: str
    line: int
    about: str
    parameters: tuple[str, ...]
    """Names of the parameters in order."""
    tensors: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]]
    """Type, axes and accepted dtypes of each tensor."""
    recipes: Mapping[str, str]
    """Defaults of the recipe arguments; empty: none."""
    options: Mapping[str, Any]
    """Defaults of the options."""
    choices: Mapping[str, tuple[Any, ...]]
    """All values of an option with choices."""
    flags: tuple[str, ...]
    """The options of the type `Flag`."""
    rows: str
    """"independent" if a row has the same bytes in every batch, else empty."""
    tracer: Tracer
    dialects: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of the options by the names of dialects."""
    by_name: tuple[str, ...] = ()
    """Tensors passed by name, if used by the steps."""

    @cached_property
    def _answers(self) -> dict[str, Answer]:
        """Answers by the keys of the requests."""
        return {}

    @cached_property
    def _programs(self) -> dict[str, Program]:
        return {}

    def program(self, request: Request) -> Program:
        """The steps of a request. Raises ContractError, with file and line, if the function is no contract."""
        key = request.key
        if key not in self._programs:
            if key not in self._answers:
                self._answers.update(self.tracer([request]))
            answer = self._answers[key]
            if "error" in answer:
                raise ContractError(answer["error"])
            self._programs[key] = Program.from_json(answer["program"])
        return self._programs[key]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields: options about differences of kernels, passed to no kernel."""
        return tuple(name for name in self.choices if name not in self.flags)

    @property
    def sequences(self) -> bool:
        """Whether rows attend to the tokens of their requests: all inputs must fit together."""
        return any(kind == "QueryLengths" for kind, _, _ in self.tensors.values())

    @property
    def of_ranks(self) -> tuple[str, ...]:
        """The arguments with a tensor per rank of a group."""
        return tuple(name for name, (kind, _, _) in self.tensors.items() if kind in ("Ranks", "QuantizedRanks"))

    @property
    def routed(self) -> bool:
        """Whether tokens name rows of a matrix."""
        return any(kind == "Positions" for kind, _, _ in self.tensors.values())

    @property
    def of_experts(self) -> bool:
        """Whether tokens are multiplied by quantized matrices of their experts."""
        return self.routed and bool(self.quantized)

    @property
    def quantized(self) -> tuple[str, ...]:
        """The quantized arguments."""
        return tuple(name for name, (kind, _, _) in self.tensors.items() if kind == "Codes")

    @property
    def caches(self) -> tuple[str, ...]:
        """The cache arguments."""
        return tuple(name for name, (kind, _, _) in self.tensors.items() if kind == "Cache")

    @cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with the steps for any dtype and recipe, and for any of the choices."""
        answers = self.tracer([])
        texts = [Program.from_json(a["program"]).digest if "program" in a else "" for _, a in sorted(answers.items())]
        return hashlib.sha256("".join(texts).encode()).hexdigest()[:8]


def saved(contract: Declared, request: Request) -> dict[str, Any]:
    """A contract with the steps of one request, for `from_saved`."""
    entry = {f.name: getattr(contract, f.name) for f in fields(contract) if f.name != "tracer"}
    return {"contract": entry, "answers": {request.key: {"program": contract.program(request).to_json()}}}


def from_saved(data: Mapping[str, Any]) -> Declared:
    """The contract of `saved`. Other requests than the saved one are a ContractError."""
    answers: Mapping[str, Answer] = data["answers"]

    def trace(requests: list[Request]) -> Mapping[str, Answer]:
        missing = {"error": f"{data['contract']['file']}: these steps are not in the file of the saved failure"}
        return {**{request.key: missing for request in requests}, **answers}

    return declared(data["contract"], trace)


def declared(entry: Mapping[str, Any], tracer: Tracer) -> Declared:
    """The contract of a description. `tracer`: gives its steps."""
    tensors = {name: (kind, tuple(axes), tuple(dtypes)) for name, (kind, axes, dtypes) in entry["tensors"].items()}
    choices = {name: tuple(values) for name, values in entry["choices"].items()}
    names = {key: tuple(entry.get(key, ())) for key in ("parameters", "flags", "by_name")}
    values = {**entry, **names, "tensors": tensors, "choices": choices}
    return Declared(**values, tracer=tracer)


_FILES: dict[tuple[str, str], dict[str, Declared]] = {}
"""Contracts by file and the state of its imported files."""


def contracts_of(file: Path) -> dict[str, Declared]:
    """The contracts of a file by name. Raises ContractError for a file without contracts or with a failing import."""
    path = str(file.resolve())
    known = _kept(path) or _traced(path, {})
    key = path, json.dumps(known["state"])
    if key not in _FILES:
        _FILES[key] = {
            entry["name"]: declared(entry, partial(_answers, path, entry["name"])) for entry in known["contracts"]
        }
    return _FILES[key]


def _answers(path: str, name: str, requests: list[Request]) -> Mapping[str, Answer]:
    """The answers to requests, and all kept answers of the contract."""
    known = _kept(path)
    if known is None or any(request.key not in known["answers"].get(name, {}) for request in requests):
        known = _traced(path, {name: [vars(request) for request in requests]})
    found: Mapping[str, Answer] = known["answers"][name]
    return found


def _traced(path: str, asked: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The answers of a separate process about a file, with all earlier answers."""
    command = [sys.executable, "-m", "narrowgauge.contract.traced_file", path]
    paths = [str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")]  # a checkout may not be installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=_SECONDS,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ContractError(f"{path}: its import takes more than {_SECONDS:g} s") from None
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ContractError(f"{path}: its process ended with status {done.returncode}: {last}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ContractError(answer["error"])
    before = (_kept(path) or {"answers": {}})["answers"]
    answers = {name: {**before.get(name, {}), **found} for name, found in answer["answers"].items()}
    known = {"contracts": answer["contracts"], "answers": answers, "state": _state(answer["files"])}
    _keep(path, known)
    return known


# ---- answers that are kept -------------------------------------------------------------------------------------------


def _state(files: Iterable[str]) -> list[list[Any]]:
    """Files with the times of their last change and their sizes; 0 for a file that is gone."""
    found = []
    for file in files:
        try:
            status = os.stat(file)
            found.append([file, status.st_mtime_ns, status.st_size])
        except OSError:
            found.append([file, 0, 0])
    return found


def _place(path: str) -> Path:
    """The file with the kept answers about a file."""
    if not os.path.isdir(os.environ.get(VARIABLE, "")):
        folder, owner = tempfile.mkdtemp(prefix="narrowgauge-traces-"), os.getpid()
        os.environ[VARIABLE] = folder
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return Path(os.environ[VARIABLE]) / f"{hashlib.sha256(path.encode()).hexdigest()[:16]}.json"


def _kept(path: str) -> dict[str, Any] | None:
    """The kept answers of a file; None without answers, and after a change of an imported file."""
    try:
        known: dict[str, Any] = json.loads(_place(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known if known["state"] == _state(entry[0] for entry in known["state"]) else None


def _keep(path: str, known: Mapping[str, Any]) -> None:
    place = _place(path)
    temporary = place.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(known), encoding="utf-8")
    temporary.replace(place)
