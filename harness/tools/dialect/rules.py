"""What a rule makes of the stacked inputs, and in how many bytes the backend differs from it.

Every stage is judged given the backend's own result of the stage before, so that the choices separate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from narrowgauge.harness.diagnosis.quantize.recipe_fields import EPSILONS
from narrowgauge.harness.tools.dialect.inputs import Observed
from narrowgauge.reference.numbers.blocks import block_amax, tensor_amax
from narrowgauge.reference.quantize.elements import rounded_codes, special_codes_
from narrowgauge.reference.quantize.scaling import block_scales, element_factors, per_row, scale_elements, tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, row_amax, stored_scales
from narrowgauge.spec.formats import E4M3, E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe

ELEMENT_FIELDS = ("element_scale", "rounding", "zero_scale", "negative_zero", "nan_code")
"""Fields that decide codes under given scales."""
_NOT_SEEN = (
    "granularity", "candidates", "packing", "decode", "alpha", "columnwise",
)  # fmt: skip
"""Fields that the bytes of `quantize` do not show, and parts of the name of a recipe."""
CHOICES: dict[str, tuple[Any, ...]] = {
    field.name: get_args(hint)
    for field in fields(Recipe)
    if get_origin(hint := get_type_hints(Recipe)[field.name]) is Literal and field.name not in _NOT_SEEN
} | {"smallest_amax": (0.0, *EPSILONS)}
"""Values of every field that a fit chooses."""
_FIELDS = tuple(field.name for field in fields(Recipe))
SCALE_FIELDS = tuple(name for name in CHOICES if name not in ELEMENT_FIELDS)
"""Fields that decide the tensor scale and the block scales."""
_STEP = 5
"""Every row with this distance serves the first choice among many rules: odd, because rows of inputs have patterns."""
_KINDS = (1.0, 0.0, torch.inf, torch.nan)
"""A number per kind of scaled elements with a special code of its own."""
_INFINITY_BITS = 0x7F800000
_SIGN_BIT = -(1 << 31)
"""Sign of a float32 number as int32."""
_KEPT = 48
"""Number of scaled matrices in memory."""


@dataclass(frozen=True, order=True)
class Score:
    """Bytes in which a rule differs; a smaller score is better."""

    major: int
    """Bytes with another decoded value."""
    minor: int
    """Bytes that differ in the sign of 0 or NaN, or codes in blocks with a scale of 0 or NaN."""

    def __add__(self, other: Score) -> Score:
        return Score(self.major + other.major, self.minor + other.minor)


def canonical(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes without the sign of 0 and NaN; the NaN codes of a format are one. float32 numbers become int32 bits."""
    if fmt is FP32:
        bits = codes.contiguous().view(torch.int32)
        return bits.masked_fill(codes.isnan(), FP32.nan_code or 0).masked_fill_(codes == 0, 0)
    if not fmt.signed:
        return codes
    if not fmt.negative_zero:  # the sign code is the only NaN
        return codes
    sign = fmt.sign_code
    plain = codes.masked_fill(codes == sign, 0)
    if fmt.nan_code is not None:
        magnitude = codes & (sign - 1)
        above = fmt.max_code if fmt.inf_code is None else fmt.inf_code
        plain = plain.masked_fill_(magnitude > above, fmt.nan_code)
    return plain


def raw(codes: torch.Tensor) -> torch.Tensor:
    """Codes, or the bits of float32 numbers. NaN has its sign, but one payload: PyTorch's conversions choose others."""
    if codes.dtype != torch.float32:
        return codes
    bits = codes.contiguous().view(torch.int32)
    return bits.where(~codes.isnan(), bits & _SIGN_BIT | (FP32.nan_code or 0))


class Rules:
    """Rules on the inputs of an observed backend. Results are cached by the fields with an influence on them."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        one = next((i for i, stack in enumerate(observed.stacks) if stack.x.dtype is torch.bfloat16), 0)
        self.one_dtype = slice(one, one + 1)
        """The stack whose inputs alone choose among many rules: bfloat16 if the backend takes it."""
        self._scale_scores: dict[Hashable, Score] = {}
        self._code_scores: dict[Hashable, Score] = {}
        self._blocks: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scaled: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self._tables: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        self._own_codes: dict[tuple[int, int], torch.Tensor] = {}
        self._dead: dict[int, torch.Tensor] = {}
        self._canonical: dict[Hashable, torch.Tensor] = {}

    # ---- what a rule gives

    def amaxes(self, number: int, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
        """Block amaxes of a stack, and the amaxes of its tensors or rows."""

        def made() -> tuple[torch.Tensor, torch.Tensor]:
            stack = self.observed.stacks[number]
            parts = torch.split(stack.x, stack.height)
            blocks = [block_amaxes(part, recipe) for part in parts]
            if recipe.granularity == "row":
                return torch.cat(blocks), torch.cat([row_amax(block) for block in blocks])
            propagate = recipe.nan == "propagate"
            whole = [
                tensor_amax(block_amax(part, 128, propagate_nan=propagate)) if recipe.whole else tensor_amax(block)
                for part, block in zip(parts, blocks, strict=True)
            ]
            return torch.cat(blocks), torch.cat(whole)

        key = (number, recipe.nan)
        if key not in self._blocks:
            self._blocks[key] = made()
        return self._blocks[key]

    def tensor_scales(self, number: int, recipe: Recipe) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Tensor scales of a stack, a scale per input or row; bool: the rule refuses the amax."""
        if recipe.tensor_scale == "none":
            return None, None
        stack = self.observed.stacks[number]
        if recipe.tensor_scale == "given":
            return stack.given, None
        amax = self.amaxes(number, recipe)[1]
        if recipe.tensor_limit != "refuse":
            return tensor_scale(amax, recipe, stack.x.dtype), None
        unlimited = tensor_scale(amax, with_fields(recipe, tensor_limit="none") or recipe, stack.x.dtype)
        return unlimited, (unlimited == 0) | ~unlimited.isfinite()

    def shown_tensor_scale(self, recipe: Recipe) -> str:
        """What the backend shows as tensor scale, by all ordinary amaxes; empty if it shows none.

        `the tensor scale` of the rule, its reciprocal, amax, amax/6 or amax/448, or another number.
        """
        forms: dict[str, bool] = {}
        for number, stack in enumerate(self.observed.stacks):
            tensor, amax = self.tensor_scales(number, recipe)[0], self.amaxes(number, recipe)[1]
            shown = stack.tensor_scale
            if shown is None or tensor is None or len(shown) != len(tensor):
                return ""
            seen = amax.isfinite() & (amax != 0) & tensor.isfinite() & (tensor != 0)
            numbers = {"the tensor scale": tensor, "the reciprocal of the tensor scale": 1 / tensor, "amax": amax}
            numbers |= {f"amax/{divisor}": amax / torch.full_like(amax, divisor) for divisor in (6, 448)}
            for name, values in numbers.items():
                forms[name] = forms.get(name, True) and bool((values == shown)[seen].all())
        return next((name for name, fits in forms.items() if fits), "a number of its own")

    def scales(self, number: int, recipe: Recipe, step: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stored scales of a stack, or every `step`-th row, and the rows of inputs that the rule refuses (None: none).

        All rows if the choice of a scale needs the elements.
        """
        stack = self.observed.stacks[number]
        blocks, amax = self.amaxes(number, recipe)
        tensor, refused = self.tensor_scales(number, recipe)
        rows = None if tensor is None else spread(tensor, len(stack.scales))
        if recipe.candidates != "6":
            return stored_scales(stack.x, blocks, spread(amax, len(stack.x)), rows, recipe), None
        some = None if rows is None else rows[::step]
        made = block_scales(blocks[::step], some, recipe, stack.x.dtype)
        return made, None if refused is None else spread(refused, len(stack.scales))[::step]

    def scaled(self, number: int, recipe: Recipe) -> torch.Tensor:
        """Scaled elements under the backend's own scales, float32."""
        stack = self.observed.stacks[number]
        tensor, _ = self.tensor_scales(number, recipe)
        key = self._scaled_key(number, recipe)
        if key in self._scaled:
            self._scaled.move_to_end(key)
            return self._scaled[key]
        rows = None if tensor is None else spread(tensor, len(stack.scales))
        blocks = self.amaxes(number, recipe)[0] if recipe.scale is FP32 else None
        factors = element_factors(stack.scales, rows, recipe, stack.x.dtype, blocks)
        if recipe.whole:
            factors = spread(factors, len(stack.x))
        factors = per_row(factors, recipe, len(stack.x))
        scaled = scale_elements(stack.x, factors, None if tensor is None else spread(tensor, len(stack.x)), recipe)
        self._scaled[key] = scaled
        if len(self._scaled) > _KEPT:
            self._scaled.popitem(last=False)
        return scaled

    def tensor_key(self, recipe: Recipe) -> Hashable:
        """The bits of all tensor scales."""
        found = [self.tensor_scales(number, recipe)[0] for number in range(len(self.observed.stacks))]
        return tuple(None if tensor is None else tuple(raw(tensor).tolist()) for tensor in found)

    def _scaled_key(self, number: int, recipe: Recipe) -> Hashable:
        """Everything that decides `scaled`."""
        tensor, _ = self.tensor_scales(number, recipe)
        bits = None if tensor is None else tuple(raw(tensor).tolist())
        own = tuple(getattr(recipe, name) for name in SCALE_FIELDS) if recipe.scale is FP32 else ()
        statistics = recipe.statistics if recipe.element_scale.startswith("R(") else ""
        return number, recipe.element_scale, recipe.zero_scale, statistics, bits, own

    def codes(self, number: int, recipe: Recipe) -> torch.Tensor:
        """Codes of a stack under the backend's own scales."""
        return special_codes_(self.rounded(number, recipe), self.scaled(number, recipe), recipe)

    def rounded(self, number: int, recipe: Recipe, step: int = 1) -> torch.Tensor:
        """Codes of every `step`-th row of a stack, by the rounding alone."""
        random = self.observed.stacks[number].random
        scaled = self.scaled(number, recipe)[::step]
        return rounded_codes(scaled, recipe, None if random is None else random[::step])

    def dead(self, number: int) -> torch.Tensor:
        """bool (n·M, K): elements of blocks whose stored scale is 0 or NaN: no code has a value of its own there."""
        if number not in self._dead:
            stack, recipe = self.observed.stacks[number], self.observed.recipe
            if recipe.scale is FP32:
                dead = (stack.scales == 0) | stack.scales.isnan()
            elif recipe.scale is E8M0:
                dead = stack.scales.eq(E8M0.nan_code or 0)
            else:
                dead = ((stack.scales & 0x7F) == 0) | ((stack.scales & 0x7F) == E4M3.nan_code)
            self._dead[number] = self.of_elements(number, dead)
        return self._dead[number]

    def of_elements(self, number: int, of_scales: torch.Tensor) -> torch.Tensor:
        """A property of the stored scales of a stack, for each element (n·M, K)."""
        stack, recipe = self.observed.stacks[number], self.observed.recipe
        rows = spread(of_scales, len(stack.x)) if recipe.whole else per_row(of_scales, recipe, len(stack.x))
        width = stack.x.shape[1] if recipe.spans_k else recipe.block[1]
        return rows.repeat_interleave(width, 1)[:, : stack.x.shape[1]]

    def special(self, number: int, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
        """Block amaxes of a stack that are NaN or infinite if NaN counts, and amaxes of its tensors or rows that are 0,
        infinite or NaN."""
        blocks, amax = self.amaxes(number, with_fields(recipe, nan="propagate") or recipe)
        return ~blocks.isfinite(), ~(amax.isfinite() & (amax != 0))

    # ---- differences

    def scale_score(self, recipe: Recipe) -> Score:
        """Block scales, and shown tensor scales, in which the backend differs from the rule."""
        return _cached(self._scale_scores, _scale_key(recipe), lambda: self._score_scales(recipe))

    def sampled_scale_score(self, recipe: Recipe, stacks: slice = slice(None)) -> Score:
        """`scale_score` of a part of the rows of these stacks."""
        return self._score_scales(recipe, 1 if recipe.whole or recipe.candidates != "6" else _STEP, stacks)

    def _score_scales(self, recipe: Recipe, step: int = 1, stacks: slice = slice(None)) -> Score:
        major = minor = 0
        for number, stack in list(enumerate(self.observed.stacks))[stacks]:
            made, refused = self.scales(number, recipe, step)
            kernel = self._own(number, "scales", stack.scales, recipe.scale)[::step]
            own = canonical(made, FP32) if recipe.scale is FP32 else made  # the reference has one zero and one NaN
            wrong = own != kernel
            if refused is not None:
                wrong |= refused.unsqueeze(1)
            major += int(wrong.sum())
            minor += int(((raw(made) != raw(stack.scales[::step])) & ~wrong).sum())
        return Score(major, minor)

    def code_score(self, recipe: Recipe) -> Score:
        """Codes in which the backend differs from the rule under the backend's own scales."""
        return _cached(self._code_scores, self._code_key(recipe), lambda: self._score_codes(recipe))

    def sampled_code_score(self, recipe: Recipe) -> Score:
        """`code_score` of a part of the rows."""
        return _cached(
            self._code_scores, ("sampled", *self._code_key(recipe)), lambda: self._score_codes(recipe, _STEP)
        )

    def ordinary_code_score(self, recipe: Recipe, stacks: slice = slice(None)) -> Score:
        """`sampled_code_score` of the elements with finite scaled values.

        The codes of all others have choices of their own, which would hide the form and the rounding.
        """
        return self._score_codes(recipe, _STEP, stacks, ordinary=True)

    def _code_key(self, recipe: Recipe) -> tuple[Hashable, ...]:
        """Everything that decides `codes`."""
        numbers = range(len(self.observed.stacks))
        choices = tuple(getattr(recipe, name) for name in ("rounding", "negative_zero", "nan_code"))
        return (choices, *(self._scaled_key(number, recipe) for number in numbers))

    def _score_codes(
        self, recipe: Recipe, step: int = 1, stacks: slice = slice(None), *, ordinary: bool = False
    ) -> Score:
        major = minor = 0
        for number in range(len(self.observed.stacks))[stacks]:
            rounded, scaled, kernel, alive, counts = self._counts(number, recipe, step)
            made = special_codes_(rounded.clone(), scaled, recipe)
            unequal = made != kernel
            if ordinary:
                unequal &= scaled.isfinite()
            of_value = unequal & alive & (canonical(made, recipe.element) != canonical(kernel, recipe.element))
            count = int(counts[of_value].sum())
            major, minor = major + count, minor + int(counts[unequal].sum()) - count
        return Score(major, minor)

    def _counts(self, number: int, recipe: Recipe, step: int) -> tuple[torch.Tensor, ...]:
        """How often each combination occurs in every `step`-th row of a stack: rounded code, kind of the scaled element
        (a number of this kind), code of the backend, and whether the block scale is neither 0 nor NaN."""
        key = (self._scaled_key(number, recipe), recipe.rounding, step)
        if key not in self._tables:
            codes = 16 if recipe.element.bits == 4 else 256
            own = (number, step)
            if own not in self._own_codes:
                kernel, dead = self.observed.stacks[number].codes[::step].int(), self.dead(number)[::step].int()
                self._own_codes[own] = kernel * 2 + dead
            bits = self.scaled(number, recipe)[::step].view(torch.int32) & ~_SIGN_BIT
            kind = (bits == 0).byte().add_(bits == _INFINITY_BITS, alpha=2).add_(bits > _INFINITY_BITS, alpha=3)
            mixed = self.rounded(number, recipe, step).int().mul_(len(_KINDS)).add_(kind)
            table = torch.bincount(mixed.mul_(2 * codes).add_(self._own_codes[own]).flatten())
            seen = table.nonzero().flatten()
            kinds = seen.new_tensor(_KINDS, dtype=torch.float32)[seen // (2 * codes) % len(_KINDS)]
            rounded = (seen // (2 * codes * len(_KINDS))).byte()
            self._tables[key] = (rounded, kinds, (seen // 2 % codes).byte(), seen % 2 == 0, table[seen])
        return self._tables[key]

    def score(self, recipe: Recipe) -> Score:
        """All bytes in which the backend differs from the rule."""
        return self.scale_score(recipe) + self.code_score(recipe)

    def by_input(self, recipe: Recipe) -> list[tuple[Score, Score]]:
        """Differing block scales and codes of every input. The sums are kept for `scale_score` and `code_score`."""
        found = [pair for number in range(len(self.observed.stacks)) for pair in self.unequal_by_input(number, recipe)]
        self._scale_scores[_scale_key(recipe)] = sum((scales for scales, _ in found), Score(0, 0))
        self._code_scores[self._code_key(recipe)] = sum((codes for _, codes in found), Score(0, 0))
        return found

    def unequal_by_input(self, number: int, recipe: Recipe) -> list[tuple[Score, Score]]:
        """Differing block scales and codes of every input of a stack."""
        stack = self.observed.stacks[number]
        count = len(stack.names)
        made, refused = self.scales(number, recipe)
        unequal = raw(made) != raw(stack.scales)
        major = canonical(made, recipe.scale) != self._own(number, "scales", stack.scales, recipe.scale)
        if refused is not None:
            major = major | refused.unsqueeze(1)
        codes = self.codes(number, recipe)
        unequal_codes = codes != stack.codes
        kernel = self._own(number, "codes", stack.codes, recipe.element)
        of_value = (canonical(codes, recipe.element) != kernel) & ~self.dead(number)
        bytes_of = (major, unequal | major, of_value, unequal_codes)
        sums = zip(*(found.view(count, -1).sum(1).tolist() for found in bytes_of), strict=True)
        return [(Score(a, b - a), Score(c, d - c)) for a, b, c, d in sums]

    def _own(self, number: int, what: str, codes: torch.Tensor, fmt: Format) -> torch.Tensor:
        key = (number, what)
        if key not in self._canonical:
            self._canonical[key] = canonical(codes, fmt)
        return self._canonical[key]


def with_fields(recipe: Recipe, **values: Any) -> Recipe | None:
    """The rule with other values of fields, or None if the values exclude each other.

    Order of operations of `dequantize` and `gemm`, which `quantize` does not show, follow the levels of scales.
    """
    stored = {name: getattr(recipe, name) for name in _FIELDS} | values
    stored["packing"] = "low-first"
    if stored["tensor_scale"] in ("none", "given"):  # no amax gives a tensor scale that has a limit
        stored["tensor_limit"] = "none"
    if stored["tensor_scale"] == "none" or recipe.spans_k:
        stored["decode"], stored["alpha"] = "s", "s_a*s_b" if recipe.spans_k else "1"
    else:
        stored["decode"], stored["alpha"] = "(s*amax)*(1/max)", "(a*b)/d"
    try:
        return Recipe(**stored)
    except ValueError:
        return None


def spread(numbers: torch.Tensor, rows: int) -> torch.Tensor:
    """Numbers of inputs or rows, repeated for each of `rows` rows."""
    return numbers.repeat_interleave(rows // len(numbers), 0) if len(numbers) != rows else numbers


def _scale_key(recipe: Recipe) -> tuple[Any, ...]:
    """Everything that decides the tensor scale and the block scales."""
    return tuple(getattr(recipe, name) for name in SCALE_FIELDS)


def _cached(cache: dict[Hashable, Score], key: Hashable, made: Callable[[], Score]) -> Score:
    if key not in cache:
        cache[key] = made()
    return cache[key]
