"""The base class of all cases: fields and labels of every operation, the id, selection by tier and keyword.

The class of an operation declares further fields, and answers every question that needs no tensor: input families, work
and memory, tensors with their axes, methods of a backend, stages. Case classes import no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

from narrowgauge.harness.cases.axes import Axis, Tensors, block_columns, block_rows
from narrowgauge.harness.cases.families import EXACT_SUMS, Family, Kind, families_for
from narrowgauge.harness.cases.keys import (
    Autograd,
    Concurrency,
    Repeats,
    Shape,
    Tier,
    flags_of,
    keys_of,
    one_of,
    sizes_of,
)
from narrowgauge.harness.cases.methods import Method
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import scales_shape
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, ScaleLayout

SECTION = 1 << 12
"""Work of an additional section, in elements: measured, 1.6 ms compared with 0.4 µs an element."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A point of the matrix. The classes of the operations declare the other fields."""

    operation: ClassVar[str]
    """Name of the operation in case files and ids."""
    kinds: ClassVar[tuple[Kind, ...]] = ()
    """Kinds of inputs: the operation takes the shared input families of these kinds."""
    smallest_first: ClassVar[bool] = True
    """Whether the smallest case of several tells its cause best."""
    own_families: ClassVar[tuple[Family, ...]] = ()
    """Input families of this operation, behind the shared ones."""
    methods: ClassVar[Mapping[str, Method]] = {}
    """Methods of a backend that the operation calls, the first always. Empty: one with the name of the operation, `_`
    for `-`."""
    descriptions: ClassVar[tuple[str, ...]] = ()
    """Optional methods of a backend that describe the backend and compute no result."""
    declarations: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Keys and values of the attribute `declares` of a backend. A <letter> in a value stands for a number."""
    seconds: ClassVar[tuple[float, float]] = (10e-3, 200e-9)
    """Seconds of a core for a case, and for each element of its work: fitted to the quick tier on one core of a CPU.
    Shards divide by their ratios: the slowest of 16 shards takes 7 % longer than the mean, 0 % by recorded times. The
    number of workers at the start of a run follows from their sum."""
    bytes_per_element: ClassVar[int] = 110
    """Peak memory in bytes for each element of the inputs (`memory`)."""
    small: ClassVar[int] = 1 << 24
    """Work, in elements, below which a case for a GPU is judged on the CPU (`harness.cases.cost.home_of`)."""
    autograd_modes: ClassVar[tuple[Autograd, ...]] = ("plain", "no-grad", "inference-mode", "requires-grad")
    """Values of the key `autograd`. An operation with one value does not have the key."""
    composed: ClassVar[bool] = False
    """Whether the operation is composed of others: the case launches their kernels and measures a part of their
    figures."""

    shape: Shape
    """The sizes that the class of the operation names."""
    inputs: str
    """Input family, or `file:tensor` for a captured tensor."""
    autograd: Autograd = "plain"
    """How methods are called: under `torch.no_grad()`, under `torch.inference_mode()`, with tensors that require
    grad."""
    repeats: Repeats = 0
    """Number of further calls on the same inputs, with the bytes of the first call."""
    concurrency: Concurrency = "sequential"
    """How further calls run: in sequence, from two threads or on two CUDA streams at once, in a CUDA graph."""
    tier: Tier = "quick"
    """Tier of its table. `tier_on` is the tier of a run."""
    file: str = ""
    """Path of the case file."""

    @cached_property
    def id(self) -> str:
        """operation/recipe/shape/dtype/inputs/flags without empty parts; the flags are joined by `+`.

        The id is stable: reports and baselines name the case by its id, and the id seeds the inputs.
        """
        parts = [self.operation, self.recipe_label, self.shape_label, self.dtype_label, self.inputs]
        return "/".join(part for part in [*parts, "+".join(self.flags)] if part)

    @property
    def __name__(self) -> str:
        """The id, which pytest takes as the id of a parameter (`narrowgauge.matrix`)."""
        return self.id

    @property
    def recipe_label(self) -> str:
        """The recipe in ids and records: `x+w` if two operands have different recipes; empty without a recipe."""
        return "+".join(dict.fromkeys(self.recipe_names))

    @property
    def dtype_label(self) -> str:
        """The dtypes in ids and records: `bf16`, `bf16xfp32-bf16` of a GEMM; empty without a dtype."""
        return str(getattr(self, "dtype", ""))

    @property
    def shape_label(self) -> str:
        """The shape in ids and records: `128x256`."""
        return "x".join(map(str, self.shape))

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the id: layout, sections and the like, and options that differ from their defaults."""
        return flags_of(type(self), vars(self))

    def labels(self) -> dict[str, Any]:
        """The case in a saved failure; `harness.cases.operations.case_from_labels` is the inverse."""
        return {
            "operation": self.operation, "recipe": self.recipe_label, "shape": self.shape, "dtype": self.dtype_label,
            "inputs": self.inputs, "flags": self.flags, "tier": self.tier, "file": self.file,
        }  # fmt: skip

    @property
    def recipe_names(self) -> tuple[str, ...]:
        """Recipes of the operands by name, or the training recipe of a module; empty without a recipe."""
        return tuple(filter(None, [getattr(self, "recipe", "")]))

    @property
    def section_sizes(self) -> tuple[int, ...]:
        """Rows of the sections of a grouped operation; empty for operations without sections."""
        return ()

    def tier_on(self, device: str) -> str:
        """`quick` or `full`: the tier of the case in a run on a device. `quick-cuda` is quick on a GPU alone."""
        quick = ("quick", "quick-cuda") if device == "cuda" else ("quick",)
        return "quick" if self.tier in quick else "full"

    def problem(self) -> str | None:
        """Why allowed values of different keys exclude one another; None for a valid case."""
        return None

    # ---- inputs ------------------------------------------------------------------------------------------------------

    @classmethod
    def families(cls) -> Mapping[str, Family]:
        """Input families of the operation by name."""
        return families_for(cls.kinds, cls.own_families)

    @property
    def is_product(self) -> bool:
        """Whether the operation is a product of matrices."""
        return Kind.MULTIPLIED in self.kinds

    @property
    def has_exact_sums(self) -> bool:
        """Whether a product's sums are exact in any order: docs/tolerance.md#exact-sums."""
        short = self.recipe_label.startswith("nvfp4") and self.extents.get("K", 0) <= 2048
        return self.inputs in EXACT_SUMS or short

    @classmethod
    def family_problem(cls, name: Any) -> str | None:
        """Why a value of the key `inputs` is no input family, or None."""
        return one_of(cls.families())(name)

    @classmethod
    def of_matrix(cls, recipe: Recipe, shape: tuple[int, int], dtype: Any, inputs: str, file: str) -> Iterable[Self]:
        """Cases whose input is a captured matrix. They may have a `problem`. By default no cases."""
        return ()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Recipes of all tensors that are quantized."""
        return tuple(map(find_recipe, self.recipe_names))

    @property
    def extents(self) -> Mapping[str, int]:
        """Sizes by the names of the shape. Leading sizes of a longer shape are the rows of a matrix."""
        names = sizes_of(type(self))
        extra = len(self.shape) - len(names)
        first = math.prod(self.shape[: extra + 1])
        return dict(zip(names, (first, *self.shape[extra + 1 :]), strict=True))

    @property
    def sizes(self) -> Mapping[str, int]:
        """`extents`, and G, the number of sections."""
        return {**self.extents, "G": len(self.section_sizes)}

    @property
    def tensors(self) -> Tensors:
        """Axes of the input tensors by name (`harness.cases.axes`). Tensors that are not part of every case may be
        named too."""
        return {}

    @property
    def axes(self) -> Mapping[str, Axis]:
        """Axes along which the inputs of a failing case are cropped. The order is that of the search.

        By default every named axis of the tensors, M and K in whole blocks of the recipes. Empty: no part of the inputs
        is a case of the operation.
        """
        named = {name for axes in self.tensors.values() for name in axes}
        units = {"M": math.lcm(*map(block_rows, self.recipes)), "K": math.lcm(*map(block_columns, self.recipes))}
        return {
            name: Axis(extent, units.get(name, 1)) for name, extent in self.extents.items() if name in named
        }  # fmt: skip

    def axes_of_stage(self, prefix: str) -> tuple[str, ...]:
        """Axes of the tensors that a stage with this prefix judges: rows and columns of its findings."""
        return self.tensors.get(prefix) or next(iter(self.tensors.values()), ())

    def recipe_of_stage(self, prefix: str) -> Recipe:
        """The recipe of the tensor that stages with this prefix judge."""
        return self.recipes[0]

    # ---- cost --------------------------------------------------------------------------------------------------------

    @property
    def elements(self) -> int:
        """Elements of the matrices of the inputs."""
        return math.prod(self.shape)

    @property
    def work(self) -> int:
        """Work to run and judge the case, in elements."""
        return self.elements + SECTION * len(self.section_sizes)

    @property
    def memory(self) -> int:
        """Peak memory in bytes: inputs, results of all runs, reference, and tensors of the checks.

        `bytes_per_element` is the largest of the recipes, dtypes and flags measured on either device, plus a tenth: on
        a CPU the resident set of a process, on an H200 the memory allocated by torch, `bytes_peak` of each record.
        """
        return self.bytes_per_element * self.elements

    @property
    def preloaded(self) -> tuple[str, ...]:
        """Modules imported by kernel hosts before the fork, because the case needs slowly loading modules."""
        return ()

    @property
    def chance(self) -> bool:
        """Whether a correct backend can fail the case by chance: a recipe rotates or rounds stochastically."""
        return any(recipe.transform is not None or recipe.rounding == "stochastic" for recipe in self.recipes)

    # ---- backends ----------------------------------------------------------------------------------------------------

    @classmethod
    def all_methods(cls) -> Mapping[str, Method]:
        """`methods`, or the default."""
        return cls.methods or {cls.operation.replace("-", "_"): Method()}

    @property
    def constrained(self) -> Mapping[str, tuple[int, ...]]:
        """Sizes that the constraints of a backend on M, K and N hold for."""
        if {"M", "K"} <= self.extents.keys():
            return {name: (size,) for name, size in self.extents.items() if name in ("M", "K", "N")}
        return {"M": (math.prod(self.shape[:-1]),), "K": (self.shape[-1],)}

    @classmethod
    def may_declare(cls, key: str, value: object) -> bool:
        """Whether a backend may declare this value of a key of `declarations`."""
        return value in cls.declarations[key]

    @classmethod
    def declaration_problem(cls, declared: Mapping[str, Any]) -> str | None:
        """Why the declarations of a backend, each allowed, exclude one another; None if they do not."""
        return None

    @property
    def native_sources(self) -> frozenset[str]:
        """Sources of the kernels that the native backend launches for the case; possibly one source too many."""
        return frozenset()

    # ---- a function under `narrowgauge.check` ------------------------------------------------------------------------

    @property
    def called(self) -> str:
        """The method of a backend that the function stands for."""
        return next(iter(self.all_methods()))

    @classmethod
    def usual_shapes(cls, recipe: Recipe) -> list[tuple[int, ...]]:
        """Shapes of the cases of a recipe: a matrix of some tiles, then shapes with tails. Raises ValueError if the
        operation has none."""
        if len(names := sizes_of(cls)) != 2:
            sizes = ", ".join(names)
            raise ValueError(
                f"a {cls.operation} has a shape [{sizes}]; give shapes, such as shapes={[[128] * len(names)]}"
            )
        height, width = usual_block(recipe)
        return [(max(128, 2 * height), max(256, 2 * width)), (1, width), (129, uneven(width))]

    @classmethod
    def usual_keys(cls, recipe: Recipe, dtype: str) -> dict[str, Any]:
        """Keys of the cases beside recipe, shape and inputs. `dtype`: of x, of a product that of the output."""
        return {"dtype": dtype} if any(key.name == "dtype" for key in keys_of(cls)) else {}

    @classmethod
    def usual_options(cls, parameters: Collection[str]) -> list[tuple[dict[str, Any], bool]]:
        """Further keys for cases of the first shape, and whether a right kernel may refuse the case.

        `parameters`: names of the parameters of the function.
        """
        views = ("strided", "transposed") if any(key.name == "view" for key in keys_of(cls)) else ()
        return [({"view": view}, True) for view in views]

    @classmethod
    def may_refuse(cls, shape: Sequence[int], recipe: Recipe) -> bool:
        """Whether a right kernel may refuse a shape."""
        height, width = (1, 1) if recipe.spans_k else recipe.block
        return len(shape) != 2 or bool(shape[0] % height or shape[1] % width)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def stages(self) -> tuple[str, ...]:
        """Stages that a kernel can report, in order. A stage that is missing in a record was not observed."""
        return self.stage_names()

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        """Every stage in records of the operation. Empty if the stages depend on the results of a case."""
        return ()


def usual_block(recipe: Recipe) -> tuple[int, int]:
    """Rows and columns of which `usual_shapes` are multiples: of a block, or of a rotated group."""
    height, width = (1, 32) if recipe.spans_k else recipe.block
    return height, max(width, recipe.transform.group if recipe.transform else 1)


def uneven(width: int) -> int:
    """The least multiple of `width` above 128 that is no multiple of 64, or three times `width`: a row of whole blocks
    that ends in the middle of a vector or a tile."""
    return next((size for size in range(width, 256, width) if size > 128 and size % 64), 3 * width)


def rotation_problem(recipe: Recipe, dtypes: Iterable[str], extent: int, axis: str) -> str | None:
    """Why a recipe cannot rotate operands of these dtypes along an axis of `extent` elements, or None."""
    if recipe.transform is None:
        return None
    if wrong := [dtype for dtype in dtypes if dtype != "bf16"]:
        return f"recipe {recipe} rotates bf16 alone, not {wrong[0]}"
    group = recipe.transform.group
    if extent % group:
        return f"recipe {recipe} rotates whole groups of {group}; {axis} = {extent} is no multiple of it"
    return None


def view_problem(view: str, *dtypes: str) -> str | None:
    """Why a tensor of these dtypes cannot begin as many bytes past an aligned address as a view says, or None."""
    kind, _, offset = view.partition("-")
    if kind == "offset" and int(offset) % 4 and "fp32" in dtypes:
        return f"view is {view!r}, but the elements of fp32 have 4 bytes; it can be offset-4 or offset-8"
    return None


def scales_problem(name: str, layout: ScaleLayout, recipe: Recipe, shape: tuple[int, int]) -> str | None:
    """Why the scales of a matrix of this shape do not have a layout, which the key `scales` calls `name`, or None."""
    if layout == LINEAR:
        return None
    row = LAYOUTS[layout]
    if recipe.scale is FP32:
        return f"scales is {name!r}, but recipe {recipe} has float32 scales; the {layout} layout is of bytes"
    if row.by_group or row.scale not in ("", recipe.scale.name):
        of = "scales of groups by output columns, which pack-scales packs" if row.by_group else f"{row.scale} scales"
        return f"scales is {name!r}, a layout of {of}; recipe {recipe} has rows of {recipe.scale.name} scales"
    problem = row.problem(scales_shape(shape, recipe))
    return problem and f"scales is {name!r}: {problem}; the scales of {recipe} have shape {scales_shape(shape, recipe)}"


_IN_WORDS = str.maketrans({"@": "\u16a0", ",": "\u16a2"})
"""Characters of ids that end a word of a keyword expression, and the letters that stand for them while an expression
is read: `nvfp4@modelopt` and `rows:64,32` are words."""


_WORD = re.compile(r"[\w/:+.@,-]+")
"""An expression of a single word, for example an id."""


class _Matcher:
    """Tells the evaluator of a keyword expression whether an id contains a word."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, word: str, /, **_: object) -> bool:
        return word.lower() in self.text


def matching(keyword: str) -> Callable[[str], bool]:
    """A function from a name to whether a pytest keyword expression matches. The empty expression matches all names.
    `@` and `,` are characters of words: an id is a word.

    Raises ValueError if the expression cannot be read.
    """
    if not keyword:
        return lambda name: True
    if _WORD.fullmatch(keyword) and keyword not in ("and", "or", "not"):  # without the import of pytest
        return lambda name: keyword.lower() in name.lower()
    from _pytest.mark.expression import Expression

    try:
        expression = Expression.compile(keyword.translate(_IN_WORDS))
    except Exception as error:  # pytest's own ParseError before release 9, SyntaxError since
        raise ValueError(f"cannot read the keyword expression {keyword!r}: {error}") from error
    return lambda name: expression.evaluate(_Matcher(name.lower().translate(_IN_WORDS)))


def select(cases: Iterable[Case], *, tier: str = "full", keyword: str = "", device: str = "cpu") -> list[Case]:
    """The cases of a tier on a device (`full` contains all cases) whose ids a pytest keyword expression matches.

    Raises ValueError if the expression cannot be read.
    """
    matches = matching(keyword)
    return [case for case in cases if tier in ("full", case.tier_on(device)) and matches(case.id)]
