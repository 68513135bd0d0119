"""`@contract`: a function with tensors, recipes and options in its signature, and a formula as its text.

This module does not import torch.
"""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, overload

from narrowgauge.contract.steps import quantize
from narrowgauge.contract.values import CachedHalves, Trace, Value
from narrowgauge.spec.kv_cache import HALVES
from narrowgauge.spec.program import (
    BITS,
    CODES,
    GEMM,
    HALF,
    INDEX,
    KEPT,
    RANKS,
    SUBNORMALS,
    SUBNORMALS_CHOICES,
    Axes,
    ContractError,
    Program,
    Tensor,
    rank_name,
    tensors_of_cache,
    tensors_of_codes,
)
from narrowgauge.spec.recipes import recipes


class Argument(Value):
    """The type of a tensor argument. `Annotated[Matrix, ("M", "N")]` renames the axes."""

    own_axes: ClassVar[Axes]
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")


class Matrix(Argument):
    """A matrix (M, K)."""

    own_axes = ("M", "K")


class Ranks(Matrix):
    """A matrix (M, K) on every rank of a group of processes: in a contract, the tuple of these matrices. The option
    `ranks` is the number of processes."""


class QuantizedRanks(Ranks):
    """A quantized matrix of every rank, by the parameter `recipe`: in a contract, the tuple of the
    results of `c.quantize`. A kernel gets a `Quantized`, and no recipe."""


class Row(Argument):
    """A number per column: (K,)."""

    own_axes = ("K",)


class Column(Argument):
    """A float32 number per row, for example a saved 1/√(mean square): (M, 1)."""

    own_axes = ("M", "1")
    dtypes = ("float32",)


class Scalar(Argument):
    """A float32 number: ()."""

    own_axes = ()
    dtypes = ("float32",)


class Scale(Argument):
    """A scale of a tensor: float32 (1,)."""

    own_axes = ("1",)
    dtypes = ("float32",)


class Index(Argument):
    """Numbers of rows of a second argument, for `table[index]`: int64 (M,)."""

    own_axes = ("M",)
    dtypes = (INDEX,)


class Codes(Argument):
    """A quantized matrix (N, K), passed to a kernel as a `Quantized`. The default of the parameter names its recipe;
    without a default, cases name the recipe."""

    own_axes = ("N", "K")
    dtypes = (CODES,)


class Scales(Argument):
    """Scales of a cache, of all rows or per head: float32 (scales,), 1 or as many as heads."""

    own_axes = ("scales",)
    dtypes = ("float32",)


class Slots(Argument):
    """Slots of tokens in a cache, page · (tokens of a page) + offset; a negative slot is no place: int64 (tokens,)."""

    own_axes = ("tokens",)
    dtypes = (INDEX,)


class Pages(Argument):
    """Numbers of the pages per request, in the order of its tokens: int64 (requests, most pages)."""

    own_axes = ("requests", "most")
    dtypes = (INDEX,)


class Lengths(Argument):
    """Number of tokens per request in a cache: int64 (requests,). Their sum is the number of tokens."""

    own_axes = ("requests",)
    dtypes = (INDEX,)


class QueryLengths(Argument):
    """Number of rows per request in a batch, at least 1: int64 (requests,). Their sum is the number of rows."""

    own_axes = ("requests",)
    dtypes = (INDEX,)


class Heads(Argument):
    """Rows of numbers for the heads of all tokens of a batch, for example queries: (queries, q_heads, dim)."""

    own_axes = ("queries", "q_heads", "dim")


class Sinks(Argument):
    """A logit per head without a token: float32 (q_heads,)."""

    own_axes = ("q_heads",)
    dtypes = ("float32",)


class Positions(Argument):
    """Rows of a matrix, a number per choice of a token; a negative number is no row: int64 (tokens, choices)."""

    own_axes = ("tokens", "choices")
    dtypes = (INDEX,)


class RouterWeights(Argument):
    """A weight per choice of a token: float32 (tokens, choices)."""

    own_axes = ("tokens", "choices")
    dtypes = ("float32",)


class Cache(Argument):
    """A paged cache, passed to a kernel as a `narrowgauge.spec.kv_cache.Cache` and open to changes: (pages, tokens of a
    page, heads, columns of keys, columns of values). Its recipe is the recipe of the contract; `cache.keys` and
    `cache.values` are its halves."""

    own_axes = ("pages", "page", "heads", "dim", "v_dim")
    dtypes = (HALF,)


class Bits(Argument):
    """Random bits of the elements of a matrix (M, K), for stochastic rounding: words, int32 (M, K/4). Element 4j + i of
    a row takes byte i of word j, the lowest byte first."""

    own_axes = ("M", "K/4")
    dtypes = (BITS,)


TYPES = (
    Matrix, Ranks, QuantizedRanks, Row, Column, Scalar, Scale, Index, Bits, Codes, Scales, Slots, Pages, Lengths,
    QueryLengths, Heads, Sinks, Positions, RouterWeights, Cache,
)  # fmt: skip
"""Types of tensors."""


class Recipe(str):
    """The type of an argument with the name of a recipe."""

    __slots__ = ()


_PASSED = "passed to the kernel"
_T = TypeVar("_T")
Passed = Annotated[_T, _PASSED]
"""The type of an option with few values, also an argument of the kernel: `Passed[Literal["tanh", "erf"]]`. Options with
few values and without this type are fields: differences of kernels. Numbers are passed."""
Flag = Passed[bool]
"""The type of a bool that is also an argument of the kernel."""


_MOST = 64
"""Largest number of sets of choices traced together."""
Rows = Literal["independent"]


@dataclass(frozen=True)
class Contract:
    """The formula of a kernel. `trace` gives the steps; the function itself is never called with tensors."""

    function: Callable[..., Any]
    tensors: Mapping[str, tuple[type[Argument], Axes]]
    """Types and axes of the tensor arguments."""
    recipes: Mapping[str, str]
    """Defaults of the recipe arguments, and of `NAME_recipe` for the quantized arguments; empty: no default."""
    options: Mapping[str, Any]
    """Defaults of the keyword arguments."""
    choices: Mapping[str, tuple[Any, ...]]
    """All values of the keyword arguments of a `Literal` or of bool."""
    flags: tuple[str, ...]
    """The keyword arguments with choices and passed to a kernel: of the type `Flag` or `Passed`."""
    rows: str = ""
    """"independent": every row has the same bytes alone and in any batch. Empty: not declared."""
    dialects: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Named sets of values of the options with choices."""
    by_name: tuple[str, ...] = ()
    """Tensors passed by name: parameters behind the `*` with the default None. A kernel gets the tensors used by the
    steps."""

    @property
    def name(self) -> str:
        """The name in methods and records."""
        return self.function.__name__.replace("_", "-")

    @property
    def file(self) -> str:
        """The file of the function."""
        return self.function.__code__.co_filename

    @property
    def line(self) -> int:
        """The first line of the function."""
        return self.function.__code__.co_firstlineno

    @property
    def description(self) -> dict[str, Any]:
        """The arguments of the contract, as JSON values."""
        return {
            "name": self.name, "file": self.file, "line": self.line, "about": inspect.getdoc(self.function) or "",
            "parameters": list(inspect.signature(self.function).parameters),
            "tensors": {name: [kind.__name__, axes, kind.dtypes] for name, (kind, axes) in self.tensors.items()},
            "recipes": dict(self.recipes), "options": dict(self.options), "choices": dict(self.choices),
            "flags": list(self.flags), "rows": self.rows, "by_name": list(self.by_name),
            "dialects": {name: dict(fields) for name, fields in self.dialects.items()},
        }  # fmt: skip

    def usual_requests(self) -> Iterator[dict[str, Any]]:
        """Usual arguments of `trace` in a run: every dtype with every recipe, and with every choice."""
        named = [dict.fromkeys(self.recipes, str(recipe)) for recipe in recipes()] if self.recipes else [{}]
        sets = itertools.islice(itertools.product(*self.choices.values()), _MOST)
        every = [{**self.options, **dict(zip(self.choices, values, strict=True))} for values in sets]
        first = next((recipe for recipe in self.recipes.values() if recipe), "nvfp4")
        for dtype in Argument.dtypes:
            dtypes = {n: dtype if dtype in kind.dtypes else kind.dtypes[0] for n, (kind, _) in self.tensors.items()}
            passed = [(flag, value) for flag in self.flags for value in self.choices[flag]]
            for recipe, flag in itertools.product(named, [(), *passed]):
                options = {**self.options, **dict([flag] if flag else [])}
                yield {"dtypes": dtypes, "recipes": recipe, "options": options}
            for options in every:
                yield {"dtypes": dtypes, "recipes": dict.fromkeys(self.recipes, first), "options": options}

    def answer(self, request: Mapping[str, Any]) -> dict[str, str]:
        """The steps for dtypes, recipes and options as JSON, under `program`, or the reason for no steps, under
        `error`."""
        try:
            return {"program": self.trace(request["dtypes"], request["recipes"], request["options"]).to_json()}
        except ContractError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{place_of(error, self.file)}: {self.name}: {type(error).__name__}: {error}"}

    def trace(self, dtypes: Mapping[str, str], recipes: Mapping[str, str], options: Mapping[str, Any]) -> Program:
        """The steps for dtypes of tensors, names of recipes, and values of options.

        Raises ContractError, with file and line, for a function that is no contract, and TypeError for unknown
        arguments.
        """
        for wanted, known, what in ((recipes, self.recipes, "recipe"), (options, self.options, "option")):
            unknown = set(wanted) - set(known)
            if unknown:
                raise TypeError(f"{self.name} has no {what} {', '.join(sorted(unknown))}; it has {', '.join(known)}")
        chosen = {name: default for name, default in self.recipes.items() if default} | dict(recipes)
        missing = set(self.recipes) - set(chosen)
        if missing:
            raise TypeError(f"{self.name} needs {', '.join(sorted(missing))}, the name of a recipe")
        program = self._traced(dtypes, chosen, {**self.options, **options}, ())
        absent = [name for name in self.by_name if name not in program.used]
        return self._traced(dtypes, chosen, {**self.options, **options}, absent) if absent else program

    def _traced(
        self, dtypes: Mapping[str, str], recipes: Mapping[str, str], options: Mapping[str, Any], absent: Sequence[str]
    ) -> Program:
        """The steps. `absent`: tensors with the value None."""
        trace, given = Trace(self.file), dict[str, Any].fromkeys(absent)
        arguments, chosen = [], dict(recipes)
        for name, (kind, axes) in self.tensors.items():
            dtype = dtypes.get(name, "")
            if dtype not in kind.dtypes:
                raise TypeError(f"{name} of {self.name} is {' or '.join(kind.dtypes)}, not {dtype or 'absent'}")
            if issubclass(kind, Ranks):
                own = []
                for rank in range(options[RANKS]):
                    arguments.append(Tensor(rank_name(name, rank), kind.__name__, axes, dtype))
                    own.append(trace.add("argument", (), axes, dtype, name=arguments[-1].name))
                    trace.steps[-1] = replace(trace.steps[-1], line=self.line)
                given[name] = tuple(own if kind is Ranks else (quantize(one, recipes["recipe"]) for one in own))
            elif kind not in (Codes, Cache) and name not in absent:
                arguments.append(Tensor(name, kind.__name__, axes, dtype))
                given[name] = trace.add("argument", (), axes, dtype, name=name)
                trace.steps[-1] = replace(trace.steps[-1], line=self.line)
        for name, (kind, axes) in self.tensors.items():
            if kind is Codes:
                recipe = chosen.pop(f"{name}_recipe")
                arguments += tensors_of_codes(name, axes, recipe)
                given[name] = trace.add(CODES, (), axes, CODES, name=name, recipe=recipe)
                trace.steps[-1] = replace(trace.steps[-1], line=self.line)
            elif kind is Cache:
                recipe, halves = chosen["recipe"], []
                arguments += tensors_of_cache(name, axes, recipe)
                for half, columns in zip(HALVES, axes[3:], strict=True):
                    rows = "*".join(axes[:3])
                    halves.append(trace.add(HALF, (), (rows, columns), HALF, name=name, half=half, recipe=recipe))
                    trace.steps[-1] = replace(trace.steps[-1], line=self.line)
                given[name] = CachedHalves(*halves)
        result = self.function(**given, **chosen, **options)
        product = next((step for step in trace.steps if step.function == GEMM), None)
        if product is not None and SUBNORMALS in options:
            raise ContractError(f"{self.file}:{product.line}: c.gemm keeps subnormal numbers; leave {SUBNORMALS} out")
        outputs, subnormals = self._outputs(trace, result), options.get(SUBNORMALS, KEPT)
        return Program(self.name, self.file, tuple(arguments), tuple(trace.steps), outputs, subnormals)

    def _outputs(self, trace: Trace, result: Any) -> dict[str, int]:
        """Numbers of the steps with the results."""
        named = result if isinstance(result, Mapping) else {"": result}
        at = f"{self.file}:{self.line}: {self.name}"
        found = {}
        for name, value in named.items():
            if not isinstance(value, Value) or value.trace is not trace:
                raise ContractError(f"{at} returns {value!r}, which is no step; return a value, or values by name")
            default = "quantized" if value.step.recipe is not None else "output"
            found[name or default] = value.number
        if not found:
            raise ContractError(f"{at} returns nothing; return a value, or values by name")
        return found


def place_of(error: BaseException, path: str) -> str:
    """File and line of an error in the file of a user, if the error was raised in the file."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path


@overload
def contract(function: Callable[..., Any]) -> Contract: ...


@overload
def contract(
    *, rows: Rows | None = None, dialects: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[Callable[..., Any]], Contract]: ...


def contract(
    function: Callable[..., Any] | None = None,
    *,
    rows: Rows | None = None,
    dialects: Mapping[str, Mapping[str, Any]] | None = None,
) -> Contract | Callable[[Callable[..., Any]], Contract]:
    """Make a function a contract. Its text states the formula of a kernel step by step.

    `@contract(rows="independent")` also declares that a row has the same bytes alone, in any batch and in any place: a
    sum has the same order for every number of rows. Kernels then run on rows alone too.

    `dialects`: names of libraries and their values of the options with few values. A recipe takes the name behind @,
    and a backend declares the name. Options unknown to the contract are left out.

    Positional parameters have the type of a tensor (`Matrix`, `Row`, `Column`, `Scalar`, `Scale`, `Index`, `Bits`,
    `Slots`, `Pages`, `Lengths`, `Cache`) or `Recipe`, which may have a default. A keyword parameter `Scales | None` is
    a tensor, passed to a kernel by name if a step uses the tensor. The remaining keyword parameters are options with a
    default. A number, a `Flag` and a `Passed` are arguments of the kernel too; a bool and a Literal say how kernels
    differ, and are not passed. The option `subnormals: Literal["kept", "flushed"]` acts by its name: under "flushed"
    every step may flush subnormal numbers. The option `page_layout` is told to a kernel by its cache, and `ranks` by
    its group. The function returns a value, or a mapping of values by name; names are the names of the results of a
    kernel, in their order. Raises ContractError for a wrong signature.
    """
    if function is None:
        return lambda function: _with(contract(function), rows or "", dialects or {})
    at = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__name__}"
    tensors: dict[str, tuple[type[Argument], Axes]] = {}
    recipes: dict[str, str] = {}
    options: dict[str, Any] = {}
    choices: dict[str, tuple[Any, ...]] = {}
    flags: list[str] = []
    by_name: list[str] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        annotation = parameter.annotation
        axes: Axes = ()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None:
            annotation = next((kind for kind in get_args(annotation) if kind is not type(None)), annotation)
            by_name.append(name)
        if get_origin(annotation) is Annotated and get_args(annotation)[1] == _PASSED:
            flags.append(name)
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) is Annotated:
            annotation, axes = get_args(annotation)
        if parameter.kind is parameter.KEYWORD_ONLY and name not in by_name:
            if parameter.default is parameter.empty:
                raise ContractError(f"{at} has the option {name} without a default; give it one")
            options[name] = parameter.default
            values = get_args(annotation) if get_origin(annotation) is Literal else ()
            if isinstance(parameter.default, bool):
                values = (False, True)
            if name == SUBNORMALS and values != SUBNORMALS_CHOICES:
                words = ", ".join(map(repr, SUBNORMALS_CHOICES))
                raise ContractError(f"{at}: the option {name} has values of its own: Literal[{words}] = {KEPT!r}")
            if values and parameter.default not in values:
                raise ContractError(f"{at}: the default of {name} is {parameter.default!r}, none of {values}")
            if not values and type(parameter.default) not in (int, float):
                raise ContractError(
                    f"{at}: the option {name} is {parameter.default!r}; an option is a bool, a number, or one of the "
                    f"words of a Literal: {name}: Literal[{parameter.default!r}, …]"
                )
            if values:
                choices[name] = values
        elif isinstance(annotation, type) and issubclass(annotation, TYPES):
            axes = axes or annotation.own_axes
            if len(axes) != len(annotation.own_axes):
                raise ContractError(f"{at}: {name} has {len(annotation.own_axes)} axes, not ({', '.join(axes)})")
            tensors[name] = annotation, axes
            if annotation is Codes:
                recipes[f"{name}_recipe"] = "" if parameter.default is parameter.empty else str(parameter.default)
        elif annotation is Recipe:
            recipes[name] = "" if parameter.default is parameter.empty else str(parameter.default)
        elif parameter.default is not parameter.empty:
            raise ContractError(f"{at} has the option {name} before *; write *, {name}={parameter.default!r}")
        else:
            kinds = ", ".join([*(kind.__name__ for kind in TYPES), "Recipe"])
            raise ContractError(f"{at} has the parameter {name} of type {annotation!r}; a parameter is one of {kinds}")
    if any(issubclass(kind, Ranks) for kind, _ in tensors.values()) and type(options.get(RANKS)) is not int:
        raise ContractError(f"{at} takes a matrix of each rank; give it the option {RANKS}: int = 2 behind *")
    if not tensors:
        raise ContractError(f"{at} takes no tensor; give a parameter the type Matrix")
    return Contract(function, tensors, recipes, options, choices, tuple(flags), by_name=tuple(by_name))


def _with(contract: Contract, rows: str, dialects: Mapping[str, Mapping[str, Any]]) -> Contract:
    """The contract with dialects. Raises ContractError for an unknown value of an option."""
    own = {}
    for name, fields in dialects.items():
        own[name] = {option: value for option, value in fields.items() if option in contract.choices}
        for option, value in own[name].items():
            if value not in contract.choices[option]:
                raise ContractError(
                    f"{contract.file}:{contract.line}: {contract.name}: {option} is {value!r} in the dialect {name}; "
                    f"it can be {', '.join(map(repr, contract.choices[option]))}"
                )
    return replace(contract, rows=rows, dialects=own)
