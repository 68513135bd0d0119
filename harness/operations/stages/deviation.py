"""Known deviations of kernels, as rows of tables: the reference with one change. This module does not import torch.

A row stands beside the code that it changes. `harness.diagnosis.cause_names` collects the rows of all tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

Of = TypeVar("Of")
Values = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Names and values; as pairs, a name may be repeated."""
_AFTER_AMAX = ("tensor scale", "scales", "codes")
_STAGES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "x": (("scales", "codes"), ("amax",)),
    "rotation": (("amax", "scales", "codes"), ()),
    "used amax": (("scales", "codes"), ()),
    "tensor scale": (_AFTER_AMAX, ()),
    "used tensor scale": (_AFTER_AMAX, ()),
    # FP8 kernels scale elements by the encode scale, which follows from the amax, or by the inverse of the stored
    # scale.
    "blocks": (("scales",), ("amax", "codes")),
    **dict.fromkeys(("elements", "factors", "scaled elements", "element codes", "random bytes"), (("codes",), ())),
}  # fmt: skip
"""Stages of a quantized matrix that a changed step changes, and stages that the step may change. A kernel can compute
the amax of the tensor before or after it changes its inputs."""


@dataclass(frozen=True)
class Deviation(Generic[Of]):
    """A known mistake of a kernel: the reference with a changed step.

    `Of` decides about the rows of a table that apply: a recipe, the parts of a product, the arguments of a formula.
    """

    cause: str
    """Name in lower case with hyphens. {} stands for a key of `over`."""
    sentence: str
    """Sentence for people. {} or {0} stands for the key of `over`, {1} for its value, and {of} for words of the user of
    the table, for example the name of a matrix."""
    step: str
    """Step of the reference with a changed result, for example `factors`, `epilogue`, `norm`."""
    change: Callable[..., Any] | None = None
    """Function to the changed result of the step, from the value of `over`, if there is one, and the arguments of the
    step. Its result is None if the change does not apply. None: the cause is observed, or a search of its own finds it.
    """
    over: Values | Callable[[Of], Values] | None = None
    """Values of the row, by their names, or names with values. None: the row is a single deviation."""
    when: Callable[[Of], bool] | None = None
    """Whether an `Of` can show the mistake. None: always."""
    stages: frozenset[str] = frozenset()
    """Stages that the deviation can change. An explanation must give the kernel's bytes in all these stages. Without a
    value, the stages follow from the step."""
    optional_stages: frozenset[str] = frozenset()
    """Further stages that the deviation may change."""
    row_local: bool = True
    """Whether rows of the result depend only on the same rows of the matrix."""
    exact: bool = True
    """Whether the deviation predicts the bytes. If not, it only describes how the bytes can arise."""
    of_case: bool = False
    """Whether the deviation holds numbers of the case, such as the amax of an earlier call. The description is about
    these inputs alone."""
    implausible: bool = False
    """Whether the mistake is less plausible than a choice of an existing library."""

    def __post_init__(self) -> None:
        if not self.stages:
            stages, optional = _STAGES.get(self.step, ((self.step,), ()))
            object.__setattr__(self, "stages", frozenset(stages))
            object.__setattr__(self, "optional_stages", self.optional_stages | frozenset(optional))

    def result(self, *of: Any) -> Any:
        """The changed result of the step, from its arguments."""
        assert self.change is not None, f"{self.cause} has no change"
        return self.change(*of)

    def through(self, change: Callable[..., Any], **fields: Any) -> Deviation[Any]:
        """The row with another change, which calls the row's own: its first argument. `fields`: other fields."""
        return replace(self, change=partial(change, self.result), over=None, when=None, **fields)

    def bound(self, name: object = "", value: Any = None) -> Deviation[Of]:
        """The row for a value of `over`. {of} stays in its sentence."""
        change = self.change if self.change is None or value is None else partial(self.change, value)
        sentence = self.sentence.format(name, value, of="{of}")
        return replace(self, cause=self.cause.format(name), sentence=sentence, change=change, over=None)

    def rows(self, of: Of) -> Iterator[Deviation[Of]]:
        """The rows for the values of `over` that apply to `of`."""
        if self.when is not None and not self.when(of):
            return
        if self.over is None:
            yield self
            return
        values = self.over(of) if callable(self.over) else self.over
        for name, value in values.items() if isinstance(values, Mapping) else values:
            yield self.bound(name, value)


def rows_of(table: Iterable[Deviation[Of]], of: Of) -> Iterator[Deviation[Of]]:
    """The rows of a table that apply to `of`, in order, a row per value."""
    for row in table:
        yield from row.rows(of)


def in_turn(over: Mapping[str, Any], *rows: Deviation[Of]) -> tuple[Deviation[Of], ...]:
    """Rows with the same values: every row for the first value, then every row for the next."""
    return tuple(replace(row, over={name: value}) for name, value in over.items() for row in rows)
