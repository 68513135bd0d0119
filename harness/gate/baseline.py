"""Baselines: accepted figures of a run, in a small file with readable diffs.

The file is JSON: architecture, device, backend and seed, then a line per group of cases with a common beginning of
their ids. The group of a case follows from its id, so a changed case changes only its own line.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.keys import nearest
from narrowgauge.harness.gate.architecture import NAME, architecture, product_name
from narrowgauge.harness.gate.figures import Figures, figures, not_finite, parse
from narrowgauge.harness.machine.plain_text import unique_keys
from narrowgauge.harness.records.environment import CONTRACT, RULE
from narrowgauge.harness.records.journal import RecordedRun
from narrowgauge.harness.report.text import plural

FORMAT = 2
"""Version of the file. Raised with every change of its keys or of the text of figures."""
_TYPES = {"format": int, "architecture": str, "device": str, "backend": str, "seed": int, "cases": dict}
_TO_2 = (
    'accept a run anew, or write "format": 2 into it, and a line "architecture": "sm_90" with the digits of its '
    'compute capability, or "architecture": "host" for a CPU'
)
"""Remedy for format 1, which had the product name alone."""
_read_figures = cache(parse)


class BaselineError(Exception):
    """A baseline cannot be read, or a run cannot become a baseline. The message names the reason and the remedy."""


@dataclass(frozen=True)
class Baseline:
    """Accepted figures of every case of a run."""

    architecture: str
    """`host` or `sm_90` (`harness.gate.architecture`). The gate compares runs of the same architecture."""
    device: str
    """Product name of the processor, such as `NVIDIA H200`, or `cpu`. For readers: the gate does not compare it."""
    backend: str
    seed: int
    groups: dict[str, dict[str, list[str]]]
    """Beginning of the ids → figures as text → ends of the ids with these figures: `pass 561` → `zeros`, `inf/both`."""
    rules: dict[str, str] = field(default_factory=dict)
    """Digests of the rules of a user by name (`rules_of`). The gate compares them."""

    def cases(self) -> dict[str, Figures]:
        """Figures by case id."""
        return {
            _id(start, end): _read_figures(text)
            for start, group in self.groups.items()
            for text, ends in group.items()
            for end in ends
        }


def baseline_of(run: RecordedRun) -> Baseline:
    """The baseline of a run. Raises BaselineError if the run has no record, is interrupted, is a shard, has two records
    of a case, or has figures that are not finite."""
    if not run.records:
        raise BaselineError("nothing ran, so there is nothing to accept")
    if run.shard is not None:
        raise BaselineError(f"the run is shard {run.shard} of a matrix; narrowgauge merge joins all shards into one")
    if missing := run.missing:
        raise BaselineError(
            f"the run was interrupted: {len(missing)} of {plural(len(run.cases), 'case')} did not run, the first "
            f"{missing[0]}; go on with it by --resume"
        )
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    seen: set[str] = set()
    for record in run.records:
        if record["case"] in seen:
            raise BaselineError(f"{record['case']} has two records in the run; run it anew")
        seen.add(record["case"])
        if problems := not_finite(record):
            raise BaselineError(f"{record['case']}: {', '.join(problems)}; a baseline holds finite figures alone")
        start, end = _parts(record)
        groups[start][str(figures(record))].append(end)
    names = architecture(run.device, run.environment), product_name(run.device, run.environment)
    return Baseline(*names, run.backend, run.seed, groups, rules_of(run))


def rules_of(run: RecordedRun) -> dict[str, str]:
    """Digests of the rules and the contracts of a user, by name, that the cases of a run have."""
    used = {name for record in run.records for name in (*record["recipe"].split("+"), record["operation"])}
    digests = {part.removeprefix(RULE).removeprefix(CONTRACT): value.partition(" ")[0]
               for part, value in run.sources.items() if part.startswith((RULE, CONTRACT))}  # fmt: skip
    return {name: digest for name, digest in sorted(digests.items()) if name in used}


def _parts(record: dict[str, Any]) -> tuple[str, str]:
    """A case's id in two parts. The first part ends after the dtype; for a product after the inputs, because its
    figures depend on them."""
    product = "-" in record["dtype"]  # `bf16xbf16-fp32`: dtypes of operands and output
    names = ["operation", "recipe", "shape", "dtype", *(["inputs"] if product else [])]
    start = "/".join(record[name] for name in names if record[name])
    if _id(start, rest := record["case"][len(start) + 1 :]) != record["case"]:
        return record["case"], ""  # ids of captured tensors begin with the file
    return start, rest


def _id(start: str, end: str) -> str:
    return f"{start}/{end}" if end else start


def write(baseline: Baseline, path: Path) -> None:
    """Replace the file `path` with a baseline, sorted. Raises BaselineError if the file cannot be written."""
    head = {
        "format": FORMAT, "architecture": baseline.architecture, "device": baseline.device,
        "backend": baseline.backend, "seed": baseline.seed, **({"rules": baseline.rules} if baseline.rules else {}),
    }  # fmt: skip
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    groups = {
        start: {text: sorted(ends) for text, ends in sorted(group.items(), key=lambda item: min(item[1]))}
        for start, group in sorted(baseline.groups.items())
    }
    cases = ",\n".join(f"{json.dumps(start)}: {json.dumps(group)}" for start, group in groups.items())
    content = "\n".join(["{", *lines, '"cases": {', cases, "}", "}", ""])
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(content, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise BaselineError(f"{path}: cannot be written: {error.strerror}") from error


def read(path: Path) -> Baseline:
    """The baseline in a file. Raises BaselineError if the file is no valid baseline."""
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys
        )  # a merge leaves keys twice
    except FileNotFoundError as error:
        raise BaselineError(
            f"{path}: there is no such file; `narrowgauge baseline accept --baseline {path}` makes it of a run"
        ) from error
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path}: is no baseline: {error}") from error
    try:
        return _checked(content)
    except ValueError as error:
        raise BaselineError(f"{path}: is no baseline: {error}") from error


def _checked(content: Any) -> Baseline:
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, not an object")
    version = content.get("format")
    if version != FORMAT:
        remedy = _TO_2 if version == 1 else "accept a run anew"
        raise ValueError(f"its format is {version}; this narrowgauge reads {FORMAT}: {remedy}")
    for name in content:
        if name not in (*_TYPES, "rules"):
            raise ValueError(f"unknown key {name!r}{nearest(name, _TYPES)}; it can be {', '.join(_TYPES)}")
    for name, kind in _TYPES.items():
        if type(content.get(name)) is not kind:
            raise ValueError(f"{name} is {content.get(name)!r}, not {kind.__name__}")
    if not NAME.fullmatch(content["architecture"]):
        raise ValueError(f"architecture is {content['architecture']!r}; it is host, or sm_90 and the like")
    _check_groups(content["cases"])
    rules = content.get("rules", {})
    if type(rules) is not dict or not all(type(digest) is str for digest in rules.values()):
        raise ValueError(f"rules is {rules!r}, not an object of digests by the names of rules")
    head = {name: content[name] for name in _TYPES if name not in ("format", "cases")}
    return Baseline(**head, groups=content["cases"], rules=rules)


def _check_groups(groups: dict[str, Any]) -> None:
    if not groups:
        raise ValueError("it holds no case")
    seen: set[str] = set()
    for start, group in groups.items():
        if not isinstance(group, dict) or not group:
            raise ValueError(f"{start!r} is {group!r}, not an object of figures")
        for text, ends in group.items():
            try:
                _read_figures(text)
            except ValueError as error:
                raise ValueError(f"{start}: {error}") from error
            if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends) or not ends:
                raise ValueError(f"{start}: {text!r} is of {ends!r}, not of a list of how ids go on")
            _check_new(seen, (_id(start, end) for end in ends))


def _check_new(seen: set[str], ids: Iterable[str]) -> None:
    for case in ids:
        if case in seen:
            raise ValueError(f"{case} is there twice")
        seen.add(case)
