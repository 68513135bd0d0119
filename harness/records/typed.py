"""Values of JSON files against types, checked by msgspec. Messages name the place, the value and the type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_type_hints

import msgspec

INT64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
NUMBER = INT64 | float
"""An int is a float. The bounds keep ints beyond float from msgspec: versions before 0.22 fail."""
COUNT = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_WIDTH = 80
"""Largest number of characters of a value in a message."""
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_WORDS = {"array": "list", "null": "None", "int | float": "float", "float | int": "float"}


def shown(value: Any) -> str:
    """A value of a file in a message: ASCII, and not long."""
    text = ascii(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def types_of(cls: type) -> dict[str, Any]:
    """Types of the fields of a dataclass in JSON: an int has 64 bits."""
    return get_type_hints(cls, localns={"int": INT64, "float": NUMBER}, include_extras=True)


def object_type(name: str, types: Mapping[str, Any], *, optional: Iterable[str] = (), unknown: bool = False) -> type:
    """The type of objects with these keys. `optional`: keys that an object may lack. `unknown`: further keys are
    allowed."""
    absent = set(optional)
    keys = [(key, kind, None) if key in absent else (key, kind) for key, kind in types.items()]
    return msgspec.defstruct(name, keys, kw_only=True, forbid_unknown_fields=not unknown)


def has_type(value: Any, kind: Any) -> bool:
    """Whether `type_problem` finds nothing."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def type_problem(value: Any, kind: Any, noun: str = "key") -> str:
    """Reason why a value from JSON does not have a type: `stages[3].compared is 'x', not int`. Empty if it has.

    An int is a float; a bool is neither. `noun`: a key of the value itself, in messages.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        if field := _FIELD.fullmatch(text):
            key = f"{field[3]}: key" if field[3] else noun
            return f"{key} {shown(field[2])} is {'unknown' if 'unknown' in field[1] else 'missing'}"
        expected, _, path = text.partition(" - at `$")
        place = path.rstrip("`").removesuffix("[...]").removeprefix(".")
        for step in re.findall(r"\w+", place):
            value = value[int(step) if isinstance(value, list) else step]
        expected = expected.partition(", got ")[0].removeprefix("Expected ").replace("`", "")
        for word, ours in _WORDS.items():
            expected = expected.replace(word, ours)
        inside = "with a value that is " if "[...]" in path else ""
        return f"{place or 'it'} is {shown(value)}, {inside}not {expected.replace(' | ', ' or ')}"
    return ""
