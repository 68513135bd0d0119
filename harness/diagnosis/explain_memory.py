"""Causes observed while the backend ran: guard zones, poison, thread orders, the steps of a module, memory that results
share, and results that stay when the inputs change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.outcome import Outcome


def _observed(step: str, sentences: Mapping[str, str]) -> list[Deviation[Outcome]]:
    return [Deviation(cause, sentence, step) for cause, sentence in sentences.items()]


MEMORY_CAUSES = {
    row.cause: row for row in _observed("memory", {
        "writes-outside": "it writes outside its outputs",
        "changes-its-input": "it writes into its inputs",
        "overwrites-earlier-result": "a call overwrites the result of an earlier one",
        "never-written": "it leaves elements of its outputs unwritten",
        "reads-outside": "it reads bytes outside its inputs, or memory that nobody wrote",
        "order-of-threads": "its result depends on the order in which threads run",
        "not-repeatable": "its result changes from run to run",
        "wrong-after-many-calls": "its result changes after many calls on the same inputs",
        "concurrent-threads": "its result depends on calls of another thread at the same time",
        "captured-inputs": "in a CUDA graph its result depends on the inputs of the capture or of an earlier replay",
        "concurrent-streams": "its result depends on calls on another CUDA stream at the same time",
        "autograd:no-grad": "it is right in a plain call, and wrong under torch.no_grad()",
        "autograd:inference-mode": "it is right in a plain call, and wrong under torch.inference_mode()",
        "autograd:requires-grad": "it is right in a plain call, and wrong if its inputs require grad",
        "rows-dependent": "a row has other bytes beside other rows",
        "ranks-differ": "the ranks of a group hold different bytes",
        "prefill-dependent": "what a cache held before decides bytes that it writes, or bytes that stay change",
    })
}  # fmt: skip
"""Causes that the guarded runs report (`harness.operations.stages.repeated`)."""
MODULE_CAUSES = {
    row.cause: row for row in _observed("module", {
        "gradient-missing": "a weight has no gradient",
        "gradient-too-early": "a gradient that is to wait does not",
        "recomputed-otherwise": "a second forward gives other bytes than the first",
        "operand-of-the-step-before": "an operand is that of the step before",
        "operand-of-the-forward-before": "an operand is that of the forward before, of weights that were changed since",
        "operand-of-another-pass": "an operand is that of another pass whose backward was pending",
        "gradient-not-wanted": "a weight that needs no gradient has one",
        "gradient-overwritten": "the gradient of a later backward replaces that of an earlier one",
        "use:unobserved": "it is right with an observer, and wrong without one",
        "use:no-grad": "it is wrong only if a forward under torch.no_grad() runs before",
        "use:frozen-weight": "it is wrong only if the weights need no gradient",
        "use:frozen-input": "it is wrong only if x needs no gradient",
        "use:reloaded": "it is wrong only after its state dict was saved and loaded",
        "use:pending": "it is wrong only if two forwards run before their backwards",
        "use:microbatches": "it is wrong only if two forwards run in one autocast before their backwards",
        "use:pending-reversed": "it is wrong only if two forwards run before their backwards, the later backward first",
        "use:rewritten": "it is wrong only if weights are changed in place between two forwards",
        "padding-not-zeroed": "rows of the padding of a section are not 0",
        "recipe-of-another-operand": "an operand is quantized by the recipe of another operand of the training recipe",
        "operand-not-rotated": "operands are quantized without their rotation",
        "random-bits-of-another-backward": "an operand is rounded by the random bits of another backward",
        "random-offset-grows-by-one": "the offset of the random bits grows by 1 a backward, not by 2",
        "quantized-twice": "a half is made of the other one's decoded values",
    })
}  # fmt: skip
"""Causes that the judge of a module's steps reports (`harness.operations.modules.linear`)."""
ALIAS_CAUSES = {
    row.cause: row for row in _observed("memory", {
        "returns-its-input": "its result shares memory with an input",
        "returns-earlier-result": "its result shares memory with an earlier result",
    })
}  # fmt: skip
"""Causes that the kernel host reports for results that share memory."""
SAME_RESULT: Deviation[Outcome] = Deviation(
    "same-result-for-other-inputs", "{} the same for the inputs of another seed", "memory"
)


@dataclass(frozen=True)
class Run:
    """Tensors of a case on the inputs of one seed, by name."""

    inputs: Mapping[str, torch.Tensor]
    """The inputs, by the names of `Inputs.named`."""
    results: Mapping[str, torch.Tensor]
    """The results of the backend, by the names of `Outcome.outputs`."""
    expected: Mapping[str, torch.Tensor]
    """The results of the reference, by the same names."""


def explain_memory(outcome: Outcome, wrong_stage: StageResult) -> list[Explanation]:
    """Explanations by the observed causes of a wrong stage. They are exact: nothing is inferred from wrong elements."""
    rows = MEMORY_CAUSES | MODULE_CAUSES
    return [Explanation.of(rows[cause], wrong_stage.stage) for cause in wrong_stage.causes]


def explain_aliases(outcome: Outcome, wrong_stage: StageResult, *, exact: bool) -> list[Explanation]:
    """Explanations by memory that results share with inputs or with earlier results, as the kernel host reports it.

    A kernel may reuse the memory of its results and be wrong for another reason. So the caller gives `exact=False` if
    another mistake gives the bytes of the kernel.
    """
    found = {
        entry["cause"]: Explanation(entry["cause"], entry["sentence"], wrong_stage.stage, exact=exact)
        for entry in outcome.aliases
        if entry["cause"] in ALIAS_CAUSES
    }
    return list(found.values())


def explain_same_results(wrong_stage: StageResult, first: Run, other: Run, *, exact: bool) -> list[Explanation]:
    """The explanation `same-result-for-other-inputs`: wrong results with the same bytes for the inputs of two seeds.

    A result counts if it is not empty, differs from the reference, and has the bytes of its counterpart of the other
    run, while the references of the two runs differ. No result counts if the inputs of both runs are equal, as those of
    the family `zeros`. `exact`: as of `explain_aliases`.
    """
    if not _differ(first.inputs, other.inputs):
        return []
    names = [
        name
        for name, result in first.results.items()
        if result.numel()
        and _equal(result, other.results.get(name))
        and name in first.expected
        and not _equal(first.expected[name], other.expected.get(name))
        and not _equal(result, first.expected[name])
    ]
    if not names:
        return []
    row = SAME_RESULT.bound(f"{_listed(names)} {'is' if len(names) == 1 else 'are'}")
    return [Explanation(row.cause, row.sentence, wrong_stage.stage, exact=exact)]


def _differ(inputs: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether any tensor differs from the tensor of the same name."""
    return any(not _equal(tensor, others.get(name)) for name, tensor in inputs.items())


def _equal(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors have equal shape, dtype and bytes."""
    if other is None or (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    left, right = (element_bytes(t) for t in (tensor, other))
    return torch.equal(left, right)


def _listed(names: list[str]) -> str:
    """Names as an enumeration: `codes, scales and amax`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
