"""The rule of a quantizer: named dialects, differences by class, and rules that no library has."""

import contextlib
import dataclasses
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import narrowgauge
from narrowgauge.harness.backends.backend import BackendError, Unsupported, load_backend
from narrowgauge.harness.cli import app
from narrowgauge.harness.tools.dialect import inputs
from narrowgauge.harness.tools.dialect.differences import classified
from narrowgauge.harness.tools.dialect.fit import dialects_of, fit
from narrowgauge.harness.tools.dialect.issue import _nearest_text, issue
from narrowgauge.harness.tools.dialect.report import as_json, pasted, save, sentence
from narrowgauge.harness.tools.dialect.rules import Rules, Score, with_fields
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import swap_nibbles
from narrowgauge.spec.dialects import DIALECTS
from narrowgauge.spec.formats import E8M0
from narrowgauge.spec.recipes import VARIABLE, RuleError, find_recipe
from tests.harness.sample_backends import backend, quantize

FEW = ("e4m3-ties", "near-ties", "low-rows", "scale-edges", "nan", "zeros")
"""Families that separate all dialects, in a single dtype."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on more threads than idle cores take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few(monkeypatch):
    """A tenth of the inputs."""
    monkeypatch.setattr(inputs.QuantizeCase, "families", classmethod(lambda _: FEW))
    monkeypatch.setattr(inputs, "DTYPES", ("bf16",))


def speaking(rule):
    """A backend that quantizes by this recipe, for any given recipe."""
    return backend(quantize=lambda x, recipe, **options: reference.quantize(x, rule, **options))


def names(result):
    """Matching dialects."""
    return [agreement.dialect for agreement in result.matching]


def changed_by(method, byte):
    """A change of every byte of the codes, in place."""

    def change(q):
        getattr(q.codes, method)(byte)

    return change


def of(result, dialect):
    """The agreement with a dialect."""
    return next(agreement for agreement in result.agreements if agreement.dialect == dialect)


# Rules in files


def test_a_rule_is_saved_and_judges_its_quantizer(few, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    rule = replace(find_recipe("nvfp4@modelopt"), dialect="mine", nan_code=0, packing="high-first")
    result = fit(speaking(rule))
    assert save(result, Path("mine.toml"), "mine") == "nvfp4@mine"
    saved = find_recipe("mine.toml")
    assert eval(pasted(result, "mine"), {"narrowgauge": narrowgauge, "dataclasses": dataclasses}) == saved == rule
    text = Path("mine.toml").read_text(encoding="utf-8")
    assert "# The rule of mine, by narrowgauge" in text
    assert text.endswith('\nbase = "modelopt"\nnan_code = 0\npacking = "high-first"\n')
    again = fit(speaking(rule))
    assert names(again) == ["mine"]
    assert save(again, Path("mine.toml"), "mine") == "nvfp4@mine"
    assert narrowgauge.check(lambda x: reference.quantize(x, rule), "mine.toml", families=["near-ties"]).passed


def test_a_rule_that_explains_not_all_is_not_saved(few, tmp_path):
    wrong = backend(quantize=quantize(changed_by("bitwise_xor_", 1)))
    with pytest.raises(RuleError, match="no rule explains every byte of mine"):
        save(fit(wrong), tmp_path / "own.toml", "mine")
    assert not [*tmp_path.iterdir()]


# Named dialects


def test_the_reference_speaks_te():
    result = fit(load_backend("reference"))
    assert sentence(result) == "speaks te or te-native, which no input here tells apart: every byte of 101 inputs"
    assert [agreement.dialect for agreement in result.agreements[:3]] == ["te", "te-native", "te-2.8"]
    assert {agreement.dialect for agreement in result.agreements} == set(DIALECTS)
    older, quark = of(result, "te-2.8"), of(result, "quark")
    assert 0.9 < older.explained / 95 < 1
    assert older.codes == Score(0, 0)  # given the quantizer's scales
    assert older.scales.major > 0
    assert quark.codes.minor > 0  # quark drops the sign of zeros
    assert result.explained


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_of_nvfp4_is_recognised(few, name):
    result = fit(speaking(f"nvfp4@{name}"))
    tie = ["te", "te-native"]  # the same codes, and different products
    assert names(result) == (tie if name in tie else [name])
    refused = 2 * (name == "fp-quant")  # NaN and zeros
    assert (result.observed.inputs, len(result.observed.skipped)) == (6 - refused, refused)


@pytest.mark.long
@pytest.mark.parametrize("base", ["mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxfp8-2d"])
def test_every_rule_of_mx_is_recognised(few, base):
    for recipe in dialects_of(find_recipe(base)):
        assert recipe.dialect in names(fit(speaking(recipe), base))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    ["mxfp8-e4m3-sr", "nvfp4-rowscaled", "nvfp4-4over6-448-mae", "fp8-delayed-e5m2", "fp8-block-128x128-e4m3-fp32"],
)
def test_every_kind_of_recipe_is_fitted(few, name):
    assert "te" in names(fit(load_backend("reference"), name))


# Differences


def test_packing_is_no_part_of_a_dialect(few):
    def swapped(q):
        return swap_nibbles(q.codes), q.scales

    result = fit(backend(quantize=quantize(swapped)))
    assert names(result) == ["te", "te-native"]
    assert sentence(result).endswith("every byte of 6 inputs. The first of two elements is in the high nibble")


def test_signs_of_nan_and_zero_and_dead_blocks_are_classes(few):
    def other(q):
        zero = (q.scales == 0).repeat_interleave(8, 1)
        low, high = q.codes & 0xF, q.codes >> 4
        codes = low.masked_fill(low == 0, 8) | high.masked_fill(high == 0, 8) << 4
        return codes.masked_fill(zero, 0x35), q.scales.masked_fill(q.scales == 0x7F, 0xFF)

    door = quantize(other)
    result = fit(backend(quantize=lambda x, recipe: door(x, "nvfp4@trtllm")))
    assert (result.nearest.dialect, result.changes, result.explained) == ("trtllm", {}, True)
    kinds = {difference.kind: difference for difference in result.differences}
    assert set(kinds) == {"NaN sign", "positive zeros as -0", "dead blocks"}
    assert kinds["NaN sign"].count == 1024
    assert kinds["NaN sign"].inputs == ["nan bf16"]
    text = sentence(result)
    assert text.startswith("trtllm, except: NaN sign: 1 024 block scales in nan bf16, the first at row 0, block 0: ")
    assert "0b11111111 = nan, where the rule has 0b01111111 = nan" in text
    assert text.endswith("This explains every byte of 6 inputs")


def test_roundings_near_the_first_tie_are_classes():
    """floor(|x| + 1/2) in float32 rounds the number below a tie up: the sum is a tie itself. A division with an
    error of 2 ulp reaches the tie from two numbers below it, and not from three."""
    recipe = find_recipe("mxfp4")
    x = torch.zeros(4, 32)
    x[:, 0], x[:, 1] = 4.0, 0.25 - torch.tensor([1, 2, 3, 0]) * 2.0**-26  # scale 1
    expected = reference.quantize(x, recipe)
    kinds = []
    for row in range(4):
        codes = expected.codes.clone()
        codes[row, 0] |= 0x10  # 0.5
        observed = inputs.observe(
            backend(quantize=lambda x, recipe, codes=codes: (codes, expected.scales)), recipe,
            given=[inputs.Given("few", "fp32", x)],
        )  # fmt: skip
        kinds += [difference.kind for difference in classified(Rules(observed), recipe)]
    assert kinds == ["rounding below the first tie", "rounding beside ties", "element rule", "rounding of ties"]


@pytest.mark.parametrize(("ulps", "unknown"), [(2, set()), (6, {"element rule"})])
def test_a_division_with_an_error_of_2_ulp_is_a_class(ulps, unknown):
    """Triton's x/s: the codes beside a tie are the other neighbours, also where the tie is not the first."""
    recipe = find_recipe("fp8-block-1x128-e4m3-fp32@torchao-triton")

    def quantize(x, recipe):
        q = reference.quantize(x, "fp8-block-1x128-e4m3-fp32@torchao-triton")
        quotient = x.float() / q.scales.repeat_interleave(128, 1)
        moved = (quotient.view(torch.int32) + ulps).view(torch.float32)
        codes = moved.to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(quotient.isfinite() & (quotient.abs() < 448), codes, q.codes), q.scales

    observed = inputs.observe(backend(quantize=quantize), recipe)
    found = classified(Rules(observed), recipe)
    assert {difference.kind for difference in found} >= {"rounding beside ties", "rounding of ties"}
    assert {difference.kind for difference in found if not difference.known} == unknown


def test_arithmetic_in_float16_is_a_class():
    """MXFP8 of JAX on a CPU: XLA multiplies by 1/448 and by 1/s, both in float16."""

    def door(x, recipe):
        if x.dtype is not torch.float16:
            q = reference.quantize(x, "mxfp8-e4m3")
            return q.codes, q.scales
        product = x.abs().view(len(x), -1, 32).amax(2) * torch.tensor(1 / 448).half()
        scales = torch.ceil(product.double().log2()).clamp(min=-127).add(127).byte()
        inverse = torch.exp2(127 - scales.double()).half().repeat_interleave(32, 1)
        return (x * inverse).float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales

    result = fit(backend(quantize=door), "mxfp8-e4m3")
    assert (result.nearest.dialect, result.changes, result.explained) == ("te", {}, True)
    counts = {difference.kind: difference.count for difference in result.differences}
    assert counts["scales by products in float16"] > 0
    assert counts["codes by infinite reciprocals in float16"] > 0
    # 0.87548828125 is above 1.75/2, but times R(1/448) = 0.0022316 it is 2^-9.
    x = torch.zeros(2, 32, dtype=torch.float16)
    x[0, 0], x[1, :2] = 0.87548828125, torch.tensor([0.003, 0.001])
    seen = inputs.observe(backend(quantize=door), find_recipe("mxfp8-e4m3"), given=[inputs.Given("few", "fp16", x)])
    assert seen.stacks[0].scales.flatten().tolist() == [118, 110]
    assert (seen.stacks[0].codes[1, :3] & 0x7F).tolist() == [0x7E, 0x7E, 0x7F]
    assert reference.quantize(x, "mxfp8-e4m3").scales.flatten().tolist() == [119, 110]


@pytest.mark.long
def test_inputs_explained_find_a_dialect_too():
    """The special bytes of inf and NaN outnumber the ties that a decode scale changes."""

    def door(x, recipe):
        scale = torch.tensor(448.0).div(x.abs().float().amax())
        scale = torch.where(scale == torch.inf, torch.finfo(x.dtype).max, scale)
        scale = torch.where(x.abs().amax() == 0, 1.0, scale)
        return (x.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8), scale.reciprocal().view(1, 1)

    result = fit(backend(quantize=door), "fp8-current-e4m3")
    assert (result.nearest.dialect, result.changes, result.explained) == ("te", {}, True)


def test_an_unknown_rule_is_not_explained(few):
    def wrong(q):
        codes = q.codes[5]
        codes[17] ^= 0x10

    door = quantize(wrong)
    result = fit(backend(quantize=lambda x, recipe, **options: door(x, "nvfp4@torchao", **options)))
    assert (result.nearest.dialect, result.nearest.explained, result.explained) == ("torchao", 0, False)
    assert result.nearest.scales == Score(0, 0)
    assert "element rule" in {difference.kind for difference in result.differences}
    message = r"agrees with no dialect and no known rule; nearest torchao: every byte of 0 of 6 inputs; "
    message += r".*element rule: \d codes in .* the first at row 5, column 35 \(x = \S+, 0x[0-9A-F]{4}\): "
    message += r"0b[01]{4} = -?[\d.]+, where the rule has 0b[01]{4} = -?[\d.]+.*"
    assert re.fullmatch(message, sentence(result))


def test_a_rule_between_two_dialects_is_named_with_its_fields(few):
    rule = with_fields(find_recipe("nvfp4@modelopt"), smallest_scale="2^-6", rounding="nearest-toward-zero")
    result = fit(speaking(rule))
    assert result.nearest.dialect == "modelopt"
    assert result.changes == {
        "smallest_scale": ("2^-9", "2^-6"), "rounding": ("nearest-even", "nearest-toward-zero"),
    }  # fmt: skip
    text = sentence(result)
    assert text.startswith("modelopt, except: smallest_scale is 2^-6 in place of 2^-9; rounding is ")
    made = eval(pasted(result), {"dataclasses": dataclasses, "narrowgauge": SimpleNamespace(recipe=find_recipe)})
    assert with_fields(made, name=rule.name, dialect=rule.dialect) == rule


def test_choices_that_the_inputs_do_not_separate_are_said(few):
    """A division by a power of two is a multiplication by its reciprocal, which is exact."""
    rule = with_fields(find_recipe("mxfp4@ocp"), negative_zero="never")
    result = fit(speaking(rule), "mxfp4")
    assert (result.nearest.dialect, result.changes) == ("ocp", {"negative_zero": ("keep", "never")})
    assert "x/s" in result.alternatives["element_scale"]
    assert "The inputs do not separate: " in sentence(result)


# Backends


def test_inputs_that_a_backend_does_not_take_are_left_out(few):
    def door(x, recipe):
        if not x.any():
            raise NotImplementedError("no kernel for zeros")
        return reference.quantize(x, recipe)

    result = fit(backend(quantize=door))
    assert (result.observed.inputs, result.observed.skipped) == (5, ["zeros bf16: no kernel for zeros"])
    assert sentence(result).endswith(
        ": every byte of 5 inputs. Left out 1 input that it does not quantize, first zeros bf16: no kernel for zeros"
    )


def test_a_backend_that_gives_nothing_is_one_error(few):
    def raising(x, recipe):
        raise RuntimeError("illegal memory access")

    with pytest.raises(
        BackendError, match=r"^quantize raised RuntimeError: illegal memory access \(at test_dialect.py"
    ):
        fit(backend(quantize=raising))
    with pytest.raises(BackendError, match="quantize gave scales as uint8 of shape"):
        fit(backend(quantize=quantize(lambda q: (q.codes, q.scales[1:], q.amax))))
    with pytest.raises(Unsupported, match="has no quantize"):
        fit(backend(gemm=reference.gemm))


# The issue text


def negative_zeros(q):
    """+0 as code 8."""
    low, high = q.codes & 0xF, q.codes >> 4
    q.codes.copy_(low.masked_fill(low == 0, 8) | high.masked_fill(high == 0, 8) << 4)


def test_an_issue_has_versions_a_program_and_exact_numbers(few, monkeypatch, capsys):
    door = backend(quantize=quantize(negative_zeros))
    text = issue(fit(door), door, "torch.kernels:Backend")
    assert text.startswith("# nvfp4 in torch.kernels:Backend differs from te: bytes with equal values\n")
    assert text.splitlines()[-1].startswith("te or te-native")
    assert f"Versions: torch {torch.__version__}, Python 3." in text
    assert "Decoded values are the same." in text
    assert re.search(r"Exact numbers: x/scale = \S+ under the stored scales. The nearest number is 0b0000 = 0.0.", text)
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert 1 <= len(programs) <= 3
    monkeypatch.setattr("narrowgauge.harness.backends.backend.load_backend", lambda name: door)
    for program in programs:
        assert len(program.strip().splitlines()) <= 12
        exec(program, {})
    printed = capsys.readouterr().out.split()
    assert len(printed) == len(programs)
    assert printed == re.findall(r"^Actual: (0b[01]+) = ", text, re.MULTILINE)


def test_a_scale_that_differs_has_an_issue_with_the_exact_scale(few, monkeypatch, capsys):
    door = speaking("nvfp4@te-2.8")
    result = fit(door)
    result.nearest = of(result, "te")
    text = issue(result, door, "kernels:Backend")
    assert "scale rule" in text
    actual = re.search(r"Actual: 0b([01]{8}) = \S+\. Expected, by dialect te: 0b([01]{8}) = ", text)
    assert actual is not None
    assert actual[1] != actual[2]
    assert re.search(r"Exact numbers: amax/6/\(tensor amax/2688\) = \S+\. (It is a tie of|The nearest number is)", text)
    monkeypatch.setattr("narrowgauge.harness.backends.backend.load_backend", lambda name: door)
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})
    assert capsys.readouterr().out.strip() == "0b" + actual[1]


@pytest.mark.parametrize(
    ("exact", "message"),
    [
        (Fraction(3, 2**129), "The smallest scale is 2^-127 (code 0)."),
        (Fraction(3), "The powers of two around it are 2^1 and 2^2 (codes 128 and 129)."),
        (Fraction(2**127), "The largest scale is 2^127 (code 254)."),
    ],
)
def test_a_power_of_two_is_named_with_codes_that_exist(exact, message):
    assert _nearest_text(exact, E8M0) == message


def test_a_dialect_has_no_issue(few):
    door = speaking("nvfp4@jax")
    assert issue(fit(door), door, "mine:Backend").endswith("There is nothing to report.")


# The command


def command(*message):
    return CliRunner().invoke(app, ["dialect", *message])


@pytest.fixture
def wrong(monkeypatch):
    """`narrowgauge dialect wrong` with the sign of every code changed."""
    door = backend(quantize=quantize(changed_by("bitwise_xor_", 1)))
    monkeypatch.setattr(
        "narrowgauge.harness.hosts.remote_host.hosted_backend", lambda spec, device: contextlib.nullcontext(door)
    )


def test_the_command_prints_a_row_a_dialect_and_one_sentence(few, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = command("reference", "--recipe", "nvfp4@quark", "--seed", "4", "--details")
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "nvfp4@quark   backend reference, device cpu, seed 4"
    assert lines.pop(1).startswith("Python 3.")
    assert re.split(r" {2,}", lines[1]) == ["dialect", "scale bytes", "codes", "signs, dead", "inputs explained"]
    assert lines[2].split() == ["quark", *["100", "%"] * 2, "6/6"]
    assert {line.split()[0] for line in lines[2 : 2 + len(DIALECTS)]} == set(DIALECTS)
    rows = [line.split()[0] for line in lines[3 + len(DIALECTS) : -1]]
    assert rows == list(FEW)
    assert lines[-1] == "speaks quark: every byte of 6 inputs"


def test_the_command_s_json(few):
    result = command("reference", "--recipe", "mxfp4", "--format", "json")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert (content["matching"], content["explained"], content["inputs"]) == (["te"], True, 6)
    assert {row["input"] for row in content["rows"]} == {f"{family} bf16" for family in FEW}
    assert content["dialects"][0]["codes_different"] == 0
    assert content == as_json(fit(load_backend("reference"), "mxfp4"), "reference")


def test_the_command_s_status_and_errors(few, monkeypatch, tmp_path):
    for arguments, message in (
        (["natve"], "no backend is called 'natve'"),
        (["reference", "--recipe", "nvfp4-rht"], "recipe nvfp4-rht rotates"),
        (["reference", "--device", "gpu"], "--device is 'gpu' (did you mean 'cuda'?)"),
    ):
        refused = command(*arguments)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"narrowgauge: {message}")
