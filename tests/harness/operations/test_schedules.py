"""--schedules: threads of a block in more orders, and a race named by its first element and the two orders."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness import cli
from narrowgauge.harness.backends.backend import BackendError, load_backend
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.tools import run_cases
from narrowgauge.native import ops
from narrowgauge.native.runtime import host, sources
from tests.harness.sample_backends import QUANTIZE, backend, quantize
from tests.paths import CASES, PLUGIN

pytest_plugins = ["pytester"]

# Thread 37 writes an element that thread 3 reads, without a barrier: wrong if thread 37 comes first.
RACE = """
extern "C" __global__ void race(const unsigned char* x, unsigned char* out, int n) {
    __shared__ unsigned char last;
    const int t = threadIdx.x;
    if (t == 0) last = 0;
    __syncthreads();
    if (t == 37) last = 1;
    if (t == 3) out[3] = x[3] ^ last;
    else if (t < n) out[t] = x[t];
}
"""


@pytest.fixture
def racing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A quantize with a race in its last kernel, and the variations of the native kernels."""
    from narrowgauge.native.runtime import launch

    (tmp_path / "cpu").mkdir()
    shutil.copy(sources.FOLDER / "cpu" / "simt.h", tmp_path / "cpu")
    (tmp_path / "racing.cu").write_text(RACE)
    monkeypatch.setattr(host, "FOLDER", tmp_path)
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    monkeypatch.setitem(sources.KERNELS, "racing", ("race",))
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))

    def pass_on(q):
        codes = torch.empty_like(q.codes)
        arguments = [q.codes, codes, torch.tensor(codes.numel(), dtype=torch.int32).numpy()[()]]
        launch.launch("racing", "race", (1,), (codes.numel(),), arguments, device=codes.device)
        return codes, q.scales, q.amax

    return quantize(pass_on)


def test_a_race_is_named_by_its_first_element_and_the_two_orders(racing: object) -> None:
    record = run_case(QUANTIZE, backend(quantize=racing, variations=ops.variations))
    assert (record.verdict, record.stage) == ("fail", "repeat")
    assert re.fullmatch(
        r"repeat: 1 of 768 elements of codes differ between forward threads and reverse threads, all else the same: "
        r"a race, seen first in row 0, column 3: 0x(\w\w) and 0x(\w\w)",
        record.message,
    )
    first, second = record.message.split("0x")[1:]
    assert int(first[:2], 16) ^ int(second, 16) == 1, "what the kernel does to it"
    assert record.explanations[0]["cause"] == "order-of-threads"


ORDER = """
extern "C" __global__ void turns(unsigned* out, unsigned* turn) { out[threadIdx.x] = (*turn)++; }
"""


def test_every_seed_shuffles_in_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    (tmp_path / "cpu").mkdir()
    shutil.copy(sources.FOLDER / "cpu" / "simt.h", tmp_path / "cpu")
    (tmp_path / "turning.cu").write_text(ORDER)
    monkeypatch.setattr(host, "FOLDER", tmp_path)
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    monkeypatch.setitem(sources.KERNELS, "turning", ("turns",))
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    ways = ops.variations(torch.device("cpu"), shuffles=4)
    assert list(ways)[:3] == list(ops.variations(torch.device("cpu")))
    assert list(ways)[3:] == [f"shuffled threads (seed {n})" for n in (2, 3, 4)]
    seen = {}
    for name, way in [*ways.items(), ("again", list(ways.values())[-1])]:
        out, turn = np.zeros(96, np.uint32), np.zeros(1, np.uint32)
        with way():
            host.launch(
                "turning", "turns", (1, 1, 1), (96, 1, 1), [np.uintp(a.ctypes.data) for a in (out, turn)], workers=1
            )
        seen[name] = out.tolist()
    assert seen.pop("again") == seen["shuffled threads (seed 4)"], "each is the same every time"
    assert seen["forward threads"] == list(range(96))
    assert seen["reverse threads"] == list(range(95, -1, -1))
    assert len({tuple(turns) for turns in seen.values()}) == 6


def test_a_case_runs_through_as_many_as_are_asked_for(tmp_path: Path) -> None:
    """Stage `memory` counts the inputs of every run."""
    usual, more = (run_case(QUANTIZE, load_backend("native", "cpu", schedules)) for schedules in (0, 5))
    counted = [next(s["compared"] for s in record.stages if s["stage"] == "memory") for record in (usual, more)]
    assert counted[1] == counted[0] // 3 * 7


def test_a_backend_that_has_no_orders_is_refused() -> None:
    with pytest.raises(BackendError, match="--schedules: backend reference does not choose the order of its threads"):
        load_backend("reference", "cpu", 2)


# The options reach the workers.

FILE = str(CASES / "nvfp4_layout.toml")


def test_the_command_hands_its_options_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(run_cases, "run_session", lambda cases, settings, *_, **__: seen.append(settings) or True)
    monkeypatch.setattr("narrowgauge.harness.running.sanitizer.check_sanitizer", lambda device: None)
    for options in ([], ["--schedules", "3"], ["--sanitize"]):
        assert CliRunner().invoke(cli.app, ["run", FILE, *options]).exit_code == 0
    assert [(settings.schedules, settings.sanitize) for settings in seen] == [(0, False), (3, False), (0, True)]


@pytest.mark.parametrize("option", [["--schedules", "2"], ["--sanitize"]])
def test_the_command_refuses_both_on_a_gpu(option: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["run", FILE, "--device", "cuda", *option])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"narrowgauge: {option[0]} ")
    assert "on a CPU, not on cuda; " in result.stderr
    assert "`narrowgauge sanitize" in result.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("options", "words"), [
    (["--ng-schedules", "0"], "ERROR: --ng-schedules is 0; *"),
    (["--ng-sanitize", "--ng-device", "cuda"], "ERROR: --ng-sanitize is for kernels on a CPU, not on cuda; *"),
    (["--ng-sanitize", "--pdb"], "ERROR: --ng-sanitize runs cases in processes that have the sanitizers, *"),
])  # fmt: skip
def test_pytest_refuses_what_cannot_be(
    options: list[str], words: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowgauge.harness.backends.backend.check_device", lambda device: None)
    pytester.makefile(".toml", one="")
    result = pytester.runpytest_inprocess("-p", PLUGIN, "one.toml", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([words])
