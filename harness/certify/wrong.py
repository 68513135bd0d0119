"""The set of wrong inputs of a failing certificate: as a rule of their features, and as runs of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

RUNS = 10_000
"""Largest number of listed runs of wrong inputs."""


@dataclass
class Feature:
    """A property of the inputs, named by rules."""

    values: torch.Tensor
    """int64 (n,) or float64 (n,): the property of every input."""
    names: Sequence[str] | None = None
    """Name of every value from 0; None: the values are ordered, and a rule names an interval."""


@dataclass(frozen=True)
class Rule:
    """A conjunction of conditions that holds for the wrong inputs and for no right input."""

    conditions: dict[str, list[Any]]
    """By feature: names of the values, or the two ends of an interval."""

    def __str__(self) -> str:
        parts = []
        for name, value in self.conditions.items():
            if len(value) == 2 and all(isinstance(end, float) for end in value):
                low, high = value
                parts.append(f"{name} {low!r}" if low == high else f"{name} from {low!r} to {high!r}")
            else:
                parts.append(f"{name}: {' or '.join(map(str, value))}")
        return "; ".join(parts) or "every input"


def find_rule(wrong: torch.Tensor, features: Mapping[str, Feature]) -> Rule | None:
    """The conjunction of conditions, as short as possible, that holds exactly for the inputs `wrong`, bool (n,).

    Every condition is the least that covers the wrong inputs: the values of a feature that occur, or the interval
    between the least and the largest. None if a right input meets all conditions too, or if no input is wrong.
    """
    if not bool(wrong.any()):
        return None
    held = {name: _condition(wrong, feature) for name, feature in features.items()}
    narrow = [name for name, (mask, _) in held.items() if not bool(mask.all())]
    right = ~wrong

    def explains(names: Sequence[str]) -> bool:
        left = right
        for name in names:
            left = left & held[name][0]
        return not bool(left.any())

    if not explains(narrow):
        return None
    for name in sorted(narrow, key=lambda name: features[name].names is not None):  # intervals are dropped first
        rest = [other for other in narrow if other != name]
        narrow = rest if explains(rest) else narrow
    return Rule({name: held[name][1] for name in narrow})


def _condition(wrong: torch.Tensor, feature: Feature) -> tuple[torch.Tensor, list[Any]]:
    """Inputs under the least condition on a feature that covers all wrong inputs, and the condition."""
    found = feature.values[wrong]
    if feature.names is None:
        low, high = found.min(), found.max()
        return (feature.values >= low) & (feature.values <= high), [float(low), float(high)]
    seen = torch.unique(found)
    return torch.isin(feature.values, seen), [feature.names[int(value)] for value in seen]


def runs(keys: torch.Tensor) -> list[list[int]]:
    """First and last of every run of consecutive integers in `keys`, int64 (n,), sorted and different."""
    if not keys.numel():
        return []
    breaks = torch.nn.functional.pad((keys.diff() != 1).nonzero().flatten() + 1, (1, 0))
    last = torch.cat([breaks[1:] - 1, breaks.new_tensor([len(keys) - 1])])
    return torch.stack([keys[breaks], keys[last]], 1).tolist()
