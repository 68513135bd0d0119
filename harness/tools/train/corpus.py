"""Generated text: sentences of a small grammar, as character numbers."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_NOUNS = ("cat", "dog", "bird", "fish", "horse", "mouse", "tree", "stone")
_VERBS = ("sees", "hears", "likes", "finds", "follows")
_ADJECTIVES = ("big", "small", "old", "red", "quiet")
_TURNS = ("and", "but", "while")


@dataclass(frozen=True)
class Corpus:
    """A text."""

    text: str

    @property
    def characters(self) -> str:
        """Characters of the text, sorted, without duplicates. A character's number is its index."""
        return "".join(sorted(set(self.text)))

    @property
    def entropy(self) -> float:
        """Entropy in nats of a character given the previous character.

        No model with ineffective layers has a smaller mean loss over the text, whatever its embedding and output are.
        """
        return _entropy(zip(self.text, self.text[1:], strict=False)) - _entropy(self.text[:-1])

    def batches(self, steps: int, batch: int, sequence: int, seed: int) -> Sequence[torch.Tensor]:
        """A tensor int64 (batch, sequence + 1) for each step: pieces of the text at random positions."""
        import torch

        number = {character: place for place, character in enumerate(self.characters)}
        numbers = torch.tensor([number[character] for character in self.text])
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.text) - sequence, (steps, batch, 1), generator=generator)
        return numbers[starts + torch.arange(sequence + 1)].unbind()


def _entropy(events: Iterable[object]) -> float:
    """Entropy of the distribution of the events, in nats."""
    counts = Counter(events)
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())


def make(seed: int, length: int = 1 << 15) -> Corpus:
    """A corpus of `length` characters: `the old cat sees a tree, but a dog hears the small bird.`"""
    draw = random.Random(seed)
    sentences: list[str] = []
    size = 0
    while size < length:
        sentence = _clause(draw)
        if draw.random() < 0.3:
            sentence += f", {draw.choice(_TURNS)} {_clause(draw)}"
        sentences.append(f"{sentence}. ")
        size += len(sentences[-1])
    return Corpus("".join(sentences)[:length])


def _clause(draw: random.Random) -> str:
    return f"{_noun(draw)} {draw.choice(_VERBS)} {_noun(draw)}"


def _noun(draw: random.Random) -> str:
    adjective = f"{draw.choice(_ADJECTIVES)} " if draw.random() < 0.4 else ""
    return f"{draw.choice(('a', 'the'))} {adjective}{draw.choice(_NOUNS)}"
