"""Tensors in shards: with their common amax, processes of a group quantize to the bytes of the whole tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from narrowgauge.reference.modules.linear import Linear
from narrowgauge.reference.ops import quantize_both
from tests.processes import JUDGED_WRONG, WRONG, Results, run
from tests.sharded_linear import operand_differences, sharded_linears
from tests.shards import Sharded, differences, sharded_matrices

OF_ANOTHER = (
    r"ValueError: process {failing} of the group cannot quantize its shard; "
    r"see the error that process {failing} raised"
)
NOT_IN_GROUP = "ValueError: this process is not in the group of the amax reduction; give a group with this process"
MISALIGNED = (
    r"ValueError: recipe {recipe} has blocks of {step} along dimension {dim}, and a block would lie in two shards: the "
    r"shard of process 0 has {extent}, no multiple of {step} \(shards: \({shape}\), .*\); give every shard but the "
    r"last a multiple of {step}"
)
REFUSED = {
    "dtype": "TypeError: recipe nvfp4-rht rotates bfloat16, not float32; convert it first",
    "part of a rotated group": r"ValueError: recipe nvfp4-rht rotates .* of 16; 24 elements of x .*: pad x first",
    "no matrix": r"ValueError: quantize takes a matrix \(M, K\) or \(…, K\), not shape \(16,\); reshape it first",
}
"""Arguments of the last process alone, and its exception."""
REFUSED_BY_ALL = {
    "rows": "ValueError: recipe nvfp4-rowscaled has an amax for every row, so shards share no amax of the tensor",
    "neither": "ValueError: sharded_amax takes rowwise=True, columnwise=True or both; both are False",
    "not a member": NOT_IN_GROUP,
    "not a member either": NOT_IN_GROUP,
    "straddling": MISALIGNED.format(recipe="nvfp4", step=16, dim=0, extent="24 rows", shape="24, 16"),
    "straddling tiles": MISALIGNED.format(recipe="nvfp4-2d", step=16, dim=0, extent="24 rows", shape="24, 16"),
    "straddling columns": MISALIGNED.format(recipe="mxfp8-e4m3", step=32, dim=1, extent="16 columns", shape="32, 16"),
    "straddling rotation": MISALIGNED.format(recipe="nvfp4-rht64", step=64, dim=0, extent="32 rows", shape="32, 16"),
    "unequal": r"ValueError: shards along dimension 1 have equal extents along the other dimension, not .*, \(24, 16\)",
    "dimension": r"ValueError: shards lie along dimension 0 or 1 of a matrix \(M, K\), not 2",
    "rows need no blocks": "nothing was raised",
    "columns are not rotated": "nothing was raised",
    "one scale": "nothing was raised",
    "a short last one": "nothing was raised",
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The matrices are small: two threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("world", [2, 4])
def test_shards_are_quantized_as_parts_of_the_whole(world: int, tmp_path: Path) -> None:
    [found] = run(tmp_path, [world], "gloo")
    assert_sharded(found)


@pytest.mark.long
def test_a_process_that_fails_is_shown(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"process 1:\n(.*\n)+RuntimeError: this process was asked to fail"):
        run(tmp_path, [2], "gloo", fail=True)


def assert_sharded(found: list[Results]) -> None:
    """All assertions on the results of the processes of a group, on CPUs or GPUs."""
    rooms = {"reference", "native"} - found[0]["missing"].keys()
    matrices, linears = sharded_matrices(len(found)), sharded_linears(len(found))
    wholes = [
        quantize_both(case.whole(), case.recipe, columnwise=case.columnwise, scale=case.scale(), random=case.words())
        for case in matrices
    ]
    layers = [linear.observe(Linear, torch.device("cpu")) for linear in linears]
    for room in sorted(rooms):
        differ: dict[str, list[str]] = {}
        caught: set[tuple[str, str]] = set()
        for number, (case, whole) in enumerate(zip(matrices, wholes, strict=True)):
            shards = [process[room, "right", number] for process in found]
            if isinstance(shards[0], NotImplementedError):
                assert room == "native"
                assert "@" in case.name or "fnuz" in case.name
                continue
            differ[f"{room}: {case}"] = differences(shards, whole, case.dim)
            for version in WRONG:
                if (
                    len(found) == 2
                    and case.name in JUDGED_WRONG
                    and sum(map(bool, case.extents)) > 1
                    and not case.special
                ):
                    shards = [process[room, version, number] for process in found]
                    assert_wrong(version, differences(shards, whole, case.dim), case)
                    caught.add((version, case.name))
        assert caught == {(version, name) for version in WRONG for name in JUDGED_WRONG} or len(found) > 2
        for number, (linear, layer) in enumerate(zip(linears, layers, strict=True)):
            parts = [process[room, "linear", number] for process in found]
            differ[f"{room}: {linear}"] = operand_differences(parts, layer, linear)
        assert {case: fields for case, fields in differ.items() if fields} == {}
        for rank, process in enumerate(found):
            assert_refused(process[room, "refused"], rank, len(found))
            assert_in_subgroup(process[room, "subgroup"], rank, len(found))


def assert_wrong(version: str, differ: list[str], case: Sharded) -> None:
    """A mistake shows in its shards, and nowhere else."""
    fields = {"sum": ["amax"], "scale-first": ["tensor_scale", "codes"], "rowwise-only": ["amax", "codes"]}[version]
    sides = ["columnwise"] if version == "rowwise-only" else ["rowwise", "columnwise"]
    assert {f"{side} {field}" for side in sides for field in fields} <= set(differ), (version, str(case))
    if version == "scale-first":
        assert not {"rowwise amax", "columnwise amax"} & set(differ), str(case)
    if version == "rowwise-only":
        assert all(part.startswith("columnwise") for part in differ), str(case)


def assert_refused(messages: dict[str, str], rank: int, world: int) -> None:
    """Bad input of the last process is an error of all processes, and so is bad input of all processes."""
    expected = REFUSED_BY_ALL | (
        REFUSED if rank == world - 1 else dict.fromkeys(REFUSED, OF_ANOTHER.format(failing=world - 1))
    )
    assert messages.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.fullmatch(pattern, messages[name]), (name, messages[name])


def assert_in_subgroup(found: tuple[torch.Tensor, torch.Tensor, str], rank: int, world: int) -> None:
    """Every second process is in a group: the group has the amaxes of its processes alone, and counts its processes."""
    row, column, message = found
    last = world - 2 + rank % 2
    assert row.tolist() == column.tolist() == [last + 1]
    if rank == last:
        assert message == "TypeError: x is float32, bfloat16, float16, not float64"
    else:
        assert message == OF_ANOTHER.format(failing=world // 2 - 1)
