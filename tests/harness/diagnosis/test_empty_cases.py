"""Wrong results of cases with an extent of 0 have a diagnosis."""

from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.cases.case_file import load_all, shipped_cases
from narrowgauge.harness.running.runner import run_case
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipes import find_recipe
from tests.harness.operations.test_layouts import METHODS, mapped
from tests.harness.sample_backends import backend


def _class_of(case: Case) -> tuple[Any, ...]:
    """The method, the extents of 0, and the formats with an influence on the diagnoses."""
    recipes = [find_recipe(name) for name in case.recipe_names]
    empty = tuple(extent == 0 for extent in case.shape)
    packed, floats = any(r.element.bits == 4 for r in recipes), any(r.scale is FP32 for r in recipes)
    return case.called, empty, 0 in case.section_sizes, packed, floats


def _cases() -> list[Case]:
    """The cheapest case of each class of the quick tier that has an extent or a section of 0."""
    empty = [c for c in select(load_all([shipped_cases()]), tier="quick") if 0 in c.shape or 0 in c.section_sizes]
    ordered = sorted((c for c in empty if not c.composed), key=lambda case: (case.work, case.id))
    return list({_class_of(case): case for case in reversed(ordered)}.values())


def _flipped(x: torch.Tensor) -> torch.Tensor:
    return x ^ 1 if x.dtype == torch.uint8 else x * 1.5 + 1


PARTS = 12


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_of_an_empty_case_has_a_diagnosis(part):
    failed = 0
    for case in _cases()[part::PARTS]:

        def door(*arguments: Any, method=METHODS[case.called], **options: Any) -> Any:
            return mapped(method(*arguments, **options), _flipped)

        record = run_case(case, backend(**METHODS | {case.called: door}))
        assert record.verdict in ("fail", "pass"), (case.id, record.message)
        assert all(entry["cause"] != "no-diagnosis" for entry in record.explanations), (case.id, record.explanations)
        failed += record.verdict == "fail"
    assert failed
