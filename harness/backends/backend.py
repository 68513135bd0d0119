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
    pack_scales(scales, layout, *, sections=None) -> Tensor
    unpack_scales(packed, shape, layout, *, sections=None) -> Tensor
    gemm(a, b, *, out_dtype, c=None, bias=None) -> Tensor
    gemm_grouped(a, b, *, out_dtype, c=None, bias=None) -> Tensor, a GroupedQuantized, b a list of Quantized
    gemm_quantized(a, b, recipe, *, out_dtype, c=None, bias=None, scale=None) -> as quantize
    update_scale(history, scale, recipe) -> (history, scale)
    pad_sections(x, sizes, recipe) -> (padded, sizes)
    unpad_sections(y, sizes, recipe) -> Tensor
    gemm_masked(a, b, masked_m, *, out_dtype, expected_m) -> Tensor, a a BatchedQuantized, b a list of Quantized
    gemm_contiguous(a, b, m_indices, *, out_dtype, grouping="contiguous", alignment=128, experts=None) -> Tensor
    permute(x, expert_ids, *, experts, alignment=1, capacity=0) -> (x, source_rows, sizes)
    Linear(in_features, out_features, bias=True, *, dtype=torch.bfloat16, device=None, seed=0, accumulate=False,
           quantized_parameters=False, delay_wgrad=False) -> torch.nn.Module
    LayerNormLinear(in_features, out_features, bias=True, *, norm="layer", eps=1e-5, as Linear) -> torch.nn.Module
    GroupedLinear(groups, in_features, out_features, bias=True, *, as Linear) -> torch.nn.Module
    MoELayer(experts, hidden, ffn, bias=True, *, as Linear) -> torch.nn.Module
    TransformerLayer(hidden, ffn, heads, *, norm="layer", eps=1e-5, bias=True, as Linear) -> torch.nn.Module

A module has the parameters and methods of its counterpart in `reference.modules`. It reads the training recipe from
`spec.modules.autocast.current()` in its forward. Its outputs and gradients are judged. If it reports intermediate
results by calling its `observer(name, value)`, as the modules of the reference do, each stage is judged separately,
given the module's own result of the stage before.

Keyword arguments are passed only if they differ from their default, so a method may lack the arguments of features that
the backend does not have. A method raises NotImplementedError for a case it does not support.

Optional attributes of a backend:

`variations(device)`: a dict of names to context managers. The results under all of them must be the same bytes. Without
this method an operation runs twice. A backend that can choose the order of its threads takes `variations(device,
shuffles=n)` and returns n seeded shuffles.

`check(device)`: called before any case; raises if the backend cannot run at all, for example without a compiler.

`warm_up(device)`: called by each kernel host when it has loaded the backend, for what the first call would take long
for: imports, compilations. Its time belongs to loading, and to no case.

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

    {"batch": "invariant"}         rows of a product and requests of attention have the same bytes in every batch: the
                                   stage `rows` runs them alone
    {"results": "reused"}          a result is valid until the next call of the same method: the backend gives the same
                                   memory again. Without it a result belongs to its caller

    {"sources": ["csrc/*.cu"]}     files of the kernel that Python does not import, relative to the module of the
                                   backend: a run is stale if one has changed (docs/gate.md)
    {"environment": ["NV_TILE"]}   environment variables on which the results depend: the same

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

from collections.abc import Collection, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.host import Host
from narrowgauge.harness.backends.loading import error_location, load_implementation
from narrowgauge.harness.backends.local_host import LocalHost
from narrowgauge.harness.backends.offer import Offer
from narrowgauge.harness.backends.results import BackendError, TensorForm, Unsupported, type_name
from narrowgauge.harness.backends.transfer import tensors_in
from narrowgauge.harness.cases.keys import nearest
from narrowgauge.harness.cases.operations import OPERATIONS, all_methods
from narrowgauge.harness.machine.timing import count_seconds

if TYPE_CHECKING:
    import torch

    from narrowgauge.harness.backends.module_driver import Plan, Step

__all__ = ["Backend", "BackendError", "Unsupported", "check_device", "error_location", "load_backend", "non_default"]


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
        self.brief = False
        """Whether judges run one variation alone and leave out figures that decide no verdict."""
        if host.schedules and not facts.takes_shuffles:
            raise BackendError(
                f"--schedules: backend {self.name} does not choose the order of its threads: it has no "
                "variations(device, shuffles)"
            )
        if facts.methods.isdisjoint(methods := all_methods()):
            raise BackendError(
                f"backend {self.name} has none of the methods {', '.join(methods)}; see docs/backends.md"
            )
        rules, self.named = _named(self.name, facts.declares)
        """The declarations `sources` and `environment`: what the results depend on beside the modules."""
        self.declares = _declarations(self.name, rules)
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

    def ranks(self, count: int) -> Backend:
        """The backend in a group of processes. Its `call` takes and gives a sequence with an entry for each rank.

        Raises Unsupported if the host has no processes, or too few GPUs for the ranks.
        """
        if (group := getattr(self.host, "ranks", None)) is None:
            raise Unsupported(
                "a collective runs in a process for each rank: use `narrowgauge run`, not a local backend"
            )
        found = copy(self)
        found.host = group(count)
        return found

    def run_module(self, plan: Plan, given: Mapping[str, torch.Tensor]) -> list[Step]:
        """The steps of a module, as `module_driver.run` gives them. Raises as `call` does."""
        if not self.has(plan.kind):
            raise Unsupported(f"backend {self.name} has no {plan.kind}")
        with count_seconds("backend"):
            return self.host.run_module(plan, given)

    def results(
        self, method: str, forms: Mapping[str, TensorForm], *arguments: Any, **options: Any
    ) -> dict[str, torch.Tensor]:
        """Tensors that a method gives, by the names of their forms, each checked. A method with one form gives the
        tensor, others a tuple or a list. Options are passed if they differ from None and False.

        Raises Unsupported, or BackendError for an exception and for a result of another form.
        """
        result = self.call(method, *arguments, **non_default(**options))
        device = next(tensors_in((arguments, options))).device
        if len(forms) == 1:
            ((name, form),) = forms.items()
            return {name: form.checked(result, method, device)}
        if not isinstance(result, tuple | list) or len(result) != len(forms):
            raise BackendError(f"{method} gave {type_name(result)}; it gives {' and '.join(forms)}")
        pairs = zip(forms.items(), result, strict=True)
        return {name: form.checked(part, method, device, name) for (name, form), part in pairs}


def non_default(**options: Any) -> dict[str, Any]:
    """Options whose value is not the default, None or False."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


NAMED = ("sources", "environment")
"""Declarations that name files and environment variables."""
MOST_NAMED = 1000
"""Largest number of names in one of them."""


def _named(name: str, declared: Any) -> tuple[Any, dict[str, list[str]]]:
    """The declarations without those in `NAMED`, and those. Raises BackendError for a value that is no list of
    names."""
    if not isinstance(declared, Mapping):
        return declared, {}
    named = {key: declared[key] for key in NAMED if key in declared}
    for key, value in named.items():
        if not isinstance(value, list | tuple) or not all(isinstance(part, str) and part for part in value):
            example = {"sources": ["csrc/*.cu", "build/*.so"], "environment": ["NV_TILE"]}[key]
            raise BackendError(f"backend {name}: declares {key!r} to be {value!r}; it is a list of names: {example}")
        if len(value) > MOST_NAMED:
            raise BackendError(
                f"backend {name}: declares {len(value)} {key}; the limit is {MOST_NAMED}, and sources may have a *"
            )
    return {key: value for key, value in declared.items() if key not in NAMED}, {k: list(v) for k, v in named.items()}


_OF_ALL_METHODS: dict[str, Collection[str]] = {"results": ("reused",)}
"""Values of declarations that hold for all methods."""


def _declarations(name: str, declared: Any) -> dict[str, str]:
    """The declarations of a backend. Raises BackendError for an unknown key or value."""
    owners = {key: cls for cls in OPERATIONS.values() for key in cls.declarations}
    values = _OF_ALL_METHODS | {key: cls.declarations[key] for key, cls in owners.items()}
    allowed = ", ".join(f"{{{key!r}: {' | '.join(map(repr, known))}}}" for key, known in values.items())
    if not isinstance(declared, Mapping):
        raise BackendError(f"backend {name}: declares is {declared!r}; it is a mapping, {allowed}")
    for key, value in declared.items():
        if key not in values:
            raise BackendError(f"backend {name}: declares has {key!r}{nearest(key, values)}; it can say {allowed}")
        if not (owners[key].may_declare(key, value) if key in owners else value in values[key]):
            close = nearest(value, values[key])
            raise BackendError(f"backend {name}: declares {key!r} to be {value!r}{close}; it can say {allowed}")
    for cls in dict.fromkeys(owners.values()):
        if problem := cls.declaration_problem(declared):
            raise BackendError(f"backend {name}: {problem}")
    return dict(declared)


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
