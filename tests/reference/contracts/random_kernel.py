"""A correct kernel that is as unlike the reference as possible: the kernel draws every open choice of a contract.

Each number rounds to float32 or stays in float64, sums run in a random order and tree, a quotient is a quotient, a
product with the reciprocal or an approximation, and functions are off by their documented error in a random direction.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.contract import Program
from narrowgauge.reference.contracts.functions import FUNCTIONS, Form

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ULP = 2.0**-23


class RandomKernel:
    """Runs a contract on tensors; `values` has the number of every step in float64."""

    def __init__(
        self, program: Program, tensors: dict[str, torch.Tensor], seed: int, *, flavour: str = "mixed"
    ) -> None:
        """`flavour`: "mixed" draws for each number; "float32" and "float64" round every number or none."""
        self.tensors = tensors
        self.device = next(iter(tensors.values())).device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.flavour = flavour
        self.values: list[Any] = []
        for step in program.steps:
            if step.function == "argument":
                self.values.append(tensors[step.options["name"]].double())
            elif step.function != "quantize":
                operands = [self.values[number] for number in step.operands]
                self.values.append(getattr(self, step.function, self.function)(step, *operands))
            else:
                self.values.append(None)

    def number(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self.generator, device=self.device))

    def coin(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, generator=self.generator, device=self.device) < 0.5

    def signs(self, x: torch.Tensor) -> torch.Tensor:
        """Between −1 and 1, most often one of both."""
        drawn = torch.rand(x.shape, generator=self.generator, dtype=torch.float64, device=self.device)
        return (drawn * 4 - 2).clamp(-1, 1)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """Each number in float32 or in float64."""
        if self.flavour == "float64":
            return x
        return x.float().double() if self.flavour == "float32" else torch.where(self.coin(x), x.float().double(), x)

    def constant(self, step: Any) -> torch.Tensor:
        return self.stored(torch.tensor(step.options["value"], dtype=torch.float64, device=self.device))

    def float32(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    def once(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    def cast(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return x.float().to(DTYPES[step.dtype]).double()

    def add(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.stored(a + b)

    def subtract(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.stored(a - b)

    def multiply(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.stored(a * b)

    def square(self, step: Any, a: torch.Tensor) -> torch.Tensor:
        return self.stored(a * a)

    def negative(self, step: Any, a: torch.Tensor) -> torch.Tensor:
        return -a

    def absolute(self, step: Any, a: torch.Tensor) -> torch.Tensor:
        return a.abs()

    def maximum(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(self.coin(a + b), torch.maximum(a, b), torch.fmax(a, b))

    def minimum(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(self.coin(a + b), torch.minimum(a, b), torch.fmin(a, b))

    def compare(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return {">": torch.gt, ">=": torch.ge, "<": torch.lt, "<=": torch.le}[step.options["relation"]](a, b)

    def where(self, step: Any, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(c, a, b)

    def part(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(step.options["parts"], -1)[step.options["part"]]

    def columns(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        even, odd = x[..., ::2], x[..., 1::2]
        return {
            "rotated": lambda: torch.cat([-b, a], -1),
            "rotated-pairs": lambda: torch.stack([-odd, even], -1).flatten(-2),
            "repeated": lambda: torch.cat([x, x], -1), "repeated-pairs": lambda: x.repeat_interleave(2, -1),
        }[step.options["order"]]()  # fmt: skip

    def joined(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a, b], -1)

    def transposed(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return x.T.contiguous()

    def rotated(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        """Products with a matrix that is built block by block, each row of products summed in an order of its own."""
        group = step.options["group"]
        matrix = torch.ones(1, 1, dtype=torch.float64, device=self.device)
        while len(matrix) < group:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        bits = torch.arange(group, device=self.device) % 16
        matrix = matrix * (1 - 2 * (torch.tensor(step.options["signs"], device=self.device) >> bits & 1))
        matrix = matrix * float(torch.tensor(group**-0.5).bfloat16())
        outputs = [self.total(x.view(-1, group) * row) for row in matrix]
        return torch.cat(outputs, 1).view(x.shape)

    def any_of(self, step: Any, *values: torch.Tensor) -> torch.Tensor:
        first, *others = torch.broadcast_tensors(*values)
        for other in others:
            first = torch.where(self.coin(first), first, other)
        return first

    def roundings(self, step: Any, x: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
        for _ in range(step.options["count"]):
            x = x * (1 + self.signs(x) * ULP / 2) if of is None else x + of * self.signs(x) * ULP / 2
        return x

    def merged(self, step: Any, statistic: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The statistic in two passes, or by Welford's updates of some columns each, merged two by two."""
        if self.number(2):
            return statistic
        parts = []
        for part in x.split(1 + self.number(x.shape[-1]), -1):
            mean, squares = part[..., :1], torch.zeros_like(part[..., :1])
            for count, column in enumerate(part.split(1, -1)[1:], 2):
                delta = self.stored(column - mean)
                mean = self.stored(mean + self.stored(delta / count))
                squares = self.stored(squares + self.stored(delta * self.stored(column - mean)))
            parts.append((part.shape[-1], mean, squares))
        while len(parts) > 1:
            (n, mean, squares), (m, other, more) = parts[:2]
            delta = self.stored(other - mean)
            mean = self.stored(mean + self.stored(delta * (m / (n + m))))
            squares = self.stored(
                self.stored(squares + more) + self.stored(self.stored(delta * delta) * (n * m / (n + m)))
            )
            parts = [*parts[2:], (n + m, mean, squares)]
        return self.stored(parts[0][2] / x.shape[-1]) if step.options.get("squares") else parts[0][1]

    def divide(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.quotient(a, b, step.options.get("form"))

    def quotient(self, a: torch.Tensor, b: torch.Tensor, form: str | None) -> torch.Tensor:
        # A division has one form in the whole call, and a divisor one reciprocal.
        form = form or ("quotient", "reciprocal", "approximate")[self.number(3)]
        if form == "quotient":
            return self.stored(a / b)
        if form == "reciprocal":
            return self.stored(a * (1 / b).float().double())
        if b.numel() == a.numel():
            return self.stored(a / b * (1 + self.signs(a / b) * 2 * ULP))
        return self.stored(a * (1 / b * (1 + self.signs(b) * 1.5 * ULP)))

    def sum(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return self.along(step, x, self.total)

    def along(self, step: Any, x: torch.Tensor, reduce: Any) -> torch.Tensor:
        return reduce(x.T).squeeze(-1) if step.options.get("axis") == 0 else reduce(x)

    def sum_of(self, step: Any, *values: torch.Tensor) -> torch.Tensor:
        return self.total(torch.stack(torch.broadcast_tensors(*values), -1)).squeeze(-1)

    def mean(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[step.options.get("axis", -1)]
        form = step.options.get("division") if size & (size - 1) else "quotient"  # every form of a power of two
        count = torch.tensor(float(size), dtype=torch.float64, device=self.device)
        return self.quotient(self.along(step, x, self.total), count, form)

    def amax(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return self.along(step, x.abs().nan_to_num(0.0, torch.inf), lambda t: t.amax(-1, keepdim=True))

    def largest(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        ignored = torch.where(x.isnan(), -torch.inf, x)
        return self.along(step, x if self.number(2) else ignored, lambda t: t.amax(-1, keepdim=True))

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Columns in a random order, joined two by two, in runs, or by random pairs."""
        x = x[..., torch.randperm(x.shape[-1], generator=self.generator, device=self.device)]
        style = self.number(3)
        if style == 0 and x.shape[-1] <= 512:
            found = x[..., :1]
            for column in range(1, x.shape[-1]):
                found = self.stored(found + x[..., column : column + 1])
            return found
        while x.shape[-1] > 1:
            half = x.shape[-1] // 2
            if style == 1:
                half = 1 + self.number(half)
            joined = self.stored(x[..., :half] + x[..., half : 2 * half])
            x = torch.cat([joined, x[..., 2 * half :]], -1)
        return x

    def function(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        """A function in one of its forms."""
        function = FUNCTIONS[step.function]
        names = step.options.get("forms") or function.default
        return self.any_of(step, *(self.form(step.function, function.forms[name], x) for name in names))

    def form(self, name: str, form: Form, x: torch.Tensor) -> torch.Tensor:
        exact = getattr(torch, name)(x * (1 + self.signs(x) * form.argument))
        # The documented error holds the rounding of the result.
        error = ((form.relative - ULP / 2) * exact.abs() + form.absolute).clamp(min=0)
        if form.ulps:
            ulps = form.ulps + (form.ulps_of_argument * x.abs() if form.ulps_of_argument else 0)
            error = error + ulps * ULP * exact.abs()
        free = exact.isfinite() & ~torch.isin(x, x.new_tensor(FUNCTIONS[name].exact_at))
        moved = torch.where(free, exact + self.signs(exact) * error, exact)  # −0 stays
        return self.stored(moved.clamp(*FUNCTIONS[name].range))


class FlushingKernel(RandomKernel):
    """A kernel with steps that flush subnormal operands and results: single numbers by a coin, or all."""

    def flushed(self, x: torch.Tensor) -> torch.Tensor:
        tiny = x.abs() < 2.0**-126
        return torch.where(tiny & self.coin(x) if self.flavour == "mixed" else tiny, torch.copysign(x * 0, x), x)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        return self.flushed(super().stored(self.flushed(x)))

    def float32(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return self.flushed(x)

    def cast(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return super().cast(step, self.flushed(x))

    def compare(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return super().compare(step, self.flushed(a), self.flushed(b))

    def amax(self, step: Any, x: torch.Tensor) -> torch.Tensor:
        return super().amax(step, self.flushed(x))

    def maximum(self, step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.flushed(super().maximum(step, a, b))

    def quotient(self, a: torch.Tensor, b: torch.Tensor, form: str | None) -> torch.Tensor:
        a, b = self.flushed(a), self.flushed(b)
        if form == "reciprocal":
            return self.stored(a * self.stored((1 / b).float().double()))
        return super().quotient(a, b, form)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return super().total(self.flushed(x))

    def form(self, name: str, form: Form, x: torch.Tensor) -> torch.Tensor:
        return super().form(name, form, self.flushed(x))
