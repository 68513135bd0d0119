"""Old names of options, which the commands accept beside the present names, without a line in `--help`.

An option has one name in all commands: docs/api.md#command-line. A renamed option gets a line in `OLD_NAMES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

POSITION = ""
"""Present name of an option whose value is a positional argument."""
_CASES = {"--cases": POSITION}
_JSON = {"--json": "--format=json"}
OLD_NAMES: Mapping[str, Mapping[str, str]] = {
    "check": _JSON,
    "power": _JSON,
    "run": _CASES,
    "list": _CASES,
    "show": _CASES,
    "sanitize": _CASES,
    "mutants": _CASES,
    "soak": {"--from": "--seed", **_CASES},
    "dialect": {
        "--backend": POSITION,
        "--rows": "--details",
        **_JSON,
        "--issue": "--format=issue",
    },
    "order": {"--backend": POSITION, "--gemm": "--shape", **_JSON},
    "predict": {"--gemm": "--shape", "--inputs": "--family", "--from": "--input", "--out": "--save"},
    "tolerance": {"--gemm": "--shape", "--inputs": "--family", "--out": "--out-dtype"},
    "bench": {"--sizes": "--shape", "--out": "--report-dir"},
}
"""Present name of each old name, by command. A present name with a value replaces an option without a value."""


def with_present_names(command: str, words: Sequence[str]) -> list[str]:
    """The words of a command line with present names of options in place of old ones, positional arguments last."""
    names = OLD_NAMES.get(command, {})
    end = words.index("--") if "--" in words else len(words)
    given, positions = iter(words[:end]), []
    present = []
    for word in given:
        name, equals, value = word.partition("=")
        if name not in names:
            present.append(word)
        elif names[name] != POSITION:
            present.append(names[name] + equals + value)
        elif equals or (value := next(given, "")):
            positions.append(value)
        else:
            present.append(word)  # without its value: an error of the command line
    return [*present, *words[end:], *positions]
