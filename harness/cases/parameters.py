"""The parameters of the modules by name: their shapes, and which of them are matrices that are quantized."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.harness.cases.case import Case


@dataclass(frozen=True)
class Layer:
    """A linear layer, alone or a child of a transformer layer."""

    prefix: str
    """Before the names of its parameters: nothing, or `qkv.` and the like."""
    inner: int
    """K: features of the input."""
    outer: int
    """N: features of the output."""
    groups: int = 0
    """Weights of a grouped layer, one a section; 0 of any other, which has one weight without a number."""
    norm: str = ""
    """`layer` or `rms`, of a layer that normalizes its input first; nothing of one that does not."""

    @property
    def weights(self) -> list[str]:
        """Names of the matrices (N, K) that are quantized."""
        return [f"{self.prefix}weight{number}" for number in self._numbers]

    @property
    def biases(self) -> list[str]:
        """Names of the biases (N,), where the module has any."""
        return [f"{self.prefix}bias{number}" for number in self._numbers]

    @property
    def gamma(self) -> str:
        """Name of the factor (K,) of the norm; nothing where there is none."""
        return f"{self.prefix}layer_norm_weight" if self.norm else ""

    @property
    def beta(self) -> str:
        """Name of what the norm adds, (K,); nothing where there is none."""
        return f"{self.prefix}layer_norm_bias" if self.norm == "layer" else ""

    @property
    def _numbers(self) -> list[str]:
        return [str(number) for number in range(self.groups)] if self.groups else [""]

    def shapes(self, *, bias: bool) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter."""
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.weights, (self.outer, self.inner))
        found |= dict.fromkeys(self.biases if bias else [], (self.outer,))
        return found | dict.fromkeys(filter(None, (self.gamma, self.beta)), (self.inner,))


def transformer(hidden: int, ffn: int, norm: str) -> list[Layer]:
    """The linear layers of a transformer layer, in order."""
    return [
        Layer("qkv.", hidden, 3 * hidden, norm=norm),
        Layer("proj.", hidden, hidden),
        Layer("fc1.", hidden, ffn, norm=norm),
        Layer("fc2.", ffn, hidden),
    ]


def layers_of(case: Case) -> list[Layer]:
    """The linear layers of a module case, in order."""
    if case.operation == "transformer-layer":
        return transformer(case.shape[2], case.shape[3], case.norm)
    inner, outer = case.shape[-2:]
    if case.operation == "grouped-linear":
        return [Layer("", inner, outer, groups=len(case.sections))]
    return [Layer("", inner, outer, norm=case.norm if case.operation == "layernorm-linear" else "")]
