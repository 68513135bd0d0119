"""The trained model: transformer layers of a backend between an embedding and an output in high precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as F

LAYERS = 2
SEEDS = 4
"""Seeds used by a transformer layer: a seed per product."""
SPREAD = 0.02
"""Standard deviation of the initial weights, as in GPT-2."""


@dataclass(frozen=True)
class Size:
    """Size of the model and of a batch. Every product has batch · sequence rows."""

    hidden: int = 64
    ffn: int = 256
    heads: int = 4
    sequence: int = 64
    batch: int = 4


class LayerMaker(Protocol):
    """Makes layers: a backend, or its layers in a kernel host."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A layer. `method`: its name."""


class Model(torch.nn.Module):
    """Tokens int64 (B, S) to logits float32 (B, S, characters).

    All parts except the backend's layers are torch modules in float32, equal for every backend. The initial weights
    depend only on the seed and on their names. Raises Unsupported and BackendError as the backend does.
    """

    def __init__(self, backend: LayerMaker, size: Size, characters: int, *, seed: int, device: torch.device) -> None:
        super().__init__()
        self.embedding = _weight(characters, size.hidden, device)
        self.position = _weight(size.sequence, size.hidden, device)
        self.layers = torch.nn.ModuleList(
            backend.call(
                "TransformerLayer", size.hidden, size.ffn, size.heads, dtype=torch.bfloat16, device=device,
                seed=seed + SEEDS * number,
            )
            for number in range(LAYERS)
        )  # fmt: skip
        self.norm = torch.nn.LayerNorm(size.hidden, device=device)
        self.output = torch.nn.Linear(size.hidden, characters, device=device)
        self.between: list[torch.Tensor] = []
        """Input of the first layer and output of each layer in the last forward, with gradients."""
        self._start(seed)

    def _start(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in sorted(self.named_parameters()):
                if weight.dim() == 2:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD)
                else:
                    weight.fill_(float("norm" in name and name.endswith("weight")))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # A product with one-hot rows instead of a lookup: a GPU adds the gradient of a lookup in any order.
        x = F.one_hot(tokens, len(self.embedding)).float() @ self.embedding + self.position
        self.between = [x.bfloat16()]
        for layer in self.layers:
            self.between.append(layer(self.between[-1]))
        for tensor in self.between:
            if tensor.requires_grad:
                tensor.retain_grad()
        logits: torch.Tensor = self.output(self.norm(self.between[-1].float()))
        return logits

    def loss(self, pieces: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in nats, of each next character of pieces int64 (B, S + 1)."""
        return F.cross_entropy(self(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def _weight(rows: int, columns: int, device: torch.device) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(rows, columns, device=device))


class Adam:
    """Adam on float32 copies of a model's weights: small steps would be lost in bfloat16."""

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        self._weights = dict(sorted(model.named_parameters()))
        self._masters = {name: weight.detach().float().clone() for name, weight in self._weights.items()}
        self._optimizer = torch.optim.Adam(self._masters.values(), lr=rate)

    def step(self) -> None:
        """Take a step with the gradients of the model's weights, and clear the gradients."""
        for name, weight in self._weights.items():
            assert weight.grad is not None
            self._masters[name].grad = weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._masters[name])
