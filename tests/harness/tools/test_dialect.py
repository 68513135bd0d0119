"""Which dialect a quantizer speaks: every named one is recognised, and where none is spoken the nearest is named."""

import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import BackendError, Unsupported, load_backend
from narrowgauge.harness.cli import app
from narrowgauge.harness.tools import dialect
from narrowgauge.harness.tools.dialect import dialects_of, sentence, survey, table
from narrowgauge.reference import ops as reference
from narrowgauge.spec.dialects import DIALECTS, MX_DIALECTS
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend, quantize

FEW = ("e4m3-ties", "near-ties", "low-rows", "scale-edges", "nan", "zeros")
"""Families that tell all dialects apart, in one dtype."""


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
    monkeypatch.setattr(dialect, "families_of", lambda operation: FEW)
    monkeypatch.setattr(dialect, "DTYPES", ("bf16",))


def speaking(name):
    """A backend that quantizes by this recipe, whatever it is asked for."""
    return backend(quantize=lambda x, asked, **options: reference.quantize(x, name, **options))


def changed_by(method, byte):
    """A change of every byte of the codes, in place."""

    def change(q):
        getattr(q.codes, method)(byte)

    return change


def test_the_reference_speaks_te():
    found = survey(load_backend("reference"))
    assert sentence(found) == "speaks te or te-native, which no input here tells apart: every byte of 71 inputs"
    figures = {one.dialect: one for one in found.agreements}
    assert list(figures)[:3] == ["te", "te-native", "te-2.8"]
    assert set(figures) == set(DIALECTS)
    older, quark, strict = figures["te-2.8"], figures["quark"], figures["fp-quant"]
    assert 0.9 < older.explained / 71 < 1
    assert (quark.codes < quark.unsigned) is True  # it drops the sign of zeros
    assert strict.refused > 0
    assert strict.explained + strict.refused <= 71
    assert all(one.unsigned >= one.codes and one.inputs == 71 for one in found.agreements)
    assert older.elements == 71 * 64 * 256 == 16 * older.blocks


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_of_nvfp4_is_recognised(few, name):
    found = survey(speaking(f"nvfp4@{name}"))
    tie = ["te", "te-native"]  # they quantize alike: their products differ
    assert [one.dialect for one in found.spoken] == (tie if name in tie else [name])
    refused = 2 * (name == "fp-quant")  # NaN and zeros
    assert (found.inputs, len(found.left_out)) == (6 - refused, refused)


@pytest.mark.long
@pytest.mark.parametrize("base", ["mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxfp8-2d"])
def test_every_rule_of_mx_is_recognised(few, base):
    for name in MX_DIALECTS:
        found = survey(speaking(f"{base}@{name}"), base)
        assert [one.dialect for one in found.spoken] == [name]


def test_a_recipe_that_a_dialect_cannot_have_is_left_out():
    names = [rule.dialect for rule in dialects_of(find_recipe("nvfp4-4over6-256-mse"))]
    assert "te" in names
    assert set(names) < set(DIALECTS)


def test_stochastic_rounding_is_compared_on_the_same_bits(few):
    found = survey(load_backend("reference"), "mxfp8-e4m3-sr")
    assert [one.dialect for one in found.spoken] == ["te"]


def test_the_nearest_dialect_and_the_first_place_it_leaves(few):
    def wrong(q):
        codes = q.codes[5]
        codes[17] ^= 0x10

    door = quantize(wrong)
    found = survey(backend(quantize=lambda x, asked, **options: door(x, "nvfp4@torchao", **options)))
    assert found.spoken == []
    nearest = found.agreements[0]
    assert (nearest.dialect, nearest.explained, nearest.inputs) == ("torchao", 0, 6)
    assert nearest.scales == nearest.blocks
    assert nearest.codes == nearest.elements - 6
    words = r"agrees with no dialect everywhere; nearest torchao: 0 of 6 inputs; leaves it first at e4m3-ties bf16: "
    words += r"1 of 16 384 codes, the first at row 5, column 35 \(x = \S+, 0x[0-9A-F]{4}\): "
    words += r"0b[01]{4} = -?[\d.]+, where it has 0b[01]{4} = -?[\d.]+"
    assert re.fullmatch(words, sentence(found))


def test_scales_that_differ_are_named_before_codes(few):
    def wrong(q):
        q.scales[3, 7] ^= 1
        q.codes[0, 0] ^= 1

    found = survey(backend(quantize=quantize(wrong)))
    told = "1 of 1 024 block scales, the first at row 3, block 7: 0b"
    assert sentence(found).partition(" bf16: ")[2].startswith(told)
    assert "nearest te or te-native, which no input here tells apart: 0 of 6 inputs" in sentence(found)


def test_signs_of_zero_and_values_behind_a_scale_of_zero_are_apart(few):
    """Codes of a block whose scale is 0 stand for 0 whatever they are."""

    def other_zeros(q):
        zero = (q.scales == 0).repeat_interleave(8, 1)
        q.codes.masked_fill_(zero, 0x35)

    found = survey(backend(quantize=quantize(other_zeros)))
    nearest = next(one for one in found.agreements if one.dialect == "te")
    assert nearest.unsigned < nearest.values == nearest.elements
    assert nearest.scales == nearest.blocks

    def unsigned(q):
        low, high = q.codes & 0xF, q.codes >> 4
        q.codes.copy_(low.masked_fill(low == 8, 0) | high.masked_fill(high == 8, 0) << 4)

    found = survey(backend(quantize=quantize(unsigned)))
    nearest = next(one for one in found.agreements if one.dialect == "te")
    assert nearest.codes < nearest.unsigned == nearest.values == nearest.elements


def test_bytes_that_are_no_codes_have_no_value(few):
    found = survey(backend(quantize=quantize(changed_by("bitwise_or_", 0x80))), "mxfp6-e2m3")
    assert found.agreements[0].values == 0


def test_a_backend_may_give_tuples_without_an_amax(few):
    door = quantize(lambda q: (q.codes, q.scales.view(torch.float8_e4m3fn)))
    assert [one.dialect for one in survey(backend(quantize=door)).spoken] == ["te", "te-native"]


def test_inputs_that_a_backend_does_not_take_are_left_out(few):
    def door(x, asked):
        if not x.any():
            raise NotImplementedError("no kernel for zeros")
        return reference.quantize(x, asked)

    found = survey(backend(quantize=door))
    assert (found.inputs, found.left_out) == (5, ["zeros bf16: no kernel for zeros"])
    assert sentence(found).endswith(
        ": every byte of 5 inputs. Left out 1 input that it does not quantize, first zeros bf16: no kernel for zeros"
    )


def test_a_backend_that_gives_nothing_is_one_error(few):
    def raising(x, asked):
        raise RuntimeError("illegal memory access")

    with pytest.raises(
        BackendError, match=r"^quantize raised RuntimeError: illegal memory access \(at test_dialect.py"
    ):
        survey(backend(quantize=raising))
    with pytest.raises(BackendError, match="quantize gave scales as uint8 of shape"):
        survey(backend(quantize=quantize(lambda q: (q.codes, q.scales[1:], q.amax))))
    with pytest.raises(Unsupported, match="has no quantize"):
        survey(backend(gemm=reference.gemm))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8-current-e4m3", "recipe fp8-current-e4m3 has one dialect, and nothing to tell apart"),
        ("nvfp4-rht", "recipe nvfp4-rht rotates in an order that is free; ask for the recipe without the rotation"),
        ("nvfp5", "no recipe is called 'nvfp5' (did you mean 'nvfp4'?)"),
    ],
)
def test_recipes_without_a_choice_are_refused(name, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        survey(load_backend("reference"), name)


def test_the_seed_makes_other_inputs(few):
    one, other = (survey(speaking("nvfp4@jax"), seed=seed).agreements for seed in (0, 1))
    assert one[0] == replace(other[0])  # its own dialect explains every seed
    assert [a.codes for a in one[1:]] != [a.codes for a in other[1:]]


# The command


def command(*words):
    return CliRunner().invoke(app, ["dialect", *words])


def test_the_command_prints_a_row_a_dialect_and_one_sentence(few, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = command("reference", "--recipe", "nvfp4@quark", "--seed", "4")
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "nvfp4@quark   backend reference, device cpu, seed 4"
    assert re.split(r" {2,}", lines[1]) == [
        "dialect", "codes", "codes, -0 = 0", "scale bytes", "decoded values", "inputs explained",
    ]  # fmt: skip
    assert lines[2].split() == ["quark", *["100", "%"] * 4, "6/6"]
    rows = {line.split()[0]: line for line in lines[2:-1]}
    assert set(rows) == set(DIALECTS)
    assert rows["fp-quant"].endswith("refuses 2")
    assert lines[-1] == "speaks quark: every byte of 6 inputs"


def test_the_command_s_status_and_errors(few, monkeypatch, tmp_path):
    (tmp_path / "dialect_kernels.py").write_text(
        "from reference import ops\n\n\ndef quantize(x, recipe):\n    q = ops.quantize(x, recipe)\n"
        "    q.codes[0, 0] ^= 1\n    return q\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    wrong = command("dialect_kernels.py"[:-3] + ":quantize", "--recipe", "mxfp8-e4m3")
    assert (wrong.exit_code, wrong.stdout) == (2, "")  # a function has no doors
    for words, message in (
        (["natve"], "no backend is called 'natve'"), (["reference", "--recipe", "fp8-current"], "recipe fp8-current"),
        (["reference", "--device", "gpu"], "--device is 'gpu' (did you mean 'cpu'?)"),
    ):  # fmt: skip
        refused = command(*words)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"narrowgauge: {message}")


def test_the_command_fails_where_no_dialect_is_spoken(few, monkeypatch):
    wrong = backend(quantize=quantize(changed_by("bitwise_xor_", 1)))
    monkeypatch.setattr("narrowgauge.harness.backends.backend.load_backend", lambda spec, device: wrong)
    result = command("wrong")
    assert result.exit_code == 1
    assert "agrees with no dialect everywhere; nearest te" in result.stdout


def test_shares_say_100_percent_of_all_alone(few):
    def wrong(q):
        q.codes[0, 0] ^= 0x10

    shown = [next(iter(column.cells)) for column in table(survey(backend(quantize=quantize(wrong)))).columns]
    assert shown[1:4:2] == ["> 99.9 %", "100 %"]
