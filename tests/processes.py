"""Processes of a torch.distributed group, each with shards to quantize: `python -m tests.processes`.

A single interpreter imports torch, then forks the processes: a group of four costs one import.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from narrowgauge.native import ops as native_ops
from narrowgauge.native.modules import linear as native_linear
from narrowgauge.native.modules import parallel as native_parallel
from narrowgauge.native.runtime.sources import ToolchainError
from narrowgauge.reference import ops as reference_ops
from narrowgauge.reference.modules import linear as reference_linear
from narrowgauge.reference.modules import parallel as reference_parallel
from tests.paths import ROOT
from tests.sharded_linear import sharded_linears
from tests.shards import Halves, Sharded, sharded_matrices

LIMIT = 120.0
"""Seconds after which running processes count as hanging."""
WRONG = ("sum", "scale-first", "rowwise-only")
"""Mistakes: amaxes are added; each shard has its own scale; the halves share the scale of the rowwise half."""
JUDGED_WRONG = ("nvfp4-rht", "fp8-current-e4m3")
"""The recipes with shards also quantized under every mistake."""

_ROOMS: dict[str, tuple[ModuleType, ModuleType, Callable[..., Any]]] = {
    "reference": (reference_ops, reference_parallel, reference_linear.Linear),
    "native": (native_ops, native_parallel, native_linear.Linear),
}
Results = dict[Any, Any]


# ---- of the tests ----------------------------------------------------------------------------------------------------


def run(folder: Path, worlds: Sequence[int], backend: str, *, fail: bool = False) -> list[list[Results]]:
    """Results of each process of groups of these sizes, tensors on the CPU.

    Raises AssertionError with the traceback of a process that failed or hangs.
    """
    command = [sys.executable, "-m", "tests.processes", str(folder), backend, *map(str, worlds), *["--fail"] * fail]
    root = ROOT
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=2 * LIMIT)
    if ended.returncode:
        raise AssertionError(f"processes with {backend} ended with {ended.returncode}:\n{ended.stderr}")
    return [
        [torch.load(folder / f"{rank}-of-{world}.pt", weights_only=False) for rank in range(world)] for world in worlds
    ]


# ---- the processes ---------------------------------------------------------------------------------------------------


def main() -> int:
    """Forks the processes of the groups in turn and waits for them; the first failure ends all processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("backend", choices=("gloo", "nccl"))
    parser.add_argument("worlds", type=int, nargs="+")
    parser.add_argument("--fail", action="store_true")
    given = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink, which not every machine lets a process set up
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)  # no thread has work yet
    deadline = time.monotonic() + LIMIT
    return int(not all(_group(world, given.backend, given.folder, given.fail, deadline) for world in given.worlds))


def _group(world: int, backend: str, folder: Path, fail: bool, deadline: float) -> bool:
    """Whether all processes of a group ended well; none runs any more."""
    context = multiprocessing.get_context("fork")
    arguments = (world, backend, folder, fail)
    processes = [context.Process(target=_process, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        if time.monotonic() > deadline:
            print(f"after {LIMIT:.0f} s some of {world} processes still run", file=sys.stderr)
            break
        time.sleep(0.05)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes == [0] * world


def _process(rank: int, world: int, backend: str, folder: Path, fail: bool) -> None:
    faulthandler.dump_traceback_later(LIMIT - 10, exit=True)
    try:
        torch.set_num_threads(1)
        device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, init_method=f"file://{folder / f'rendezvous-{world}'}", rank=rank, world_size=world,
            timeout=timedelta(seconds=LIMIT),
        )  # fmt: skip
        if fail and rank == world - 1:
            raise RuntimeError("this process was asked to fail")
        torch.save(_to_cpu(_work(rank, world, device)), folder / f"{rank}-of-{world}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        print(f"process {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: _to_cpu(every) for name, every in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_to_cpu, value))
    if is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: _to_cpu(getattr(value, f.name)) for f in fields(value)}
        tensors = {name: every for name, every in moved.items() if isinstance(every, torch.Tensor)}
        return replace(value, **tensors) if tensors else value
    return value


def _work(rank: int, world: int, device: torch.device) -> Results:
    """By room, then version, and number of the case: what the tests compare."""
    everybody = dist.group.WORLD
    assert everybody is not None
    found: Results = {"missing": {}}
    try:
        native_ops.check(device)
    except ToolchainError as error:
        found["missing"]["native"] = str(error)
    for room in [room for room in _ROOMS if room not in found["missing"]]:
        for number, case in enumerate(sharded_matrices(world)):
            for version in ["right", *(WRONG if world == 2 and case.name in JUDGED_WRONG else ())]:
                try:
                    found[room, version, number] = _quantized(case, rank, room, version, device, everybody)
                except NotImplementedError as error:
                    found[room, version, number] = error
        for number, linear in enumerate(sharded_linears(world)):
            found[room, "linear", number] = linear.observe(_ROOMS[room][2], device, rank, everybody)
        found[room, "refused"] = _refused(rank, world, room, device, everybody)
        found[room, "subgroup"] = _in_subgroup(rank, world, room, device)
    return found


def _quantized(
    case: Sharded, rank: int, room: str, version: str, device: torch.device, group: dist.ProcessGroup
) -> Halves:
    """The shard of this process, quantized as one of the whole matrix."""
    ops, parallel, _ = _ROOMS[room]
    x, scale = case.shard(rank).to(device), case.scale()
    words = case.shard_words(rank)
    options: dict[str, Any] = {"columnwise": case.columnwise}
    if version == "right":
        parallel.check_shards(x, case.recipe, group, dim=case.dim, **options)
    all_reduce = dist.all_reduce

    def summing(tensor: torch.Tensor, op: Any = None, group: Any = None) -> Any:
        return all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)

    with patch.object(dist, "all_reduce", summing if version == "sum" else all_reduce):
        amax = parallel.sharded_amax(x, case.recipe, group, **options)
    if version == "rowwise-only":
        amax = amax[0], None
    options |= {
        "amax": amax,
        "scale": None if scale is None else scale.to(device),
        "random": words and tuple(half if half is None else half.to(device) for half in words),
    }
    if version == "scale-first":
        del options["amax"]
    found: Halves = ops.quantize_both(x, case.recipe, **options)
    if version == "scale-first":
        row, column = found
        return row and replace(row, amax=amax[0]), column and replace(column, amax=amax[1])
    return found


def _message(function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _refused(rank: int, world: int, room: str, device: torch.device, group: dist.ProcessGroup) -> dict[str, str]:
    """What bad input raises in this process. All go on afterwards, or the next collective would hang."""
    parallel = _ROOMS[room][1]
    last = rank == world - 1
    wide, x = torch.ones(32, 16, device=device), torch.ones(32, 16, dtype=torch.bfloat16, device=device)
    few = torch.ones(24, 16, dtype=torch.bfloat16, device=device)
    amax, check = parallel.sharded_amax, parallel.check_shards
    alone = [dist.new_group([number]) for number in range(world)][(rank + 1) % world]
    return {
        "dtype": _message(amax, wide if last else x, "nvfp4-rht", group),
        "part of a rotated group": _message(amax, few if last else x, "nvfp4-rht", group),
        "no matrix": _message(amax, x[0] if last else x, "fp8-current-e4m3", group),
        "rows": _message(amax, x, "nvfp4-rowscaled", group),
        "neither": _message(amax, x, "nvfp4", group, rowwise=False, columnwise=False),
        "not a member": _message(amax, x, "nvfp4", alone),
        "not a member either": _message(check, x, "nvfp4", alone, dim=0),
        "straddling": _message(check, few, "nvfp4", group, dim=0),
        "straddling tiles": _message(check, few, "nvfp4-2d", group, dim=0, columnwise=False),
        "straddling columns": _message(check, x, "mxfp8-e4m3", group, dim=1, columnwise=False),
        "straddling rotation": _message(check, x, "nvfp4-rht64", group, dim=0),
        "unequal": _message(check, few if last else x, "nvfp4", group, dim=1),
        "dimension": _message(check, x, "nvfp4", group, dim=2),
        "rows need no blocks": _message(check, few, "nvfp4-rht", group, dim=0, columnwise=False),
        "columns are not rotated": _message(check, x, "nvfp4-rht64", group, dim=1),
        "one scale": _message(check, few, "fp8-current-e4m3", group, dim=0),
        "a short last one": _message(check, few if last else x, "nvfp4", group, dim=0),
    }


def _in_subgroup(rank: int, world: int, room: str, device: torch.device) -> tuple[Any, Any, str]:
    """The amaxes of rank + 1 over every second process; and the rank in the group of the process named as failed."""
    parallel = _ROOMS[room][1]
    groups = [dist.new_group(list(range(first, world, 2))) for first in (0, 1)]
    group = groups[rank % 2]
    x = torch.full((2, 16), rank + 1.0, device=device)
    row, column = parallel.sharded_amax(x, "fp8-current-e4m3", group)
    bad = x.double() if rank >= world - 2 else x
    return row, column, _message(parallel.sharded_amax, bad, "fp8-current-e4m3", group)


if __name__ == "__main__":
    sys.exit(main())
