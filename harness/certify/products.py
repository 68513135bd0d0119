"""The proof of a GEMM: products of two codes under two scales, at every place of K, and sums of random products.

All codes of a row of the first operand are 0 but for a single code. An output is then a single product, and no order of
summation rounds the output.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.backends.results import TensorForm
from narrowgauge.harness.certify.certificate import Certificate, CertificateError, Trial
from narrowgauge.harness.certify.inputs.space import Numbers, Outer
from narrowgauge.harness.certify.proof import WrongSet, shown_code, shown_number
from narrowgauge.harness.certify.wrong import Feature, find_rule
from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.checks.order.probe import accumulation_order
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import generate
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.gemm.probed_gemm import operand_dtype, product_of
from narrowgauge.harness.operations.gemm.product import order_of
from narrowgauge.harness.report.text import number, share
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import ANY_ORDER, Bounds, bounds
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.layout import pack_codes
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized, amax_shape
from narrowgauge.spec.recipes import Recipe

COLUMNS = 128
"""K of the products: at least that of a matrix instruction."""
_EVERY = 1 << 12
"""Rows up to which an operand has every code under every scale."""
_FEW = 4
"""Scales of every code, and codes of every scale, of an operand with more rows."""
_ROWS = 128
"""The rows of an operand are a multiple of this number: some kernels require it."""
_SUMS = ("normal", "outliers", "lattice", "cancelling", "rounding", "positive")
"""Families of the random products."""
_SHAPE = (256, 1024, 256)
_PROBED = (64, 512, 64)
"""(M, K, N) of the random products, and of the probed order."""


@dataclass
class Products:
    """Result of the proof."""

    rows: int = 0
    """Pairs of a code and a scale of an operand."""
    complete: bool = True
    """Whether an operand has every code under every scale."""
    places: int = 0
    outputs: int = 0
    wrong: list[WrongSet] = field(default_factory=list)


@dataclass(frozen=True)
class Side:
    """An operand of all pairs of a code and a scale, a row for each."""

    recipe: Recipe
    codes: torch.Tensor
    """uint8 (n,)."""
    scales: torch.Tensor
    """uint8 (n,)."""

    def at(self, place: int, *, alone: bool) -> Quantized:
        """The operand with the codes at a column. Other columns have 0 if the code is `alone`, else the finite codes of
        other rows; other blocks have the scales of the next row."""
        recipe, rows = self.recipe, len(self.codes)
        column = torch.arange(COLUMNS, device=self.codes.device)
        finite = decode(self.codes, recipe.element).isfinite()
        others = torch.where(finite, self.codes, recipe.element.max_code)
        shifted = (torch.arange(rows, device=self.codes.device).view(-1, 1) + column) % rows
        codes = torch.zeros_like(others[shifted]) if alone else others[shifted]
        codes[:, place] = self.codes
        scales = self.scales.roll(-1).view(-1, 1).repeat(1, COLUMNS // recipe.block[1])
        scales[:, place // recipe.block[1]] = self.scales
        shape, amax, factor = (rows, COLUMNS), None, None
        if recipe.tensor_scale != "none":  # a tensor scale of 1
            amax = torch.full(amax_shape(shape, recipe), recipe.max_product, device=codes.device)
            factor = torch.ones_like(amax)
        return Quantized(pack_codes(codes, recipe), scales.contiguous(), amax, recipe, shape, factor)


def side_of(recipe: Recipe, device: str, seed: int) -> Side:
    """Every code under every scale if these are few; else every code under `_FEW` scales, and `_FEW` codes under every
    scale. NaN of a scale is left out."""
    codes = torch.arange(recipe.element.codes)
    scales = torch.arange(recipe.scale.max_code + 1)
    if len(codes) * len(scales) > _EVERY:
        generator = torch.Generator().manual_seed(seed)
        middle = (recipe.scale.max_code + 1) // 2
        few = torch.cat([torch.tensor([middle, 0]), torch.randint(0, len(scales), (_FEW - 2,), generator=generator)])
        drawn = torch.randint(1, recipe.element.max_code, (_FEW - 2,), generator=generator)
        some = torch.cat([torch.tensor([1, recipe.element.max_code]), drawn])
        pairs = torch.cat([torch.cartesian_prod(codes, few), torch.cartesian_prod(some, scales)])
    else:
        pairs = torch.cartesian_prod(codes, scales)
    pairs = pairs[torch.arange(-(-len(pairs) // _ROWS) * _ROWS) % len(pairs)].to(torch.uint8).to(device)
    return Side(recipe, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


def certificate_of_products(
    backend: Backend, subject: str, recipe: Recipe, device: str, places: int, seed: int
) -> Certificate:
    """The certificate of the `gemm` of a backend, without the digests of its sources. `places`: columns of K with
    products. Raises CertificateError for a recipe without a proof, and if the kernel fails on an input."""
    if recipe.scale is FP32 or recipe.zero_points or recipe.block[0] > 1 or recipe.granularity == "row":
        raise CertificateError(
            f"recipe {recipe} has no proof of products: it needs scales of 8 bits for blocks of a row"
        )
    begun = time.monotonic()
    try:
        side = side_of(recipe, device, seed)
        proof = prove_products(backend, side, places)
        sums = list(_sums(backend, recipe, device, seed))
        order = _order(backend, recipe, device, seed)
    except (BackendError, Unsupported, HostLost) as error:
        raise CertificateError(f"{subject}, {recipe}: fails on an input of the proof: {escape(str(error))}") from error
    table = "every pair of a code and a scale times every other" if proof.complete else (
        f"every pair of two codes under {_FEW} scales of both, every pair of two scales under {_FEW} codes of both"
    )  # fmt: skip
    line = f"products: {table}: {number(proof.outputs)} outputs"
    where = f"places of a product in K: {proof.places} of {COLUMNS}"
    proved, sampled = [line], [order, *(text for text, _ in sums)]
    (proved if proof.places == COLUMNS else sampled).append(where)
    trials = [trial for _, trial in sums]
    outputs = sum(trial.blocks for trial in trials)
    assumption = (
        "Assumption: a product depends on its two codes and their scales alone, not on rows, columns, neighbours, "
        f"shapes or earlier calls, and a sum on its products alone. Tried on {number(outputs)} sums."
    )
    outside = ["larger K and other shapes, tensor scales other than 1, c, bias, other output dtypes, layouts and views"]
    return Certificate(
        subject, str(recipe), "float32", device, assumption, trials, proved, sampled, outside, proof.wrong, {},
        seconds=time.monotonic() - begun, seed=seed,
    )  # fmt: skip


def prove_products(backend: Backend, side: Side, places: int) -> Products:
    """Judge the products at columns spread over K. Stops behind the first column with a wrong product."""
    proof = Products(len(side.codes), side.recipe.element.codes * (side.recipe.scale.max_code + 1) <= _EVERY)
    for place in sorted({n * COLUMNS // min(places, COLUMNS) for n in range(min(places, COLUMNS))}):
        a, b = side.at(place, alone=True), side.at(place, alone=False)
        output, right, limits = _judged(backend, a, b)
        proof.places += 1
        proof.outputs += output.numel()
        if not bool(right.all()):
            proof.wrong.append(_wrong_set(side, place, output, limits.expected, ~right))
            break
    return proof


def _judged(backend: Backend, a: Quantized, b: Quantized) -> tuple[torch.Tensor, torch.Tensor, Bounds]:
    """Output of the kernel, float32 (M, N), mask of the right outputs, and their bounds."""
    form = {"output": TensorForm((a.shape[0], b.shape[0]), torch.float32)}
    output = backend.results("gemm", form, a, b, out_dtype=torch.float32)["output"]
    limits = bounds(a, b, out_dtype=torch.float32, order=order_of(backend, a, b))
    return output, within_bounds(output, limits), limits


def _wrong_set(side: Side, place: int, output: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> WrongSet:
    first = tuple(int(n) for n in wrong.nonzero()[0])
    recipe, numbers = side.recipe, Numbers(torch.float32)
    values, scales = decode(side.codes, recipe.element).double(), decode(side.scales, recipe.scale).double()
    of_row = {
        "NaN code of {}": Feature(values.isnan().long(), ("no", "yes")),
        "sign of the code of {}": Feature((side.codes & recipe.element.sign_code != 0).long(), ("+", "−")),
        "magnitude of the code of {}": Feature(values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)),
        "scale of {}": Feature(scales),
    }
    features: dict[str, Feature] = {}
    shown: dict[str, Any] = {"column of K": place}
    for axis, name in enumerate("ab"):
        form = (-1, 1) if axis == 0 else (1, -1)
        for title, feature in of_row.items():
            features[title.format(name)] = Feature(
                feature.values.view(form).expand(wrong.shape).flatten(), feature.names
            )
        shown[f"code of {name}"] = shown_code(int(side.codes[first[axis]]), recipe.element)
        shown[f"scale of {name}"] = shown_code(int(side.scales[first[axis]]), recipe.scale)
    for name, tensor in (("expected", expected), ("actual", output)):
        shown[name] = shown_number(tensor[first].view(1).cpu(), numbers)
    rule = find_rule(wrong.flatten(), features)
    return WrongSet("products", Outer(), int(wrong.sum()), wrong.numel(), rule, [], shown, steady=True)


def _sums(backend: Backend, recipe: Recipe, device: str, seed: int) -> Iterator[tuple[str, Trial]]:
    """A sentence and a trial for the random products of each family."""
    M, K, N = _SHAPE
    for family in _SUMS:
        x, w = (
            generate(family, Draw(f"certify|{family}|{role}|{seed}"), (rows, K), torch.bfloat16, role, recipe).to(
                device
            )
            for role, rows in (("x", M), ("w", N))
        )
        output, right, limits = _judged(backend, reference.quantize(x, recipe), reference.quantize(w, recipe))
        wrong = int((~right).sum())
        given = share(float((limits.tier != ANY_ORDER).double().mean()))
        text = f"sums of the family {family}: {number(output.numel())} outputs, {given} exact or in a declared order"
        yield text, Trial(f"sums of the family {family}, {M}x{K}x{N}", output.numel(), 1, wrong)


def _order(backend: Backend, recipe: Recipe, device: str, seed: int) -> str:
    """A sentence on the order of summation, found by masks."""
    try:
        dtype = operand_dtype(recipe)
    except ValueError as error:
        return f"order of summation: not probed; {error}"
    order = accumulation_order(product_of(backend, recipe), *_PROBED, dtype=dtype, device=device, seed=seed)
    return f"order of summation at {'x'.join(map(str, _PROBED))}: {str(order).splitlines()[0]}"
