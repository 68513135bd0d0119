"""The case class of a contract: the parameters of its function are the keys of its cases."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from narrowgauge.harness.cases.axes import Axis, block_columns, block_rows, size_of
from narrowgauge.harness.cases.case import Case, rotation_problem, scales_problem, view_problem
from narrowgauge.harness.cases.contracts.traces import Declared, Request
from narrowgauge.harness.cases.families import MIXTURES, PRODUCTS, RANK_FAMILIES, SEQUENCES, Kind
from narrowgauge.harness.cases.keys import (
    Check,
    Dtype,
    Flag,
    Named,
    OutRecipeName,
    RecipeName,
    Shape,
    View,
    count,
    dims,
    keys_of,
    shown,
)
from narrowgauge.spec.formats import FP32, INT8
from narrowgauge.spec.kv_cache import PAGE_LAYOUTS, has_attention
from narrowgauge.spec.program import (
    CODES,
    GEMM,
    HALF,
    HIDDEN,
    PAGE_LAYOUT,
    PER_ELEMENT,
    QUANTIZE,
    RANKS,
    WRITTEN,
    ContractError,
    Program,
)
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_OPTION = "option_"
"""Beginning of the names of fields with options: an option may have the name of any attribute of a case."""
_AIMED = re.compile(r"aimed:[^/+]+:\d+", re.ASCII)
"""Inputs for a mistake, by its name and a seed."""
_OVERFLOWS = "amax-largest-first"
"""The family of overflowing products of matrices."""
_STORED = ("stored", "batch", "scales")
"""Keys of the cases of a contract with quantized matrices."""
_FEW = ("ladder", "position", "one-hot", "geometric")
"""Families of the usual cases of further shapes, beside `normal`."""
_CACHES = tuple(
    dict(zip(("tokens", "heads", "dim", "v_dim", "pages", "page", "scales", "requests", "most"), sizes, strict=True))
    for sizes in ((40, 4, 64, 64, 5, 16, 1, 7, 3), (1, 1, 128, 64, 2, 1, 1, 1, 1), (33, 3, 192, 128, 9, 8, 3, 3, 4))
)
"""Shapes of the usual cases of a cache: whole pages and a part of one, a single row, and keys wider than values."""
_SEQUENCES = tuple(
    dict(zip(("queries", "q_heads", "dim", "pages", "page", "heads", "v_dim", "requests", "most"), sizes, strict=True))
    for sizes in ((10, 8, 128, 14, 16, 2, 128, 4, 3), (1, 1, 64, 2, 1, 1, 64, 1, 1), (3, 6, 192, 9, 64, 6, 128, 3, 2))
)
"""Shapes of the usual cases of attention: decode and prefill in one batch, a single key, and decode."""
_ROUTED = tuple(
    dict(zip(("rows", "N", "tokens", "choices"), sizes, strict=True))
    for sizes in ((70, 96, 33, 2), (1, 1, 1, 1), (41, 40, 5, 8), (9, 1024, 3, 3))
)
"""Shapes of the usual cases of sums of choices: more rows than choices, one row, eight choices, long rows."""
_EXPERTS = tuple(
    dict(zip(("tokens", "K", "experts", "F", "choices"), sizes, strict=True))
    for sizes in ((12, 128, 4, 32, 2), (3, 64, 1, 32, 1), (5, 96, 3, 64, 8))
)
"""Shapes of the usual cases of mixtures of experts: several experts, one of one token, more choices than experts."""
_MOST_RANKS = 64
"""Processes of a group at most."""
_RESERVED = ("operation", "tier", "shape", "inputs", "dtype", "view", "autograd", "repeats", "concurrency", "recipe")
"""Keys of every case."""


@dataclass(frozen=True, kw_only=True)
class ContractCase(Case):
    """A contract on a family of inputs. `case_class` adds the fields of its parameters."""

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.CONTRACT,)
    smallest_first: ClassVar[bool] = False
    seconds: ClassVar[tuple[float, float]] = (20e-3, 300e-9)
    """A contract has about 20 steps, with two ends in float64 per step."""
    bytes_per_element: ClassVar[int] = 160
    """Results, their ends, and codes of both ends; the steps are evaluated in slabs of rows."""
    declared: ClassVar[Declared]
    """The arguments of the contract."""

    view: View = "contiguous"

    # ---- the contract ------------------------------------------------------------------------------------------------

    @property
    def constrained(self) -> Mapping[str, tuple[int, ...]]:
        """M, K and N of matrices; a cache has none of them."""
        return {name: (size,) for name, size in self.extents.items() if name in ("M", "K", "N")}

    @classmethod
    def may_declare(cls, key: str, value: object) -> bool:
        """Whether a backend may say this of its kernel: a dialect of the contract, or values of its fields by name."""
        if isinstance(value, str):
            return value in cls.declared.dialects
        fields = {name: cls.declared.choices[name] for name in cls.declared.fields} | {HIDDEN: (PER_ELEMENT,)}
        return isinstance(value, Mapping) and all(v in fields.get(name, ()) for name, v in value.items())

    @classmethod
    def declared_fields(cls, declared: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values of the fields by the declarations of a backend: of a dialect, or of single fields."""
        said = declared.get(cls.operation, {})
        return cls.declared.dialects[said] if isinstance(said, str) else said

    def declared_program(self, fields: Mapping[str, Any]) -> Program:
        """The steps of a kernel with these values of the fields of the contract, where the case has the defaults."""
        options, defaults = self.request.options, self.declared.options
        return self.with_fields({n: v for n, v in fields.items() if n == HIDDEN or options[n] == defaults[n]})

    def with_fields(self, fields: Mapping[str, Any]) -> Program:
        """The steps of a kernel with these values of the fields of the contract."""
        if not fields:
            return self.program
        chosen = {name: value for name, value in fields.items() if name != HIDDEN}
        program = self.declared.program(replace(self.request, options={**self.request.options, **chosen}))
        return replace(program, hidden=fields.get(HIDDEN, ""))

    @property
    def is_product(self) -> bool:
        """Whether the contract takes quantized matrices."""
        return bool(self.declared.quantized)

    @property
    def request(self) -> Request:
        """The arguments with an influence on the steps."""
        chosen, free = getattr(self, "dtype", ""), _free(self.declared)
        dtypes = {
            name: DTYPES[getattr(self, f"{name}_dtype", None) or chosen] if name in free else kinds[0]
            for name, (_, _, kinds) in self.declared.tensors.items()
        }
        options = {name: getattr(self, f"{_OPTION}{name}") for name in self.declared.options}
        for name, value in self._of_dialect.items():
            if options[name] == self.declared.options[name]:
                options[name] = value
        return Request(dtypes, {name: getattr(self, field) for name, field in _recipe_fields(self.declared)}, options)

    @property
    def _of_dialect(self) -> Mapping[str, Any]:
        """The fields of the dialect of the recipe, if the contract has the dialect."""
        dialect = find_recipe(self.recipe_names[0]).dialect if self.recipe_names else ""
        return self.declared.dialects.get(dialect, {})

    @cached_property
    def program(self) -> Program:
        """The steps of the case. Raises ContractError for a function that is no contract."""
        return self.declared.program(self.request)

    @property
    def passed(self) -> dict[str, Any]:
        """Options passed to a kernel: values different from their defaults."""
        given = {name: getattr(self, f"{_OPTION}{name}") for name in self.declared.options}
        fields = self.declared.fields
        own = (*fields, RANKS, PAGE_LAYOUT) if self.declared.caches or self.declared.of_ranks else fields
        return {name: v for name, v in given.items() if v != self.declared.options[name] and name not in own}

    @property
    def page_layout(self) -> str:
        """Name of the order in memory of a cache; "nhd" without one."""
        return str(getattr(self, f"{_OPTION}{PAGE_LAYOUT}", "nhd"))

    @property
    def ranks(self) -> int:
        """Processes of the group that calls the kernel; 1 without a group."""
        return int(getattr(self, f"{_OPTION}{RANKS}", 1)) if self.declared.of_ranks else 1

    @property
    def recipe_label(self) -> str:
        """The recipe in ids; a second one is a flag."""
        return str(getattr(self, "recipe", ""))

    @property
    def recipe_names(self) -> tuple[str, ...]:
        """The recipes in the order of the parameters."""
        return tuple(getattr(self, field) for _, field in _recipe_fields(self.declared))

    def recipe_of(self, argument: str) -> Recipe:
        """The recipe of a quantized argument."""
        return find_recipe(dict(zip(self.declared.recipes, self.recipe_names, strict=True))[f"{argument}_recipe"])

    def recipe_of_stage(self, prefix: str) -> Recipe:
        """The recipe of the quantization with this name."""
        number = self.program.outputs.get(prefix or "quantized")
        name = None if number is None else self.program.steps[number].recipe
        return find_recipe(name) if name else find_recipe("nvfp4")

    # ---- inputs ------------------------------------------------------------------------------------------------------

    @classmethod
    def family_problem(cls, name: Any) -> str | None:
        """Why a value is no input family: the families of the types, and the families printed by `narrowgauge contract
        --aim`, or None."""
        aimed = isinstance(name, str) and _AIMED.fullmatch(name)
        return None if aimed else super().family_problem(name)

    @property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """Axes of the tensors of the contract: of a quantized matrix, its codes, scales and amax."""
        if not self.declared.quantized and not self.declared.caches and not self.declared.of_ranks:
            return {name: axes for name, (_, axes, _) in self.declared.tensors.items()}
        return {argument.name: argument.axes for argument in self.program.arguments}

    @property
    def axes(self) -> Mapping[str, Axis]:
        """Axes in whole blocks of quantized steps, and in equal parts of divided steps."""
        units = self._units
        named = set(self.program.tables.values())  # an index names their elements, so that none can be left out
        if self.declared.caches or self.declared.routed:
            named = set(self.extents)
        return {
            name: Axis(extent, extent if name in named else units.get(name, 1)) for name, extent in self.extents.items()
        }

    def stages(self) -> tuple[str, ...]:
        """Names of the results that a kernel may leave out; for a named quantization, the name of its codes."""
        if self.declared.of_ranks:
            return ()
        steps = ((name, self.program.steps[number]) for name, number in self.program.outputs.items())
        shown = (name if step.recipe is None else f"{name}.codes" for name, step in steps if step.function != WRITTEN)
        return tuple(name for name in shown if name != "quantized.codes")

    def axes_of_stage(self, prefix: str) -> tuple[str, ...]:
        """Axes of a result: those of the only one, or of the one that the prefix names."""
        outputs = self.program.outputs
        number = next(iter(outputs.values())) if len(outputs) == 1 else outputs.get(prefix)
        return super().axes_of_stage(prefix) if number is None else self.program.steps[number].axes

    @property
    def _units(self) -> dict[str, int]:
        """Divisor of the size of an axis, by its name."""
        units: dict[str, int] = {}
        for step in self.program.steps:
            blocks = (1,) * len(step.axes)
            if step.function in (QUANTIZE, CODES, HALF):
                recipe = find_recipe(step.options["recipe"])
                blocks = (block_rows(recipe), block_columns(recipe))
            for axis, block in zip(step.axes, blocks, strict=True):
                name, _, divisor = axis.rpartition("*")[2].partition("/")
                units[name] = math.lcm(
                    units.get(name, 1), block * math.prod(map(int, divisor.split("/") if divisor else []))
                )
        return units

    def problem(self) -> str | None:
        """Reason if allowed values exclude one another, or if the function is no contract; else None."""
        try:
            axes = {axis for step in self.program.steps for axis in step.axes}
        except ContractError as error:
            return str(error)
        for axis in sorted(axis for axis in axes if "*" not in axis):
            name, *divisors = axis.split("/")
            parts = math.prod(map(int, divisors))
            if parts > 1 and self.extents[name] % parts:
                return f"{name} is {self.extents[name]}; the contract divides it into {parts} equal parts"
        if wrong := self._rotation_problem():
            return wrong
        if self.declared.of_ranks and not 2 <= self.ranks <= _MOST_RANKS:
            return f"{RANKS} is {self.ranks}; a group has 2 to {_MOST_RANKS} processes"
        if self.declared.caches and (wrong := self._cache_problem()):
            return wrong
        if wrong := self._inputs_problem():
            return wrong
        return view_problem(self.view, getattr(self, "dtype", ""))

    def _inputs_problem(self) -> str | None:
        """Why the recipe of the activations has no such inputs: under one scale for the whole tensor, an activation of
        many bits is rounded, and other sums give other bytes."""
        if self.declared.of_experts and self.inputs == "exact-sums":
            for name in (step.options["recipe"] for step in self.program.steps if step.function == QUANTIZE):
                recipe = find_recipe(name)
                if recipe.tensor_scale != "none" or recipe.whole:
                    return f"inputs is {self.inputs!r}, but {recipe} has a scale of the whole tensor; use 'one-hot-k'"
        return None

    def _rotation_problem(self) -> str | None:
        """Why a recipe cannot rotate the columns of a step that it quantizes."""
        for step in self.program.steps:
            if step.function == QUANTIZE:
                recipe, columns = find_recipe(step.options["recipe"]), step.axes[1]
                if wrong := rotation_problem(recipe, (), size_of(columns, self.sizes), columns):
                    return wrong
        return None

    def _cache_problem(self) -> str | None:
        """Why a cache of these sizes does not hold the tokens, or has no rows of its recipe or page layout."""
        sizes, units, held = self.sizes, self._units, self.sizes["pages"] * self.sizes["page"]
        for half in (step for step in self.program.steps if step.function == HALF):
            columns = half.axes[1]
            if sizes[columns] % units.get(columns, 1):
                recipe = half.options["recipe"]
                return f"{columns} is {sizes[columns]}; a row of {recipe} has whole blocks of {units[columns]}"
        if sizes.get("scales", 1) not in (1, sizes["heads"]):
            return f"there are {sizes['scales']} scales; a cache has 1, or {sizes['heads']}, one for each head"
        if sizes.get("tokens", 0) > held:
            return f"the cache has {held} slots, and there are {sizes['tokens']} tokens"
        parts = {a.name.partition(".")[2]: size_of(a.axes[-1], sizes) for a in self.program.arguments if a.of_cache}
        return PAGE_LAYOUTS[self.page_layout].problem(parts, sizes["page"]) or (
            self._batch_problem() if self.declared.sequences else None
        )

    def _batch_problem(self) -> str | None:
        """Why rows and tokens of these sizes do not fit together."""
        sizes, recipe = self.sizes, find_recipe(self.recipe_names[0])
        if not has_attention(recipe):
            return (
                "attention reads caches of FP8 with a given scale of the tensor or scales of tokens, MXFP8 and NVFP4, "
                f"not of {recipe}"
            )
        rows, requests, heads, most = (sizes[name] for name in ("queries", "requests", "heads", "most"))
        if not requests <= rows <= requests * most * sizes["page"]:
            return f"{requests} requests of at most {most} pages of {sizes['page']} tokens do not have {rows} queries"
        if sizes["pages"] < requests * most:
            return f"{requests} requests of {most} pages need {requests * most} pages, not {sizes['pages']}"
        return f"{sizes['q_heads']} heads of q do not share {heads} heads equally" if sizes["q_heads"] % heads else None

    # ---- cost --------------------------------------------------------------------------------------------------------

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(size_of(axis, self.sizes) for axis in axes) for axes in self.tensors.values())

    # ---- the usual cases ---------------------------------------------------------------------------------------------

    @classmethod
    def shapes_of(cls, recipe: str | None, dtype: str) -> list[tuple[int, ...]]:
        """Shapes of the usual cases: whole blocks, a single row, partial tiles of rows and columns, and many
        columns."""
        try:
            unit = cls.example(recipe, dtype)._units
        except ContractError as error:
            raise ValueError(str(error)) from error
        names = _sizes(cls.declared)
        given = _SEQUENCES if cls.declared.sequences else _CACHES if cls.declared.caches else ()
        routed = _EXPERTS if cls.declared.of_experts else _ROUTED
        if sizes_of_cases := routed if cls.declared.routed else given:
            rounded = [
                {n: -(-size // unit.get(n, 1)) * unit.get(n, 1) for n, size in sizes.items()}
                for sizes in sizes_of_cases
            ]
            return [tuple(sizes[name] for name in names) for sizes in rounded]

        def shape(rows: int, columns: int, other: int) -> tuple[int, ...]:
            wanted = {names[0]: rows, names[-1]: columns} if len(names) > 1 else {names[0]: columns}
            least = {name: -(-wanted.get(name, other) // unit.get(name, 1)) * unit.get(name, 1) for name in names}
            return tuple(least.values())

        return list(dict.fromkeys([shape(64, 256, 96), shape(1, 1, 1), shape(129, 96, 33), shape(9, 4096, 64)]))

    @classmethod
    def usual(
        cls,
        recipes: Sequence[str],
        *,
        dtypes: Sequence[str] = ("bf16",),
        families: Sequence[str] | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        keys: Mapping[str, Any] | None = None,
        views: bool = True,
        file: str = "",
    ) -> list[tuple[Case, bool]]:
        """The cases that test a kernel, and whether a right kernel may refuse the case.

        `recipes`: names, for a contract with a recipe; empty for the default of its signature. `views`: whether inputs
        are strided too. Raises ValueError for a wrong value, and for a contract whose recipe is missing.
        """
        names = cls.recipe_choices(recipes)
        every = list(cls.families() if families is None else families)
        known = {key.name: key for key in keys_of(cls)}
        values = dict(keys or {})
        for name, value in values.items():
            if name not in known or name in ("shape", "inputs"):
                raise ValueError(f"no key of {cls.operation} is called {name!r}; it has {', '.join(known)}")
            if wrong := known[name].check(value):
                raise ValueError(f"{name} {wrong}")
        fields = {known[name].field: value for name, value in values.items()}
        found: dict[Case, bool] = {}
        for recipe in names:
            for dtype in dtypes:
                main, *others = shapes or cls.shapes_of(recipe, dtype)
                few = [name for name in ("normal", *_FEW) if name in every] or every[:1]
                wanted: list[tuple[Sequence[int], str, Mapping[str, Any], bool]]
                wanted = [(main, family, {}, False) for family in every]
                wanted += [(shape, family, {}, not shapes) for shape in others for family in (every if shapes else few)]
                for name in cls.declared.flags:
                    others = [v for v in cls.declared.choices[name] if v != cls.declared.options[name]]
                    wanted += [(main, few[0], {f"{_OPTION}{name}": value}, True) for value in others]
                for view in ("strided", "transposed") if views else ():
                    wanted.append((main, few[-1], {"view": view}, True))
                # The sum of such products overflows or not by its order, so nothing would be judged.
                product = families is None and cls._has_product(recipe, dtype)
                whole = recipe is not None and find_recipe(recipe).element is INT8
                left_out = (_OVERFLOWS, *(() if whole else ("integer-edge",))) if product else ()
                wanted = [case for case in wanted if case[1] not in left_out]
                for shape, family, more, optional in wanted:
                    if wrong := known["shape"].check(list(shape)) or known["inputs"].check(family):
                        raise ValueError(wrong)
                    case = cls._made(recipe, dtype, tuple(shape), {**more, **fields, "inputs": family, "file": file})
                    wrong = case.problem()
                    if families is None and case._inputs_problem():
                        continue
                    if wrong and not any(name.startswith(_OPTION) for name in more):
                        raise ValueError(f"{case.id}: {wrong}")
                    if not wrong:  # a page layout may be for other recipes
                        found.setdefault(case, optional)
        return list(found.items())

    @classmethod
    def example(cls, recipe: str | None, dtype: str) -> ContractCase:
        """A case with the defaults of the options, of no elements."""
        return cls._made(recipe, dtype, (0,) * len(_sizes(cls.declared)), {})

    @classmethod
    def _has_product(cls, recipe: str | None, dtype: str) -> bool:
        """Whether a step is a product of matrices."""
        return any(step.function == GEMM for step in cls.example(recipe, dtype).program.steps)

    @classmethod
    def recipe_choices(cls, recipes: Sequence[str]) -> list[str | None]:
        """The recipes of the usual cases; `[None]` for a contract without a recipe. Raises ValueError."""
        default = next(iter(cls.declared.recipes.values()), None)
        if default is None:
            if recipes:
                raise ValueError(f"the contract {cls.operation} has no recipe; leave {recipes[0]!r} out")
            return [None]
        chosen = [str(find_recipe(name)) for name in recipes] or ([default] if default else [])
        if not chosen:
            parameter = next(iter(cls.declared.recipes))
            raise ValueError(
                f'the contract {cls.operation} takes a recipe, and none is given: --recipe nvfp4, recipe="nvfp4" in '
                f'Python, or a default in its signature, {parameter}: c.Recipe = "nvfp4"'
            )
        return list(chosen)

    @classmethod
    def _made(cls, recipe: str | None, dtype: str, shape: tuple[int, ...], fields: Mapping[str, Any]) -> ContractCase:
        """A case with these values, and defaults for all further keys."""
        names = cls.__dataclass_fields__
        given: dict[str, Any] = {"shape": shape, "inputs": "normal"}
        if recipe is not None:
            given |= {field: recipe for _, field in _recipe_fields(cls.declared)}
        if "dtype" in names:
            given["dtype"] = dtype
        return cls(**(given | dict(fields)))


@dataclass(frozen=True, kw_only=True)
class ProductCase(ContractCase):
    """A contract of quantized matrices: storage of the matrices, and number of products per call."""

    stored: Annotated[Literal["nt", "nn", "tn", "tt"], Flag.CHANGED] = "nt"
    """Storage of the first matrix, n: (M, K), t: (K, M); and of the others, t: (N, K), n: (K, N)."""
    batch: Annotated[int, count("products of a batch", 1 << 16), Flag.NAMED] = 0
    """Number of products of tensors with a further axis in front, each with its own scales; 0: one of matrices."""
    scales: Annotated[ScaleLayout, Flag.CHANGED] = LINEAR
    """Layout of the block scales of every operand with scales of a byte."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes by name, and B of a batch."""
        return {**super().sizes, **({"B": self.batch} if self.batch else {})}

    @property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """Axes of the tensors of every operand."""
        return {name: ("B", *axes) if self.batch else axes for name, axes in super().tensors.items()}

    @property
    def axes(self) -> Mapping[str, Axis]:
        """Axes of the matrices, and the products of a batch."""
        return {**super().axes, **({"B": Axis(self.batch)} if self.batch else {})}

    def axes_of_stage(self, prefix: str) -> tuple[str, ...]:
        """Axes of the result. A row of a batch is a row of all its results."""
        axes = super().axes_of_stage(prefix)
        return ("B*" + axes[0], *axes[1:]) if self.batch else axes

    def is_transposed(self, name: str) -> bool:
        """Whether an operand is stored as its transpose."""
        matrices = [other for other, (_, axes, _) in self.declared.tensors.items() if len(axes) == 2]
        return name in matrices and ("t" if name == matrices[0] else "n") == self.stored[name != matrices[0]]

    def layout_of(self, recipe: Recipe) -> ScaleLayout:
        """The layout of the scales of an operand."""
        return LINEAR if recipe.scale is FP32 else self.scales

    def problem(self) -> str | None:
        """Reason against this storage of the matrices, or None."""
        bytes_ = []
        for name in self.declared.quantized:
            recipe = self.recipe_of(name)
            if self.is_transposed(name) and recipe.element.bits < 8:
                return f"stored is {self.stored!r}, but two elements of a row of {recipe} share a byte; leave it out"
            if recipe.scale is not FP32:
                rows, columns = (size_of(axis, self.sizes) for axis in self.declared.tensors[name][1])
                bytes_.append(name)
                if wrong := scales_problem(self.scales, self.scales, recipe, (rows, columns)):
                    return wrong
        if self.scales != LINEAR and not bytes_:
            return f"scales is {self.scales!r}, a layout of bytes; {', '.join(self.recipe_names)} has float32 scales"
        return super().problem()


def recipes_of(
    contracts: Sequence[type[ContractCase]], recipes: Sequence[str]
) -> dict[type[ContractCase], Sequence[str]]:
    """The recipes of each contract of a file. A contract without a parameter `Recipe` has no recipe, if a contract of
    the file has the parameter."""
    takes = any(cls.declared.recipes for cls in contracts)
    return {cls: recipes if cls.declared.recipes or not takes else () for cls in contracts}


def no_recipe_note(contracts: Sequence[type[ContractCase]], recipes: Sequence[str]) -> str:
    """A sentence with the contracts to which given recipes do not apply; empty without such contracts."""
    without = [cls.operation for cls, names in recipes_of(contracts, recipes).items() if recipes and not names]
    return f"{', '.join(recipes)} does not apply to {', '.join(without)}: no recipe in the signature" if without else ""


def _free(declared: Declared) -> tuple[str, ...]:
    """The tensors with a choice of dtypes."""
    return tuple(name for name, (_, _, dtypes) in declared.tensors.items() if len(dtypes) > 1)


def _sizes(declared: Declared) -> list[str]:
    """Names of the sizes of a case, in the order of the tensors."""
    axes = [part.partition("/")[0] for _, axes, _ in declared.tensors.values() for axis in axes
            for part in axis.split("*") if not part.isdecimal()]  # fmt: skip
    return list(dict.fromkeys(axes)) or ["K"]


def _recipe_fields(declared: Declared) -> Iterator[tuple[str, str]]:
    """The recipe parameters, with the fields of the case: `recipe` is the parameter of this name, or the first recipe
    parameter."""
    main = "recipe" if "recipe" in declared.recipes else next(iter(declared.recipes), "")
    for name in declared.recipes:
        yield name, "recipe" if name == main else name


def _among(values: tuple[Any, ...]) -> Check:
    """Check that a value is a word or number of an option."""

    def check(value: Any) -> str | None:
        right = not isinstance(value, bool) and value in values
        return None if right else f"is {shown(value)}; it can be {', '.join(map(str, values))}"

    return check


def _families(declared: Declared) -> dict[str, Any]:
    """The kinds of inputs of a contract, its own families, and whether its cases are judged on a CPU."""
    if declared.of_ranks:  # the processes copy their tensors from and to a CPU
        return {"own_families": RANK_FAMILIES, "small": sys.maxsize}
    if declared.sequences:
        return {"kinds": (), "own_families": SEQUENCES}
    if declared.of_experts:
        return {"kinds": (), "own_families": MIXTURES}
    return {"own_families": PRODUCTS if declared.quantized else ()}


def case_class(declared: Declared) -> type[ContractCase]:
    """The case class of a contract. Raises ContractError for a parameter with the name of an existing key."""
    at = f"{declared.file}:{declared.line}: {declared.name}"
    sizes = _sizes(declared)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter, field in sorted(_recipe_fields(declared), key=lambda pair: pair[1] != "recipe"):
        further: Any = OutRecipeName if len(declared.recipes) == 2 else Annotated[RecipeName, Flag.NAMED]
        kind: Any = RecipeName if field == "recipe" else further
        default = declared.recipes[parameter]
        fields.append((field, kind, default) if field != "recipe" and default else (field, kind))
    fields.append(("shape", Annotated[Shape, dims(f"[{', '.join(sizes)}]", len(sizes), len(sizes))]))
    free = _free(declared)
    if free:
        fields.append(("dtype", Dtype))
    for name in free[1:]:
        fields.append((f"{name}_dtype", Annotated[Dtype | None, Flag.NAMED], None))
    for name, default in declared.options.items():
        values = declared.choices.get(name, ())
        checks = () if isinstance(default, bool) or not values else (_among(values),)
        flag = Flag.CHANGED if isinstance(default, bool) else Flag.NAMED
        fields.append((f"{_OPTION}{name}", Annotated[type(default), *checks, Named(name), flag], default))
    taken = {*(_RESERVED if free else set(_RESERVED) - {"dtype"}), HIDDEN, *(f"{name}_dtype" for name in free[1:])}
    taken |= {*_STORED} if declared.quantized else set()
    for name in [*declared.options, *(field for _, field in _recipe_fields(declared) if field != "recipe")]:
        if name in taken:
            raise ContractError(f"{at}: the parameter {name} has the name of a key of every case; give it another name")
    texts = tuple(declared.dialects)
    texts += tuple(f"{{{name!r}: {' or '.join(map(repr, declared.choices[name]))}}}" for name in declared.fields)
    namespace = {
        "operation": declared.name, "declared": declared, "__doc__": declared.about, "__module__": __name__,
        **_families(declared),
        "declarations": {declared.name: (*texts, f"{{{HIDDEN!r}: {PER_ELEMENT!r}}}")},
    }  # fmt: skip
    name = "".join(part.capitalize() for part in declared.name.split("-")) + "Case"
    return dataclasses.make_dataclass(
        name, fields, bases=(ProductCase if declared.quantized else ContractCase,), namespace=namespace, frozen=True,
        kw_only=True,
    )  # fmt: skip
