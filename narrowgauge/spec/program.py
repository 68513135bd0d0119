"""A contract as data: the list of its steps. This module does not import torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from narrowgauge.spec.formats import FP32
from narrowgauge.spec.kv_cache import HALVES, part_name
from narrowgauge.spec.recipes import find_recipe

T = TypeVar("T")

Axes = tuple[str, ...]
"""Names of the sizes of a tensor; "1" is an axis of a single element, repeated along the axis of the second operand."""


QUANTIZE = "quantize"
"""The step of codes and scales, with the option `recipe`. A second operand is a given scale or, with the option
`statistics`, a matrix with the amaxes of the scales; with the option `random` the last operand has the random bits."""


DEQUANTIZE, DECODE, FACTOR, GEMM = BEHIND = ("dequantize", "decode", "factor", "gemm")
"""The steps behind a quantization: its values, its elements times the scales of their blocks, the factor of its tensor
or rows, and products of matrices."""
CODES = "codes"
"""The step of a quantized argument, and its kind of dtype. Options: `name` and `recipe`."""
PROMOTIONS = ("sum-first", "scales-first")
"""How a product multiplies the sums of blocks by their float32 scales."""
TAKE = "take"
"""The step of the rows of an argument, selected by an index."""
SEGMENTS, HEADS, SCORES, WEIGHTED, OF_TOKENS = SEQUENCES = ("segments", "heads", "scores", "weighted", "of_tokens")
"""The steps of sequences: the request of each row of a batch, or the place of the row in its request (option `part`);
the head of the tokens that each head of the rows has; the products of each row with the tokens of its request; the sums
of the tokens of its request with weights; and a number of each of these tokens and their heads. With the option `to` an
index is another one, in no contract."""
CHOSEN, ACCUMULATED, OF_EXPERT, ROWS_OF_CHOICES = ROUTED = ("chosen", "accumulated", "of_expert", "rows_of_choices")
"""The steps of mixtures of experts: the rows of a matrix by the choices of tokens, the sum over the choices of a token
with a row, the columns of the experts of the choices, and the choices of all tokens as rows."""
EXPERTS = "experts"
"""The axis of the experts; an argument with the rows experts·N has their matrices in sequence."""
LAYOUTS_OF_PARTS = ("joined", "interleaved", "interleaved-8")
"""Columns of an expert with two parts, such as gate and up: the parts in sequence, their columns by turns, or
groups of 8 columns by turns."""
ORDERS_OF_CHOICES = ("any", "choices")
"""Orders of a kernel's sum over the choices of a token: any, or from the first to the last choice."""
PLACES = "places"
"""The step of the numbers 0, 1, … along the last axis of a tensor."""
WEIGHTS, RESCALED = "weights", "rescaled"
"""Two steps of a softmax: its weights are rounded to the dtype of the second product, under any running maximum of a
kernel; its weights are rescaled if the maximum grows or splits are merged."""
WEIGHT_DTYPES = ("any", "float32", "bfloat16", "float16", "e4m3", "e5m2")
"""Dtypes of the weights of a second product. E4M3 codes are of 2⁸·p, E5M2 codes of 2⁷·p."""
TILE = 16
"""Keys of the smallest tile; the first key is a multiple of this number. A running maximum is taken over whole
tiles."""
SQUEEZED, UNSQUEEZED = "squeezed", "unsqueezed"
"""The steps that remove and add a last axis of a single element."""
COLUMNS = "columns"
"""The step of reordered columns of a tensor, with the option `order`."""
COLUMN_ORDERS = ("exchanged", "even-odd", "interleaved", "rotated", "rotated-pairs", "repeated", "repeated-pairs")
"""Orders of columns x: the halves exchanged; the even columns before the odd ones, and the inverse; for the halves (a,
b) of a row, or for a pair of neighbours, (−b, a); and every column twice, as (x, x) or in sequence."""
TRANSPOSED = "transposed"
"""The step of a matrix with rows and columns exchanged."""
JOINED = "joined"
"""The step that joins two matrices, the halves of the result, along the last axis."""
ROTATED = "rotated"
"""The step that rotates groups of the last axis, with the options `group` and `signs` of a Hadamard transform."""
HALF = "half"
"""The step of the keys or the values of a cache, with the options `name`, `half` and `recipe`, and its kind of
dtype."""
WRITTEN = "written"
"""The step of a half of a cache with rows written to the slots of an index: operands are a quantization, the half, and
the index. All further rows keep their bytes."""
READ = "read"
"""The step of the rows in the slots of an index: operands are a half of a cache, the index, and a given scale if any.
The result is a quantized matrix, with the option `recipe`."""
SLOTS = "slots"
"""The step of the slots of the tokens of all requests: operands are the page numbers per request, and lengths."""
OF_HEADS = "of_heads"
"""The step of a scale per row: from a scale per head, or from a single scale."""
RENUMBERED = "renumbered"
"""The step of wrong slots, with the option `to`, in no contract."""
INDEX = "int64"
"""Dtype of an index."""
BITS = "int32"
"""Dtype of random bits."""
INTEGERS = (INDEX, BITS)
DIVISIONS = ("quotient", "reciprocal", "approximate")
"""The forms of a division."""
ONCE = "once"
"""The step that declares a number per row, computed once by a kernel and used for the whole row."""


PAGE_LAYOUT = "page_layout"
"""The reserved option of a contract: the order in memory of a cache, told to a kernel by the cache."""
RANKS = "ranks"
"""The reserved option of a contract: the number of processes of a group with their own matrices."""
OWN_STRIPE = "own_stripe"
"""The reserved result of a contract of a group: rows reduced by the rank itself: stripe r of the result `output` on
rank r, or the only result of rank r."""
SUBNORMALS = "subnormals"
"""The reserved option of a contract: treatment of subnormal numbers of float32 in its kernels."""
KEPT, FLUSHED = SUBNORMALS_CHOICES = ("kept", "flushed")
"""Values of the option `subnormals`."""


HIDDEN, PER_ELEMENT = "hidden", "per-element"
"""The declaration of a backend with a hidden number per element in place of a number per row: no scopes are judged."""


class ContractError(ValueError):
    """A function that is no contract. The message begins with file and line."""


def request_key(request: Mapping[str, Any]) -> str:
    """Arguments of `narrowgauge.contract.Contract.trace` by name as text, the same for equal arguments."""
    return json.dumps([request[name] for name in ("dtypes", "recipes", "options")], sort_keys=True)


def rank_name(name: str, rank: int) -> str:
    """Name of a rank's matrix for an argument of a group."""
    return f"{name}.{rank}"


def stripe(rows: int, ranks: int, rank: int) -> slice:
    """The rows reduced by a rank: ⌈rows/ranks⌉ rows, in order of the ranks; the last stripes may be shorter, or
    empty."""
    height = -(-rows // ranks)
    return slice(min(rows, rank * height), min(rows, (rank + 1) * height))


@dataclass(frozen=True)
class Tensor:
    """A tensor argument of a contract."""

    name: str
    kind: str
    """Name of its type, such as Matrix."""
    axes: Axes
    dtype: str
    """float32, bfloat16 or float16; int64 of an index, int32 of random bits, uint8 of codes."""

    @property
    def of_codes(self) -> str:
        """Name of the quantized argument with this tensor as a part; else empty."""
        return self.name.partition(".")[0] if self.kind == "Codes" else ""

    @property
    def of_cache(self) -> str:
        """Name of the cache with this tensor as a part; else empty."""
        return self.name.partition(".")[0] if self.kind == "Cache" else ""


def tensors_of_codes(name: str, axes: Axes, recipe: str) -> tuple[Tensor, ...]:
    """The tensors of a quantized argument (rows, columns): `name.codes`, `name.scales`, `name.amax` and
    `name.tensor_scale` if the recipe has two levels of scales, `name.zeros` if it has zero points. A size such as K/16
    is rounded up.
    """
    rule, (rows, columns) = find_recipe(recipe), axes
    scales: Axes
    stored = rows if rule.stored_rows == 1 else f"{rows}/{rule.stored_rows}"
    scales = ("1", "1") if rule.whole else (rows, "1") if rule.spans_k else (stored, f"{columns}/{rule.block[1]}")
    parts: dict[str, tuple[Axes, str]] = {
        "codes": ((rows, f"{columns}/2" if rule.element.bits == 4 else columns), "uint8"),
        "scales": (scales, "float32" if rule.scale is FP32 else "uint8"),
    }
    if rule.scale is not FP32 and rule.tensor_scale != "none":
        of_tensor = (rows,) if rule.granularity == "row" else ("1",)
        parts |= {"amax": (of_tensor, "float32"), "tensor_scale": (of_tensor, "float32")}
    if rule.zero_points:
        parts["zeros"] = (scales, "uint8")
    return tuple(Tensor(f"{name}.{part}", "Codes", shape, dtype) for part, (shape, dtype) in parts.items())


def tensors_of_cache(name: str, axes: Axes, recipe: str) -> tuple[Tensor, ...]:
    """The tensors of a cache (pages, page, heads, columns of keys, columns of values): `name.keys` and `name.values`,
    and `name.key_scales` and `name.value_scales` if the recipe stores scales; uint8 or float32 (pages, page, heads, …).
    """
    rule, found = find_recipe(recipe), list[Tensor]()
    for half, columns in zip(HALVES, axes[3:], strict=True):
        parts = {"codes": (f"{columns}/2" if rule.element.bits == 4 else columns, "uint8")}
        if rule.tensor_scale != "given" or rule.scale is not FP32:
            scales = "1" if rule.spans_k else f"{columns}/{rule.block[1]}"
            parts["scales"] = scales, "float32" if rule.scale is FP32 else "uint8"
        found += [
            Tensor(f"{name}.{part_name(half, part)}", "Cache", (*axes[:3], last), dtype)
            for part, (last, dtype) in parts.items()
        ]
    return tuple(found)


@dataclass(frozen=True)
class Step:
    """A step of a contract."""

    function: str
    """Name of the step, such as "add"; the table is `reference.contracts.evaluate.STEPS`."""
    operands: tuple[int, ...]
    """Numbers of the steps with the operands."""
    options: Mapping[str, Any]
    axes: Axes
    dtype: str
    """Dtype of the result. A step in float32 rounds to float32 or not at all; a cast rounds in every kernel."""
    line: int
    """Line of the file."""

    @property
    def across_rows(self) -> bool:
        """Whether the step reduces the first axis: rows cannot be judged alone."""
        return self.options.get("axis") == 0

    @property
    def recipe(self) -> str | None:
        """Name of the recipe of a quantization; None of every other step."""
        return self.options.get("recipe") if self.function == QUANTIZE else None

    @property
    def is_stored(self) -> bool:
        """Whether the result is judged by its bytes: a quantization, or a cache that holds one."""
        return self.function in (QUANTIZE, WRITTEN)

    @property
    def random(self) -> int | None:
        """Number of the step with the random bits of a quantization; None of every other step."""
        return self.operands[-1] if self.options.get("random") else None


@dataclass(frozen=True)
class Program:
    """The steps of a contract for a set of dtypes and keyword arguments; operands come before their users."""

    name: str
    file: str
    arguments: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    outputs: Mapping[str, int]
    """Numbers of the steps with the results, in the order of a kernel's results."""
    subnormals: str = KEPT
    """"flushed": each step may take a subnormal operand or give a subnormal result as a zero of its sign."""
    hidden: str = ""
    """"per-element": elements of a row may have hidden numbers of their own. Empty: scopes are judged."""

    @property
    def flushes(self) -> bool:
        """Whether a kernel may flush subnormal numbers."""
        return self.subnormals == FLUSHED

    @property
    def digest(self) -> str:
        """SHA-256 of all data behind a verdict: neither the file nor the lines."""
        steps = [[step.function, step.operands, step.options, step.axes, step.dtype] for step in self.steps]
        data = [self.name, [asdict(argument) for argument in self.arguments], steps, list(self.outputs.items())]
        if self.flushes:  # a contract that keeps subnormals has the digest of earlier versions
            data.append(self.subnormals)
        if self.hidden:
            data.append(self.hidden)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def cone(self, *numbers: int) -> set[int]:
        """Numbers of the given steps, and of all steps with an influence on their results."""
        found, waiting = set[int](), list(numbers)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.steps[number].operands
        return found

    @property
    def used(self) -> set[str]:
        """Names of the arguments with an influence on the results."""
        steps = (self.steps[number] for number in self.cone(*self.outputs.values()))
        return {str(step.options["name"]) for step in steps if "name" in step.options}

    def beside(self, output: str) -> Program:
        """The program with the results that have numbers in common with an output; an index has none. A mistake in
        another result changes nothing here."""
        indexes = {number for number, step in enumerate(self.steps) if step.dtype == INDEX}
        cones = {name: self.cone(number) - indexes for name, number in self.outputs.items()}
        joined, found = cones[output], {output}
        while more := [name for name in self.outputs if name not in found and cones[name] & joined]:
            found |= set(more)
            joined = joined.union(*(cones[name] for name in more))
        return replace(self, outputs={name: n for name, n in self.outputs.items() if name in found})

    @property
    def tables(self) -> dict[str, str]:
        """The axis of the elements selected by an index, by the name of the index."""
        found = {}
        for step in self.steps:
            if step.function in (TAKE, CHOSEN, OF_EXPERT):
                table, index = (self.steps[number] for number in step.operands)
                axis = EXPERTS if step.function == OF_EXPERT else table.axes[0]
                while index.function == RENUMBERED:
                    index = self.steps[index.operands[0]]
                if index.function == "argument":
                    found[str(index.options["name"])] = axis
        return found

    def scale_of(self, step: Step, tensors: Mapping[str, T]) -> T | None:
        """The given scale of a quantization among the tensors; None of a quantization with scales of its own."""
        given = step.operands[1:] and not step.options.get("statistics") and step.random is None
        return tensors[self.steps[step.operands[1]].options["name"]] if given else None

    def sizes(self, tensors: Mapping[str, Any]) -> dict[str, int]:
        """The sizes of the axes of the arguments; of a product of axes, the sizes of its factors."""
        found = {"1": 1}
        for argument in self.arguments:
            found |= dict(zip(argument.axes, tensors[argument.name].shape, strict=True))
        for step in self.steps:
            if step.function == SLOTS:
                found[step.axes[0]] = int(tensors[self.steps[step.operands[1]].options["name"]].sum())
        for argument in self.arguments:  # codes of 4 bits, of which a row has whole bytes
            name, _, count = (
                argument.axes[-1].rpartition("/") if argument.of_cache or argument.of_codes else ("", "", "")
            )
            if count == "2":
                found.setdefault(name, 2 * found[argument.axes[-1]])
        for axis in sorted((axis for axis in found if "*" in axis), key=len):
            parts = [part for part in axis.split("*") if not part.isdecimal()]
            if len(unknown := [part for part in parts if part not in found]) == 1:
                others = math.prod(found[part] for part in parts if part in found)
                found[unknown[0]] = found[axis] // max(1, others * math.prod(map(int, re.findall(r"\b\d+\b", axis))))
        return found

    def to_json(self) -> str:
        """The program as JSON; `from_json` reads it."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        """The program of `to_json`."""
        data = json.loads(text)
        arguments = tuple(Tensor(**{**a, "axes": tuple(a["axes"])}) for a in data.pop("arguments"))
        steps = tuple(
            Step(**{**s, "operands": tuple(s["operands"]), "axes": tuple(s["axes"])}) for s in data.pop("steps")
        )
        return Program(arguments=arguments, steps=steps, **data)

    def text(self) -> str:
        """A line for each step: its number, formula, axes and dtype, and the line of the file."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        names = {number: name for name, number in self.outputs.items()}
        for number, step in enumerate(self.steps):
            operands = [f"%{operand}" for operand in step.operands]
            options = [f"{name}={value}" for name, value in step.options.items()]
            formula = f"{step.function}({', '.join(operands + options)})"
            shown = f"  shown as {names[number]}" if number in names else ""
            yield f"%{number:<3} {formula:<44} {' x '.join(step.axes):<10} {step.dtype:<9} line {step.line}{shown}"


# ---- measured errors of functions ------------------------------------------------------------------------------------

FUNCTIONS_VARIABLE = "NARROWGAUGE_FUNCTIONS"
"""Environment variable with the path of a file of `doctor --functions --save`, for all processes of a run."""


class FunctionsFileError(ValueError):
    """A file of measured errors that cannot be used."""


@dataclass(frozen=True)
class MeasuredFunctions:
    """Errors of the functions of one GPU, over all float32 arguments."""

    path: str
    about: str
    """GPU, driver and compiler."""
    ulps: Mapping[str, float]
    """Largest distance from the exact result by the name of a function, in ulps."""
    flushes: frozenset[str]
    """Functions with subnormal results that are 0."""


def use_functions(path: str | os.PathLike[str]) -> None:
    """Let contracts rest on measured errors of functions, in this process and those that it starts.

    `path`: a file of `narrowgauge doctor --functions --save`. Raises FunctionsFileError.
    """
    read_functions(os.path.abspath(path))
    os.environ[FUNCTIONS_VARIABLE] = os.path.abspath(path)


def measured_functions() -> MeasuredFunctions | None:
    """The measured errors in use. None: documented errors. Raises FunctionsFileError."""
    path = os.environ.get(FUNCTIONS_VARIABLE)
    return read_functions(path) if path else None


@lru_cache(maxsize=4)
def read_functions(path: str) -> MeasuredFunctions:
    """The measured errors in a file. Raises FunctionsFileError."""
    remedy = "write it by `narrowgauge doctor --functions --save FILE` on a GPU"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        about, rows = content["about"], {row["function"]: row for row in content["functions"]}
        ulps = {name: float(row["ulp_of_exact"]) for name, row in rows.items()}
        flushes = frozenset(name for name, row in rows.items() if row["flushed"])
        text = ", ".join(str(about[key]) for key in ("gpu", "driver", "compiler"))
    except OSError as error:
        raise FunctionsFileError(f"{path}: cannot be read: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FunctionsFileError(f"{path}: has no errors of functions: {error!r}; {remedy}") from error
    wrong = [f"{name} is off by {value} ulps" for name, value in ulps.items() if not 0 < value < 2.0**22]
    if wrong:
        raise FunctionsFileError(f"{path}: {wrong[0]}, not a finite number above 0; {remedy}")
    return MeasuredFunctions(path, text, ulps, flushes)
