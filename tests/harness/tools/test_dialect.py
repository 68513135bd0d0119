"""Which dialect a quantizer speaks: every named one is recognised, and where none is spoken the nearest is named."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import BackendError, Unsupported, load_backend
from narrowgauge.harness.cli import app
from narrowgauge.harness.hosts.remote_host import hosted_backend
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
    return backend(quantize=lambda x, recipe, **options: reference.quantize(x, name, **options))


def changed_by(method, byte):
    """A change of every byte of the codes, in place."""

    def change(q):
        getattr(q.codes, method)(byte)

    return change


def test_the_reference_speaks_te():
    result = survey(load_backend("reference"))
    assert sentence(result) == "speaks te or te-native, which no input here tells apart: every byte of 95 inputs"
    figures = {agreement.dialect: agreement for agreement in result.agreements}
    assert list(figures)[:3] == ["te", "te-native", "te-2.8"]
    assert set(figures) == set(DIALECTS)
    older, quark, strict = figures["te-2.8"], figures["quark"], figures["fp-quant"]
    assert 0.9 < older.explained / 95 < 1
    assert (quark.codes < quark.unsigned) is True  # it drops the sign of zeros
    assert strict.refused > 0
    assert strict.explained + strict.refused <= 95
    assert all(agreement.unsigned >= agreement.codes and agreement.inputs == 95 for agreement in result.agreements)
    assert older.elements == 95 * 64 * 256 == 16 * older.blocks


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_of_nvfp4_is_recognised(few, name):
    result = survey(speaking(f"nvfp4@{name}"))
    tie = ["te", "te-native"]  # they quantize alike: their products differ
    assert [agreement.dialect for agreement in result.matching] == (tie if name in tie else [name])
    refused = 2 * (name == "fp-quant")  # NaN and zeros
    assert (result.inputs, len(result.skipped)) == (6 - refused, refused)


@pytest.mark.long
@pytest.mark.parametrize("base", ["mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxfp8-2d"])
def test_every_rule_of_mx_is_recognised(few, base):
    for name in MX_DIALECTS:
        result = survey(speaking(f"{base}@{name}"), base)
        assert [agreement.dialect for agreement in result.matching] == [name]


def test_a_recipe_that_a_dialect_cannot_have_is_left_out():
    names = [recipe.dialect for recipe in dialects_of(find_recipe("nvfp4-4over6-256-mse"))]
    assert "te" in names
    assert set(names) < set(DIALECTS)


def test_stochastic_rounding_is_compared_on_the_same_bits(few):
    result = survey(load_backend("reference"), "mxfp8-e4m3-sr")
    assert [agreement.dialect for agreement in result.matching] == ["te"]


def test_the_nearest_dialect_and_the_first_place_it_leaves(few):
    def wrong(q):
        codes = q.codes[5]
        codes[17] ^= 0x10

    door = quantize(wrong)
    result = survey(backend(quantize=lambda x, recipe, **options: door(x, "nvfp4@torchao", **options)))
    assert result.matching == []
    nearest = result.agreements[0]
    assert (nearest.dialect, nearest.explained, nearest.inputs) == ("torchao", 0, 6)
    assert nearest.scales == nearest.blocks
    assert nearest.codes == nearest.elements - 6
    message = r"agrees with no dialect everywhere; nearest torchao: 0 of 6 inputs; leaves it first at e4m3-ties bf16: "
    message += r"1 of 16 384 codes, the first at row 5, column 35 \(x = \S+, 0x[0-9A-F]{4}\): "
    message += r"0b[01]{4} = -?[\d.]+, where it has 0b[01]{4} = -?[\d.]+"
    assert re.fullmatch(message, sentence(result))


def test_scales_that_differ_are_named_before_codes(few):
    def wrong(q):
        q.scales[3, 7] ^= 1
        q.codes[0, 0] ^= 1

    result = survey(backend(quantize=quantize(wrong)))
    told = "1 of 1 024 block scales, the first at row 3, block 7: 0b"
    assert sentence(result).partition(" bf16: ")[2].startswith(told)
    assert "nearest te or te-native, which no input here tells apart: 0 of 6 inputs" in sentence(result)


def test_signs_of_zero_and_values_behind_a_scale_of_zero_are_apart(few):
    """Codes of a block whose scale is 0 stand for 0 whatever they are."""

    def other_zeros(q):
        zero = (q.scales == 0).repeat_interleave(8, 1)
        q.codes.masked_fill_(zero, 0x35)

    result = survey(backend(quantize=quantize(other_zeros)))
    nearest = next(agreement for agreement in result.agreements if agreement.dialect == "te")
    assert nearest.unsigned < nearest.values == nearest.elements
    assert nearest.scales == nearest.blocks

    def unsigned(q):
        low, high = q.codes & 0xF, q.codes >> 4
        q.codes.copy_(low.masked_fill(low == 8, 0) | high.masked_fill(high == 8, 0) << 4)

    result = survey(backend(quantize=quantize(unsigned)))
    nearest = next(agreement for agreement in result.agreements if agreement.dialect == "te")
    assert nearest.codes < nearest.unsigned == nearest.values == nearest.elements


def test_bytes_that_are_no_codes_have_no_value(few):
    result = survey(backend(quantize=quantize(changed_by("bitwise_or_", 0x80))), "mxfp6-e2m3")
    assert result.agreements[0].values == 0


def test_a_backend_may_give_tuples_without_an_amax(few):
    door = quantize(lambda q: (q.codes, q.scales.view(torch.float8_e4m3fn)))
    assert [agreement.dialect for agreement in survey(backend(quantize=door)).matching] == ["te", "te-native"]


def test_inputs_that_a_backend_does_not_take_are_left_out(few):
    def door(x, recipe):
        if not x.any():
            raise NotImplementedError("no kernel for zeros")
        return reference.quantize(x, recipe)

    result = survey(backend(quantize=door))
    assert (result.inputs, result.skipped) == (5, ["zeros bf16: no kernel for zeros"])
    assert sentence(result).endswith(
        ": every byte of 5 inputs. Left out 1 input that it does not quantize, first zeros bf16: no kernel for zeros"
    )


def test_an_input_that_ends_the_host_is_left_out(few, monkeypatch, tmp_path):
    (tmp_path / "ending_kernels.py").write_text(
        "import os\n\nfrom narrowgauge.reference import ops\n\n\nclass Backend:\n    def quantize(self, x, recipe):\n"
        "        if x.any():\n            return ops.quantize(x, recipe)\n        os.abort()\n"
    )
    monkeypatch.chdir(tmp_path)
    with hosted_backend("ending_kernels:Backend") as ending:
        result = survey(ending)
    assert (result.inputs, result.skipped) == (5, ["zeros bf16: the process died (signal SIGABRT)"])
    assert [agreement.dialect for agreement in result.matching] == ["te", "te-native"]


def test_a_backend_that_gives_nothing_is_one_error(few):
    def raising(x, recipe):
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
        ("nvfp5", "no recipe is called 'nvfp5' (did you mean 'nvfp4'"),
    ],
)
def test_recipes_without_a_choice_are_refused(name, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        survey(load_backend("reference"), name)


def test_the_seed_makes_other_inputs(few):
    agreement, other = (survey(speaking("nvfp4@jax"), seed=seed).agreements for seed in (0, 1))
    assert agreement[0] == replace(other[0])  # its own dialect explains every seed
    assert [a.codes for a in agreement[1:]] != [a.codes for a in other[1:]]


# The command


def command(*message):
    return CliRunner().invoke(app, ["dialect", *message])


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
    for arguments, message in (
        (["natve"], "no backend is called 'natve'"), (["reference", "--recipe", "fp8-current"], "recipe fp8-current"),
        (["reference", "--device", "gpu"], "--device is 'gpu' (did you mean 'cuda'?)"),
    ):  # fmt: skip
        refused = command(*arguments)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"narrowgauge: {message}")


def test_the_command_fails_where_no_dialect_is_spoken(few, monkeypatch):
    wrong = backend(quantize=quantize(changed_by("bitwise_xor_", 1)))
    monkeypatch.setattr(
        "narrowgauge.harness.hosts.remote_host.hosted_backend", lambda spec, device: contextlib.nullcontext(wrong)
    )
    result = command("wrong")
    assert result.exit_code == 1
    assert "agrees with no dialect everywhere; nearest te" in result.stdout


def test_shares_say_100_percent_of_all_alone(few):
    def wrong(q):
        q.codes[0, 0] ^= 0x10

    shown = [next(iter(column.cells)) for column in table(survey(backend(quantize=quantize(wrong)))).columns]
    assert shown[1:4:2] == ["> 99.9 %", "100 %"]
