"""Keys of case files: the types of the fields of a case, the values of each key, and the checks of these values.

The fields of a case class are the keys of its operation. `keys_of` reads name, check, default and flag of each key from
the types in this module. cases/README.md describes the keys for people.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from narrowgauge.harness.cases.sections import number_of, parse
from narrowgauge.spec.modules.training import training_recipe
from narrowgauge.spec.recipes import RULE_FILE, find_recipe

Check = Callable[[Any], str | None]
"""Function from a value to the reason of an error, or None."""
LARGEST_SIZE = 1 << 40
"""Largest size in a shape."""
SHOWN = 200
"""Characters of a value that a message shows."""


class Flag(Enum):
    """When the value of a key is a flag of the id."""

    CHANGED = "the value is not the default"
    ALWAYS = "always"
    NAMED = "the value is not the default; the flag begins with the name of the key"


@dataclass(frozen=True)
class Named:
    """Name of a key in case files, if the field has another name."""

    name: str


# ---- checks ----------------------------------------------------------------------------------------------------------


def nearest(word: Any, known: Iterable[str]) -> str:
    """` (did you mean …?)` with the known word that is nearest to `word`, or the empty string, as for no word."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: Any) -> str:
    """`repr` of a value, cut for a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def one_of(choices: Iterable[str]) -> Check:
    """Check that `choices` contains a value."""
    known = list(choices)

    def check(value: Any) -> str | None:
        return None if value in known else f"is {shown(value)}{nearest(value, known)}; it can be {', '.join(known)}"

    return check


@dataclass(frozen=True)
class Dims:
    """Check that a value is a shape of `least` to `most` sizes."""

    names: str
    """Names of the sizes as messages show them: `[M, K]`, or `[M, K] or (…, K)`."""
    least: int
    most: int

    def __call__(self, value: Any) -> str | None:
        """Reason if `value` is no shape of this kind, or None."""
        right = (
            isinstance(value, list)
            and self.least <= len(value) <= self.most
            and all(type(n) is int and 0 <= n <= LARGEST_SIZE for n in value)
        )
        count = f"{self.least} sizes" if self.least == self.most else f"{self.least} to {self.most} sizes"
        if right:
            return None
        return f"is {shown(value)}; a shape is {self.names}, {count} that are not negative and at most 2^40"


def dims(names: str, least: int, most: int) -> Dims:
    """Check that a value is a shape of `least` to `most` sizes. `names`: names of the sizes, `[M, K]`."""
    return Dims(names, least, most)


def count(noun: str, most: int) -> Check:
    """Check that a value is an integer from 1 to `most`."""

    def check(value: Any) -> str | None:
        return (
            None if type(value) is int and 1 <= value <= most else f"is {shown(value)}; there can be 1 to {most} {noun}"
        )

    return check


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"is {shown(value)}; it can be true or false"


def _whole(value: Any) -> str | None:
    right = type(value) is int and 0 <= value < 10**18
    return None if right else f"is {shown(value)}; it is a whole number, at least 0"


def _number(value: Any) -> str | None:
    right = type(value) in (int, float) and math.isfinite(value)
    return None if right else f"is {shown(value)}; it is a finite number"


_CHECKS: dict[type, Check] = {bool: _boolean, int: _whole, float: _number}
"""Checks of the types that need no further declaration."""


def _recipe(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"is {shown(value)}, not a recipe's name"
    if RULE_FILE.fullmatch(value):
        return f"is {shown(value)}, a file; name the file in `rules`, above the tables, and its rule here"
    try:
        find_recipe(value)
    except ValueError as error:
        return f"is {shown(value)}: {error}"
    return None


def _rotating(value: Any) -> str | None:
    if wrong := _recipe(value):
        return wrong
    return (
        None
        if find_recipe(value).transform
        else f"is {shown(value)}, which has no transform; nvfp4-rht and the like have"
    )


def _delayed(value: Any) -> str | None:
    if wrong := _recipe(value):
        return wrong
    delayed = find_recipe(value).delayed
    return None if delayed else f"is {shown(value)}, which takes no history; fp8-delayed-e4m3 and the like do"


def _training(value: Any) -> str | None:
    try:
        training_recipe(value)
    except (ValueError, TypeError) as error:
        return (
            f"is {shown(value)}: {error}"
            if isinstance(value, str)
            else f"is {shown(value)}, not a training recipe's name"
        )
    return None


def _sections(value: Any) -> str | None:
    try:
        parse(value)
    except ValueError as error:
        return str(error)
    return None


# ---- types of fields -------------------------------------------------------------------------------------------------

Tier = Literal["quick", "quick-cuda", "full"]
TableTier = Literal["quick", "quick-values", "quick-cuda", "full"]
Dtype = Literal["fp32", "bf16", "fp16"]
Layout = Annotated[Literal["tn", "nn", "nt"], Flag.ALWAYS]
Orientation = Annotated[Literal["rowwise", "columnwise"], Flag.CHANGED]
Usage = Annotated[Literal["rowwise", "columnwise", "both"], Flag.CHANGED]
View = Annotated[
    Literal["contiguous", "strided", "transposed", "pitched", "offset-2", "offset-4", "offset-8"], Flag.CHANGED
]
RandomBits = Annotated[Literal["philox", "words", "edges"] | None, Flag.CHANGED]
Norm = Annotated[Literal["layer", "rms"], Flag.CHANGED]
Switch = Annotated[bool, Flag.CHANGED]
Repeats = Annotated[int, count("repeated calls", 1 << 16), Flag.CHANGED]
Concurrency = Annotated[Literal["sequential", "threads", "streams", "graph"], Flag.CHANGED]
Autograd = Annotated[Literal["plain", "no-grad", "inference-mode", "requires-grad"], Flag.NAMED]
RecipeName = Annotated[str, _recipe]
OtherRecipeName = Annotated[str | None, _recipe]
RotatingRecipeName = Annotated[str, _rotating]
DelayedRecipeName = Annotated[str, _delayed]
OutRecipeName = Annotated[str, _recipe, Flag.ALWAYS]
TrainingName = Annotated[str, _training]
SectionsText = Annotated[str, _sections, Flag.ALWAYS]
OptionalSectionsText = Annotated[str | None, _sections, Flag.CHANGED]
Shape = tuple[int, ...]

TABLE_TIERS: tuple[TableTier, ...] = get_args(TableTier)
"""Tiers of the tables in case files. A table of `quick-values` has cases of the tiers quick and quick-cuda.
A case of several tables has the first of its tiers."""
TIERS = ("quick", "full")
"""Tiers of runs and records."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

ORDER = (
    "recipe", "w_recipe", "out_recipe", "training", "shape", "batch", "x", "w", "out", "dtype", "inputs", "layout",
    "sections", "padded", "heads", "norm", "usage", "view", "scales", "random", "amax", "same", "bands", "steps",
    "accumulate", "bias", "quantized_parameters", "delayed_wgrad", "recompute", "use",
)  # fmt: skip
"""Fields in the order in which messages name their keys, and in which the lists of a table are expanded: cases of the
last key with a list are neighbours. Further fields of an operation follow in the order of their declaration, and then
`_LAST`."""
_LAST = ("autograd", "repeats", "concurrency")
_LABELLED = ("recipe", "w_recipe", "training", "shape", "x", "w", "out", "dtype", "inputs")
"""Fields with a place of their own in an id."""
_NO_KEYS = ("tier", "file")
"""Fields of a case that are no keys of a table."""


# ---- keys of an operation --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key of an operation, as the declaration of a field gives it."""

    name: str
    """Name in case files."""
    field: str
    """Name of the field of the case."""
    check: Check
    default: Any
    """MISSING if the key is required."""
    flag: Flag | None
    choices: tuple[str, ...] = ()
    """All values of a key with a fixed set of words."""

    @property
    def required(self) -> bool:
        """Whether every table needs the key."""
        return self.default is MISSING

    def render(self, value: Any) -> str | None:
        """The flag of a value in an id: `bias`, `steps:3`, or the value; None for a value without a flag."""
        first = self.choices[:1] if self.default is None and self.flag is not Flag.NAMED else ()
        hidden = (self.default, *first)
        if self.flag is None or (self.flag is not Flag.ALWAYS and value in hidden):
            return None
        if isinstance(value, bool):
            return self.name if value else f"no-{self.name}"
        # A plus joins the flags of an id: 1e+20 is 1e20.
        named = self.flag is Flag.NAMED or isinstance(value, int | float)
        return f"{self.name}:{value}".replace("e+", "e") if named else str(value)

    def read(self, flag: str) -> Any:
        """The inverse of `render`: the value of a flag, or None for a flag of a different key."""
        if self.flag is None:
            return None
        name, _, number = flag.partition(":")
        value: Any = flag
        if flag in (self.name, f"no-{self.name}"):
            value = flag == self.name
        elif name == self.name:
            kind = type(self.default)
            value = number if self.flag is Flag.NAMED and kind not in (int, float) else number_of(number)
            value = _float_of(number) if kind is float else value
        if self.choices and value not in self.choices:  # the check would search the nearest choices for its message
            return None
        return value if self.check(value) is None else None


_KEYS: dict[type[Any], tuple[Key, ...]] = {}
_SIZES: dict[type[Any], tuple[str, ...]] = {}
_FLAG_FIELDS: dict[type[Any], tuple[str, ...]] = {}
_FLAGS: dict[tuple[Any, ...], tuple[str, ...]] = {}
"""Flags by the class of a case and the values of its keys: thousands of cases have the same few."""


def keys_of(cls: type[Any]) -> tuple[Key, ...]:
    """The keys of a case class besides `operation` and `tier`, in `ORDER`."""
    if cls not in _KEYS:
        hints = get_type_hints(cls, include_extras=True)
        own = {field.name: field.default for field in fields(cls) if field.name not in _NO_KEYS}
        if len(cls.autograd_modes) == 1:
            del own["autograd"]
        known = [name for name in ORDER if name in own]
        others = [name for name in own if name not in (*ORDER, *_LAST)]
        last = [name for name in _LAST if name in own]
        _KEYS[cls] = tuple(_key(cls, name, hints[name], own[name]) for name in (*known, *others, *last))
    return _KEYS[cls]


def sizes_of(cls: type[Any]) -> tuple[str, ...]:
    """Names of the sizes in the shape of a case class: ("M", "K") of `dims("[M, K] or (…, K)", 2, 4)`."""
    if cls not in _SIZES:
        (names,) = (key.check.names for key in keys_of(cls) if isinstance(key.check, Dims))
        _SIZES[cls] = tuple(name.strip() for name in names[1 : names.index("]")].split(","))
    return _SIZES[cls]


def flags_of(cls: type[Any], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The flags of a case with these values of its fields."""
    if cls not in _FLAG_FIELDS:
        _FLAG_FIELDS[cls] = tuple(key.field for key in keys_of(cls) if key.flag is not None)
    known = (cls, *map(values.__getitem__, _FLAG_FIELDS[cls]))
    if known not in _FLAGS:
        shown = (key.render(values[key.field]) for key in keys_of(cls))
        _FLAGS[known] = tuple(flag for flag in shown if flag is not None)
    return _FLAGS[known]


def _float_of(text: str) -> float | None:
    """The number in a flag, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def _key(cls: type[Any], field: str, hint: Any, default: Any) -> Key:
    plain, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(plain) in (Union, UnionType):
        (plain,) = (part for part in get_args(plain) if part is not NoneType)
    choices = get_args(plain) if get_origin(plain) is Literal else ()
    if field == "inputs":
        choices = tuple(cls.families())
    if field == "autograd":
        choices = cls.autograd_modes
    name = next((extra.name for extra in extras if isinstance(extra, Named)), field)
    flag = next((extra for extra in extras if isinstance(extra, Flag)), None)
    check = next((extra for extra in extras if callable(extra)), None)
    if field == "inputs":
        check = cls.family_problem
    elif check is None and field != "shape":
        check = one_of(choices) if choices else _CHECKS.get(plain)
    if flag is None and field not in _LABELLED:
        # Two cases with different values of a key have different ids.
        flag = Flag.ALWAYS if default is MISSING else Flag.CHANGED
    if check is None:
        raise TypeError(
            f"{cls.__name__}.{field} has the type {hint}; a key is bool, int, float or a Literal of words, a shape is "
            "Annotated[Shape, dims(…)], and another type has its check in Annotated[…]"
        )
    return Key(name, field, check, default, flag, choices)
