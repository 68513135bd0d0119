"""Saved failures: selection, content of a file, and the way back through `narrowgauge show --saved`."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.cli import app
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.records import saved_failure
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.records.saved_failure import SavedFailure, SavedFailureError, load, save
from narrowgauge.harness.report.failure_view import first_failure, group_saved_lines, saved_lines
from narrowgauge.harness.running import save_failures
from narrowgauge.harness.running.judging import judge
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.save_failures import Keeper
from narrowgauge.reference import ops as reference
from tests.harness.sample_backends import GEMM, QUANTIZE

pytest_plugins = ["pytester"]

KERNELS = """
import time
from narrowgauge.reference import ops
from tests.paths import PLUGIN


class Column:
    # Wrong in column 200 modulo 256, and in every output of column 20 modulo 32.
    def quantize(self, x, recipe, **options):
        q = ops.quantize(x, recipe, **options)
        q.codes[:, 100::128] ^= 1
        return q

    def quantize_grouped(self, x, sizes, recipe, **options):
        return [self.quantize(part, recipe, **options) for part in x.split(sizes.tolist())]

    def gemm(self, a, b, **options):
        out = ops.gemm(a, b, **options)
        out[:, 20::32] += 1e6
        return out

    def gemm_grouped(self, a, b, **options):
        out = ops.gemm_grouped(a, b, **options)
        out[:, 20::32] += 1e6
        return out
"""
WRONG = "saved_kernels:Column"
LARGE = replace(QUANTIZE, shape=(32, 512))
GROUPED = case_from_labels("quantize-grouped", "nvfp4", (96, 256), "bf16", "normal", ("ragged:3",))
STOCHASTIC = replace(QUANTIZE, recipe="nvfp4-sr", shape=(32, 512))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with kernels in saved_kernels.py."""
    (tmp_path / "saved_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("saved_kernels", None)


def kept(case, folder, *, spec=WRONG, seed=0):
    """The record of a case that is shrunk and saved."""
    keeper = Keeper(folder / "failures")
    return run_case(case, load_backend(spec), seed=seed, keeper=keeper)


def show(*arguments):
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


# The way back


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "shape", "flags", "stage"),
    [
        (LARGE, (1, 208), (), "codes"),
        (replace(LARGE, recipe="nvfp4-sr"), (1, 208), (), "codes"),
        (replace(LARGE, recipe="nvfp4-sr", random="words"), (1, 208), ("words",), "codes"),
        (replace(LARGE, recipe="fp8-delayed-e4m3", inputs="outliers"), (1, 101), (), "codes"),
        (GROUPED, (1, 208), ("rows:1",), "codes"),
        (replace(GEMM, shape=(16, 64, 48), accumulate=True, bias=True), (1, 16, 21), None, "output"),
        (case_from_labels("gemm-grouped", "nvfp4", (48, 64, 24), "bf16xbf16-bf16", "normal", ("even:3", "bias")),
         (1, 16, 21), ("rows:1", "bias"), "output"),
    ],
    ids=lambda value: value.id if isinstance(value, Case) else None,
)  # fmt: skip
def test_a_saved_failure_fails_again_at_the_same_stage(folder, case, shape, flags, stage):
    record = kept(case, folder)
    assert (record.verdict, record.stage, record.save_note) == ("fail", stage, "")
    assert record.shrunk == "x".join(map(str, shape))
    result = load(folder / record.saved)
    assert (result.id, result.backend, result.seed, result.stage) == (case.id, WRONG, 0, stage)
    labels = case.labels() | {"shape": shape, "flags": case.flags if flags is None else flags}
    assert result.case == case_from_labels(**labels)
    again = judge(result.case, result.inputs, load_backend(WRONG))
    assert next(s.stage for s in again.stages if not s.passed) == stage
    (line,) = re.findall(r": narrowgauge (show .* --saved .*)", first_failure(record.to_dict()))
    shown = CliRunner().invoke(app, line.split())
    assert shown.exit_code == 1, shown.output
    assert shown.stdout.startswith(f"{result.case.id}   backend {WRONG}, device cpu, seed 0")
    assert re.search(rf"(?m)^ *{re.escape(stage)} .* 1 +wrong$", shown.stdout), shown.stdout
    right = show(case.id, "--saved", record.saved, "--backend", "reference")
    assert right.exit_code == 0, right.output


def test_the_line_of_python_loads_the_tensors(folder):
    record = kept(LARGE, folder)
    (name,) = re.findall(r'safetensors\.torch\.load_file\("(.*)"\)', first_failure(record.to_dict()))
    tensors = load_file(name)
    assert tensors["x"].shape == (1, 208)
    oracle = reference.quantize(tensors["x"], "nvfp4")
    assert torch.equal(tensors["expected.codes"], oracle.codes)
    assert torch.equal(tensors["expected.scales"], oracle.scales)
    assert torch.equal(tensors["actual.scales"], oracle.scales)
    assert (tensors["actual.codes"] ^ tensors["expected.codes"]).nonzero().tolist() == [[0, 100]]


SAVED = [
    replace(GEMM, recipe="fp8-delayed-e4m3", accumulate=True, bias=True),
    replace(STOCHASTIC, random="words", usage="both"), replace(STOCHASTIC, usage="columnwise"),
    case_from_labels("gemm-grouped", "nvfp4", (48, 64, 24), "bf16xbf16-fp32", "normal", ("even:3", "bias")),
    case_from_labels("gemm-quantized", "fp8-delayed-e4m3", (16, 32, 48), "bf16xbf16-bf16", "lattice",
                     ("tn", "fp8-delayed-e4m3")),
    case_from_labels("update-scale", "fp8-delayed-e4m3", (16, 3), "", "amaxes-nan"),
    case_from_labels("swizzle", "", (33, 5), "", "bytes"),
    case_from_labels("transform", "nvfp4-rht", (16, 64), "bf16", "normal", ("transposed",)),
    case_from_labels("linear", "NVFP4BlockScaling", (1, 16, 32, 48), "bf16", "normal", ("steps:2", "accumulate")),
    case_from_labels("grouped-linear", "DelayedScaling", (32, 32, 48), "bf16", "zeros", ("even:2",)),
    case_from_labels("transformer-layer", "MXFP8BlockScaling", (1, 32, 64, 96), "bf16", "normal", ("heads:2", "rms")),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", SAVED, ids=[case.id for case in SAVED])
def test_all_inputs_come_back(folder, case):
    inputs = make_inputs(case, seed=5)
    outcome = judge(QUANTIZE, make_inputs(QUANTIZE), load_backend("reference"))
    save(folder / "a" / "b.safetensors", SavedFailure("id", case, inputs, 2**60, "me:Me", "codes"), outcome)
    back = load(folder / "a" / "b.safetensors")
    assert (back.id, back.case, back.seed, back.backend, back.stage) == ("id", case, 2**60, "me:Me", "codes")
    assert back.inputs.counters == inputs.counters
    named, named_back = inputs.tensors, back.inputs.tensors
    assert list(named_back) == list(named)  # the digest of the inputs has this order
    for name, tensor in named.items():
        assert named_back[name].dtype == tensor.dtype
        assert torch.equal(named_back[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert [path.name for path in (folder / "a").iterdir()] == ["b.safetensors"]  # no half-written file is left


# Selection


@pytest.mark.long
def test_one_of_a_kind_and_a_few_in_all(folder, monkeypatch):
    monkeypatch.setattr(save_failures, "MOST", 2)
    keeper = Keeper(folder / "failures")
    wrong = load_backend(WRONG)
    first, second = (run_case(replace(LARGE, inputs=i), wrong, keeper=keeper) for i in ("normal", "outliers"))
    assert first.saved
    assert (second.verdict, second.saved, second.shrunk, second.save_note) == ("fail", "", "", "")
    recipes = ["nvfp4@te-2.8", "nvfp4@quark"]
    others = [run_case(replace(LARGE, recipe=recipe), wrong, keeper=keeper) for recipe in recipes]
    assert [bool(record.saved) for record in others] == [True, False]
    assert len(list((folder / "failures").iterdir())) == 2
    assert run_case(LARGE, wrong).saved == ""  # without a keeper


def test_what_passes_or_gives_no_result_is_not_kept(folder):
    keeper = Keeper(folder / "failures")
    assert run_case(LARGE, load_backend("reference"), keeper=keeper).saved == ""
    transform = case_from_labels("transform", "nvfp4-rht", (16, 64), "bf16", "normal")
    assert run_case(transform, load_backend(WRONG), keeper=keeper).verdict != "fail"
    assert not (folder / "failures").exists()


def test_what_is_too_large_is_not_saved_and_says_so(folder, monkeypatch):
    monkeypatch.setattr(saved_failure, "LARGEST", 1 << 9)
    record = kept(LARGE, folder)
    assert (record.verdict, record.shrunk, record.saved) == ("fail", "1x208", "")
    assert record.save_note == "not saved: 0 MiB of tensors, more than 0"
    assert "\nnot saved: 0 MiB of tensors, more than 0\n" in first_failure(record.to_dict())
    assert not (folder / "failures").exists()


def test_a_search_that_raises_costs_itself_alone(folder, monkeypatch):
    def broken(*given, **options):
        raise TypeError("no such axis")

    monkeypatch.setattr(save_failures, "shrink", broken)
    record = kept(LARGE, folder)
    assert (record.verdict, record.stage) == ("fail", "codes")
    assert record.save_note.startswith("not shrunk: TypeError: no such axis (at test_saved_failure.py:")
    assert load(folder / record.saved).case == LARGE
    assert saved_lines(record.to_dict())[0] == record.save_note


def test_a_folder_that_cannot_be_written_costs_the_file_alone(folder):
    (folder / "failures").write_text("a file")
    record = kept(LARGE, folder)
    assert (record.verdict, record.shrunk, record.saved) == ("fail", "1x208", "")
    assert record.save_note.startswith("not saved: FileExistsError: ")


# Runs


def test_the_lines_of_a_group_are_of_a_record_that_is_saved():
    plain = new_record(LARGE, backend="b", device="cpu", seed=0).to_dict()
    noted, with_file = plain | {"save_note": "not saved: why"}, plain | {"saved": "f/a b.safetensors", "shrunk": "1x2"}
    assert saved_lines(plain) == group_saved_lines([plain]) == []
    assert group_saved_lines([plain, noted]) == ["not saved: why"]
    assert group_saved_lines([plain, noted, with_file]) == saved_lines(with_file)
    assert saved_lines(with_file)[0].startswith("fails at 1x2 too: ")
    assert "--saved 'f/a b.safetensors'" in saved_lines(with_file)[0]


# Refused files


def refused(*arguments):
    result = show(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.removeprefix("narrowgauge: ").rstrip("\n")


def test_a_file_of_another_case(folder):
    record = kept(LARGE, folder)
    message = refused(GEMM.id, "--saved", record.saved)
    assert message == f"{record.saved}: holds a failure of {LARGE.id}, not of {GEMM.id}"


def test_a_file_that_is_no_saved_failure(folder):
    assert refused(LARGE.id, "--saved", "gone.safetensors") == "gone.safetensors: there is no such file"
    save_file({"weight": torch.ones(2, 2)}, "weights.safetensors")
    message = "weights.safetensors: is no failure that narrowgauge saved; --input takes captured tensors"
    assert refused(LARGE.id, "--saved", "weights.safetensors") == message
    (folder / "text.safetensors").write_text("hello")
    assert refused(LARGE.id, "--saved", "text.safetensors").startswith("text.safetensors: cannot be read: ")
    for about in ("{}", "[", '{"id": "a", "case": {"shape": [1], "flags": [], "size": 3}}'):
        save_file({"x": torch.ones(2, 2)}, "odd.safetensors", metadata={"narrowgauge_saved": "1", "about": about})
        with pytest.raises(SavedFailureError, match=r"^odd\.safetensors: cannot be read: "):
            load(folder.relative_to(folder) / "odd.safetensors")
