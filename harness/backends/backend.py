"""Backends: the protocol, the built-in ones by name, and `package.module:Name` for everybody else's.

A backend is any object or module that has some of these methods (docs/design.md#both-sides-have-the-same-methods):

    quantize(x, recipe, *, amax=None, scale=None, random=None, swizzled=False)
        -> Quantized, or (codes, scales, amax), or a dict
    quantize_both(x, recipe, *, rowwise=True, columnwise=True, scale=None, random=None, swizzled=False)
        -> two such, or None
    quantize_grouped(x, sizes, recipe, *, columnwise=False, scale=None, random=None)
        -> GroupedQuantized, or a list of sections
    dequantize(q, dtype) -> Tensor
    transform(x, recipe) -> Tensor
    swizzle(scales) -> Tensor
    unswizzle(scales, shape) -> Tensor
    gemm(a, b, *, out_dtype, c=None, bias=None) -> Tensor
    gemm_grouped(a, b, *, out_dtype, c=None, bias=None) -> Tensor, a GroupedQuantized, b a list of Quantized
    gemm_quantized(a, b, recipe, *, out_dtype, c=None, bias=None, scale=None) -> as quantize
    update_scale(history, scale, recipe) -> (history, scale)
    pad_sections(x, sizes, recipe) -> (padded, sizes)
    unpad_sections(y, sizes, recipe) -> Tensor
    Linear(in_features, out_features, bias=True, *, dtype=torch.bfloat16, device=None, seed=0, accumulate=False,
           quantized_parameters=False, delay_wgrad=False) -> torch.nn.Module
    LayerNormLinear(in_features, out_features, bias=True, *, norm="layer", eps=1e-5, as Linear) -> torch.nn.Module
    GroupedLinear(groups, in_features, out_features, bias=True, *, as Linear) -> torch.nn.Module
    TransformerLayer(hidden, ffn, heads, *, norm="layer", eps=1e-5, bias=True, as Linear) -> torch.nn.Module

A module has the parameters and methods of those of `reference.modules`, and asks `spec.autocast.current()` for the
training recipe in its forward. It is judged by its outputs and gradients; where it calls its `observer(name, value)`
with the results on the way, as those do, each stage is judged by itself, given the module's own result of the one
before.

An option is passed only where it differs from its default, so a door may lack those that it does not have.

It raises NotImplementedError for what it does not do. It may have `variations(device)`, a dict of names to context
managers under which its results must be the same bytes; without one, an operation runs twice. Where it can choose the
order of its threads, `variations(device, shuffles=n)` has n seeded shuffles of them. It may have `check(device)`, which
raises where it cannot run at all, before any case does: a missing compiler, say. It may have `declares`, a mapping:
{"transform": "butterfly"} says that its rotation adds in the order of `reference.quantize.hadamard`, so that bytes must
be equal; without it the order is free (docs/tolerance.md#boundary). {"random": "own"} says that it rounds
stochastically by random bits that nobody else can know; `random` need only make other draws for another seed or offset,
and the codes are judged by their distribution (docs/tolerance.md#stochastic-rounding). Declarations
of the sums of products (docs/tolerance.md#gemm; `spec.summation.Summation` defines each):

    {"gemm": "sequential"}         products with their scales, in order of K, to one accumulator
    {"gemm": "blocks"}             those of a block of scales in order of K, then such blocks in order of K
    {"gemm": "tree"}               a balanced tree: 0 and 1, 2 and 3, then their sums, zeros up to a power of two
    {"gemm": "split-<n>"}          K in n equal slices of blocks, each as "blocks", then their sums in order
    {"gemm": "aligned-<F>-<W>"}    a tensor core's: W products aligned to the largest, cut off behind F bits; -<P>
                                   behind it where sums of P columns are moved to a float32 accumulator; decoded-
                                   before it where operands are decoded to bfloat16 first
    {"accumulator": "truncating"}  additions round to either neighbour, as those that truncate do
    {"subnormals": "flushed"}      float32 numbers below 2^-126 may become 0

An order narrows what is right (tier 1; to the very bits of a tensor core's); without one any order is (tier 2). The
other two widen it. Where not all products are added in one order, it may have `gemm_order(a, b)`: the order of the
product of two Quantized operands, or of two lists of them, those of the sections of a grouped product, by such a name,
None, or "truncating": any order, by an accumulator that truncates; then what it declares of "gemm" is not asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.results import (
    BackendError,
    as_quantized,
    as_sections,
    dtype_name,
    matrix_shape,
    padded_rows,
)
from narrowgauge.harness.backends.transfer import carried, tensors_in
from narrowgauge.harness.cases.schema import nearest
from narrowgauge.harness.machine.gpu_lock import turn
from narrowgauge.harness.machine.timing import spending
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.summation import ORDERS, Summation, is_order

if TYPE_CHECKING:
    import torch

    from narrowgauge.spec.arguments import Random

__all__ = ["Backend", "BackendError", "Unsupported", "check_device", "load_backend", "place"]

BUILT_IN = {"native": "narrowgauge.native.ops", "reference": "narrowgauge.reference.ops"}
DOORS = (
    "quantize", "quantize_both", "quantize_grouped", "dequantize", "transform", "swizzle", "unswizzle", "gemm",
    "gemm_grouped", "gemm_quantized", "update_scale", "pad_sections", "unpad_sections", "Linear", "LayerNormLinear",
    "GroupedLinear", "TransformerLayer",
)  # fmt: skip
TRUNCATING = "truncating"
"""An accumulator, and what `gemm_order` may say in place of an order: any, by such a one."""
DECLARATIONS = {
    "transform": ("butterfly",),
    "gemm": ORDERS,
    "accumulator": (TRUNCATING,),
    "subnormals": ("flushed",),
    "random": ("own",),
}
"""What a backend can declare, and how; a number stands for each <letter>."""


class Unsupported(Exception):
    """The backend says that it does not do this."""


class Backend:
    """One loaded backend: calls its doors and checks what comes back."""

    def __init__(self, name: str, doors: Any, schedules: int = 0, device: torch.device | None = None) -> None:
        self.name = name
        self.doors = doors
        self.device = device
        """Where it runs, wherever what it is given lies; None: there."""
        self.schedules = schedules
        """Shuffles of threads that its variations are asked for; 0: as many as it has of itself."""
        if schedules and not _takes_shuffles(getattr(doors, "variations", None)):
            raise BackendError(
                f"--schedules: backend {name} does not choose the order of its threads: it has no "
                "variations(device, shuffles)"
            )
        if not any(self.has(door) for door in DOORS):
            raise BackendError(
                f"backend {name} has none of the doors {', '.join(DOORS)}; see README, 'Your own kernel'"
            )
        self.declares = _declarations(name, getattr(doors, "declares", {}))

    def has(self, door: str) -> bool:
        """Whether the backend has this door."""
        return callable(getattr(self.doors, door, None))

    def variations(self, device: torch.device) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
        """Ways of running an operation that must all give the same bytes."""
        if callable(given := getattr(self.doors, "variations", None)):
            try:
                found = dict(given(device, **({"shuffles": self.schedules} if self.schedules else {})))
            except Exception as error:
                raise BackendError(f"variations raised {type(error).__name__}: {error}{place(error)}") from error
            if not found:
                raise BackendError("variations gave none; it names at least one way of running, or is left out")
            return found
        return {"first run": contextlib.nullcontext, "second run": contextlib.nullcontext}

    def call(self, door: str, *arguments: Any, **options: Any) -> Any:
        """What the door gives. Raises Unsupported, or BackendError with the exception's own words and place."""
        if not self.has(door):
            raise Unsupported(f"backend {self.name} has no {door}")
        function = getattr(self.doors, door)
        first = next(tensors_in((arguments, options)), None) if self.device is not None else None
        if first is None or self.device is None or first.device.type == self.device.type:
            return self.run(door, function, *arguments, **options)
        with turn(self.device.type):
            given, named = carried((arguments, options), self.device)
            result = self.run(door, function, *given, **named)
            for tensor in tensors_in(result):
                if tensor.device.type != self.device.type:
                    raise BackendError(f"{door} gave a tensor on {tensor.device}; its input is on {self.device}")
            return carried(result, first.device)

    def run(self, what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a function of the backend gives: a door, or a method of its modules. Raises as `call` does."""
        try:
            with spending("backend"):
                return function(*arguments, **options)
        except NotImplementedError as error:
            raise Unsupported(str(error) or f"{self.name}.{what} is not implemented for this case") from error
        except Exception as error:
            raise BackendError(f"{what} raised {type(error).__name__}: {error}{place(error)}") from error

    def quantize(
        self,
        x: torch.Tensor,
        recipe: Recipe,
        *,
        scale: torch.Tensor | None = None,
        random: Random | None = None,
        swizzled: bool = False,
    ) -> Quantized:
        """The door, with its result brought into a Quantized whose shapes and dtypes are right."""
        result = self.call("quantize", x, recipe, **_given(scale=scale, random=random, swizzled=swizzled))
        return as_quantized(result, x, recipe, swizzled=swizzled)

    def quantize_both(
        self,
        x: torch.Tensor,
        recipe: Recipe,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        scale: torch.Tensor | None = None,
        random: Random | tuple[torch.Tensor, torch.Tensor] | None = None,
        swizzled: bool = False,
    ) -> tuple[Quantized | None, Quantized | None]:
        """The door: both halves as Quantized, None for one that is not wanted."""
        options = _given(scale=scale, random=random, swizzled=swizzled)
        options |= {name: False for name, wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if not wanted}
        result = self.call("quantize_both", x, recipe, **options)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise BackendError(f"quantize_both gave {type(result).__name__}; it gives a rowwise and a columnwise half")
        shape = matrix_shape(x)
        found = []
        wanted = (("rowwise", rowwise, shape, recipe.rowwise), ("columnwise", columnwise, shape[::-1], recipe))
        for half, (name, asked, its_shape, its_recipe) in zip(result, wanted, strict=True):
            if (half is not None) != asked:
                raise BackendError(f"quantize_both gave {'no' if asked else 'a'} {name} half, {name}={asked}")
            described: dict[str, Any] = {"shape": its_shape, "swizzled": swizzled}
            described |= {"transposed": name == "columnwise" and recipe.columnwise == "in-place"}
            what = f"the {name} half of quantize_both"
            found.append(as_quantized(half, x, its_recipe, **described, door=what) if asked else None)
        return found[0], found[1]

    def quantize_grouped(
        self,
        x: torch.Tensor,
        sizes: torch.Tensor,
        recipe: Recipe,
        *,
        columnwise: bool = False,
        scale: torch.Tensor | None = None,
        random: tuple[int, int] | None = None,
    ) -> list[Quantized]:
        """The door, its result as the Quantized of each section: of its transpose where `columnwise`."""
        rows = sizes.tolist()  # before the call, which may change them
        options = _given(columnwise=columnwise, scale=scale, random=random)
        result = self.call("quantize_grouped", x, sizes, recipe, **options)
        return as_sections(result, x, rows, recipe, columnwise=columnwise)

    def gemm_quantized(
        self,
        a: Quantized,
        b: Quantized,
        recipe: Recipe,
        *,
        out_dtype: torch.dtype,
        c: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> Quantized:
        """The door, its result as the Quantized of the output (M, N)."""
        options = _given(c=c, bias=bias, scale=scale)
        result = self.call("gemm_quantized", a, b, recipe, out_dtype=out_dtype, **options)
        return as_quantized(result, a.codes, recipe, shape=(a.shape[0], b.shape[0]), door="gemm_quantized")

    def gemm_order(self, a: Quantized | Sequence[Quantized], b: Quantized | Sequence[Quantized]) -> str | None:
        """The order in which it adds the products of operands, or of those of all sections; None or TRUNCATING for any.

        It is asked on its own device, wherever the operands lie. Raises BackendError where it names none that there is.
        """
        if not self.has("gemm_order"):
            return self.declares.get("gemm")
        order: str | None = self.call("gemm_order", a, b)
        if order not in (None, TRUNCATING) and not is_order(order):
            names = ", ".join(map(repr, (*ORDERS, TRUNCATING)))
            raise BackendError(f"gemm_order gave {order!r}; the order of a sum is {names}, or None for any")
        return order

    def update_scale(
        self, history: torch.Tensor, scale: torch.Tensor, recipe: Recipe
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The door: the new history (H, N) and the new scales (N,), float32."""
        wanted = [(name, tuple(old.shape), old) for name, old in (("the history", history), ("the scale", scale))]
        return self._two("update_scale", wanted, history, scale, recipe)

    def pad_sections(self, x: torch.Tensor, sizes: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
        """The door: `x` (M, K) with the rows of each section up to a multiple of the recipe's, and those sizes (G,)."""
        rows = padded_rows(sizes.tolist(), recipe)  # before the call, which may change them
        wanted = [("the padded rows", (sum(rows), x.shape[1]), x), ("their sizes", (len(rows),), sizes)]
        return self._two("pad_sections", wanted, x, sizes, recipe)

    def _two(
        self, door: str, wanted: Sequence[tuple[str, tuple[int, ...], torch.Tensor]], *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a door gives that gives two tensors: their names, shapes, and tensors of the same dtype and device."""
        result = self.call(door, *arguments)
        if not isinstance(result, tuple | list) or len(result) != 2:
            names = " and ".join(name for name, _, _ in wanted)
            raise BackendError(f"{door} gave {type(result).__name__}; it gives {names}")
        one, other = (
            _checked_tensor(door, part, shape, like.dtype, like.device, name)
            for part, (name, shape, like) in zip(result, wanted, strict=True)
        )
        return one, other

    def tensor(
        self, door: str, shape: tuple[int, ...], dtype: torch.dtype, given: Any, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        """A door that takes `given`, a tensor or something quantized, and gives a tensor on its device.

        A dtype of one byte is seen as uint8 where that is wanted. Raises BackendError where the result has another
        shape, dtype or device.
        """
        import torch

        out = self.call(door, given, *arguments, **options)
        device = getattr(given, "codes", given).device
        if isinstance(out, torch.Tensor) and dtype == torch.uint8 and out.element_size() == 1:
            out = out.view(torch.uint8)
        return _checked_tensor(door, out, shape, dtype, device)


def _takes_shuffles(variations: Any) -> bool:
    return callable(variations) and "shuffles" in inspect.signature(variations).parameters


def _checked_tensor(
    door: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str = ""
) -> torch.Tensor:
    """`out`, called `name` where a door gives several. Raises BackendError where it is no such tensor."""
    import torch

    gave = f"{door} gave {name} as" if name else f"{door} gave"
    if not isinstance(out, torch.Tensor):
        raise BackendError(f"{gave} {type(out).__name__}, not a tensor")
    if tuple(out.shape) != shape or out.dtype != dtype:
        wanted = f"{dtype_name(dtype)} of shape {shape}"
        raise BackendError(f"{gave} {dtype_name(out.dtype)} of shape {tuple(out.shape)}, not {wanted}")
    if out.device != device:
        raise BackendError(f"{door} gave {name or 'its result'} on {out.device}; its input is on {device}")
    return out


def _given(**options: Any) -> dict[str, Any]:
    """The options that differ from their default, which is None or False."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _declarations(name: str, declared: Any) -> dict[str, str]:
    if not isinstance(declared, Mapping):
        raise BackendError(f"backend {name}: declares is {declared!r}; it is a mapping, {_ALLOWED}")
    for key, value in declared.items():
        if key not in DECLARATIONS:
            raise BackendError(
                f"backend {name}: declares has {key!r}{nearest(key, DECLARATIONS)}; it can say {_ALLOWED}"
            )
        if not (is_order(value) if key == "gemm" else value in DECLARATIONS[key]):
            close = nearest(value, DECLARATIONS[key])
            raise BackendError(f"backend {name}: declares {key!r} to be {value!r}{close}; it can say {_ALLOWED}")
    try:
        Summation(declared.get("gemm"), truncates="accumulator" in declared)
    except ValueError as error:
        raise BackendError(f"backend {name}: declares 'gemm' to be {declared['gemm']!r}: {error}") from None
    return dict(declared)


_ALLOWED = ", ".join(f"{{{key!r}: {' | '.join(map(repr, values))}}}" for key, values in DECLARATIONS.items())


def place(error: BaseException) -> str:
    """` (at file:line)`: the innermost place outside installed packages; nothing where there is none."""
    found = ""
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_file() and "site-packages" not in path.parts:
            found = f" (at {path.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def load_backend(spec: str, device: str = "", schedules: int = 0) -> Backend:
    """The backend called `native`, `reference`, or `package.module[:Name]`; a class is made into an object.

    Modules are found as `python -m` finds them, from the current folder too. `schedules`: how many shuffles of threads
    its `variations` has, where it is asked for a number. Raises BackendError where there is none, where its own `check`
    says that it cannot run on `device`, where one is named, or where its threads cannot be shuffled.
    """
    if spec not in BUILT_IN and ":" not in spec and "." not in spec:
        raise BackendError(
            f"no backend is called {spec!r}{nearest(spec, BUILT_IN)}; "
            f"there are {', '.join(BUILT_IN)}, and your own as package.module:Name"
        )
    module_name, _, attribute = BUILT_IN.get(spec, spec).partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise BackendError(f"backend {spec}: module {module_name} cannot be imported: {words}") from error
    if attribute:
        if not hasattr(found, attribute):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise BackendError(f"backend {spec}: module {module_name} has no {attribute!r}{nearest(attribute, names)}")
        found = getattr(found, attribute)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            raise BackendError(f"backend {spec}: {attribute}() raised {type(error).__name__}: {error}") from error
    import torch

    backend = Backend(spec, found, schedules, torch.device(device) if device else None)
    if device and callable(check := getattr(found, "check", None)):
        try:
            check(torch.device(device))
        except Exception as error:
            raise BackendError(f"backend {spec} cannot run on {device}: {error}") from error
    return backend


def check_schedules(schedules: int, device: str) -> None:
    """Raises BackendError where `schedules` shuffles of threads cannot be asked for: more than one, on a GPU."""
    if schedules < 1:
        raise BackendError(f"--schedules is {schedules}; threads are shuffled in 1 way or more")
    if schedules > 1 and device != "cpu":
        raise BackendError(
            f"--schedules chooses the order of threads on a CPU, not on {device}; there `narrowgauge sanitize --tool "
            "racecheck` looks for races"
        )


def check_device(device: str) -> None:
    """Raises BackendError where `device` is "cuda" and there is no GPU."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise BackendError("--device cuda needs a GPU, and torch sees none; `narrowgauge doctor` says more")
