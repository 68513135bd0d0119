"""Certificates: complete inputs, right kernels certified, wrong kernels refused with the set of wrong inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.function_backend import FunctionBackend
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.certify import certify as certify_module
from narrowgauge.harness.certify import trials as trials_module
from narrowgauge.harness.certify.certificate import Certificate, CertificateError, problems, proved_and_sampled, read
from narrowgauge.harness.certify.certify import certificate_of, certify
from narrowgauge.harness.certify.compare import Calls
from narrowgauge.harness.certify.decoding import prove_decoding
from narrowgauge.harness.certify.inputs.random_bytes import first_bytes
from narrowgauge.harness.certify.inputs.space import Effort, Numbers, Outer, Space, outers, rotated_magnitudes
from narrowgauge.harness.certify.proof import Proof, Prover
from narrowgauge.harness.certify.wrong import Feature, find_rule, runs
from narrowgauge.harness.cli import app
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.records.journal import RecordedRun
from narrowgauge.reference import ops
from narrowgauge.reference.numbers.blocks import block_amax
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.reference.quantize.layout import elements, pack_codes
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

SMALL = Outer(amax=0x0500)
"""A tensor amax with few numbers below it: 2^-117 of bfloat16."""
MIDDLE = Outer(amax=0x0828)
"""A tensor amax under which blocks have all scales, and elements ties: 2688·2^-122."""
Kernel = Callable[..., Any]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with default_settings():
        yield


def backend_of(kernel: Kernel, recipe: str) -> FunctionBackend:
    case = QuantizeCase(recipe=recipe, shape=(16, 256), dtype="bf16", inputs="normal")
    conventions = {"tensor_scale_is": "amax", "layout": "linear", "nibbles": "low-first", "transposed": False}
    return FunctionBackend("kernel", kernel, case, "quantize", declares={}, conventions=conventions, constraints={})


def prove(kernel: Kernel, recipe: str = "nvfp4", outer: Outer = SMALL, places: int = 2) -> Proof:
    calls = Calls(backend_of(kernel, recipe), find_recipe(recipe))
    return Prover(calls, Numbers(torch.bfloat16), 0).prove([outer], 1, places, 1)


def right(x: torch.Tensor, recipe: Recipe) -> Quantized:
    return ops.quantize(x, recipe)


# ---- the space -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "outer", "dtype"),
    [
        ("nvfp4", SMALL, torch.bfloat16),
        pytest.param("nvfp4-2d", Outer(amax=300), torch.bfloat16, marks=pytest.mark.long),
        pytest.param("nvfp4-rowscaled", SMALL, torch.float16, marks=pytest.mark.long),
        pytest.param("nvfp4@modelopt", SMALL, torch.bfloat16, marks=pytest.mark.long),
        ("fp8-current-e4m3", Outer(amax=0x3F80), torch.bfloat16),
    ],
)
def test_sheets_hold_every_number_under_every_scale(recipe: str, outer: Outer, dtype: torch.dtype) -> None:
    """Counted from the numbers up: for each amax up to that of the tensor, the numbers up to it under its scale."""
    found, numbers = find_recipe(recipe), Numbers(dtype)
    space = Space(found, numbers, outer)
    seen = set[tuple[int, int]]()
    amaxes = set[int]()
    for blocks in space.sheets():
        x = space.grid.matrix(numbers.tensor(blocks))
        assert float(x.abs().nan_to_num().amax()) == float(numbers.tensor(torch.tensor([outer.amax])))
        q = ops.quantize(x, found)
        scales = q.scales.expand(len(x), -1).repeat_interleave(x.shape[1] // q.scales.shape[1], 1)
        stored = scales.view(torch.int32) if scales.dtype == torch.float32 else scales.int()
        seen |= set(zip(stored.flatten().tolist(), numbers.bits(x).flatten().tolist(), strict=True))
        amaxes |= set(numbers.magnitude(blocks[:, 0]).tolist())
    assert outer.amax is not None
    if not found.whole:
        assert amaxes == set(range(outer.amax + 1))
    scale_of = dict(zip(space.amaxes.tolist(), space._scales(numbers.float(space.amaxes))[0].tolist(), strict=True))
    top: dict[float, int] = {}
    for amax, scale in scale_of.items():
        top[scale] = max(amax, top.get(scale, 0))
    nans = [*range(numbers.infinity + 1, numbers.sign)] if found.nan == "ignore" else []
    expected = sum(2 * (last + 1) + 2 * len(nans) for last in top.values())
    assert space.pairs == len(seen) == expected


def test_number_of_pairs_of_nvfp4_under_one_tensor_amax() -> None:
    """127 codes of the scale; the figure was counted by another program."""
    space = Space(find_recipe("nvfp4"), Numbers(torch.bfloat16), Outer(amax=0x4528))
    assert float(Numbers(torch.bfloat16).tensor(torch.tensor([0x4528]))) == 2688
    assert len(space.tops) == 127
    assert space.pairs - 127 * 254 == 4_241_724


def test_float32_boundaries_are_those_of_the_reference() -> None:
    """Each code changes between two neighbours of the listed numbers."""
    recipe, numbers = find_recipe("mxfp8-e4m3"), Numbers(torch.float32)
    space = Space(recipe, numbers, Outer())
    number = len(space.tops) // 2
    listed = space._listed
    assert listed is not None
    values = torch.unique(listed[number])
    x = torch.cat([numbers.tensor(values), numbers.tensor(space.tops[number : number + 1])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 31)).view(-1, 31)
    blocks = torch.cat([x, x.new_full((len(x), 1), float(numbers.tensor(space.tops[number : number + 1])))], 1)
    codes = ops.quantize(blocks, recipe).codes[:, :31].flatten()[: len(values)].int()
    changes = (codes.diff() != 0).nonzero().flatten()
    assert len(changes) == codes.max()
    assert bool((values.diff()[changes] == 1).all())


def test_tensor_amaxes_are_all_or_a_sample_with_the_ends() -> None:
    recipe, numbers = find_recipe("nvfp4"), Numbers(torch.bfloat16)
    every, of = outers(recipe, numbers, 1 << 20, 0)
    assert len(every) == of == 32641
    some, of = outers(recipe, numbers, 64, 0)
    assert len(some) == 64
    assert of == 32641
    assert {0, numbers.infinity, numbers.infinity - 1} <= {outer.amax for outer in some}


# ---- right and wrong kernels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8-current-e4m3",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("nvfp4", "nvfp4-2d", "nvfp4-rowscaled")),
    ],
)
def test_the_proof_of_the_reference_finds_nothing(recipe: str) -> None:
    proof = prove(right, recipe)
    assert proof.wrong == []
    assert proof.pairs > 0


def ties_away(x: torch.Tensor, recipe: Recipe) -> Quantized:
    return ops.quantize(x, replace(recipe, rounding="nearest-away"))


def no_negative_zero(x: torch.Tensor, recipe: Recipe) -> Quantized:
    return ops.quantize(x, replace(recipe, negative_zero="never"))


def nan_is_zero(x: torch.Tensor, recipe: Recipe) -> Quantized:
    return ops.quantize(x, replace(recipe, nan_code=0))


def wrong_for_a_power(x: torch.Tensor, recipe: Recipe) -> Quantized:
    """Scales of blocks whose amax is a power of two are one code too large."""
    q = ops.quantize(x, recipe)
    power = torch.frexp(block_amax(x, 16)).mantissa == 0.5
    return replace(q, scales=torch.where(power, q.scales + 1, q.scales))


@pytest.mark.parametrize(
    ("kernel", "outer", "stage", "conditions"),
    [
        (ties_away, MIDDLE, "codes", {"scaled element": ["a tie"], "lower code": ["even"]}),
        (no_negative_zero, SMALL, "codes", {"sign of the number": ["−"], "grid point below": [0.0, 0.0]}),
        (nan_is_zero, SMALL, "codes", {"kind of the number": ["NaN"]}),
        (wrong_for_a_power, SMALL, "scales", {"block amax, a power of two": ["yes"]}),
    ],
)
def test_the_set_of_wrong_inputs_is_named(
    kernel: Kernel, outer: Outer, stage: str, conditions: dict[str, list[Any]]
) -> None:
    wrong = next(wrong for wrong in prove(kernel, outer=outer, places=1).wrong if wrong.stage == stage)
    assert wrong.rule is not None
    assert conditions.items() <= wrong.rule.conditions.items()
    assert 0 < wrong.count < wrong.of
    assert wrong.first["expected"]["bits"] != wrong.first["actual"]["bits"]


def test_a_code_that_depends_on_its_place_is_no_rule_of_numbers() -> None:
    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        q = ops.quantize(x, recipe)
        codes = q.codes.clone()
        codes[:, 7::8] = 0
        return replace(q, codes=codes)

    assert not all(wrong.steady for wrong in prove(kernel, places=2).wrong)


@pytest.mark.parametrize(
    "recipe",
    [
        "nvfp4",
        "mxfp4@ocp",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("nvfp4-2d", "nvfp4-rowscaled", "mxfp8-e5m2", "fp8-row-e4m3")
        ),
    ],
)
def test_values_of_the_reference_are_all_right(recipe: str) -> None:
    found, numbers = find_recipe(recipe), Numbers(torch.bfloat16)
    chosen, _ = outers(found, numbers, 1, 0)
    proof = prove_decoding(Backend.local("reference", ops), found, numbers, chosen, 0)
    assert proof.wrong == []
    scales = 255 if found.scale is E8M0 else 127 if found.scale is E4M3 else 1045
    nan_scale = found.nan == "propagate" and found.scale is not FP32
    assert proof.pairs == (scales + nan_scale) * found.element.codes * proof.outers


def test_wrong_values_are_named_by_code_and_scale() -> None:
    def values(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """Code 7 under scales up to 2^-8 is decoded as 4."""
        low = (q.scales <= 2).repeat_interleave(8, 1)
        return ops.dequantize(replace(q, codes=torch.where(low & (q.codes & 0xF == 7), q.codes - 1, q.codes)), dtype)

    backend = Backend.local("own", SimpleNamespace(quantize=ops.quantize, dequantize=values))
    chosen = [Outer(amax=0x4528)]
    (wrong,) = prove_decoding(backend, find_recipe("nvfp4"), Numbers(torch.bfloat16), chosen, 0).wrong
    assert wrong.count == 2  # a scale of 0 hides the code
    assert wrong.rule is not None
    assert wrong.rule.conditions["magnitude of the code"] == [6.0, 6.0]
    assert wrong.rule.conditions["scale"] == [2.0**-9, 2.0**-8]
    assert wrong.first["actual"]["decimal"] == "0.0078125"


# ---- candidates and random bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ("nvfp4-4over6-448-mae", 0.002),
        pytest.param("nvfp4-2d-4over6-448-mae", 0.002, marks=pytest.mark.long),
        pytest.param("nvfp4-rowscaled-4over6-256-mae", 0.002, marks=pytest.mark.long),
        # Squares of the smallest errors are 0 under this tensor amax, and 0 takes the first candidate.
        pytest.param("nvfp4-4over6-256-mse", 0.06, marks=pytest.mark.long),
    ],
)
def test_numbers_meet_the_scales_of_both_candidates(recipe: str, share: float) -> None:
    found = prove(right, recipe, places=1, outer=MIDDLE)
    assert found.wrong == []
    assert found.unreached <= share * found.pairs
    assert found.pairs > 300_000


def test_a_code_that_is_wrong_under_one_candidate_is_named() -> None:
    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        """−6 becomes −4 in blocks whose amax is not 6."""
        q = ops.quantize(x, recipe)
        codes = elements(q.codes, x.shape[1], recipe)
        of_four = (codes.view(-1, 16) & 7 == 7).sum(1, keepdim=True) == 0
        wrong = of_four & (codes.view(-1, 16) == 14)
        return replace(q, codes=pack_codes((codes.view(-1, 16) - wrong.byte()).view(codes.shape), recipe))

    (wrong,) = prove(kernel, "nvfp4-4over6-448-mae", places=1).wrong
    assert wrong.stage == "codes"
    assert wrong.first["expected"]["decimal"] == "-4"


@pytest.mark.parametrize("recipe", ["nvfp4-sr", pytest.param("mxfp8-e4m3-sr", marks=pytest.mark.long)])
def test_random_bytes_are_given(recipe: str) -> None:
    def kernel(off: int) -> Kernel:
        def quantized(x: torch.Tensor, recipe: Recipe, random: tuple[int, int]) -> Quantized:
            return ops.quantize(x, recipe, random=(random[0], random[1] + off))

        return quantized

    outer = SMALL if find_recipe(recipe).tensor_scale != "none" else Outer()
    assert prove(kernel(0), recipe, outer).wrong == []
    (wrong,) = prove(kernel(1), recipe, outer).wrong
    assert wrong.stage == "codes"


def test_first_bytes_are_those_of_all_bytes() -> None:
    x = torch.cat([torch.linspace(-7, 7, 2001), torch.tensor([0.0, 1e-30, 0.2499, torch.inf])])
    for element in (E2M1, E4M3):
        every = torch.stack([stochastic(x, element, torch.full(x.shape, b, dtype=torch.uint8)) for b in range(256)])
        changes = every[1:] != every[:-1]
        assert int(changes.sum(0).amax()) == 1
        assert torch.equal(
            first_bytes(x, element), torch.where(changes.any(0), changes.int().argmax(0) + 1, 256).short()
        )


@pytest.mark.parametrize(("off", "wrong"), [(0, []), (1, ["codes"])])
def test_random_words_lie_around_the_first_other_code(off: int, wrong: list[str]) -> None:
    def kernel(x: torch.Tensor, recipe: Recipe, random: torch.Tensor | tuple[int, int]) -> Quantized:
        """Takes larger bytes than the given ones."""
        if isinstance(random, torch.Tensor):
            larger = (random.contiguous().view(torch.uint8).int() + off).clamp(max=255)
            random = larger.to(torch.uint8).view(torch.int32)
        return ops.quantize(x, recipe, random=random)

    found = prove(kernel, "nvfp4-sr", places=1)
    assert [one.stage for one in found.wrong] == wrong
    assert found.words
    lines = proved_and_sampled(found, find_recipe("nvfp4-sr"), 16, True)[0]
    assert any("below, at and above" in line for line in lines)


def test_a_kernel_without_words_gets_a_seed_and_an_offset() -> None:
    def kernel(x: torch.Tensor, recipe: Recipe, random: tuple[int, int]) -> Quantized:
        seed, offset = random
        if isinstance(seed, torch.Tensor):
            raise TypeError("random is a seed and an offset")
        return ops.quantize(x, recipe, random=(seed, offset))

    found = prove(kernel, "nvfp4-sr", places=1)
    assert found.wrong == []
    assert not found.words
    assert any(
        "1 to 1 random bytes of 256" in line for line in proved_and_sampled(found, find_recipe("nvfp4-sr"), 16, True)[1]
    )


# ---- rotations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ("nvfp4-rht", 0.002),
        *(
            pytest.param(name, share, marks=pytest.mark.long)
            for name, share in (
                ("nvfp4-rht4", 0.002), ("nvfp4-2d-rht", 0.002), ("nvfp4-rht64", 0.002), ("nvfp4-rht-sr", 0.002),
                # c is no power of two: 17 % of the numbers are no rounded multiple of c.
                ("nvfp4-rht2", 0.25), ("nvfp4-rht32", 0.25),
            )
        ),
    ],
)  # fmt: skip
def test_rotated_numbers_meet_every_scale(recipe: str, share: float) -> None:
    rotation = find_recipe(recipe).transform
    assert rotation is not None
    reached = rotated_magnitudes(rotation, Numbers(torch.bfloat16))
    outer = Outer(amax=int(reached[reached >= 0x400][0]))

    def kernel(x: torch.Tensor, recipe: Recipe, random: torch.Tensor | None = None) -> Quantized:
        return ops.quantize(x, recipe, random=random)

    found = prove(kernel, recipe, outer)
    assert found.wrong == []
    assert found.pairs > 0
    assert found.unreached <= share * found.pairs


def test_a_rotated_tie_is_named() -> None:
    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        return ties_away(ops.transform(x, recipe), find_recipe("nvfp4"))

    codes = next(one for one in prove(kernel, "nvfp4-rht", MIDDLE, places=1).wrong if one.stage == "codes")
    assert codes.rule is not None
    assert {"scaled element": ["a tie"], "lower code": ["even"]}.items() <= codes.rule.conditions.items()


@pytest.mark.long
def test_the_command_certifies_candidates_and_random_bits(tmp_path: Path) -> None:
    for recipe, words in (
        ("nvfp4-4over6-448-mae", "sampled: choices of a candidate"),
        ("nvfp4-sr", "pairs, with the random bytes below, at and above the first one with another code"),
        ("nvfp4-rht", "which no number of a group gives alone: 127"),
    ):
        arguments = ["certify", "reference", "--recipe", recipe, "--tensor-scales", "1", "--places", "1"]
        result = CliRunner().invoke(app, [*arguments, "--report-dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert words in result.output


# ---- the assumption --------------------------------------------------------------------------------------------------


def _broken(condition: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Kernel:
    """A kernel with wrong codes in the blocks (n, 16) that meet a condition; the second argument is the matrix."""

    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        q = ops.quantize(x, recipe)
        padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 16))
        wrong = condition(padded.reshape(-1, 16), x).view(len(x), -1).repeat_interleave(8, 1)[:, : q.codes.shape[1]]
        return replace(q, codes=torch.where(wrong, q.codes ^ 0x11, q.codes))

    return kernel


def _of_all(blocks: torch.Tensor, wrong: bool) -> torch.Tensor:
    return torch.full((len(blocks),), wrong)


def _after_calls(count: int) -> Kernel:
    calls = [0]

    def condition(blocks: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return _of_all(blocks, calls[0] > count)

    return _broken(condition)


BY_CONTENT: dict[str, Kernel] = {
    "equal numbers": _broken(lambda blocks, _: (blocks == blocks[:, :1]).all(1) & (blocks[:, 0] != 0)),
    "a first element of 0": _broken(lambda blocks, _: (blocks[:, 0] == 0) & (blocks != 0).any(1)),
    "one number": _broken(lambda blocks, _: (blocks != 0).sum(1) == 1),
    "negative numbers": _broken(lambda blocks, _: (blocks < 0).all(1)),
    "ascending": _broken(lambda blocks, _: (blocks.diff() >= 0).all(1) & (blocks[:, 0] != blocks[:, -1])),
    "the amax last": _broken(lambda blocks, _: blocks.nan_to_num().abs().argmax(1) == 15),
    "powers of two": _broken(lambda blocks, _: (torch.frexp(blocks).mantissa.abs() == 0.5).all(1)),
    "sum 0": _broken(lambda blocks, _: (blocks.sum(1) == 0) & (blocks != 0).any(1)),
    "as the block before": _broken(
        lambda blocks, _: torch.cat([torch.zeros(1, dtype=torch.bool), (blocks[1:] == blocks[:-1]).all(1)])
    ),
    "rows from 4097": _broken(lambda blocks, x: _of_all(blocks, len(x) > 4096)),
    "K no multiple of 64": _broken(lambda blocks, x: _of_all(blocks, x.shape[1] % 64 != 0)),
    "strided": _broken(lambda blocks, x: _of_all(blocks, not x.is_contiguous())),
    "an odd address": _broken(lambda blocks, x: _of_all(blocks, x.data_ptr() % 16 != 0)),
    "a later call": _after_calls(25),
}
"""Kernels that are right on every pair of a number and a scale, but for some content, shape, view or call."""


@pytest.fixture
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calls, "elements", 1 << 14)
    monkeypatch.setattr(trials_module, "_ROUNDS", 1)
    monkeypatch.setattr(certify_module, "outers", lambda *_: ([SMALL], 1))
    chosen = [(4097, 16), (3, 48), (3, 64), (3, 96), (3, 128), (130, 256), (5, 33), (1, 320)]
    monkeypatch.setattr(trials_module, "shapes", lambda _: iter(chosen))


def certificate(kernel: Kernel) -> Certificate:
    backend = backend_of(kernel, "nvfp4")
    return certificate_of(backend, "kernel", find_recipe("nvfp4"), Numbers(torch.bfloat16), Effort(1, 1, 1), 0)


_FAST = ("equal numbers", "a later call")


@pytest.mark.usefixtures("small_trials")
@pytest.mark.parametrize(
    "name", [name if name in _FAST else pytest.param(name, marks=pytest.mark.long) for name in BY_CONTENT]
)
def test_a_kernel_that_is_wrong_by_content_is_refused(name: str) -> None:
    found = certificate(BY_CONTENT[name])
    assert found.verdict == "refused"
    assert any(trial.wrong for trial in found.trials)


@pytest.mark.usefixtures("small_trials")
def test_a_certificate_says_what_it_did_not_try(tmp_path: Path) -> None:
    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        if x.shape[1] % 16:
            raise NotImplementedError("K is a multiple of 16")
        return ops.quantize(x, recipe)

    found = certificate(kernel)
    assert found.verdict == "certified"
    assert any("refuses 1 calls" in line for line in found.outside)
    assert (
        str(found)
        .splitlines()[2]
        .startswith("Assumption: a scale depends on the amax of its block and the amax of the tensor")
    )
    page, data = found.write(tmp_path)
    assert page.read_text(encoding="utf-8") == f"{found}\n"
    assert read(data)["verdict"] == "certified"


@pytest.mark.usefixtures("small_trials")
def test_wrong_shapes_are_named_by_a_rule() -> None:
    found = certificate(BY_CONTENT["K no multiple of 64"])
    trial = next(trial for trial in found.trials if "shapes" in trial.name)
    assert "K a multiple of 64: no" in trial.note


@pytest.mark.parametrize(
    ("recipe", "dtype", "words"),
    [
        ("nvfp4-rht", torch.float16, "rotates bfloat16; its dtype can be bfloat16"),
        ("nvfp4-4over6-448-mae", torch.float32, "its dtype can be bfloat16 or float16"),
        ("nvfp4", torch.float64, "dtype is torch.float64"),
    ],
)
def test_what_has_no_certificate_is_refused_at_once(recipe: str, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(CertificateError, match=words):
        certify(right, recipe, dtype=dtype)


def test_own_random_bits_have_no_certificate() -> None:
    backend = Backend.local("own", SimpleNamespace(quantize=ops.quantize, declares={"random": "own"}))
    with pytest.raises(CertificateError, match="own declares random bits of its own"):
        certificate_of(backend, "own", find_recipe("nvfp4-sr"), Numbers(torch.bfloat16), Effort(1, 1, 1), 0)


def test_a_kernel_that_fails_has_no_certificate() -> None:
    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        raise RuntimeError("no memory")

    with pytest.raises(CertificateError, match=r"nvfp4: fails on an input of the proof.*no memory"):
        certify(kernel, "nvfp4")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{"])
def test_a_file_that_is_no_certificate_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(CertificateError, match=r"file\.json: is no"):
        read(tmp_path / "file.json")


def recorded_run(**changed: Any) -> RecordedRun:
    sources = {"kernels": "aa", "backend": "bb", "reference": "cc"}
    fields = {"device": "cpu", "sources": sources, "loaded": {"file k.py": "dd"}} | changed
    return RecordedRun(backend="k:B", seed=0, cases=[], environment={}, **fields)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"device": "cuda"}, ["is of device cpu, and the run of cuda"]),
        ({"loaded": {"file k.py": "ee"}}, ["file k.py is dd in the certificate, and ee in the run"]),
        ({"loaded": {}}, ["file k.py is dd in the certificate, and not there in the run"]),
        ({"sources": {"kernels": "ab", "backend": "bb"}}, ["kernels is aa in the certificate, and ab in the run"]),
    ],
)
def test_the_gate_requires_a_certificate_of_the_same_kernel(
    tmp_path: Path, changed: dict[str, Any], words: list[str]
) -> None:
    kernel = {"kernels": "aa", "backend": "bb", "reference": "dd", "file k.py": "dd"}
    content = {"format": 1, "verdict": "certified", "device": "cpu", "kernel": kernel}
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(content))
    found = list(problems(file, recorded_run(**changed)))
    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True))
    file.write_text(json.dumps(content | {"verdict": "refused"}))
    assert f"{file}: the kernel is refused" in list(problems(file, recorded_run()))


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_rules_are_exact_and_short() -> None:
    values = torch.arange(100)
    features = {
        "value": Feature(values.double()),
        "parity": Feature(values % 2, ("even", "odd")),
        "third": Feature((values % 3 == 0).long(), ("no", "yes")),
    }
    rule = find_rule((values % 2 == 1) & (values < 50), features)
    assert rule is not None
    assert rule.conditions == {"value": [1.0, 49.0], "parity": ["odd"]}
    assert str(rule) == "value from 1.0 to 49.0; parity: odd"
    assert find_rule((values == 3) | (values == 8), features) is None
    assert find_rule(values < 0, features) is None
    assert str(find_rule(values >= 0, features)) == "every input"


def test_runs_are_the_numbers() -> None:
    keys = torch.tensor([1, 2, 3, 7, 9, 10])
    assert runs(keys) == [[1, 3], [7, 7], [9, 10]]
    assert runs(keys[:0]) == []


# ---- command ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_writes_the_certificate(tmp_path: Path) -> None:
    wrong = "narrowgauge.examples.my_kernels:TiesAway"
    arguments = ["certify", wrong, "--tensor-scales", "1", "--places", "1", "--report-dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "scaled element: a tie" in result.output
    content = json.loads((tmp_path / "certificate.json").read_text(encoding="utf-8"))
    assert content["verdict"] == "refused"
    assert content["wrong"][0]["runs"]


def test_the_command_names_a_wrong_dtype() -> None:
    result = CliRunner().invoke(app, ["certify", "reference", "--dtype", "fp8"])
    assert result.exit_code == 2
    assert "--dtype is 'fp8'" in result.output
