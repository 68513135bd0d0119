"""The proof of a quantizer: all pairs and all block amaxes under every tensor amax, at several places in a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import torch

from narrowgauge.harness.certify.compare import Calls, Parts, over_elements, wrong_codes, wrong_scales
from narrowgauge.harness.certify.inputs.choice import ChoiceSpace
from narrowgauge.harness.certify.inputs.random_bytes import random_words, scaled_elements
from narrowgauge.harness.certify.inputs.rotated import RotatedSpace
from narrowgauge.harness.certify.inputs.space import Numbers, Outer, Space
from narrowgauge.harness.certify.wrong import RUNS, Feature, Rule, find_rule, runs
from narrowgauge.harness.inputs.reached import SIDES
from narrowgauge.harness.operations.quantize.reach import boundaries
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.spec.formats import FP32, Format

FAILING = 3
"""Tensor amaxes with wrong bytes after which a proof stops."""
_MASK = 0xFFFFFFFF
_KINDS = ("zero", "subnormal", "normal", "infinity", "NaN")


@dataclass
class WrongSet:
    """The wrong inputs of a stage under one tensor amax."""

    stage: str
    """amax, scales, codes, values or products; of the gates of a contract `gates.` before the name of a result."""
    outer: Outer
    count: int
    of: int
    """Inputs of the stage under this tensor amax: block amaxes of both signs, or pairs."""
    rule: Rule | None
    runs: list[dict[str, Any]]
    """Runs of consecutive numbers, as bits, for every scale."""
    first: dict[str, Any]
    """The first wrong input: numbers in decimal and bits, and the codes."""
    steady: bool
    """Whether the inputs of the set are wrong at every tried place and beside all tried neighbours."""


@dataclass
class Proof:
    """Result of the proof."""

    outers: int = 0
    """Judged tensor amaxes, or judged given scales."""
    outers_of: int = 1
    """Number of all tensor amaxes, or of all given scales."""
    refused: int = 0
    """Tensor amaxes refused by the recipe."""
    pairs: int = 0
    unreached: int = 0
    """Pairs of a number and a scale that the proof of a recipe with candidates or a rotation did not reach."""
    words: bool = False
    """Whether random words gave the bytes below, at and above the first one with another code."""
    amaxes: int = 0
    places: list[int] = field(default_factory=list)
    """Places of the amax in a block, for every tensor amax."""
    elements: int = 0
    """Compared codes."""
    wrong: list[WrongSet] = field(default_factory=list)
    stopped: bool = False

    @property
    def failing(self) -> int:
        """Number of tensor amaxes with wrong bytes."""
        return len({wrong.outer for wrong in self.wrong})

    def add(self, other: Proof) -> None:
        """Add the proof of further tensor amaxes."""
        for name in ("outers", "refused", "pairs", "unreached", "amaxes", "places", "elements", "wrong"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.stopped |= other.stopped
        self.words |= other.words


@dataclass
class _Found:
    """Wrong inputs under a tensor amax as keys, a tensor for every call."""

    codes: list[torch.Tensor] = field(default_factory=list)
    scales: list[torch.Tensor] = field(default_factory=list)
    amax: bool = False
    first: dict[str, Any] = field(default_factory=dict)


class Prover:
    """Runs the proof of one kernel."""

    def __init__(self, calls: Calls, numbers: Numbers, seed: int) -> None:
        self.calls, self.recipe, self.numbers, self.seed = calls, calls.recipe, numbers, seed

    def prove(self, outers: Sequence[Outer], of: int, places: int, everywhere: int) -> Proof:
        """Judge every tensor amax. `places`: places of the amax in a block, all used for the first `everywhere` tensor
        amaxes; then a tensor amax has one place. `of`: number of all tensor amaxes."""
        proof = self.prove_some(outers, range(len(outers)), places, everywhere)
        proof.outers_of = of
        return proof

    def prove_some(
        self, outers: Sequence[Outer], numbers: range, places: int, everywhere: int, most: int = FAILING
    ) -> Proof:
        """Judge the tensor amaxes with these numbers, until `most` have wrong bytes. Arguments as of `prove`."""
        proof = Proof()
        for number in numbers:
            self.calls.begin(number)
            try:
                space = self._space(outers[number], self.seed + number)
            except ValueError:  # the recipe refuses this tensor amax
                proof.refused += 1
                continue
            size = space.grid.size
            if number < everywhere:
                chosen = sorted({place * size // min(places, size) for place in range(min(places, size))})
            else:
                chosen = [number * 5 % size]
            self._prove_one(proof, space, chosen)
            if proof.failing >= most:
                proof.stopped = number + 1 < len(outers)
                break
        return proof

    def _space(self, outer: Outer, seed: int) -> Space:
        made = Space if self.recipe.candidates == "6" else ChoiceSpace
        return (made if self.recipe.transform is None else RotatedSpace)(self.recipe, self.numbers, outer, seed)

    def _prove_one(self, proof: Proof, space: Space, places: Sequence[int]) -> None:
        found = _Found()
        scale = space.outer.given(self.numbers.device)
        # Sums of errors depend on the order of the elements, random bytes on their places, rotated numbers on signs.
        fixed = self.recipe.candidates != "6" or self.recipe.transform is not None
        movable = not fixed and self.recipe.rounding != "stochastic"
        for blocks in space.sheets():
            expected: Parts | None = None
            for place in places:
                x = space.matrix(blocks, place)
                quantized = space.quantized(x)
                for options in self._options(proof, x, quantized, scale, words=place == places[0]):
                    if expected is None or not movable:
                        expected, before = self.calls.expected(x, options), place
                        spread = over_elements(expected.scales, (x.shape[0], x.shape[1]), self.recipe)
                        space.saw(self.numbers.bits(quantized), spread)
                    else:
                        expected, before = self._moved(space, expected, place - before), place
                    kernel = self.calls.kernel(x, options)
                    self._compare(space, blocks, quantized, expected, kernel, found)
                    proof.elements += x.numel()
        proof.outers += 1
        proof.pairs += space.pairs
        proof.unreached += space.unreached
        proof.amaxes += space.amax_count
        proof.places.append(len(places))
        proof.wrong += self._wrong_sets(space, found, len(places))

    def _options(
        self, proof: Proof, x: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor | None, *, words: bool
    ) -> Iterator[dict[str, Any]]:
        """The further arguments of the calls with a matrix. `words`: of stochastic rounding the random bytes around the
        first one with another code, if the kernel takes words."""
        if not (words and self.recipe.rounding == "stochastic" and self.calls.takes_words(x, scale)):
            yield self.calls.options(scale)
            return
        proof.words = True
        scaled = scaled_elements(quantized, self.calls.quantized(x, self.calls.options(scale)))
        for given in random_words(scaled, self.recipe.element):
            yield {"scale": scale, "random": given}

    def _moved(self, space: Space, expected: Parts, by: int) -> Parts:
        """The right result for blocks whose elements are moved: the scales stay."""
        codes = space.grid.matrix(space.grid.blocks(expected.codes).roll(by, 1))
        return Parts(codes, expected.scales, expected.amax)

    def _compare(
        self, space: Space, blocks: torch.Tensor, x: torch.Tensor, expected: Parts, kernel: Parts, found: _Found
    ) -> None:
        """Add the wrong inputs of a call to `found`. `x`: the quantized numbers."""
        if kernel.amax is not None and expected.amax is not None and not torch.equal(kernel.amax, expected.amax):
            found.amax = True
            found.first.setdefault("amax", _differing_amaxes(kernel.amax, expected.amax))
        scales = wrong_scales(kernel, expected)
        shape = (x.shape[0], x.shape[1])
        if scales is not None:
            of_blocks = space.grid.blocks(over_elements(scales, shape, self.recipe)).any(1)
            amaxes = space.amaxes_of(blocks, x)[of_blocks]
            found.scales.append(torch.unique(amaxes.long()))
            if "scales" not in found.first:
                found.first["scales"] = self._first_scale(kernel, expected, scales, amaxes)
        codes = wrong_codes(kernel, expected, scales, self.recipe)
        if codes is not None:
            spread = over_elements(expected.scales, shape, self.recipe)
            bits = self.numbers.bits(x)
            found.codes.append(torch.unique((spread[codes].long() & _MASK) << 32 | (bits[codes].long() & _MASK)))
            if "codes" not in found.first:
                found.first["codes"] = self._first_code(x, kernel, expected, codes, spread)

    # ---- the first wrong input ---------------------------------------------------------------------------------------

    def _first_scale(
        self, kernel: Parts, expected: Parts, scales: torch.Tensor, amaxes: torch.Tensor
    ) -> dict[str, Any]:
        """The first block with a wrong scale. `amaxes`: of all such blocks."""
        return {
            "block amax": shown_number(self.numbers.tensor(amaxes[:1]), self.numbers),
            "expected": shown_code(int(expected.scales[scales][0]), self.recipe.scale),
            "actual": shown_code(int(kernel.scales[scales][0]), self.recipe.scale),
        }

    def _first_code(
        self, x: torch.Tensor, kernel: Parts, expected: Parts, codes: torch.Tensor, spread: torch.Tensor
    ) -> dict[str, Any]:
        """The first wrong code of a call."""
        return {
            "number": shown_number(x[codes][:1], self.numbers),
            "scale": shown_code(int(spread[codes][0]), self.recipe.scale),
            "expected": shown_code(int(expected.codes[codes][0]), self.recipe.element),
            "actual": shown_code(int(kernel.codes[codes][0]), self.recipe.element),
        }

    # ---- the set of wrong inputs -------------------------------------------------------------------------------------

    def _wrong_sets(self, space: Space, found: _Found, places: int) -> list[WrongSet]:
        sets = []
        if found.amax:
            sets.append(WrongSet("amax", space.outer, 1, 1, None, [], found.first["amax"], steady=True))
        if found.scales:
            keys, counts = torch.unique(torch.cat(found.scales), return_counts=True)
            every = torch.cat([space.amaxes, space.amaxes - self.numbers.sign]).long()
            wrong = torch.isin(every, keys)
            rule = find_rule(wrong, amax_features(space, every.int()))
            listed = self._runs(torch.zeros_like(keys), keys)
            steady = bool((counts >= places).all()) or self.recipe.transform is not None
            sets.append(
                WrongSet("scales", space.outer, len(keys), len(every), rule, listed, found.first["scales"], steady)
            )
        if found.codes:
            keys, counts = torch.unique(torch.cat(found.codes), return_counts=True)
            rule = self._rule_of_codes(space, keys)
            listed = self._runs(keys >> 32, keys & _MASK)
            moved = self.recipe.rounding == "stochastic" or self.recipe.transform is not None
            steady = moved or bool((counts >= places).all())
            sets.append(
                WrongSet("codes", space.outer, len(keys), space.pairs, rule, listed, found.first["codes"], steady)
            )
        return sets

    def _rule_of_codes(self, space: Space, keys: torch.Tensor) -> Rule | None:
        """A rule of the pairs with these keys. None: no rule is known, or the dtype has too many pairs to list."""
        if int(space.lengths.sum()) > 1 << 24:
            return None
        bits, classes = space.listed()
        scaled = (
            space.scaled(self.numbers.tensor(bits), classes) if self.recipe.spans_k else _scaled(space, bits, classes)
        )
        classes = classes.view(-1, 1).expand(bits.shape).flatten()
        stored = space.scales.view(torch.int32) if self.recipe.scale is FP32 else space.scales
        own = (stored[classes].long() & _MASK) << 32 | (
            self.numbers.bits(self.numbers.tensor(bits)).flatten().long() & _MASK
        )
        wrong = torch.isin(own, keys)
        if not bool(torch.isin(keys, own).all()):
            return None
        return find_rule(wrong, code_features(space, bits.flatten(), scaled.flatten(), classes))

    def _runs(self, scales: torch.Tensor, bits: torch.Tensor) -> list[dict[str, Any]]:
        """Runs of consecutive bits for every scale, at most `RUNS`."""
        bits = bits & (2 * self.numbers.sign - 1)
        listed: list[dict[str, Any]] = []
        left = RUNS
        for scale in torch.unique(scales).tolist():
            found = runs(bits[scales == scale].sort().values)[:left]
            left -= len(found)
            if found:
                listed.append({"scale": scale, "numbers": found})
        return listed


def _scaled(space: Space, bits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Scaled elements of the numbers of `pair_blocks`: one column less than a block."""
    numbers = space.numbers.tensor(bits)
    width = space.recipe.block[1]
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % width))
    return space.scaled(padded, classes)[:, : numbers.shape[1]]


def amax_features(space: Space, bits: torch.Tensor) -> dict[str, Feature]:
    """Features of block amaxes, int32 (n,), every of both signs of `space.amaxes`."""
    scales, _ = space._scales(space.numbers.float(space.amaxes))
    values = scales if space.recipe.scale is FP32 else decode(scales, space.recipe.scale)
    return {
        **number_features("block amax", space.numbers, bits),
        "scale": Feature(_ordered(values).repeat(2)),
    }


def code_features(space: Space, bits: torch.Tensor, scaled: torch.Tensor, classes: torch.Tensor) -> dict[str, Feature]:
    """Features of pairs: numbers int32 (n,), their scaled elements float32 (n,) and their classes (n,)."""
    lower, side = boundaries(scaled, space.recipe.element)
    stored = space.scales if space.recipe.scale is FP32 else decode(space.scales, space.recipe.scale)
    return {
        "scaled element": Feature(side, (*SIDES, "NaN")),
        "lower code": Feature(lower & 1, ("even", "odd")),
        "grid point below": Feature(decode(lower.to(torch.uint8), space.recipe.element).double()),
        **number_features("number", space.numbers, bits),
        "scale": Feature(_ordered(stored)[classes]),
    }


def number_features(name: str, numbers: Numbers, bits: torch.Tensor) -> dict[str, Feature]:
    magnitude = numbers.magnitude(bits)
    smallest = int(numbers.bits(torch.tensor([torch.finfo(numbers.dtype).smallest_normal], dtype=numbers.dtype)))
    kind = (magnitude > 0).int() + (magnitude >= smallest).int() + (magnitude >= numbers.infinity).int()
    kind += (magnitude > numbers.infinity).int()
    power = torch.frexp(numbers.float(magnitude).double()).mantissa == 0.5
    return {
        f"sign of the {name}": Feature((bits < 0).long(), ("+", "−")),
        f"kind of the {name}": Feature(kind.long(), _KINDS),
        f"{name}, a power of two": Feature(power.long(), ("no", "yes")),
        f"magnitude of the {name}": Feature(_ordered(numbers.float(magnitude))),
    }


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """float64, NaN as infinity: in order."""
    return values.double().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))


def shown_number(number: torch.Tensor, numbers: Numbers) -> dict[str, str]:
    """A number in full decimal and as bits."""
    value = float(number)
    digits = numbers.dtype.itemsize * 2
    bits = int(numbers.bits(number)) & ((1 << 4 * digits) - 1)
    return {
        "decimal": format(Decimal(value), "f") if value - value == 0 else str(value),
        "bits": f"0x{bits:0{digits}X}",
    }


def shown_code(bits: int, fmt: Format) -> dict[str, str]:
    """A stored code, its value in full decimal and its bits."""
    if fmt is FP32:
        return shown_number(torch.tensor([bits], dtype=torch.int32).view(torch.float32), Numbers(torch.float32))
    value = fmt.values[bits & (fmt.codes - 1)]
    return {
        "decimal": format(Decimal(value), "f") if value - value == 0 else str(value),
        "bits": f"0b{bits:0{fmt.bits}b}",
    }


def _differing_amaxes(kernel: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    place = int((kernel != expected).nonzero()[0, 0])
    shown = {name: shown_code(int(bits[place]), FP32) for name, bits in (("expected", expected), ("actual", kernel))}
    return {"row": place, **shown}
