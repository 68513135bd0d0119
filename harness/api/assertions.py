"""Assertions on the results of kernels: one line in a test.

An assertion returns None for a correct result. For a wrong result it raises `WrongResult`, an AssertionError whose text
is the report. Arguments that cannot belong together raise TypeError or ValueError with the name of the argument.

Tensors are torch tensors, numpy arrays or objects with `__dlpack__`. A result is judged on its device. Settings of the
caller, such as autocast, the default dtype and flushed subnormal numbers, do not change a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, ParamSpec

import torch

from narrowgauge import adapt
from narrowgauge.harness.api.judging.drawn_codes import Draws
from narrowgauge.harness.api.judging.judge_call import Judgement, assertion, judge_of, verdict_of
from narrowgauge.harness.api.judging.judge_output import OutputArguments, judge_output
from narrowgauge.harness.api.verdict import Verdict
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Judged, Subject, no_codes, quantize_stages, values_stage
from narrowgauge.harness.operations.transform.judge import add_rotated
from narrowgauge.reference import ops
from narrowgauge.reference.gemm.gemm import check_operands
from narrowgauge.reference.quantize.layout import with_layout
from narrowgauge.reference.quantize.scaling import tensor_scale as tensor_scale_of
from narrowgauge.spec.arguments import as_matrix, check_epilogue, check_rotation, check_tensor
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILED, Layout
from narrowgauge.spec.summation import Summation

P = ParamSpec("P")
Diagnose = Literal["quick", "full"]
Draw = Callable[[int], Any]
"""Function from a seed to a result of a kernel: (codes, scales), (codes, scales, amax), or a mapping of these."""


@assertion
def assert_quantized(
    x: Any,
    codes: Any,
    scales: Any,
    recipe: str | Recipe = "nvfp4",
    *,
    amax: Any = None,
    tensor_scale: Any = None,
    tensor_scale_is: adapt.TensorScaleIs = "amax",
    layout: adapt.AnyLayout = "linear",
    nibbles: adapt.Nibbles = "low-first",
    transposed: bool = False,
    static: bool = False,
    scale: Any = None,
    random: Any = None,
    rotation: Literal["any", "butterfly"] = "any",
    diagnose: Diagnose = "quick",
) -> Judgement:
    """Assert that `codes` and `scales` are the quantization of `x` along its last dimension.

    A stage is judged given the kernel's own stage before: amax, tensor scale, layout, block scales, codes.

    x: (M, K) or (…, K), float32, bfloat16 or float16.
    codes, scales: shapes and dtypes as of `narrowgauge.adapt.quantized`, which also defines `tensor_scale_is`, `layout`
    and `nibbles`. (M, ⌈K/2⌉) bytes of two 4-bit elements or (M, K) bytes, and (M, ⌈K/block⌉) scales for `linear`.
    amax, tensor_scale: float32 (1,), or (M,) for an amax per row; None if the kernel reports no such number.
    transposed: codes are stored as (K, M) and scales as (⌈K/block⌉, M). The columnwise half of a matrix w is judged
    with x = w.T.
    static: amax or tensor_scale was an input of the kernel, such as the global scale of vLLM and FlashInfer. It is not
    judged.
    scale: float32 (1,), the given encode scale of a recipe of delayed scaling.
    random: (seed, offset) of Philox4x32-10, or words, int32 (M, ⌈K/4⌉), that the kernel rounded with. For random bits
    of the kernel's own use `assert_stochastic`.
    rotation: "butterfly" if the kernel's Hadamard rotation adds in the order of the reference; "any" order is judged by
    the interval of all orders.
    diagnose: "quick" stops the search for a cause after about 1 s of work; "full" tries every known deviation.

    Source of the rules: docs/tolerance.md. Raises WrongResult for a wrong result, ValueError and TypeError for
    arguments that do not fit together.
    """
    recipe, matrix = find_recipe(recipe), _matrix(x)
    random = tuple(random) if isinstance(random, (list, tuple)) else _optional(random, "random", matrix)
    scale = _optional(scale, "scale", matrix)
    if recipe.rounding == "stochastic" and random is None:
        raise ValueError(
            f"recipe {recipe} rounds stochastically: give random=(seed, offset) or the words that the kernel used; "
            "assert_stochastic judges a kernel with random bits of its own"
        )
    oracle = ops.quantize(matrix, recipe, scale=scale, random=random)
    conventions = {"tensor_scale_is": tensor_scale_is, "layout": layout, "nibbles": nibbles, "transposed": transposed}
    parts = {"codes": codes, "scales": scales, "amax": amax, "tensor_scale": tensor_scale}
    kernel = _quantized(parts, matrix, recipe, conventions, None if static else oracle.amax)
    if static:
        oracle = _static_oracle(matrix, kernel, oracle, random)
    outcome = _quantize_outcome(Subject(matrix, recipe, random, free=_free(rotation)), kernel, oracle, static=static)
    row = layout if isinstance(layout, Layout) else TILED.get(layout) if isinstance(layout, str) else None
    if row is not None and kernel.scale_layout == LINEAR and row.padding == "0":
        padding = adapt.padding(scales, recipe, kernel.shape, layout=layout, transposed=transposed)
        rows, columns = kernel.scales.shape
        beside = rows * (row.padded_shape((rows, columns))[1] - columns)
        outcome.stages.append(_padding_stage(padding if row.row_padding is None else padding[:beside]))
    return Judgement(outcome, _label(recipe, matrix), matrix, diagnose)


@assertion
def assert_stochastic(
    x: Any,
    draws: Draw | Sequence[Any],
    recipe: str | Recipe = "nvfp4-sr",
    *,
    tensor_scale_is: adapt.TensorScaleIs = "amax",
    layout: adapt.AnyLayout = "linear",
    nibbles: adapt.Nibbles = "low-first",
    transposed: bool = False,
    static: bool = False,
    rotation: Literal["any", "butterfly"] = "any",
    diagnose: Diagnose = "quick",
) -> Judgement:
    """Assert that a kernel with random bits of its own quantizes `x` with correct stochastic rounding.

    Scales are exact, every code is a neighbour of its scaled value, and statistical tests judge how often each code
    goes up. A correct kernel fails with probability at most 1e-9.

    x: (M, K) or (…, K), float32, bfloat16 or float16.
    draws: function from a seed (int) to a result of the kernel: (codes, scales), (codes, scales, amax), or a mapping
    with keys among codes, scales, amax and tensor_scale. It is called with the seeds 0, 1, 2, … as often as
    the tests need, 4 to 512 times, and once with the seed 2^30. It may ignore the seed if its generator moves on with
    every call. A sequence holds the results of these calls in order.
    The remaining arguments are those of `assert_quantized`.

    Source of the rules: docs/tolerance.md#stochastic-rounding. Raises WrongResult for a wrong result, ValueError and
    TypeError for arguments that do not fit together; exceptions of `draws` pass unchanged.
    """
    recipe, matrix = find_recipe(recipe), _matrix(x)
    if recipe.rounding != "stochastic":
        raise ValueError(f"recipe {recipe} rounds {recipe.rounding}; assert_quantized judges its results")
    oracle = ops.quantize(matrix, recipe, random=(0, 0))
    conventions = {"tensor_scale_is": tensor_scale_is, "layout": layout, "nibbles": nibbles, "transposed": transposed}
    true_amax = None if static else oracle.amax
    drawn = Draws(draws, lambda parts: _quantized(parts, matrix, recipe, conventions, true_amax))
    first = drawn.first
    if static:
        oracle = _static_oracle(matrix, first, oracle, (0, 0))
    subject = Subject(matrix, recipe, free=_free(rotation), own=True, draw=drawn.codes)
    outcome = _quantize_outcome(subject, first, oracle, static=static)
    outcome.stages.insert(0, drawn.repeated)
    return Judgement(outcome, _label(recipe, matrix), matrix, diagnose, saved={"draws": drawn.results})


@assertion
def assert_dequantized(
    codes: Any,
    scales: Any,
    values: Any,
    recipe: str | Recipe = "nvfp4",
    *,
    amax: Any = None,
    tensor_scale: Any = None,
    tensor_scale_is: adapt.TensorScaleIs = "amax",
    layout: adapt.AnyLayout = "linear",
    nibbles: adapt.Nibbles = "low-first",
    transposed: bool = False,
    diagnose: Diagnose = "quick",
) -> Judgement:
    """Assert that `values` are the dequantized `codes` and `scales`, bit for bit. A rotation is not undone.

    values: (M, K) or (…, K), float32, bfloat16 or float16.
    The remaining arguments are those of `assert_quantized`. A recipe with a tensor scale needs amax or tensor_scale.

    Source of the formula: docs/numerics.md#nvfp4, Dequantize. Raises WrongResult for wrong values, ValueError and
    TypeError for arguments that do not fit together.
    """
    recipe, matrix = find_recipe(recipe), _matrix(values, "values")
    conventions = {"tensor_scale_is": tensor_scale_is, "layout": layout, "nibbles": nibbles, "transposed": transposed}
    parts = {"codes": codes, "scales": scales, "amax": amax, "tensor_scale": tensor_scale}
    kernel = with_layout(_quantized(parts, matrix, recipe, conventions, None), LINEAR)
    if recipe.element.bits == 6 and bool(no_codes(kernel).any()):
        raise ValueError(f"codes has bytes from {recipe.element.codes} up, which are no codes of {recipe.element.name}")
    subject = Subject(matrix, replace(recipe, transform=None))
    encode = kernel.tensor_scale
    if encode is None and kernel.amax is not None:
        encode = tensor_scale_of(kernel.amax, recipe, matrix.dtype)
    judged = Judged("", subject, kernel, replace(kernel, tensor_scale=encode), kernel)
    outcome = Outcome([values_stage(kernel, matrix)], {"values": matrix}, judged=[judged])
    return Judgement(outcome, _label(recipe, matrix), matrix, diagnose)


@assertion
def assert_transformed(
    x: Any,
    actual: Any,
    recipe: str | Recipe = "nvfp4-rht",
    *,
    rotation: Literal["any", "butterfly"] = "any",
    diagnose: Diagnose = "quick",
) -> Judgement:
    """Assert that `actual` is the Hadamard rotation of `x` by a recipe with a transform.

    x: (M, K), bfloat16, with K a multiple of the group of the rotation.
    actual: as `x`.
    rotation, diagnose: as of `assert_quantized`; "butterfly" is judged bit for bit.

    Source of the rules: docs/tolerance.md#boundary. Raises WrongResult for a wrong result, ValueError and TypeError for
    arguments that do not fit together.
    """
    recipe, matrix = find_recipe(recipe), _tensor(x, "x")
    check_rotation(matrix, recipe)
    output = _beside(actual, "actual", matrix)
    check_tensor(output, "actual", (matrix.dtype,), matrix.shape)
    outcome = Outcome(outputs={"output": output})
    add_rotated(outcome, Subject(matrix, recipe, free=_free(rotation)), output)
    return Judgement(outcome, _label(recipe, matrix), matrix, diagnose)


@assertion
def assert_gemm(
    a: Quantized | Mapping[str, Any],
    b: Quantized | Mapping[str, Any],
    actual: Any,
    *,
    out_dtype: torch.dtype,
    c: Any = None,
    bias: Any = None,
    order: str = "any",
    accumulator: Literal["nearest", "truncating"] = "nearest",
    subnormals: Literal["kept", "flushed"] = "kept",
    operands: Literal["codes", "decoded-float32", "decoded-bfloat16"] = "codes",
    diagnose: Diagnose = "quick",
) -> Judgement:
    """Assert that `actual` is a @ b.T (+ c) (+ bias) of quantized operands, with a float32 accumulator.

    a, b: Quantized (M, K) and (N, K), of `narrowgauge.quantize` or `narrowgauge.adapt.quantized`, or mappings of the
    fields of a Quantized. A recipe with a tensor scale needs its amax or its tensor scale.
    actual: (M, N) of dtype `out_dtype`: float32, bfloat16 or float16. Any strides.
    c: (M, N), bias: (N,), float32, bfloat16 or float16.
    order: "any", or the declared order of additions: "sequential", "blocks", "tree", "split-<n>", "aligned-<F>-<W>" and
    others of docs/tolerance.md#declared-order. The FP8 tensor cores of Hopper have less than float32 precision: they
    need "aligned-13-32", or "aligned-13-32-128" with promotion.
    accumulator: "truncating" if additions return either neighbour. subnormals: "flushed" if float32 numbers below
    2^-126 may become 0.
    operands: "decoded-float32" or "decoded-bfloat16" if the kernel decodes both operands, with all their scales, before
    it multiplies them; "codes" if scales multiply products or sums. Decoded operands are summed in any order.
    diagnose: as of `assert_quantized`.

    Source of the rules: docs/tolerance.md#gemm. Raises WrongResult for a wrong result, ValueError and TypeError for
    arguments that do not fit together.
    """
    left, right = (_operand(q, name) for q, name in ((a, "a"), (b, "b")))
    shape = (left.shape[0], right.shape[0])
    if right.codes.device != left.codes.device:
        raise ValueError(f"b is on {right.codes.device}; a is on {left.codes.device}: move one of them")
    check_operands(left, right)
    output = _beside(actual, "actual", left.codes)
    addend, row = (_optional(t, name, left.codes) for t, name in ((c, "c"), (bias, "bias")))
    check_epilogue(shape, out_dtype, addend, row)
    check_tensor(output, "actual", (out_dtype,), shape)
    declared = Summation(
        None if order == "any" else order,
        truncates=_chosen(accumulator, "accumulator", "nearest", "truncating"),
        flushes=_chosen(subnormals, "subnormals", "kept", "flushed"),
        operands=None if operands == "codes" else operands,
    )
    outcome = judge_output(OutputArguments(left, right, out_dtype, addend, row, declared), output.contiguous())
    recipes = str(left.recipe) if left.recipe == right.recipe else f"{left.recipe}+{right.recipe}"
    label = f"{recipes} {left.shape[0]}x{left.shape[1]}x{right.shape[0]}"
    return Judgement(outcome, label, output, diagnose)


def explain(assertion: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Verdict:
    """The verdict of an assertion as an object, also for a correct result. A wrong result raises no error, and no
    arguments are saved.

    `explain(narrowgauge.assert_gemm, a, b, y, out_dtype=torch.bfloat16)` takes the arguments of the assertion. Raises
    TypeError if `assertion` is no assertion of narrowgauge, and what the assertion raises for arguments that do not fit
    together.
    """
    return verdict_of(judge_of(assertion), args, kwargs)[0]


# ---- arguments -------------------------------------------------------------------------------------------------------


def _tensor(value: Any, name: str) -> torch.Tensor:
    """An argument as a tensor without gradient, of a dtype of inputs."""
    found = adapt.tensor(value).detach()
    if found.dtype not in INPUT_DTYPES:
        check_tensor(found, name, INPUT_DTYPES)
    return found


def _matrix(value: Any, name: str = "x") -> torch.Tensor:
    """An argument (…, K) as a matrix (M, K)."""
    return as_matrix(_tensor(value, name))


def _beside(value: Any, name: str, other: torch.Tensor) -> torch.Tensor:
    """An argument as a tensor on the device of a second argument. Raises ValueError for a different device."""
    found = adapt.tensor(value).detach()
    if found.device != other.device:
        raise ValueError(f"{name} is on {found.device}; the other arguments are on {other.device}: move one of them")
    return found


def _optional(value: Any, name: str, other: torch.Tensor) -> torch.Tensor | None:
    return None if value is None else _beside(value, name, other)


def _chosen(value: str, name: str, default: str, other: str) -> bool:
    """Whether an argument with two values is the second. Raises ValueError for any other value."""
    if value not in (default, other):
        raise ValueError(f"{name} is {default!r} or {other!r}, not {value!r}")
    return value == other


def _free(rotation: str) -> bool:
    return not _chosen(rotation, "rotation", "any", "butterfly")


def _quantized(
    parts: Mapping[str, Any],
    matrix: torch.Tensor,
    recipe: Recipe,
    conventions: Mapping[str, Any],
    true_amax: torch.Tensor | None,
) -> Quantized:
    """The parts of a kernel's result as the Quantized of `matrix` (M, K), on its device."""
    for name in ("codes", "scales"):
        _beside(parts[name], name, matrix)
    return adapt.quantized(
        parts["codes"], parts["scales"], recipe, tuple(matrix.shape), amax=parts.get("amax"),
        tensor_scale=parts.get("tensor_scale"), true_amax=true_amax, **conventions,
    )  # fmt: skip


def _operand(q: Quantized | Mapping[str, Any], name: str) -> Quantized:
    """An operand of a product with linear scales."""
    if isinstance(q, Mapping):
        parts: dict[str, Any] = {"recipe": "", **q}
        q = Quantized(**parts | {"recipe": find_recipe(parts["recipe"])})
    if not isinstance(q, Quantized):
        raise TypeError(
            f"{name} is a Quantized, of narrowgauge.quantize or narrowgauge.adapt.quantized, not {type(q).__name__}"
        )
    return with_layout(q, LINEAR)


def _static_oracle(matrix: torch.Tensor, kernel: Quantized, oracle: Quantized, random: Any) -> Quantized:
    """The reference's quantization of `matrix` with the kernel's given amax. `oracle`: with its own amax.

    Raises ValueError if the arguments show neither amax nor tensor scale.
    """
    if kernel.amax is not None:
        return ops.quantize(matrix, oracle.recipe, amax=kernel.amax, random=random)
    if kernel.tensor_scale is None:
        raise ValueError("static=True says that amax or tensor_scale was an input of the kernel; give one of them")
    return oracle


def _padding_stage(padding: torch.Tensor) -> StageResult:
    """The stage `layout` of scales in tiles not kept by a Quantized: their padding is 0."""
    wrong = int((padding != 0).sum())
    text = f"{format_count(wrong)} of {format_count(padding.numel())} padding bytes are not 0" if wrong else ""
    return StageResult("layout", "exact", padding.numel(), wrong, sentence=text)


def _quantize_outcome(subject: Subject, kernel: Quantized, oracle: Quantized, *, static: bool) -> Outcome:
    stages, judged = quantize_stages(subject, kernel, oracle)
    if static:
        stages = [stage for stage in stages if stage.stage not in ("amax", "tensor scale")]
    return Outcome(stages, {"codes": kernel.codes, "scales": kernel.scales}, judged=[judged])


def _label(recipe: Recipe, matrix: torch.Tensor) -> str:
    return f"{recipe} {matrix.shape[0]}x{matrix.shape[1]}"
