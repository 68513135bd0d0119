"""`narrowgauge.certify`: the proof of a quantizer, the trials of its assumption, and the certificate."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.adapt.conventions import AnyLayout, Nibbles, TensorScaleIs
from narrowgauge.contract import Contract
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.api.check import selected_cases
from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.function_backend import FunctionBackend, name_of_function
from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.backends.loading import parameters_of
from narrowgauge.harness.certify.activations import SHAPE, certificate_of_contract
from narrowgauge.harness.certify.certificate import Certificate, CertificateError, Trial, proved_and_sampled
from narrowgauge.harness.certify.compare import Calls
from narrowgauge.harness.certify.decoding import prove_decoding
from narrowgauge.harness.certify.inputs.space import Effort, Grid, Numbers, outers
from narrowgauge.harness.certify.proof import Proof, Prover
from narrowgauge.harness.certify.trials import Repeated, outside, trials, tried_sentence
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR


def certify(
    function: Callable[..., Any],
    subject: str | Recipe | Contract | None = None,
    *,
    recipe: str | Recipe | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    tensor_scales: int | None = None,
    places: int | None = None,
    tensor_scale_is: TensorScaleIs = "amax",
    layout: AnyLayout = LINEAR,
    nibbles: Nibbles = "low-first",
) -> Certificate:
    """Prove a quantizer on every number under every scale of a block, or an activation on every gate, and try the
    assumption of the proof.

    function: as for `narrowgauge.check`: function(x), further recipe and scale, gives (codes, scales[, amax]), a dict
    or a Quantized. It is called in this process. A function with stochastic rounding takes `random`: seed and offset of
    Philox, or words too. subject: a recipe, or a contract that quantizes a function of single numbers, such as
    "silu-mul-quantize", with its recipe as `recipe`.
    dtype: bfloat16 or float16, whose numbers are all tried, or float32: every rounding boundary ± 2 ulp and a sample.
    tensor_scales: number of tensor amaxes, or of given scales (default: 64 on a CPU, all on a GPU; of a contract 4
    and 64). places: number of places of a number in a block (default: up to 128 on a CPU, of a contract 4; all on a
    GPU). tensor_scale_is, layout, nibbles: conventions of the result, as of `narrowgauge.check`. What a certificate
    says: docs/certify.md.

    Returns the certificate, of a wrong kernel too: `certificate.passed`. Raises CertificateError, a ValueError, for a
    recipe, contract or dtype that has no certificate, and if the function fails on the inputs of the proof; ValueError
    and TypeError for arguments that do not fit together.
    """
    if isinstance(subject, Contract) or (isinstance(subject, str) and subject in CONTRACTS):
        effort = Effort.of(str(device), tensor_scales, places, contract=True)
        with default_settings():
            return _of_contract(function, subject, recipe, (dtype, str(torch.device(device))), effort, seed)
    if subject is None or recipe is not None:
        raise TypeError('certify takes a recipe, certify(function, "nvfp4"), or a contract and its recipe')
    found = find_recipe(subject)
    numbers = numbers_of(found, dtype, str(torch.device(device)))
    case = QuantizeCase(recipe=str(found), shape=(16, 256), dtype="bf16", inputs="normal")
    conventions = {"tensor_scale_is": tensor_scale_is, "layout": layout, "nibbles": nibbles, "transposed": False}
    name = name_of_function(function)
    backend = FunctionBackend(
        name, function, case, case.operation, declares={}, conventions=conventions, constraints={}
    )
    effort = Effort.of(str(device), tensor_scales, places)
    with default_settings():
        certificate = certificate_of(backend, name, found, numbers, effort, seed)
    certificate.kernel = _digest_of(function)
    return certificate


def _of_contract(
    function: Callable[..., Any], contract: str | Contract, recipe: str | Recipe | None,
    numbers: tuple[torch.dtype, str], effort: Effort, seed: int,
) -> Certificate:  # fmt: skip
    chosen: dict[str, Any] = {"families": None, "shapes": [SHAPE], "dtypes": numbers[:1], "keys": {}}
    _, operation, cases = selected_cases(contract, recipe, None, chosen, parameters=parameters_of(function))
    name, case = name_of_function(function), cases[0][0]
    backend = FunctionBackend(name, function, case, operation)
    certificate = certificate_of_contract(backend, name, case, Numbers(*numbers), effort, seed)
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
        before = Repeated(calls, numbers, chosen[0].given(numbers.device), seed)
        prover = Prover(calls, numbers, seed)
        proof = proved_by(prover) if proved_by else prover.prove(chosen, of, effort.places, effort.everywhere)
        calls.begin(len(chosen))
        tried = list(trials(calls, numbers, chosen[0].given(numbers.device), seed))
        tried.append(before.again())
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
        subject, str(recipe), str(numbers.dtype).removeprefix("torch."), numbers.device, assumption(recipe, tried),
        tried, proved, sampled, outside(tried), proof.wrong, {}, seconds=time.monotonic() - begun, seed=seed,
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


def assumption(recipe: Recipe, trials: list[Trial]) -> str:
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
    return tried_sentence(depends, trials)


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
