"""The functions of a contract. A function adds a step, or the steps of a formula. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowgauge.contract.values import Value, broadcast, combined, in_float32, number
from narrowgauge.spec.program import (
    BITS,
    CODES,
    COLUMNS,
    DECODE,
    DEQUANTIZE,
    DIVISIONS,
    FACTOR,
    GEMM,
    HALF,
    INDEX,
    JOINED,
    OF_HEADS,
    ONCE,
    PROMOTIONS,
    QUANTIZE,
    READ,
    ROTATED,
    SLOTS,
    TRANSPOSED,
    WRITTEN,
)
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import summation

DTYPES = ("float32", "bfloat16", "float16")
EXACT = "exact"
"""Dtype of numbers without a rounding in any kernel: products of codes and scales."""


def float32(x: Value) -> Value:
    """`x` in float32, exactly."""
    return x if x.dtype == "float32" else x.trace.add("float32", (x,), x.axes, "float32")


def cast(x: Value, dtype: str) -> Value:
    """`x` rounded to a dtype in every kernel, nearest even: `x.dtype` of an argument, "bfloat16" or "float16"."""
    if dtype not in DTYPES:
        x.trace.fail(f"a cast takes one of {', '.join(DTYPES)}, not {dtype!r}")
    return x.trace.add("cast", (x,), x.axes, dtype)


def square(x: Value) -> Value:
    """x²."""
    return x.trace.add("square", (in_float32(x),), x.axes, "float32")


def sum(x: Value | Sequence[Value], *, depth: int | None = None, axis: int = -1) -> Value:
    """Σ along an axis, or of a list of values, in any order, or with at most `depth` roundings of a term.

    `axis`: the last, (M, K) to (M, 1), or 0, (M, K) to (K,).
    """
    if isinstance(x, Value):
        return _reduced("sum", in_float32(x), axis, depth=depth)
    values = [in_float32(value) for value in x]
    axes = values[0].axes
    for value in values[1:]:
        axes = broadcast(value.trace, axes, value.axes)
    return values[0].trace.add("sum_of", tuple(values), axes, "float32", **({} if depth is None else {"depth": depth}))


def mean(x: Value, *, depth: int | None = None, division: str | None = None, axis: int = -1) -> Value:
    """Σ along an axis, divided by its size: `sum`, then `divide`."""
    _check_division(x, division)
    return _reduced("mean", in_float32(x), axis, depth=depth, division=division)


def amax(x: Value, *, axis: int = -1) -> Value:
    """The largest magnitude along an axis."""
    return _reduced("amax", x, axis)


def largest(x: Value, *, axis: int = -1) -> Value:
    """The largest number along an axis."""
    return _reduced("largest", x, axis)


def divide(x: Value | float, y: Value | float, form: str | None = None) -> Value:
    """x / y as "quotient", as x·fl(1/y) ("reciprocal") or "approximate"; None: any form, as the operator `/`."""
    value = x if isinstance(x, Value) else y
    assert isinstance(value, Value)
    _check_division(value, form)
    return combined("divide", x, y, **({} if form is None else {"form": form}))


def maximum(x: Value, y: Value | float) -> Value:
    """The larger of two numbers; a NaN operand gives the second operand or NaN."""
    return combined("maximum", x, y)


def minimum(x: Value, y: Value | float) -> Value:
    """The smaller of two numbers; a NaN operand gives the second operand or NaN."""
    return combined("minimum", x, y)


def where(condition: Value, x: Value | float, y: Value | float) -> Value:
    """x where the condition holds, else y."""
    trace = condition.trace
    if condition.dtype != "bool":
        trace.fail("the condition of c.where is a comparison, such as x > 0")
    one, other = (in_float32(v) if isinstance(v, Value) else number(trace, v) for v in (x, y))
    axes = broadcast(trace, condition.axes, broadcast(trace, one.axes, other.axes))
    return trace.add("where", (condition, one, other), axes, "float32")


def exp(x: Value, *forms: str) -> Value:
    """eˣ. Forms of functions: `reference.contracts.functions.FUNCTIONS`; without a name: all forms without
    fast-math."""
    return _function("exp", x, forms)


def exp2(x: Value, *forms: str) -> Value:
    """2ˣ."""
    return _function("exp2", x, forms)


def log(x: Value, *forms: str) -> Value:
    """Natural logarithm of x."""
    return _function("log", x, forms)


def rsqrt(x: Value, *forms: str) -> Value:
    """1/√x."""
    return _function("rsqrt", x, forms)


def sqrt(x: Value, *forms: str) -> Value:
    """√x."""
    return _function("sqrt", x, forms)


def tanh(x: Value, *forms: str) -> Value:
    """tanh x."""
    return _function("tanh", x, forms)


def erf(x: Value, *forms: str) -> Value:
    """erf x."""
    return _function("erf", x, forms)


def any_of(*values: Value) -> Value:
    """A number by any of the given formulas: every kernel may choose."""
    first, *others = [in_float32(value) for value in values]
    axes = first.axes
    for other in others:
        axes = broadcast(first.trace, axes, other.axes)
    return first.trace.add("any_of", (first, *others), axes, "float32")


def roundings(x: Value, count: int, of: Value | None = None) -> Value:
    """`x` with up to `count` further roundings, for example by a different order of products. `of`: larger rounded
    numbers, for example the operands of the difference x."""
    operands = (in_float32(x),) if of is None else (in_float32(x), in_float32(of))
    return x.trace.add("roundings", operands, x.axes, "float32", count=count)


def once(x: Value) -> Value:
    """A number of a row, computed once by a kernel: the same number explains all results of the row.

    The number reaches a result only by products, quotients, sums, casts and limits, once in a formula.
    """
    if len(x.axes) != 2 or x.axes[-1] != "1" or x.axes[0] == "1":
        x.trace.fail(f"c.once takes a number of each row, such as a sum, not a tensor of ({', '.join(x.axes)})")
    return x.trace.add(ONCE, (in_float32(x),), x.axes, "float32")


def sigmoid(x: Value, *forms: str) -> Value:
    """1/(1 + e^(−x)). Forms: the forms of `exp`, and "tanh" for ½ + ½·tanh(x/2), with an absolute error."""
    by_exp = tuple(form for form in forms if form != "tanh")
    formulas = [1.0 / (exp(-x, *by_exp) + 1.0)] if by_exp or not forms else []
    if "tanh" in forms:
        formulas.append(tanh(x * 0.5) * 0.5 + 0.5)
    return formulas[0] if len(formulas) == 1 else any_of(*formulas)


def silu(x: Value, *forms: str) -> Value:
    """x·sigmoid(x), as a quotient x/(1 + e^(−x)) or as the product. Forms: the forms of `sigmoid`."""
    product = x * sigmoid(x, *forms)
    by_exp = tuple(form for form in forms if form != "tanh")
    return any_of(x / (exp(-x, *by_exp) + 1.0), product) if by_exp or not forms else product


def gelu(x: Value, form: str = "tanh", *forms: str) -> Value:
    """GELU: "tanh" is ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), "erf" is ½·x·(1 + erf(x/√2)).

    The argument has up to six further roundings: products in any order, constants rounded together, or a factor
    2·log2 e; tanh may be computed by a sigmoid, or has the given forms.
    """
    if form == "tanh":
        argument = (x + square(x) * x * 0.044715) * math.sqrt(2 / math.pi)
        inner = tanh(roundings(argument, 6), *(forms or ("tanhf", "sigmoid")))
    elif form == "erf":
        inner = erf(roundings(x * math.sqrt(0.5), 2))
    else:
        x.trace.fail(f"c.gelu has the forms tanh and erf, not {form!r}")
    return any_of(x * 0.5 * (inner + 1.0), x * ((inner + 1.0) * 0.5))


def softmax(x: Value) -> Value:
    """e^(x − m)/Σ e^(x − m) along the last axis, m the largest number of the row."""
    e = exp(x - largest(x))
    return e / sum(e)


def rms_norm(x: Value, weight: Value | None = None, eps: float = 1e-6) -> Value:
    """x/√(mean x² + eps) along the last axis, times the weight: the products in any order."""
    return _weighted(x * rsqrt(mean(square(in_float32(x))) + eps), weight)


def layer_norm(x: Value, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5) -> Value:
    """(x − m)/√(mean (x − m)² + eps) along the last axis, m its mean, times the weight, plus the bias.

    Mean and variance in two passes or by Welford's updates, merged in a tree; x·r − m·r in place of (x − m)·r. Not
    mean x² − m².
    """
    m = _merged(mean(x), x)
    d = x - m
    r = rsqrt(_merged(mean(square(d)), x, squares=True) + eps)
    of_parts = (abs(x) + abs(m)) * r
    y = _weighted(roundings(d * r, 3, of_parts), weight)
    return y if bias is None else y + float32(bias)


def _weighted(y: Value, weight: Value | None) -> Value:
    return y if weight is None else roundings(y * float32(weight), 1)


def _merged(statistic: Value, x: Value, **options: bool) -> Value:
    """A mean of x, or its mean square deviation (`squares`), also merged by a kernel from the means of parts."""
    return x.trace.add("merged", (statistic, x), statistic.axes, "float32", **options)


def halves(x: Value) -> tuple[Value, Value]:
    """The first and the second half of the last axis."""
    axes = (*x.axes[:-1], f"{x.axes[-1]}/2")
    first, second = (x.trace.add("part", (x,), axes, x.dtype, part=part, parts=2) for part in (0, 1))
    return first, second


def joined(first: Value, second: Value) -> Value:
    """Two matrices (…, K/2) side by side, (…, K): the inverse of `halves`."""
    if first.axes != second.axes or first.dtype != second.dtype:
        first.trace.fail(
            f"c.joined takes two values of the same axes and dtype, not {first.dtype} ({', '.join(first.axes)}) and "
            f"{second.dtype} ({', '.join(second.axes)})"
        )
    return first.trace.add(JOINED, (first, second), (*first.axes[:-1], _whole(first, "c.joined")), first.dtype)


def transposed(x: Value) -> Value:
    """A matrix (M, K) with rows and columns exchanged: (K, M)."""
    if len(x.axes) != 2:
        x.trace.fail(f"c.transposed takes a matrix, not a tensor of the axes ({', '.join(x.axes)})")
    return x.trace.add(TRANSPOSED, (x,), x.axes[::-1], x.dtype)


def rotate_half(x: Value, pairs: str = "halves") -> Value:
    """(−b, a) for the halves (a, b) of the last axis, or for each pair of neighbours ("neighbours")."""
    return x.trace.add(COLUMNS, (x,), x.axes, x.dtype, order=_paired(x, "rotated", pairs))


def repeat_half(x: Value, pairs: str = "halves") -> Value:
    """(x, x) along the last axis (…, K/2), or every number twice in sequence ("neighbours"): (…, K)."""
    axes = (*x.axes[:-1], _whole(x, "c.repeat_half"))
    return x.trace.add(COLUMNS, (x,), axes, x.dtype, order=_paired(x, "repeated", pairs))


def _whole(x: Value, function: str) -> str:
    """The axis whose half is the last axis of a value."""
    name, _, divisor = x.axes[-1].rpartition("/") if x.axes else ("", "", "")
    if divisor != "2":
        x.trace.fail(
            f'{function} takes half of an axis, not ({", ".join(x.axes)}): declare Annotated[c.Matrix, ("M", "K/2")]'
        )
    return name


def _paired(x: Value, order: str, pairs: str) -> str:
    if pairs not in ("halves", "neighbours"):
        x.trace.fail(f"pairs of columns are of the halves or of neighbours, not {pairs!r}")
    return order if pairs == "halves" else f"{order}-pairs"


def dequantize(x: Value, dtype: str = "float32", *, fused: bool = False) -> Value:
    """The values of a quantization, rounded to a dtype once: the values of the kernel's own codes and scales, if
    returned. `fused`: a kernel may also keep the product of code and scale unrounded, as a fused multiply-add does.

    A kernel may hide the quantization of numbers with an interval, if its scales are scales of rows or groups.
    """
    _check_quantized(x, "dequantize")
    if dtype not in DTYPES:
        x.trace.fail(f"c.dequantize gives one of {', '.join(DTYPES)}, not {dtype!r}")
    if fused and dtype != "float32":
        x.trace.fail(f"c.dequantize rounds the product to {dtype}; fused=True keeps it unrounded in float32")
    return x.trace.add(DEQUANTIZE, (x,), x.axes, dtype, **({"fused": True} if fused else {}))


def decode(q: Value, dtype: str | None = None, *, scale: str | None = None, zero: str | None = None) -> Value:
    """Element times the scale of its block, rounded once to `dtype`, or exact without one: (N, K).

    A scale that spans K, and the scale of a tensor, are no scales of blocks: `factor`. `scale`: dtype of a first
    rounding of the scale of a block. `zero`: "rounded" if kernels round the product of zero point and scale to `dtype`
    before the subtraction. An exact product goes into `gemm` alone.
    """
    _check_quantized(q, "decode")
    for name in (dtype, scale):
        if name is not None and name not in DTYPES:
            q.trace.fail(f"c.decode rounds to one of {', '.join(DTYPES)}, not {name!r}")
    if zero not in (None, "rounded") or (zero and dtype is None):
        q.trace.fail(f"zero of c.decode is 'rounded', to a dtype; these are {zero!r} and {dtype!r}")
    options = {name: value for name, value in (("scale", scale), ("zero", zero)) if value is not None}
    return q.trace.add(DECODE, (q,), q.axes, dtype or EXACT, **options)


def factor(q: Value, *, axis: int = 0) -> Value:
    """The factor of a quantization beside the scales of blocks: the scale of the tensor, or the scales of rows, or 1.

    `axis`: 0, a number for each row of the matrix (N, 1); 1, for each column of a product with it (N,). The scale of a
    tensor is a single number, ("1",).
    """
    _check_quantized(q, "factor")
    if axis not in (0, 1):
        q.trace.fail(f"c.factor has the axis 0 or 1, not {axis}")
    rule = find_recipe(q.step.options["recipe"])
    rows = (rule.spans_k and not rule.whole) or rule.granularity == "row"
    axes = ("1",) if not rows else (q.axes[0], "1") if axis == 0 else q.axes[:1]
    return q.trace.add(FACTOR, (q,), axes, "float32")


def gemm(a: Value, b: Value, order: str | None = None, *, promotion: str | None = None) -> Value:
    """a·bᵀ of (M, K) and (N, K) in float32: (M, N).

    Operands are two quantizations, with their scales, or two matrices of known numbers: arguments, and the results of
    `decode` and `dequantize` of quantized arguments. The sum has any order, or a declared one:
    docs/tolerance.md#gemm, `spec.summation`.

    An exact operand of `decode` whose blocks have float32 scales is multiplied block by block: the sum P of a block
    is added to y in order of K. `promotion`: "sum-first" is y = fma(fl(P·s_a), s_b, y), "scales-first" is
    y = fma(fl(s_a·s_b), P, y); None: fused or not.
    """
    if promotion not in (None, *PROMOTIONS):
        a.trace.fail(f"c.gemm has the promotion {', '.join(PROMOTIONS)}, not {promotion!r}")
    quantized = [_is_quantized(value) for value in (a, b)]
    for value, other in ((a, b), (b, a)):
        if _is_quantized(value) and not _is_quantized(other):
            a.trace.fail("one operand of c.gemm is quantized and one is not: c.decode gives the numbers of codes")
        if not any(quantized) and not _is_known(value):
            a.trace.fail(
                f"c.gemm takes quantizations, arguments, c.decode and c.dequantize, not the result of "
                f"{value.step.function}: quantize it, or let a kernel take it as an argument"
            )
    if a.axes[1:] != b.axes[1:] or len(a.axes) != 2:
        a.trace.fail(f"operands of c.gemm have the axes ({', '.join(a.axes)}) and ({', '.join(b.axes)}); K differs")
    try:
        declared = summation(order)
    except ValueError as error:
        a.trace.fail(str(error))
    if declared.joined_in_output:
        a.trace.fail(f"c.gemm gives float32, so the sums of slices are float32: leave -out of {order!r} out")
    narrow = declared.aligned is not None or (declared.fraction or (24, 0))[0] < 24
    if narrow and _is_whole(a) and _is_whole(b):
        a.trace.fail(f"sums of whole numbers are int32, or float32 with the order fraction-24-8, not {order!r}")
    options = {} if promotion is None else {"promotion": promotion}
    return a.trace.add(GEMM, (a, b), (a.axes[0], b.axes[0]), "float32", order=order, **options)


def _is_whole(x: Value) -> bool:
    """Whether the numbers of a matrix are whole numbers times scales."""
    step = x.step
    if step.function == DECODE:
        return _is_whole(Value(x.trace, step.operands[0]))
    return step.function == CODES and find_recipe(step.options["recipe"]).integer


def _is_known(x: Value) -> bool:
    """Whether the numbers of a matrix are known before a kernel runs: arguments, and decoded arguments."""
    step = x.step
    if step.function in ("float32", "part", DECODE, DEQUANTIZE, COLUMNS):
        return _is_known(Value(x.trace, step.operands[0]))
    return step.function in ("argument", CODES)


def quantize(
    x: Value,
    recipe: str,
    scale: Value | None = None,
    *,
    random: Value | None = None,
    statistics: Value | None = None,
) -> Value:
    """`x` quantized by a recipe: codes, scales, and the amax if the recipe has a scale for the tensor.

    `scale`: an argument of the type Scale, for a recipe with a given scale. `random`: an argument of the type Bits, for
    a recipe with stochastic rounding. `statistics`: a second matrix of the shape of `x`, with the amaxes of the scales,
    for a recipe without given scales. A recipe with a rotation rotates `x` first, in any order of summation, and rounds
    it to bfloat16.
    """
    if len(x.axes) != 2:
        x.trace.fail(f"c.quantize takes a matrix, not a tensor of the axes ({', '.join(x.axes)})")
    try:
        rule = find_recipe(recipe)
    except ValueError as error:
        x.trace.fail(str(error))
    drawn = rule.rounding == "stochastic"
    if drawn != (random is not None):
        x.trace.fail(
            f"recipe {recipe} takes {'random bits' if drawn else 'no random bits'}; c.quantize has "
            f"{'none: c.quantize(y, recipe, random=bits), with an argument of the type Bits' if drawn else 'some'}"
        )
    _check_given(x, recipe, scale, "c.quantize")
    if random is not None and (random.dtype != BITS or random.axes != (x.axes[0], f"{x.axes[1]}/4")):
        x.trace.fail(
            f"the random bits of c.quantize of ({', '.join(x.axes)}) are an argument of the type Bits, "
            f"({x.axes[0]}, {x.axes[1]}/4), not {random.dtype} ({', '.join(random.axes)})"
        )
    makes = rule.tensor_scale != "given" and rule.transform is None
    if statistics is not None and not (makes and statistics.axes == x.axes):
        x.trace.fail(
            f"the statistics of c.quantize are a matrix ({', '.join(x.axes)}), not ({', '.join(statistics.axes)}), "
            f"for a recipe that makes its scales without a rotation, not {recipe}"
        )
    rotation = rule.transform
    if rotation is not None:
        if x.dtype != "bfloat16":
            x.trace.fail(f"recipe {recipe} rotates bfloat16, and the operand of c.quantize is {x.dtype}: use c.cast")
        rotated = x.trace.add(ROTATED, (x,), x.axes, "float32", group=rotation.group, signs=rotation.signs)
        x = cast(rotated, "bfloat16")
    operands = (x, *(operand for operand in (scale, statistics, random) if operand is not None))
    options = {name: True for name, operand in (("statistics", statistics), ("random", random)) if operand is not None}
    return x.trace.add(QUANTIZE, operands, x.axes, x.dtype, recipe=recipe, **options)


def quantize_both(x: Value, recipe: str, *, random: tuple[Value, Value] | None = None) -> dict[str, Value]:
    """Both orientations of a matrix (M, K), as the operation `quantize` with both halves: "rowwise" (M, K), and
    "columnwise", the transpose (K, M), which alone is rotated by a recipe with a rotation.

    `random`: the random bits of both halves, (M, K/4) and (K, M/4), for a recipe that rounds stochastically.
    """
    try:
        rowwise = str(find_recipe(recipe).rowwise)
    except ValueError as error:
        x.trace.fail(str(error))
    row, column = random or (None, None)
    return {
        "rowwise": quantize(x, rowwise, random=row),
        "columnwise": quantize(transposed(x), recipe, random=column),
    }


def write(q: Value, half: Value, slots: Value) -> Value:
    """A half of a cache, `cache.keys` or `cache.values`, with the rows of a quantization of (tokens·heads, columns) in
    the slots of their tokens. A token with a negative slot is not stored; of tokens with the same slot any may be
    stored. All further bytes stay."""
    if q.step.recipe is None or half.dtype != HALF or slots.dtype != INDEX:
        q.trace.fail("c.write takes a result of c.quantize, cache.keys or cache.values, and an argument of type Slots")
    rows = f"{slots.axes[0]}*{half.axes[0].rpartition('*')[2]}"
    if q.axes != (rows, half.axes[1]):
        q.trace.fail(
            f"rows of ({', '.join(q.axes)}) do not fit the cache: declare k: Annotated[c.Matrix, "
            f'("{rows}", "{half.axes[1]}")]'
        )
    recipe = q.step.options["recipe"]
    if recipe != half.step.options["recipe"]:
        q.trace.fail(f"the cache has the recipe {half.step.options['recipe']}, and c.quantize has {recipe}")
    if find_recipe(recipe).tensor_scale not in ("none", "given"):
        q.trace.fail(f"recipe {recipe} has an amax of the tensor, which a cache does not hold; take a given scale")
    return q.trace.add(WRITTEN, (q, half, slots), half.axes, HALF)


def read(half: Value, slots: Value, scale: Value | None = None) -> Value:
    """The rows in slots of a half of a cache, as a quantized matrix (tokens·heads, columns). `scale`: an argument of
    the type Scales, for a recipe whose scale is given."""
    if half.dtype != HALF or slots.dtype != INDEX:
        half.trace.fail("c.read takes cache.keys or cache.values, and slots: an argument of type Slots, or c.slots_of")
    recipe = half.step.options["recipe"]
    _check_given(half, recipe, scale, "c.read")
    operands = (half, slots) if scale is None else (half, slots, scale)
    axes = f"{slots.axes[0]}*{half.axes[0].rpartition('*')[2]}", half.axes[1]
    return half.trace.add(READ, operands, axes, CODES, recipe=recipe)


def slots_of(pages: Value, lengths: Value, tokens: str = "tokens") -> Value:
    """Slots of the tokens of all requests in sequence, by the page numbers and the length of a request: (tokens,)."""
    return pages.trace.add(SLOTS, (pages, lengths), (tokens,), INDEX)


def of_heads(scale: Value, rows: str = "tokens*heads") -> Value:
    """The scales of the rows of (tokens·heads, columns), from an argument of the type Scales: (tokens·heads, 1)."""
    return scale.trace.add(OF_HEADS, (scale,), (rows, "1"), "float32")


def takes_scale(recipe: str) -> bool:
    """Whether the scale of a recipe is given."""
    return find_recipe(recipe).tensor_scale == "given"


def _check_given(x: Value, recipe: str, scale: Value | None, function: str) -> None:
    if takes_scale(recipe) != (scale is not None):
        x.trace.fail(
            f"recipe {recipe} takes {'no' if scale is not None else 'a'} scale; {function} has "
            f"{'none' if scale is None else 'one'}"
        )
    axes = [("1",)] if "*" not in x.axes[0] else [("1",), ("scales",)]
    if scale is not None and (scale.step.function != "argument" or scale.axes not in axes):
        kind = "Scale" if len(axes) == 1 else "Scales"
        x.trace.fail(f"the scale of {function} is an argument of the type {kind}")


def _function(name: str, x: Value, forms: tuple[str, ...]) -> Value:
    return x.trace.add(name, (in_float32(x),), x.axes, "float32", **({"forms": list(forms)} if forms else {}))


def _reduced(name: str, x: Value, axis: int, **options: object) -> Value:
    given = {key: value for key, value in options.items() if value is not None}
    if axis == -1:
        return x.trace.add(name, (x,), (*x.axes[:-1], "1"), x.dtype, **given)
    if axis != 0 or len(x.axes) != 2:
        x.trace.fail(f"c.{name} along axis {axis} of ({', '.join(x.axes)}); the axis is -1, or 0 of a matrix")
    return x.trace.add(name, (x,), x.axes[1:], x.dtype, axis=0, **given)


def _check_division(x: Value, form: str | None) -> None:
    if form is not None and form not in DIVISIONS:
        x.trace.fail(f"a division has the form {', '.join(DIVISIONS)}, not {form!r}")


def _check_quantized(x: Value, function: str) -> None:
    if not _is_quantized(x):
        x.trace.fail(
            f"c.{function} takes a result of c.quantize or an argument of the type Codes, not {x.step.function}"
        )


def _is_quantized(x: Value) -> bool:
    return x.step.recipe is not None or x.dtype == CODES
