"""Shards of a proof: their journal, several processes, and a proof that goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.certify.certificate import CertificateError
from narrowgauge.harness.certify.proof import Proof
from narrowgauge.harness.certify.shards import Journal, Task
from narrowgauge.harness.cli import app

TASK = Task("reference", "nvfp4", "bf16", "cpu", 0, 4, 1, 12)
SOURCES = {"kernels": "aa"}
PART = Proof(outers=2, pairs=7, amaxes=3, places=[1, 1], elements=9)
WRONG = "narrowgauge.examples.my_kernels:TiesAway"


def test_shards_cover_all_tensor_scales_once() -> None:
    chosen, of = replace(TASK, tensor_scales=1 << 62).outers()
    assert len(chosen) == of == 32641
    for some in (chosen, chosen[:64], chosen[:1]):
        assert [number for numbers in Task.shards(some) for number in numbers] == list(range(len(some)))
    assert len(Task.shards(chosen[:64])) == 64


def test_a_journal_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "proof.jsonl"
    Journal(path, TASK, SOURCES, resume=False).add(2, PART)
    with path.open("a") as file:
        file.write('{"first": 4, "proof": {"out')
    found = Journal(path, TASK, SOURCES, resume=True)
    assert found.proofs == {2: PART}
    found.add(4, PART)
    assert Journal(path, TASK, SOURCES, resume=True).proofs == {2: PART, 4: PART}
    assert Journal(path, TASK, SOURCES, resume=False).proofs == {}


@pytest.mark.parametrize(
    ("task", "sources", "words"),
    [
        ({"seed": 1}, SOURCES, "seed 0, and this proof of 1"),
        ({"places": 2}, SOURCES, "places 1, and this proof of 2"),
        ({}, {"kernels": "ab"}, "kernels aa, and this proof of ab"),
        ({}, {**SOURCES, "file k.py": "cc"}, "file k.py None, and this proof of cc"),
    ],
)
def test_the_journal_of_another_proof(
    tmp_path: Path, task: dict[str, Any], sources: Mapping[str, str], words: str
) -> None:
    path = tmp_path / "proof.jsonl"
    Journal(path, TASK, SOURCES, resume=False).add(0, PART)
    before = path.read_bytes()
    with pytest.raises(CertificateError, match=f"{words}; leave --resume out"):
        Journal(path, replace(TASK, **task), sources, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", [None, "", "x\n", "[]\n", "{}\n", '{"task": {}, "sources": {}}\n{"first": 1}\n'])
def test_a_file_that_is_no_journal_is_one_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proof.jsonl").write_text(text)
    with pytest.raises(CertificateError, match=r"proof\.jsonl: .*; leave --resume out"):
        Journal(tmp_path / "proof.jsonl", TASK, SOURCES, resume=True)


def certified(folder: Path, backend: str, scales: int, *options: str) -> dict[str, Any]:
    arguments = ["certify", backend, "--tensor-scales", str(scales), "--places", "1", "--report-dir", str(folder)]
    arguments += options
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code < 2, result.output
    content: dict[str, Any] = json.loads((folder / "certificate.json").read_text(encoding="utf-8"))
    return {name: content[name] for name in ("verdict", "proved", "sampled", "wrong")}


@pytest.mark.long
@pytest.mark.parametrize(("backend", "scales", "wrong"), [("reference", 3, 0), (WRONG, 8, 3)])
def test_processes_and_parts_give_the_same_certificate(tmp_path: Path, backend: str, scales: int, wrong: int) -> None:
    alone, several = (certified(tmp_path / n, backend, scales, "-n", n) for n in ("1", "2"))
    assert several == alone
    assert len(alone["wrong"]) == wrong
    journal = tmp_path / "2" / "proof.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) > 3
    journal.write_text("".join(lines[:3]))
    assert certified(tmp_path / "2", backend, scales, "-n", "2", "--resume") == alone


def test_a_proof_of_products_has_no_shards() -> None:
    result = CliRunner().invoke(app, ["certify", "reference", "--operation", "gemm", "--resume"])
    assert result.exit_code == 2
    assert "-n and --resume are for the proof of a recipe of quantize" in result.output


def test_a_shard_is_data() -> None:
    assert Proof(**json.loads(json.dumps(asdict(PART)))) == PART
