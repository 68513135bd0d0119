"""`narrowgauge.certify`: the proof of a quantizer, the trials of its assumption, and the certificate."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.adapt.conventions import AnyLayout, Nibbles, TensorScaleIs
from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.function_backend import FunctionBackend, name_of_function
from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.certify.certificate import Certificate, CertificateError, Trial, proved_and_sampled
from narrowgauge.harness.certify.compare import Calls, Parts, wrong_codes, wrong_scales
from narrowgauge.harness.certify.decoding import prove_decoding
from narrowgauge.harness.certify.inputs.space import Grid, Numbers, outers
from narrowgauge.harness.certify.proof import Proof, Prover
from narrowgauge.harness.certify.trials import CONTENTS, Content, shapes
from narrowgauge.harness.certify.wrong import Feature, find_rule
from narrowgauge.harness.inputs.inputs import laid_out
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.report.text import number
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR

_VIEWS = ("offset-2", "offset-8", "pitched", "strided", "transposed")
_ELEMENTS = 1 << 19
"""Elements of a call of a trial."""
_ROUNDS = 4
"""Calls of every trial, with different tensor amaxes."""
ALL = 1 << 62


@dataclass(frozen=True)
class Effort:
    """Size of the samples of a proof."""

    tensor_scales: int
    """Tensor amaxes, or given scales."""
    places: int
    """Places of a number in a block."""
    everywhere: int
    """Tensor amaxes with all `places`; further tensor amaxes have one place."""

    @staticmethod
    def of(device: str, tensor_scales: int | None = None, places: int | None = None) -> Effort:
        """The effort on a device: on a GPU all tensor amaxes."""
        gpu = torch.device(device).type == "cuda"
        return Effort(tensor_scales or (ALL if gpu else 64), places or (ALL if gpu else 128), 64 if gpu else 12)


def certify(
    function: Callable[..., Any],
    recipe: str | Recipe,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    tensor_scales: int | None = None,
    places: int | None = None,
    tensor_scale_is: TensorScaleIs = "amax",
    layout: AnyLayout = LINEAR,
    nibbles: Nibbles = "low-first",
) -> Certificate:
    """Prove a quantizer on every number under every scale of a block, and try the assumption of the proof.

    function: as for `narrowgauge.check`: function(x), further recipe and scale, gives (codes, scales[, amax]), a dict
    or a Quantized. It is called in this process. recipe: a recipe without rotation. A function with
    stochastic rounding takes `random`, seed and offset of Philox.
    dtype: bfloat16 or float16, whose numbers are all tried, or float32: every rounding boundary ± 2 ulp and a sample.
    tensor_scales: number of tensor amaxes, or of given scales (default: 64 on a CPU, all on a GPU). places: number of
    places of a number in a block (default: up to 128 on a CPU, all on a GPU). tensor_scale_is, layout, nibbles:
    conventions of the result, as of `narrowgauge.check`. What a certificate says: docs/certify.md.

    Returns the certificate, of a wrong kernel too: `certificate.passed`. Raises CertificateError, a ValueError, for a
    recipe or dtype that has no certificate, and if the function fails on the inputs of the proof.
    """
    found = find_recipe(recipe)
    numbers = numbers_of(found, dtype, str(torch.device(device)))
    case = QuantizeCase(recipe=str(found), shape=(16, 256), dtype="bf16", inputs="normal")
    conventions = {"tensor_scale_is": tensor_scale_is, "layout": layout, "nibbles": nibbles, "transposed": False}
    subject = name_of_function(function)
    backend = FunctionBackend(
        subject, function, case, case.operation, declares={}, conventions=conventions, constraints={}
    )
    effort = Effort.of(str(device), tensor_scales, places)
    with default_settings():
        certificate = certificate_of(backend, subject, found, numbers, effort, seed)
    certificate.kernel = _digest_of(function)
    return certificate


def certificate_of(
    backend: Backend, subject: str, recipe: Recipe, numbers: Numbers, effort: Effort, seed: int,
    proved_by: Callable[[Prover], Proof] | None = None,
) -> Certificate:  # fmt: skip
    """The certificate of the `quantize` of a backend, without the digests of its sources. Raises CertificateError.

    `proved_by`: makes the proof, with a prover for wrong bytes. None: the prover makes the proof.
    """
    if makes_own_bits(backend, recipe):
        raise CertificateError(f"{subject} declares random bits of its own; certify the recipe without -sr")
    begun, calls = time.monotonic(), Calls(backend, recipe, seed)
    chosen, of = outers(recipe, numbers, effort.tensor_scales, seed)
    try:
        before = _Repeated(calls, numbers, chosen[0].given(numbers.device), seed)
        prover = Prover(calls, numbers, seed)
        proof = proved_by(prover) if proved_by else prover.prove(chosen, of, effort.places, effort.everywhere)
        calls.begin(len(chosen))
        trials = list(_trials(calls, numbers, chosen[0].given(numbers.device), seed))
        trials.append(before.again())
        has_values = backend.has("dequantize")
        decoding = prove_decoding(backend, recipe, numbers, chosen, seed) if has_values else None
    except (BackendError, Unsupported, HostLost) as error:
        raise CertificateError(f"{subject}, {recipe}: fails on an input of the proof: {escape(str(error))}") from error
    proved, sampled = proved_and_sampled(proof, recipe, Grid.of(recipe).size, numbers.complete)
    if recipe.whole:  # a tensor scale has one stored scale
        del proved[0]
    if decoding is not None:
        (proved if decoding.complete else sampled).append(decoding.sentence())
        proof.wrong += decoding.wrong
    return Certificate(
        subject, str(recipe), str(numbers.dtype).removeprefix("torch."), numbers.device, _assumption(recipe, trials),
        trials, proved, sampled, _outside(trials), proof.wrong, {}, seconds=time.monotonic() - begun, seed=seed,
    )  # fmt: skip


def numbers_of(recipe: Recipe, dtype: torch.dtype, device: str) -> Numbers:
    """The numbers of a proof. Raises CertificateError for a recipe or dtype without a proof."""
    if dtype not in TORCH_DTYPES.values():
        raise CertificateError(f"dtype is {dtype}; it can be {', '.join(map(str, TORCH_DTYPES.values()))}")
    reasons = {
        "rotates bfloat16; its dtype can be bfloat16": recipe.transform and dtype != torch.bfloat16,
        "chooses scales by the error of a whole block; its dtype can be bfloat16 or float16": (
            recipe.candidates != "6" and dtype == torch.float32
        ),
        "has zero points, and no proof of these": recipe.zero_points,
    }
    for reason, holds in reasons.items():
        if holds:
            raise CertificateError(f"recipe {recipe} {reason}")
    return Numbers(dtype, device)


def _assumption(recipe: Recipe, trials: list[Trial]) -> str:
    scope = {"tensor": "the tensor", "row": "its row"}[recipe.granularity]
    if recipe.tensor_scale == "given":
        depends = "a code depends on its number and the given scale alone"
    elif recipe.whole:
        depends = "the scale depends on the amax of the tensor alone, and a code on its number and this scale alone"
    elif recipe.tensor_scale == "none":
        depends = "a scale depends on the amax of its block alone, and a code on its number and this scale alone"
    else:
        block = "the amax of its block" if recipe.candidates == "6" else "the numbers of its block"
        scale = f"a scale depends on {block} and the amax of {scope} alone"
        depends = f"{scale}, and a code on its number, this scale and the amax of {scope} alone"
    if recipe.rounding == "stochastic":
        depends += ", and on the random byte of its place"
    blocks, calls = sum(trial.blocks for trial in trials), sum(trial.calls for trial in trials)
    return (
        f"Assumption: {depends}; not on other numbers, places, shapes, views or earlier calls. Tried on "
        f"{number(blocks)} blocks in {number(calls)} calls."
    )


def _outside(trials: list[Trial]) -> list[str]:
    refused = [f"{trial.name}: the kernel refuses {number(trial.refused)} calls" for trial in trials if trial.refused]
    return [
        "inputs that keep the assumption from holding and that no trial has: larger shapes than those of the trials, "
        "several calls at the same time, a given amax, other layouts of scales, and patterns in several numbers that "
        "random blocks reach with less than one in a million blocks",
        *refused,
    ]


# ---- trials ----------------------------------------------------------------------------------------------------------


def _trials(calls: Calls, numbers: Numbers, scale: torch.Tensor | None, seed: int) -> Iterator[Trial]:
    recipe, grid = calls.recipe, Grid.of(calls.recipe)
    generator = torch.Generator().manual_seed(seed + 1)
    rows = max(1, _ELEMENTS // (grid.size * grid.across))
    content = Content(recipe, numbers, rows * grid.across, generator)
    for name, made in CONTENTS.items():
        trial = Trial(name)
        for _ in range(_ROUNDS):
            _try(calls, numbers, grid.matrix(numbers.tensor(made(content))), scale, trial)
        yield trial
    views = Trial("views of other memory: " + ", ".join(_VIEWS))
    x = grid.matrix(numbers.tensor(CONTENTS["random numbers, the amax anywhere"](content)))
    for view in _VIEWS:
        _try(calls, numbers, laid_out(x[:, : x.shape[1] // 2], view), scale, views)
    yield views
    yield _shapes(calls, content, scale)


def _shapes(calls: Calls, content: Content, scale: torch.Tensor | None) -> Trial:
    trial, tried, wrong = Trial(""), list(shapes(content.recipe)), []
    for rows, columns in tried:
        count = -(-rows * columns // content.size)
        blocks = Content(content.recipe, content.numbers, count, content.generator).random()
        x = content.numbers.tensor(blocks.flatten()[: rows * columns]).view(rows, columns)
        wrong.append(_try(calls, content.numbers, x, scale, trial))
    trial.name = f"{len(tried)} shapes: M from 1 to {max(rows for rows, _ in tried)}, K from 1 to "
    trial.name += str(max(columns for _, columns in tried))
    if any(wrong):
        rule = find_rule(torch.tensor(wrong), _shape_features(tried))
        failing = [f"{rows}x{columns}" for (rows, columns), is_wrong in zip(tried, wrong, strict=True) if is_wrong]
        named = f"{', '.join(failing[:5])}{' and others' if len(failing) > 5 else ''}"
        trial.note = f"{len(failing)} shapes, {named}" + (f"; exactly these with {rule}" if rule else "")
    return trial


def _shape_features(tried: list[tuple[int, int]]) -> dict[str, Feature]:
    sizes = torch.tensor(tried)
    features = {}
    for axis, name in enumerate("MK"):
        features[name] = Feature(sizes[:, axis].double())
        for step in (128, 64, 32, 16, 2):
            divisible = (sizes[:, axis] % step == 0).long()
            features[f"{name} a multiple of {step}"] = Feature(divisible, ("no", "yes"))
    return features


def _try(calls: Calls, numbers: Numbers, x: torch.Tensor, scale: torch.Tensor | None, trial: Trial) -> bool:
    """Judge a call of a trial. Returns whether a byte is wrong."""
    trial.calls += 1
    options = calls.options(scale)
    try:
        expected = calls.expected(x, options)
    except ValueError:  # the recipe refuses the amax
        return False
    try:
        kernel = calls.kernel(x, options)
    except (BackendError, Unsupported) as error:
        trial.refused += 1
        trial.note = trial.note or escape(str(error)).splitlines()[0]
        return False
    trial.blocks += expected.scales.numel()
    wrong = _wrong_bytes(kernel, expected, calls.recipe)
    trial.wrong += wrong
    return wrong > 0


def _wrong_bytes(kernel: Parts, expected: Parts, recipe: Recipe) -> int:
    scales = wrong_scales(kernel, expected)
    codes = wrong_codes(kernel, expected, scales, recipe)
    return sum(0 if wrong is None else int(wrong.sum()) for wrong in (scales, codes))


class _Repeated:
    """A call whose result is compared with the results of the same call later."""

    def __init__(self, calls: Calls, numbers: Numbers, scale: torch.Tensor | None, seed: int) -> None:
        grid = Grid.of(calls.recipe)
        content = Content(calls.recipe, numbers, 16 * grid.across, torch.Generator().manual_seed(seed + 2))
        self._calls, self._options = calls, calls.options(scale)
        self._x = grid.matrix(numbers.tensor(content.random()))
        self._expected = calls.expected(self._x, self._options)
        self._first = calls.count
        self._trial = Trial("")
        self._judge()

    def _judge(self) -> None:
        kernel = self._calls.kernel(self._x, self._options)
        self._trial.calls += 1
        self._trial.blocks += self._expected.scales.numel()
        self._trial.wrong += _wrong_bytes(kernel, self._expected, self._calls.recipe)

    def again(self) -> Trial:
        """The trial, with two further calls."""
        self._judge()
        self._judge()
        self._trial.name = f"the same call before and behind {self._calls.count - self._first - 3} others, and twice"
        return self._trial


def _digest_of(function: Callable[..., Any]) -> dict[str, str]:
    """Digest of the source file of a function, if Python finds the file."""
    name = name_of_function(function)
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        if file is None:
            return {"function": name}
        with open(file, "rb") as opened:
            return {"function": name, "file": hashlib.file_digest(opened, "sha256").hexdigest()[:16]}
    except (TypeError, OSError):
        return {"function": name}
