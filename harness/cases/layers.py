"""The linear layers of modules, and the names and shapes of their parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A linear layer: a module, or a child of a transformer layer."""

    prefix: str
    """Prefix of the parameter names: `qkv.` and the like in a transformer layer, else empty."""
    inner: int
    """K: features of the input."""
    outer: int
    """N: features of the output."""
    groups: int = 0
    """Number of weights of a grouped layer, equal to the number of sections. 0: a single weight without a number."""
    norm: str = ""
    """Norm of the input, `layer` or `rms`; empty without a norm."""

    @property
    def first(self) -> bool:
        """Whether the layer alone needs the gradient of the input of the module: no norm and no residual does."""
        return not self.norm and (not self.prefix or (self.groups > 0 and self.prefix == "fc1."))

    @property
    def weights(self) -> list[str]:
        """Names of the matrices (N, K) that are quantized."""
        return [f"{self.prefix}weight{number}" for number in self._numbers]

    @property
    def biases(self) -> list[str]:
        """Names of the biases (N,), if the module has biases."""
        return [f"{self.prefix}bias{number}" for number in self._numbers]

    @property
    def gamma(self) -> str:
        """Name of the factor (K,) of the norm; empty without a norm."""
        return f"{self.prefix}layer_norm_weight" if self.norm else ""

    @property
    def beta(self) -> str:
        """Name of the addend (K,) of a layer norm; empty for rms and without a norm."""
        return f"{self.prefix}layer_norm_bias" if self.norm == "layer" else ""

    @property
    def _numbers(self) -> list[str]:
        return [str(number) for number in range(self.groups)] if self.groups else [""]

    def shapes(self, *, bias: bool) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by name."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.weights, (self.outer, self.inner))
        shapes |= dict.fromkeys(self.biases if bias else [], (self.outer,))
        return shapes | dict.fromkeys(filter(None, (self.gamma, self.beta)), (self.inner,))


def transformer(hidden: int, ffn: int, norm: str) -> list[Layer]:
    """The linear layers of a transformer layer, in order."""
    return [
        Layer("qkv.", hidden, 3 * hidden, norm=norm),
        Layer("proj.", hidden, hidden),
        Layer("fc1.", hidden, ffn, norm=norm),
        Layer("fc2.", ffn, hidden),
    ]


def mixture(experts: int, hidden: int, ffn: int) -> list[Layer]:
    """The linear layers of a mixture of experts, in order: the first has the columns of gate and up."""
    return [Layer("fc1.", hidden, 2 * ffn, experts), Layer("fc2.", ffn, hidden, experts)]
