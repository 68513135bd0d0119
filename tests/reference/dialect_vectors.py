"""Results of the libraries for seven short rows of bfloat16 numbers: scale bytes, and a hex digit for each code.

A row tells each dialect from its nearest neighbour: the dialect with the fewest different bytes on constructed and
random families. Recorded from the code of the libraries at the versions that narrowgauge/spec/dialects.py names.
"""

# (numbers, {dialect: (scales, codes)})
VECTORS: dict[str, tuple[list[float], dict[str, tuple[str, str]]]] = {
    "a block amax of six times a midpoint of E4M3": (
        [
            -2040, 2400, 3616, -608, 636, 1880, 3680, 3680, -1096, 2304, -2048, -1304, 1960, 1600, 45, -180,
            -0.013916015625, -0.035888671875, 0.0260009765625, 0.032470703125, -0.0267333984375, 0.037841796875,
            0.025634765625, 0.05615234375, 0.00567626953125, 0.0157470703125, 0.0179443359375, 0.049072265625,
            0.0341796875, 0.05615234375, 0.005096435546875, 0.029296875,
        ],
        {
            "trtllm": ("7e04", "d67a2577c6dc5509bd45c64713365715"),
            "torchao": ("7e08", "d67a2577c6dc55099b23a42511243503"),
            "modelopt": ("7e04", "d67a2577c6dc5509bd45c64713365715"),
            "compressed-tensors": ("7e03", "d67a2577c6dc5509be56d65714476716"),
            "fouroversix": ("7e03", "d67a2577c6dc5509be56d65814476816"),
            "quark": ("7e03", "d67a2577c6dc5509be56d65714476716"),
            "flashinfer-trace": ("7e03", "d67a2577c6dc5509be56d65714476716"),
            "fireworks": ("7e04", "d67a2577c6dc5509bd45c64713365715"),
            "jax": ("7e04", "d67a2577c6dc5509bd45c64713365715"),
            "fp-quant": ("7e03", "d67a2577c6dc5509be56d65714476716"),
            "qwantize": ("7e05", "e77b3677c7ed6609be55d65713475715"),
            "breccia": ("7e05", "e77b3677c7ed6609be55d65713475715"),
            "qwix": ("7e05", "e77b3677c7ed6609be55d65713476715"),
            "te-reference": ("7e04", "d67a2577c6dc5509bd45c64713365715"),
            "torchao-one-level": ("7e08", "e77b3677c7ed6609ac34b43612254614"),
            "comfy-kitchen": ("7e03", "d67a2577c6dc5509be56d65714476716"),
            "mlx": ("7e03", "d67a2577c6dc5509be56d65714476716"),
            "mlx-one-level": ("7e05", "e77b3677c7ed6609be55d65713475715"),
        },
    ),
    "a scale that is a tie: amaxes 65 and 48.75": (
        [
            65, 48.75, -7, -10.5, 33.75, -35.75, 39.25, -37.75, -17.75, 2.25, -48, 6.75, -48.75, 1.75, -31, 11, -11,
            48.75, -13.5, 33.25, -47.5, -25.5, 27.5, -37, -46, 27.5, 24, -26.5, 4.5, -31.75, 20.75, 7,
        ],
        {
            "trtllm": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "torchao": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "modelopt": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "compressed-tensors": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "fouroversix": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "quark": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "flashinfer-trace": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "fireworks": ("7e7b", "769a5d6db0e1e0d2b7b6fd5ef55d1e42"),
            "jax": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "fp-quant": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "qwantize": ("5350", "769a5d6db0e1e0d2b7b6fd5ef55d1e52"),
            "breccia": ("5350", "769a5d6db0e1e0d2b7b6fd5ef55d1e52"),
            "qwix": ("5350", "769a5d6db0e1e0d2b7b6fd5ef55d1e52"),
            "te-reference": ("7e7b", "769a5d6db0e1e0d2b7b6fd5ef55d1e42"),
            "torchao-one-level": ("5350", "769a5d6db0e1e0d2b7b6fd5ef55d1e52"),
            "comfy-kitchen": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "mlx": ("7e7a", "769a5d6db0e1e0d2b7b6fd6ef65d1e52"),
            "mlx-one-level": ("5350", "769a5d6db0e1e0d2b7b6fd5ef55d1e52"),
        },
    ),
    "halves that are ties only to some, and −0.0": (
        [
            -0.0, 0.140625, -3.375, -0.0, 1.515625, -1.7421875, -0.0, 0.1328125, -0.5703125, -0.0, 1.3671875,
            0.263671875, -0.0, -0.4765625, 0.9140625, -0.0,
        ],
        {
            "trtllm": ("7e", "00f05d00a0410a30"),
            "torchao": ("7e", "80f85d80a8418a38"),
            "modelopt": ("7e", "00f05d00a0410a30"),
            "compressed-tensors": ("7e", "01f05d00a0410a30"),
            "fouroversix": ("7e", "00f05d00a0410a30"),
            "quark": ("7e", "00f05d00a0410a30"),
            "flashinfer-trace": ("7e", "00f05d00a0410a30"),
            "fireworks": ("7e", "80f85d80a8418a38"),
            "jax": ("7e", "80f85d80a8418a38"),
            "fp-quant": ("7e", "00f05d00a0410a30"),
            "qwantize": ("31", "00f05d00a0410a30"),
            "breccia": ("31", "00f05d00a0410a30"),
            "qwix": ("31", "80f85d80a8418a38"),
            "te-reference": ("7e", "00f05d00a0410a30"),
            "torchao-one-level": ("31", "80f85d80a8418a38"),
            "comfy-kitchen": ("7e", "80f85d80a8418a38"),
            "mlx": ("7e", "01f05d00a0410a30"),
            "mlx-one-level": ("31", "00f05d00a0410a30"),
        },
    ),
    "the midpoints of E2M1 under a scale of 448": (
        [
            0, 112, 336, 560, 784, 1120, 1568, 2240, 2688, -112, -336, -560, -784, -1120, -1568, -2240,
        ],
        {
            "trtllm": ("7e", "0022446678aaccee"),
            "torchao": ("7e", "0022446678aaccee"),
            "modelopt": ("7e", "0022446678aaccee"),
            "compressed-tensors": ("7e", "0022446678aaccee"),
            "fouroversix": ("7e", "0022446678aaccee"),
            "quark": ("7e", "0022446670aaccee"),
            "flashinfer-trace": ("7e", "00123456789abcde"),
            "fireworks": ("7e", "0022446678aaccee"),
            "jax": ("7e", "0022446678aaccee"),
            "fp-quant": ("7e", "0022446678aaccee"),
            "qwantize": ("7e", "00123456789abcde"),
            "breccia": ("7e", "00123456709abcde"),
            "qwix": ("7e", "0022446678aaccee"),
            "te-reference": ("7e", "0022446678aaccee"),
            "torchao-one-level": ("7e", "0022446678aaccee"),
            "comfy-kitchen": ("7e", "0022446678aaccee"),
            "mlx": ("7e", "00123456709abcde"),
            "mlx-one-level": ("7e", "00123456709abcde"),
        },
    ),
    "a block whose scale rounds to 0": (
        [
            -0.0, 0.140625, -3.375, -0.0, 1.515625, -1.7421875, -0.0, 0.1328125, -0.5703125, -0.0, 1.3671875,
            0.263671875, -0.0, -0.4765625, 0.9140625, -0.0, *[1e-30] * 16,
        ],
        {
            "trtllm": ("7e00", "00f05d00a0410a300000000000000000"),
            "torchao": ("7e08", "80f85d80a8418a380000000000000000"),
            "modelopt": ("7e01", "00f05d00a0410a300000000000000000"),
            "compressed-tensors": ("7e20", "01f05d00a0410a300000000000000000"),
            "fouroversix": ("7e00", "00f05d00a0410a300000000000000000"),
            "quark": ("7e00", "00f05d00a0410a300000000000000000"),
            "flashinfer-trace": ("7e00", "00f05d00a0410a300000000000000000"),
            "fireworks": ("7e00", "80f85d80a8418a380000000000000000"),
            "jax": ("7e00", "80f85d80a8418a387777777777777777"),
            "fp-quant": ("7e00", "00f05d00a0410a300000000000000000"),
            "qwantize": ("3100", "00f05d00a0410a307777777777777777"),
            "breccia": ("3100", "00f05d00a0410a300000000000000000"),
            "qwix": ("3138", "80f85d80a8418a380000000000000000"),
            "te-reference": ("7e00", "00f05d00a0410a307777777777777777"),
            "torchao-one-level": ("3108", "80f85d80a8418a380000000000000000"),
            "comfy-kitchen": ("7e00", "80f85d80a8418a380000000000000000"),
            "mlx": ("7e00", "01f05d00a0410a300000000000000000"),
            "mlx-one-level": ("3100", "00f05d00a0410a300000000000000000"),
        },
    ),
    "midpoints under one level of scales": (
        [
            -140, 0, 7, 21, 35, 49, 70, 98, 140, 168, -7, -21, -35, -49, -70, -98,
        ],
        {
            "qwantize": ("5e", "e00123456789abcd"),
            "breccia": ("5e", "e00123456709abcd"),
            "qwix": ("5e", "e0022446678aacce"),
            "torchao-one-level": ("5e", "e0022446678aacce"),
            "mlx-one-level": ("5e", "e00123456709abcd"),
        },
    ),
    "an E4M3 tie of one level": (
        [
            296, -59.25, 376, 187, -440, -158, 165, 552, -101, 14, 159, 28.75, 135, 252, 25.25, 552,
        ],
        {
            "qwantize": ("6c", "5964eb37a0313517"),
            "breccia": ("6b", "5964ec47a0413517"),
            "qwix": ("6c", "5964eb37a0313517"),
            "torchao-one-level": ("6c", "5964eb37a0313517"),
            "mlx-one-level": ("6c", "5964eb37a0313517"),
        },
    ),
}  # fmt: skip

NEAREST = {
    "trtllm": "fouroversix", "torchao": "fireworks", "modelopt": "compressed-tensors",
    "compressed-tensors": "flashinfer-trace", "fouroversix": "trtllm", "quark": "te-2.8",
    "flashinfer-trace": "compressed-tensors", "fireworks": "torchao", "jax": "te-2.8", "fp-quant": "compressed-tensors",
    "qwantize": "qwix", "breccia": "qwantize", "qwix": "qwantize",
    "te-reference": "te-2.8", "torchao-one-level": "qwix", "comfy-kitchen": "quark", "mlx": "flashinfer-trace",
    "mlx-one-level": "qwantize",
}  # fmt: skip
"""The nearest neighbour of each dialect among dialects with the same number of levels of scales."""
