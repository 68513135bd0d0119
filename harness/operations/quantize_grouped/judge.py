"""Sections of a matrix, each quantized by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from narrowgauge.harness.backends.backend import Backend, non_default
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.backends.results import as_sections, split_sections
from narrowgauge.harness.checks.stage import merge_stages
from narrowgauge.harness.inputs.inputs import Inputs, laid_out
from narrowgauge.harness.operations.quantize.judge import add_judged, has_own_rows, rotates_freely
from narrowgauge.harness.operations.quantize_grouped.case import GroupedQuantizeCase
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject
from narrowgauge.harness.operations.stages.repeated import Tensors, present, repeated
from narrowgauge.harness.operations.stages.rows import FAMILY, Independent, add_rows
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.quantized import Half, Quantized, joined_sections
from narrowgauge.spec.recipes import Recipe, find_recipe


def quantize_grouped(
    backend: Backend,
    x: torch.Tensor,
    sizes: torch.Tensor,
    recipe: Recipe,
    half: Half = Half.ROW,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: tuple[int, int] | None = None,
) -> list[Quantized]:
    """Result of `quantize_grouped`: the half of each section."""
    rows = sizes.tolist()  # read before the call: the kernel may change the tensor
    options = non_default(columnwise=half is Half.COLUMN, amax=amax, scale=scale, random=random)
    result = backend.call("quantize_grouped", x, sizes, recipe, **options)
    return as_sections(result, x, rows, recipe, half)


def judge_quantize_grouped(case: GroupedQuantizeCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge quantize_grouped of x (M, K): the stages of quantize, each stage merged from all sections."""
    half = case.half
    x, random, scale = inputs.x, inputs.counters.get("x"), inputs.get("scale.x")
    recipe = find_recipe(case.recipe)
    own = makes_own_bits(backend, recipe)

    def call(given: Tensors) -> Tensors:
        if own:
            backend.host.seed(random)
        sections = quantize_grouped(
            backend,
            given["x"], given["sizes"], recipe, half, amax=given.get("amax"),
            scale=given.get("scale"), random=random,
        )  # fmt: skip
        return joined_sections(sections, half)

    sizes = torch.tensor(case.section_sizes, device=x.device)
    amax = inputs.get("amax.x")
    given = {"x": laid_out(x, case.view), "sizes": sizes, "amax": amax, "scale": scale}
    outputs, protection, seconds = repeated(backend, x.device, given, call, ("codes",) if own else ())
    oracle = reference.quantize_grouped(
        x, sizes, recipe, columnwise=half is Half.COLUMN, amax=amax, scale=scale, random=random
    )  # fmt: skip
    outcome = Outcome(protection, outputs, seconds=seconds)
    kernels = split_sections(outputs, list(case.section_sizes), x.shape[1], recipe, half)
    parts = torch.split(x, list(case.section_sizes))
    judge_sections(
        outcome, parts, kernels, oracle.sections(), half=half, random=random,
        free=rotates_freely(backend), own=own, amax_given=case.amax,
    )  # fmt: skip
    add_rows(outcome, _sections(case, present(given), backend), backend)
    return outcome


def _sections(case: GroupedQuantizeCase, given: Tensors, backend: Backend) -> Independent | None:
    """The sections of x, each with its amax and scale. None: a section may depend on other sections."""
    recipe = find_recipe(case.recipe)
    if (case.inputs, case.view) != (FAMILY, "contiguous") or not has_own_rows(recipe, backend):
        return None

    def run(units: Tensors) -> Tensors:
        amax, scale = units.get("amax"), units.get("scale")
        sections = quantize_grouped(backend, units["x"], units["sizes"], recipe, case.half, amax=amax, scale=scale)
        return {part: torch.stack([_digest(getattr(q, part)) for q in sections]) for part in ("scales", "codes")}

    return Independent(len(case.section_sizes), given, run, sizes=case.section_sizes, noun="section")


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """SHA-256 of the bytes, uint8 (32,)."""
    content = hashlib.sha256(element_bytes(tensor).cpu().numpy().tobytes()).digest()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def judge_sections(
    outcome: Outcome,
    parts: Sequence[torch.Tensor],
    kernels: list[Quantized],
    oracles: list[Quantized],
    *,
    half: Half = Half.ROW,
    random: Random | None = None,
    free: bool,
    own: bool = False,
    amax_given: bool = False,
    prefix: str = "",
) -> None:
    """Judge each section (m, K), and add merged stages to the outcome, which name the first wrong section."""
    stages = []
    first = 0
    expected, actual = [outcome.expected], [outcome.actual]
    for part, kernel, oracle in zip(parts, kernels, oracles, strict=True):
        subject = Subject.of_half(
            half, part, oracle.recipe, random, first=first, free=free, own=own, amax_given=amax_given
        )  # fmt: skip
        section = Outcome()
        add_judged(section, subject, kernel, oracle, prefix)
        first += oracle.scales.numel()
        stages.append(section.stages)
        outcome.judged += section.judged
        expected.append(section.expected)
        actual.append(section.actual)
    same = all(a is b for a, b in zip(expected, actual, strict=True))
    outcome.expected = _together(expected)
    outcome.actual = outcome.expected if same else _together(actual)
    outcome.stages += merge_stages(stages, "section")


def _together(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The elements of all parts, concatenated once: one by one, 64 sections would be copied 64 times."""
    given = [part for part in parts if part is not None]
    return torch.cat([part.flatten() for part in given]) if len(given) > 1 else next(iter(given), None)
