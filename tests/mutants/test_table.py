"""The table of harness mutants: every change still applies."""

import ast

import pytest

from tests.mutants.run import ROOT, Mutant, load

MUTANTS = load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    assert mutant.before != mutant.after
    ast.parse(mutant.changed(ROOT))
    assert mutant.wrong.endswith(".")
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert file.startswith("tests/")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")


def test_every_folder_has_mutants() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 80
    folders = [init.parent for package in ("harness", "reference") for init in (ROOT / package).glob("*/__init__.py")]
    for folder in folders:
        count = sum((ROOT / mutant.file).is_relative_to(folder) for mutant in MUTANTS)
        assert count >= 2 or folder.name == "scalar", folder  # scalar: the reference beside which others are tested
