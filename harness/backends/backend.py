"""Backends: the protocol, and loading by name: `native`, `reference`, or `package.module:Name`.

A backend is any object or module that has some of these methods (docs/design.md#both-sides-have-the-same-methods):

    quantize(x, recipe, *, amax=None, scale=None, random=None, swizzled=False)
        -> Quantized, or (codes, scales, amax), or a dict
    quantize_both(x, recipe, *, rowwise=True, columnwise=True, amax=None, scale=None, random=None, swizzled=False)
        -> two such, or None
    quantize_grouped(x, sizes, recipe, *, columnwise=False, amax=None, scale=None, random=None)
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

A module has the parameters and methods of its counterpart in `reference.modules`, and reads the training recipe from
`spec.autocast.current()` in its forward. Its outputs and gradients are judged. If it reports intermediate results by
calling its `observer(name, value)`, as the modules of the reference do, each stage is judged separately, given the
module's own result of the stage before.

Keyword arguments are passed only if they differ from their default, so a method may lack the arguments of features that
the backend does not have. A method raises NotImplementedError for a case it does not support.

Optional attributes of a backend:

`variations(device)`: a dict of names to context managers. The results under all of them must be the same bytes. Without
this method an operation runs twice. A backend that can choose the order of its threads takes `variations(device,
shuffles=n)` and returns n seeded shuffles.

`check(device)`: called before any case; raises if the backend cannot run at all, for example without a compiler.

`declares`: a mapping. {"transform": "butterfly"}: the rotation adds in the order of `reference.quantize.hadamard`, so
its bytes must be equal; without it the order is free (docs/tolerance.md#boundary). {"random": "own"}: stochastic
rounding uses random bits that the harness cannot know; another seed or offset in `random` must change the draws, and
the distribution of the codes is tested (docs/tolerance.md#stochastic-rounding). Declarations about GEMM sums
(docs/tolerance.md#gemm; `spec.summation.Summation` defines each):

    {"gemm": "sequential"}         products with their scales, in order of K, to one accumulator
    {"gemm": "blocks"}             products of a block of scales in order of K, then the block sums in order of K
    {"gemm": "tree"}               a balanced tree: 0 and 1, 2 and 3, then their sums, zeros up to a power of two
    {"gemm": "split-<n>"}          K in n equal slices of blocks, each as "blocks", then the slice sums in order
    {"gemm": "aligned-<F>-<W>"}    tensor core: W products aligned to the largest, truncated after F bits. Suffix -<P>:
                                   sums of P columns move to a float32 accumulator. Prefix decoded-: operands are
                                   decoded to bfloat16 first. Prefix split-<n>-: K in n equal slices, whose float32
                                   sums are added in order
    {"gemm": "probe"}              the order is found by a probe for each shape; narrows the accepted results only
    {"gemm": "probe-13"}           the same for FP8 tensor cores of Hopper, whose sums keep 13 fraction bits: a probed
                                   order "aligned-13-…" decides, also if it gives less precise results
    {"accumulator": "truncating"}  additions round to either neighbour, which covers truncation
    {"subnormals": "flushed"}      float32 numbers below 2^-126 may become 0
    {"operands": "decoded-float32"} or "decoded-bfloat16": operands are decoded, with all their scales, before they are
                                   multiplied; the sums are judged in any order

A declared order narrows the accepted results (tier 1; for a tensor core to exact bits). Without it any order is
accepted (tier 2). "accumulator" and "subnormals" widen the accepted results.

`dialects`: {"nvfp4": "torchao", "mxfp8-e4m3": ["te", "ocp"]}: for each recipe name the dialect or dialects that the
backend computes. Cases of a recipe are judged in these dialects; cases of other recipes and methods are left out.

`constraints`: {"K": 128, "dtype": ["bf16"]}: divisors of M, K and N, and allowed values of keys of cases. Cases outside
of them are left out.

`gemm_order(a, b)`: for backends that do not add all products in the same order. It returns the order of the product of
two Quantized operands, or of two lists of operands (the sections of a grouped product): a name from above, None, or
"truncating" for any order with a truncating accumulator. An order that "gemm" declares is then ignored; and so is the
declaration of "operands" if the method returns a name. With a declared probe, products without a name are probed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.host import METHODS, Host
from narrowgauge.harness.backends.loading import error_location, load_implementation
from narrowgauge.harness.backends.local_host import LocalHost
from narrowgauge.harness.backends.offer import Offer
from narrowgauge.harness.backends.results import (
    BackendError,
    Unsupported,
    as_quantized,
    as_sections,
    dtype_name,
    matrix_shape,
    padded_rows,
    type_name,
)
from narrowgauge.harness.cases.keys import nearest
from narrowgauge.harness.machine.timing import count_seconds
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.summation import OPERANDS, ORDERS, Summation, is_order

if TYPE_CHECKING:
    import torch

    from narrowgauge.harness.backends.module_driver import Plan, Step
    from narrowgauge.spec.arguments import Random

__all__ = ["METHODS", "Backend", "BackendError", "Unsupported", "check_device", "error_location", "load_backend"]

TRUNCATING = "truncating"
"""An accumulator. As a result of `gemm_order`: any order, with a truncating accumulator."""
PROBE, PROBE_13 = "probe", "probe-13"
"""Declarations of "gemm": the order is found by a probe (docs/accumulators.md#declare-the-probe)."""
DECLARATIONS = {
    "transform": ("butterfly",),
    "gemm": (*ORDERS, PROBE, PROBE_13),
    "accumulator": (TRUNCATING,),
    "subnormals": ("flushed",),
    "operands": OPERANDS,
    "random": ("own",),
}
"""Allowed declarations. A <letter> stands for a number."""


class Backend:
    """A backend, as judges use it: calls its methods by a host and checks the form of their results."""

    def __init__(self, host: Host) -> None:
        """`host` runs the methods: in this process (`LocalHost`) or in a process of its own (`RemoteHost`).

        Raises BackendError if the backend has no method, an unknown declaration, or no order of threads to shuffle.
        """
        self.host = host
        facts = host.facts
        self.name = facts.name
        self.device = host.device
        """Device of the backend. None: the device of its inputs."""
        self.repeats, self.concurrency = 0, "sequential"
        """Number and kind of the further calls of the case that is judged."""
        if host.schedules and not facts.takes_shuffles:
            raise BackendError(
                f"--schedules: backend {self.name} does not choose the order of its threads: it has no "
                "variations(device, shuffles)"
            )
        if facts.methods.isdisjoint(METHODS):
            raise BackendError(
                f"backend {self.name} has none of the methods {', '.join(METHODS)}; see docs/backends.md"
            )
        self.declares = _declarations(self.name, facts.declares)
        self.offer = Offer.checked(self.name, facts.offers, facts.methods)

    @classmethod
    def local(cls, name: str, implementation: Any, schedules: int = 0, device: torch.device | None = None) -> Backend:
        """The backend of an object of this process."""
        return cls(LocalHost(name, implementation, device, schedules))

    def has(self, method: str) -> bool:
        """Whether the backend has this method."""
        return method in self.host.facts.methods

    def variations(self, device: torch.device) -> list[str]:
        """Names of the ways of running. The results of an operation under all of them must be the same bytes."""
        return self.host.variations(device)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method. Raises Unsupported, or BackendError with the exception's message and location."""
        if not self.has(method):
            raise Unsupported(f"backend {self.name} has no {method}")
        with count_seconds("backend"):
            return self.host.call(method, *arguments, **options)

    def run_module(self, plan: Plan, given: Mapping[str, torch.Tensor]) -> list[Step]:
        """The steps of a module, as `module_driver.run` gives them. Raises as `call` does."""
        if not self.has(plan.kind):
            raise Unsupported(f"backend {self.name} has no {plan.kind}")
        with count_seconds("backend"):
            return self.host.run_module(plan, given)

    def quantize(
        self,
        x: torch.Tensor,
        recipe: Recipe,
        *,
        amax: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        random: Random | None = None,
        swizzled: bool = False,
    ) -> Quantized:
        """Result of `quantize` as a Quantized with checked shapes and dtypes."""
        options = _non_default_options(amax=amax, scale=scale, random=random, swizzled=swizzled)
        result = self.call("quantize", x, recipe, **options)
        return as_quantized(result, x, recipe, swizzled=swizzled)

    def quantize_both(
        self,
        x: torch.Tensor,
        recipe: Recipe,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        scale: torch.Tensor | None = None,
        random: Random | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        swizzled: bool = False,
    ) -> tuple[Quantized | None, Quantized | None]:
        """Results of `quantize_both`: both halves as Quantized, None for a half without a request."""
        options = _non_default_options(amax=amax, scale=scale, random=random, swizzled=swizzled)
        options |= {name: False for name, halves in (("rowwise", rowwise), ("columnwise", columnwise)) if not halves}
        result = self.call("quantize_both", x, recipe, **options)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise BackendError(f"quantize_both gave {type_name(result)}; it gives a rowwise and a columnwise half")
        shape = matrix_shape(x)
        quantized = []
        halves = (("rowwise", rowwise, shape, recipe.rowwise), ("columnwise", columnwise, shape[::-1], recipe))
        for half, (name, requested, half_shape, half_recipe) in zip(result, halves, strict=True):
            if (half is not None) != requested:
                raise BackendError(f"quantize_both gave {'no' if requested else 'a'} {name} half, {name}={requested}")
            layout: dict[str, Any] = {"shape": half_shape, "swizzled": swizzled}
            layout |= {"transposed": name == "columnwise" and recipe.columnwise == "in-place"}
            half_name = f"the {name} half of quantize_both"
            quantized.append(as_quantized(half, x, half_recipe, **layout, method=half_name) if requested else None)
        return quantized[0], quantized[1]

    def quantize_grouped(
        self,
        x: torch.Tensor,
        sizes: torch.Tensor,
        recipe: Recipe,
        *,
        columnwise: bool = False,
        amax: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        random: tuple[int, int] | None = None,
    ) -> list[Quantized]:
        """Result of `quantize_grouped`: the Quantized of each section, of the section's transpose if `columnwise`."""
        rows = sizes.tolist()  # read before the call: the kernel may change the tensor
        options = _non_default_options(columnwise=columnwise, amax=amax, scale=scale, random=random)
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
        """Result of `gemm_quantized`: the Quantized of the output (M, N)."""
        options = _non_default_options(c=c, bias=bias, scale=scale)
        result = self.call("gemm_quantized", a, b, recipe, out_dtype=out_dtype, **options)
        return as_quantized(result, a.codes, recipe, shape=(a.shape[0], b.shape[0]), method="gemm_quantized")

    def gemm_order(self, a: Quantized | Sequence[Quantized], b: Quantized | Sequence[Quantized]) -> str | None:
        """Summation order of a product, or of the products of all sections. None or TRUNCATING: any order.

        The backend is asked on its own device. Raises BackendError if it returns an unknown name.
        """
        if not self.has("gemm_order"):
            return None if self.probes_order else self.declares.get("gemm")
        order: str | None = self.call("gemm_order", a, b)
        if order not in (None, TRUNCATING) and not is_order(order):
            names = ", ".join(map(repr, (*ORDERS, TRUNCATING)))
            raise BackendError(f"gemm_order gave {order!r}; the order of a sum is {names}, or None for any")
        return order

    @property
    def probes_order(self) -> bool:
        """Whether the backend asks for a probe of the order of its products."""
        return self.declares.get("gemm") in (PROBE, PROBE_13)

    def update_scale(
        self, history: torch.Tensor, scale: torch.Tensor, recipe: Recipe
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of `update_scale`: the new history (H, N) and the new scales (N,), float32."""
        expected = [
            (name, tuple(tensor.shape), tensor) for name, tensor in (("the history", history), ("the scale", scale))
        ]
        return self._two("update_scale", expected, history, scale, recipe)

    def pad_sections(self, x: torch.Tensor, sizes: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of `pad_sections`: `x` (M, K) with sections padded to a multiple of rows, and the padded sizes
        (G,)."""
        rows = padded_rows(sizes.tolist(), recipe)  # read before the call: the kernel may change the tensor
        expected = [("the padded rows", (sum(rows), x.shape[1]), x), ("their sizes", (len(rows),), sizes)]
        return self._two("pad_sections", expected, x, sizes, recipe)

    def _two(
        self, method: str, expected: Sequence[tuple[str, tuple[int, ...], torch.Tensor]], *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors of a method. `expected`: name, shape, and a tensor of the same dtype and device, for each."""
        result = self.call(method, *arguments)
        if not isinstance(result, tuple | list) or len(result) != 2:
            names = " and ".join(name for name, _, _ in expected)
            raise BackendError(f"{method} gave {type_name(result)}; it gives {names}")
        first, second = (
            _checked_tensor(method, part, shape, like.dtype, like.device, name)
            for part, (name, shape, like) in zip(result, expected, strict=True)
        )
        return first, second

    def tensor(
        self, method: str, shape: tuple[int, ...], dtype: torch.dtype, operand: Any, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        """Result of a method that takes `operand` (a tensor or a quantized operand) and returns a tensor on its device.

        If uint8 is expected, further one-byte dtypes are viewed as uint8. Raises BackendError if the shape, dtype or
        device of the result is wrong.
        """
        import torch

        out = self.call(method, operand, *arguments, **options)
        device = getattr(operand, "codes", operand).device
        if isinstance(out, torch.Tensor) and dtype == torch.uint8 and out.element_size() == 1:
            out = out.view(torch.uint8)
        return _checked_tensor(method, out, shape, dtype, device)


def _checked_tensor(
    method: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str = ""
) -> torch.Tensor:
    """`out`, checked. `name`: its name if a method returns several tensors. Raises BackendError for a wrong tensor."""
    import torch

    subject = f"{method} gave {name} as" if name else f"{method} gave"
    if not isinstance(out, torch.Tensor):
        raise BackendError(f"{subject} {type_name(out)}, not a tensor")
    if tuple(out.shape) != shape or out.dtype != dtype:
        expected = f"{dtype_name(dtype)} of shape {shape}"
        raise BackendError(f"{subject} {dtype_name(out.dtype)} of shape {tuple(out.shape)}, not {expected}")
    if out.device != device:
        raise BackendError(f"{method} gave {name or 'its result'} on {out.device}; its input is on {device}")
    return out


def _non_default_options(**options: Any) -> dict[str, Any]:
    """Options whose value is not the default, None or False."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _declarations(name: str, declared: Any) -> dict[str, str]:
    if not isinstance(declared, Mapping):
        raise BackendError(f"backend {name}: declares is {declared!r}; it is a mapping, {_ALLOWED}")
    for key, value in declared.items():
        if key not in DECLARATIONS:
            raise BackendError(
                f"backend {name}: declares has {key!r}{nearest(key, DECLARATIONS)}; it can say {_ALLOWED}"
            )
        if not (value in DECLARATIONS[key] or (key == "gemm" and is_order(value))):
            close = nearest(value, DECLARATIONS[key])
            raise BackendError(f"backend {name}: declares {key!r} to be {value!r}{close}; it can say {_ALLOWED}")
    try:
        order = None if declared.get("gemm") in (PROBE, PROBE_13) else declared.get("gemm")
        Summation(order, truncates="accumulator" in declared, operands=declared.get("operands"))
    except ValueError as error:
        raise BackendError(f"backend {name}: declares 'gemm' to be {declared['gemm']!r}: {error}") from None
    return dict(declared)


_ALLOWED = ", ".join(f"{{{key!r}: {' | '.join(map(repr, values))}}}" for key, values in DECLARATIONS.items())


def load_backend(name: str, device: str = "", schedules: int = 0) -> Backend:
    """The backend called `name` (`load_implementation`), in this process. `schedules`: number of thread shuffles to
    request from `variations`, 0 for the default.

    Raises BackendError if the backend cannot be loaded, or if its threads cannot be shuffled.
    """
    import torch

    implementation = load_implementation(name, device)
    return Backend.local(name, implementation, schedules, torch.device(device) if device else None)


def check_schedules(schedules: int, device: str) -> None:
    """Raise BackendError if `schedules` thread shuffles cannot be requested: less than 1, or more than 1 on a GPU."""
    if schedules < 1:
        raise BackendError(f"--schedules is {schedules}; threads are shuffled in 1 way or more")
    if schedules > 1 and device != "cpu":
        raise BackendError(
            f"--schedules chooses the order of threads on a CPU, not on {device}; there `narrowgauge sanitize --tool "
            "racecheck` looks for races"
        )


def check_device(device: str) -> None:
    """Raise BackendError if `device` is "cuda" and torch sees no GPU."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise BackendError("--device cuda needs a GPU, and torch sees none; `narrowgauge doctor` says more")
