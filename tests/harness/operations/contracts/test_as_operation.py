"""A contract of a user is an operation: ten lines, and every command works on them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case_file import CaseFileError, load
from narrowgauge.harness.cases.contracts import traces
from narrowgauge.harness.cases.operations import (
    OPERATIONS,
    VARIABLE,
    OperationError,
    case_from_id,
    contracts_in,
    hold,
    use_operations,
)
from narrowgauge.harness.cli import app
from narrowgauge.harness.records.environment import source_hashes
from narrowgauge.harness.running.runner import run_case

CONTRACT = '''\
from typing import Annotated, Literal
from narrowgauge import contract as c


@c.contract(rows="independent")
def scale_quantize(
    x: c.Matrix, w: c.Row, recipe: c.Recipe = "fp8-row-e4m3", *, eps: float = 0.0, plus_one: c.Flag = False,
    rounded: bool = True, order: Literal["first", "last"] = "first",
):
    """x (M, K) times w (K,), quantized."""
    factor = c.float32(w) + 1.0 if plus_one else c.float32(w)
    y = c.float32(x) * factor + eps
    return c.quantize(c.cast(y, x.dtype) if rounded else y, recipe)
'''
KERNELS = """
import narrowgauge
import torch


class Backend:
    def scale_quantize(self, x, w, recipe, *, eps=0.0, plus_one=False):
        y = self.rounded(x.float() * self.factor(w.float() + plus_one) + eps, x.dtype)
        q = narrowgauge.quantize(y, recipe)
        return q.codes, q.scales

    def rounded(self, y, dtype):
        return y.to(dtype)

    def factor(self, w):
        return w


class PlusOne(Backend):
    def factor(self, w):
        return w + 1


class Unrounded(Backend):
    def rounded(self, y, dtype):
        return y


class Declared(Unrounded):
    declares = {"scale-quantize": {"rounded": False}}


class FewRows(Backend):
    def rounded(self, y, dtype):
        return (y if len(y) > 6 else y * (1 + 2**-7)).to(dtype)
"""
ID = "scale-quantize/fp8-row-e4m3/64x256/bf16/normal"
Run = tuple[int, str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a user: a file with a contract, and one with kernels."""
    (tmp_path / "contracts.py").write_text(CONTRACT, encoding="utf-8")
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv(traces.VARIABLE, str(tmp_path))
    yield tmp_path
    OPERATIONS.let_go()
    sys.modules.pop("kernels", None)


def command(*arguments: str, status: int = 0) -> str:
    """Output of a command, which has to end with a status."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == status, done.output
    return done.output


def run(backend: str, *more: str, status: int = 0) -> str:
    """Output of a run of the usual cases of the contract."""
    given = ("--contract", "contracts.py", "--backend", f"kernels:{backend}", "--no-history", "-n", "1")
    return command("run", *given, "--report-dir", "run", *more, status=status)


def record(backend: str, case: str = ID) -> dict[str, Any]:
    """The record of a case on a class of the kernels."""
    use_operations(["contracts.py"])
    import kernels

    found = case_from_id(case)
    assert found is not None
    return run_case(found, Backend.local(backend, getattr(kernels, backend)())).to_dict()


@pytest.mark.long
def test_every_command_works_on_ten_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = command("list", "--contract", "contracts.py")
    assert f"{ID}\n" in listed
    few = ("-k", "64x256 and (normal or ladder or plus_one) and not strided")
    assert "4 cases passed" in run("Backend", *few)
    shown = command("contract", "contracts.py", "--run", "run")
    assert "mistakes are shown by a case of the run" in shown
    count = next(line for line in shown.splitlines() if "mistakes are shown" in line)
    assert f"<p>{count}.</p>" in (folder / "run" / "index.html").read_text(encoding="utf-8")
    gate = ("--run", "run", "--baseline", "baseline.json")
    command("baseline", "accept", *gate)
    assert "gate holds" in command("gate", *gate)
    text = CONTRACT.replace("+ eps", "+ (eps + 1.0)")
    (folder / "contracts.py").write_text(f"# a comment\n{CONTRACT}", encoding="utf-8")
    assert "gate holds" in command("gate", *gate)
    (folder / "contracts.py").write_text(text, encoding="utf-8")
    assert "contract scale-quantize has changed since the run" in command("gate", *gate, status=2)
    OPERATIONS.let_go()  # as in a new process
    changed = command("contract", "contracts.py", "--run", "run", status=2)
    assert "contract scale-quantize has changed since the run; run its cases again" in changed
    run("Backend", "-k", "64x256 and ladder", status=1)
    assert "another rule" in command("gate", *gate, status=1)

    # A failure is shrunk and saved with the steps of the contract: its file is not needed.
    (folder / "contracts.py").write_text(CONTRACT, encoding="utf-8")
    OPERATIONS.let_go()
    assert "1 + w" in run("PlusOne", "-k", "64x256 and normal and not plus_one", status=1)
    lines = (folder / "run" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    (failed,) = [entry for entry in map(json.loads, lines) if entry.get("case") == ID]
    assert failed["shrunk"] == "1x1"
    monkeypatch.setenv(VARIABLE, "")
    (folder / "contracts.py").unlink()
    shown = command("show", ID, "--backend", "kernels:PlusOne", "--saved", failed["saved"], status=1)
    assert "steps of scale-quantize" in shown
    assert "scale-quantize/fp8-row-e4m3/1x1" in shown


@pytest.mark.long
def test_a_case_file_has_the_parameters_as_keys(folder: Path) -> None:
    (folder / "cases.toml").write_text(
        '[[matrix]]\noperation = "scale-quantize"\ntier = "quick"\nrecipe = ["nvfp4", "mxfp8-e4m3"]\nshape = [3, 64]\n'
        'dtype = "fp16"\nw_dtype = "fp32"\ninputs = "position"\neps = [0, 0.5]\nplus_one = true\norder = "last"\n',
        encoding="utf-8",
    )
    use_operations(["contracts.py"])
    cases = load("cases.toml")
    assert [case.id for case in cases][:2] == [
        "scale-quantize/nvfp4/3x64/fp16/position/w_dtype:fp32+plus_one+order:last",
        "scale-quantize/nvfp4/3x64/fp16/position/w_dtype:fp32+eps:0.5+plus_one+order:last",
    ]
    import kernels

    verdicts = {run_case(case, Backend.local("kernels", kernels.Backend())).verdict for case in cases[2:]}
    assert verdicts == {"pass"}


@pytest.mark.long
def test_a_kernel_declares_the_fields_that_it_follows() -> None:
    found = record("Unrounded")
    assert found["verdict"] == "fail"
    assert "rounded is False, which the backend can declare" in found["explanations"][0]["sentence"]
    assert record("Declared")["verdict"] == "pass"
    assert record("Declared", f"{ID}/no-rounded")["verdict"] == "pass"
    fitted = command("dialect", "kernels:Unrounded", "--contract", "contracts.py")
    assert "declares = {'scale-quantize': {'rounded': False}}" in fitted
    assert "order = 'first'   not told apart from 'last'" in fitted
    report = json.loads(command("dialect", "kernels:Backend", "--contract", "contracts.py", "--format", "json"))
    assert report["fields"] == {"rounded": True, "order": "first"}
    assert not report["wrong"]


SEVERAL = """
from narrowgauge import contract as c


@c.contract
def doubled(x: c.Matrix):
    return {"y": c.cast(c.float32(x) * 2.0, x.dtype)}


@c.contract
def doubled_quantize(x: c.Matrix, recipe: c.Recipe):
    return c.quantize(c.cast(c.float32(x) * 2.0, x.dtype), recipe)
"""


@pytest.mark.long
def test_a_recipe_goes_to_the_contracts_that_take_one(folder: Path) -> None:
    (folder / "several.py").write_text(SEVERAL, encoding="utf-8")
    shown = command("contract", "several.py", "--recipe", "mxfp4", status=1)
    assert "mxfp4 does not apply to doubled: no recipe in the signature" in shown
    assert "doubled-quantize mxfp4 bf16" in shown
    listed = command("list", "--contract", "several.py", "--recipe", "mxfp4")
    assert "doubled/64x256/bf16/normal" in listed
    assert "doubled-quantize/mxfp4/64x256/bf16/normal" in listed
    alone = SEVERAL.partition("\n\n\n@c.contract\ndef doubled_quantize")[0].replace("doubled", "tripled")
    (folder / "one.py").write_text(alone, encoding="utf-8")
    assert "the contract tripled has no recipe" in command("contract", "one.py", "--recipe", "mxfp4", status=2)


FLUSHED = """
import torch
from typing import Literal
from narrowgauge import contract as c


@c.contract
def gated(x: c.Matrix, w: c.Row, *, subnormals: Literal["kept", "flushed"] = "kept"):
    return c.cast(c.float32(x) * c.float32(w) * 2.0**60, x.dtype)


def flush(x):
    return torch.where(x.abs() < 2.0**-126, x * 0, x)


class Backend:
    def gated(self, x, w):
        y = flush(flush(x.float()) * flush(w.float()))
        return (y * 2.0**60).to(x.dtype)


class Declared(Backend):
    declares = {"gated": {"subnormals": "flushed"}}
"""


@pytest.mark.long
def test_a_kernel_declares_that_it_flushes(folder: Path) -> None:
    (folder / "flushing.py").write_text(FLUSHED, encoding="utf-8")
    given = ("--contract", "flushing.py", "--no-history", "-n", "1", "--report-dir", "run")
    failed = command("run", *given, "--backend", "flushing.py:Backend", "-k", "bf16", status=1)
    assert "subnormals is 'flushed', which the backend can declare" in failed
    assert "cases passed" in command("run", *given, "--backend", "flushing.py:Declared")
    fitted = command("dialect", "flushing.py:Backend", "--contract", "flushing.py")
    assert "declares = {'gated': {'subnormals': 'flushed'}}" in fitted


FORMS = """
import torch
from narrowgauge import contract as c


@c.contract
def scaled(x: c.Matrix):
    z = c.float32(x)
    return {"y": c.cast(z / c.amax(z), "float32")}


class Backend:
    def scaled(self, x):
        z, half = x.float(), x.shape[1] // 2
        amax = z.abs().amax(1, keepdim=True)
        return torch.cat([z[:, :half] / amax, z[:, half:] * ((1 / amax) * (1 + 2.0**-23))], 1)


class Declared(Backend):
    declares = {"scaled": {"hidden": "per-element"}}
"""


@pytest.mark.long
def test_a_kernel_declares_two_forms_of_a_division(folder: Path) -> None:
    (folder / "forms.py").write_text(FORMS, encoding="utf-8")
    given = ("--contract", "forms.py", "--no-history", "-n", "1", "--report-dir", "run", "-k", "64x256 and normal")
    failed = command("run", *given, "--backend", "forms.py:Backend", status=1)
    assert "no single form of the division of line 9 explains all bytes" in failed
    assert "cases passed" in command("run", *given, "--backend", "forms.py:Declared")
    command("dialect", "forms.py:Backend", "--contract", "forms.py", status=1)
    assert "explains all" in command("dialect", "forms.py:Declared", "--contract", "forms.py")


def test_independent_rows_have_the_same_bytes_alone() -> None:
    found = record("FewRows")
    assert (found["verdict"], found["stage"]) == ("fail", "rows")
    assert "rows of codes have other bytes with M = 1" in found["message"] or "scales" in found["message"]
    assert [entry["cause"] for entry in found["explanations"]] == ["rows-dependent"]


def test_a_function_is_checked_by_a_contract() -> None:
    @c.contract
    def times_two(x: c.Matrix, recipe: c.Recipe):
        """Twice x, quantized."""
        return c.quantize(c.cast(c.float32(x) * 2.0, x.dtype), recipe)

    def kernel(x: torch.Tensor, recipe: Any, factor: float = 2.0) -> Any:
        return narrowgauge.quantize((x.float() * factor).to(x.dtype), recipe)

    assert narrowgauge.check(kernel, times_two, recipe="mxfp8-e4m3", shapes=[(4, 64)]).passed > 10
    assert narrowgauge.check(kernel, times_two, recipe="times-two/nvfp4/2x32/fp16/nan").passed == 1
    assert "contract times-two" not in source_hashes("reference")  # it is in no run of this process
    with pytest.raises(AssertionError, match="recipe='times-two/nvfp4"):
        narrowgauge.check(lambda x, recipe: kernel(x, recipe, 3.0), times_two, recipe=["nvfp4"], families=["normal"])
    with pytest.raises(ValueError, match="takes a recipe, and none is given"):
        narrowgauge.check(kernel, times_two)
    with pytest.raises(TypeError, match="a recipe is given twice"):
        narrowgauge.check(kernel, "nvfp4", recipe="nvfp4")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    factor =", "    factor = w if c.float32(x) > 0 else", "contracts.py:11: a contract cannot branch"),
        ("+ eps", "+ unknown", "contracts.py:12: scale-quantize: NameError: name 'unknown' is not defined"),
        ("return c.quantize", "return c.rotate", "contracts.py:13: scale-quantize: AttributeError: "),
        ("c.float32(x) * factor", "x * factor", "contracts.py:12: arithmetic is in float32"),
        ("return c.quantize(", "return len(", "contracts.py:13: scale-quantize: TypeError"),
    ],
)  # fmt: skip
def test_a_wrong_contract_is_an_error_with_file_and_line(folder: Path, old: str, new: str, words: str) -> None:
    (folder / "contracts.py").write_text(CONTRACT.replace(old, new), encoding="utf-8")
    assert words in command("list", "--contract", "contracts.py", status=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "contracts.py: holds no operation"),
        ("@c.contract\n", "contracts.py:1: cannot be imported: SyntaxError"),
        ("raise SystemExit(3)\n@contract\ndef f(): ...\n", "contracts.py:1: cannot be imported: SystemExit: 3"),
        (CONTRACT.replace("eps", "shape"), "the parameter shape has the name of a key of every case"),
        (CONTRACT.replace("scale_quantize", "quantize"), "there is an operation quantize already"),
    ],
)
def test_a_file_that_is_no_contract_is_one_error(folder: Path, text: str, words: str) -> None:
    (folder / "contracts.py").write_text(text, encoding="utf-8")
    with pytest.raises(OperationError) as error:
        use_operations(["contracts.py"])
    assert words in str(error.value)


def test_the_file_is_not_imported_here(folder: Path) -> None:
    """The judge reads the steps; a process of its own imports the file, once for a run."""
    (folder / "contracts.py").write_text(f"print('imported')\n{CONTRACT}", encoding="utf-8")
    (cls,) = contracts_in("contracts.py")
    assert "contracts" not in sys.modules
    before = sorted(path.name for path in folder.glob("*.json"))
    assert len(before) == 1
    kept = (folder / before[0]).read_text(encoding="utf-8")
    assert {case.program.name for case, _ in cls.usual(["nvfp4", "mxfp8-e4m3"])} == {"scale-quantize"}  # type: ignore[attr-defined]
    assert (folder / before[0]).read_text(encoding="utf-8") == kept  # no second import


def test_a_contract_of_this_process_does_not_hide_another() -> None:
    @c.contract
    def gemm(x: c.Matrix):
        """Not the operation of this name."""
        return c.float32(x)

    with pytest.raises(OperationError, match="there is an operation gemm already"):
        hold(gemm)


def test_a_recipe_that_a_contract_cannot_take(folder: Path) -> None:
    shutil.copy("contracts.py", "own.py")
    (folder / "cases.toml").write_text(
        '[[matrix]]\noperation = "scale-quantize"\ntier = "quick"\nrecipe = "fp8-static-e4m3"\nshape = [4, 64]\n'
        'dtype = "bf16"\ninputs = "normal"\n',
        encoding="utf-8",
    )
    use_operations(["own.py"])
    with pytest.raises(CaseFileError, match=r"own.py:13: recipe fp8-static-e4m3 takes a scale"):
        load("cases.toml")
