"""Recorded rows of experts of vLLM on an H200: the permutation is that of the reference, and sums lie in their dialect.

tests/golden/serving/README.md says where the vectors come from.
"""

from __future__ import annotations

import torch

from narrowgauge.contracts.experts import combine
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.reference.experts.permute import permute
from tests.reference.contracts.golden_serving import vectors


def test_recorded_permutations_are_those_of_the_reference() -> None:
    found = vectors("vllm_moe_permute")
    assert len(found) == 2
    for vector in found:
        given = vector["tensors"]
        x, source_rows, sizes = permute(given["x"], given["ids"], experts=vector["experts"])
        assert torch.equal(x, given["permuted"])
        assert torch.equal(source_rows.int(), given["permuted_idx"])
        assert torch.equal(sizes.cumsum(0), given["offsets"][1:])
        assert torch.equal(source_rows[given["inverse"].flatten().long()], torch.arange(len(source_rows)))


def test_recorded_sums_lie_in_their_dialect() -> None:
    found = vectors("vllm_moe_combine")
    assert len(found) == 7
    wrong = {"vllm-unpermute": 0, "weights of the next choice": 0}
    for vector in found:
        given = vector["tensors"]
        tokens, choices = vector["tokens"], vector["topk"]
        y = given["x"].reshape(-1, vector["H"])
        weights = given.get("weights", torch.ones(tokens, choices))
        positions = given.get("inverse", torch.arange(tokens * choices).view(tokens, choices)).long()
        tensors = {"y": y, "positions": positions, "weights": weights}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        for name in wrong:
            fields = combine.dialects.get(name, {"order": "choices"})
            program = combine.trace(dtypes, {}, fields)
            tensors["weights"] = weights if name in combine.dialects else weights.roll(1, 1)
            ((_, part),) = judged(program, tensors, {"output": given["out"]})
            wrong[name] += int(part.wrong.sum())
            assert name != "vllm-unpermute" or part.determined > 0.99 * part.actual.numel()
    assert wrong["vllm-unpermute"] == 0
    assert wrong["weights of the next choice"] > 500
