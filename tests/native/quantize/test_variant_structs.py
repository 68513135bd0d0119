"""Structs of variants that Python and the quantization kernels share: C++ reads the values that Python sets."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.native.quantize import fp8, nvfp4
from narrowgauge.native.quantize.variants import variant_flags
from narrowgauge.native.runtime.sources import expanded
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.spec.recipes import find_recipe
from tests.native.launching import ONE, Source, run

GPU = torch.device("cuda")
VARIANTS: dict[str, tuple[KernelStruct, dict[str, Any]]] = {
    "nvfp4": (
        nvfp4._VARIANT,
        nvfp4.variant(find_recipe("nvfp4"), rotation="NO_ROTATION", layout="linear", random_given=False),
    ),
    "fp8": (fp8._VARIANT, fp8.variant(find_recipe("fp8-block-1x128-e4m3-fp32"))),
}
EVERY_FAMILY = pytest.mark.parametrize("family", VARIANTS)

# Writes the fields of the variants that the compiler knows, in the order of their declaration.
TEXT = """
using u32 = unsigned int;
{declarations}
extern "C" __global__ void variants(int* out) {{
    const {struct} variants[] = {{{variants}}};
    for (const {struct}& variant : variants) {{
        {body}
    }}
}}
"""


def kernel(struct: KernelStruct, count: int) -> str:
    """TEXT for `count` variants of a struct, with its declaration and all enums of its file."""
    text = expanded(struct.file)
    enums = re.findall(r"^enum \w+ : int {[^}]*};", text, re.MULTILINE)
    (declaration,) = re.findall(rf"^struct {struct.name} {{.*?^}};", text, re.MULTILINE | re.DOTALL)
    body = " ".join(f"*out++ = static_cast<int>(variant.{f.name});" for f in struct.fields)
    variants = ", ".join(f"VARIANT_{i}" for i in range(count))
    return TEXT.format(declarations="\n".join([*enums, declaration]), struct=struct.name, variants=variants, body=body)


TEXTS = {family: kernel(struct, 1 + len(variant)) for family, (struct, variant) in VARIANTS.items()}


def other_value(struct: KernelStruct, name: str, value: Any) -> Any:
    """Another value of a field: a different enumerator, or the number with a changed bit."""
    field = next(field for field in struct.fields if field.name == name)
    if field.enumerators is not None:
        return next(enumerator for enumerator in reversed(list(field.enumerators)) if enumerator != value)
    return int(value) ^ 1


def expected(struct: KernelStruct, variant: dict[str, Any]) -> list[int]:
    return [
        int(variant[field.name]) if field.enumerators is None else field.enumerators[variant[field.name]]
        for field in struct.fields
    ]


@pytest.mark.sampled(2)
@EVERY_FAMILY
def test_every_field_of_a_variant_reaches_the_compiler(cuda_source: Source, family: str) -> None:
    struct, variant = VARIANTS[family]
    variants = [variant, *(variant | {name: other_value(struct, name, old)} for name, old in variant.items())]
    flags = [flag for changed in variants for flag in variant_flags(struct, changed, GPU)]
    assert all(flag.startswith("-DVARIANT=") for flag in flags)
    flags = [flag.replace("VARIANT", f"VARIANT_{number}", 1) for number, flag in enumerate(flags)]
    out = np.zeros((len(variants), len(struct.fields)), np.int32)
    run(cuda_source(TEXTS[family]), "variants", ONE, ONE, out, flags=(*flags, "-O0"))
    assert out.tolist() == [expected(struct, changed) for changed in variants]
    assert len({tuple(row) for row in out.tolist()}) == len(variants)


@EVERY_FAMILY
def test_a_missing_or_unknown_field_is_refused(family: str) -> None:
    struct, variant = VARIANTS[family]
    for wrong in (dict(list(variant.items())[1:]), variant | {"unknown": 1}):
        with pytest.raises(TypeError, match=struct.name):
            struct.initializer(**wrong)
    name = next(field.name for field in struct.fields if field.enumerators is not None)
    with pytest.raises(KeyError, match="UNKNOWN"):
        struct.initializer(**(variant | {name: "UNKNOWN"}))


@EVERY_FAMILY
def test_a_cpu_has_one_compilation_for_all_variants(family: str) -> None:
    struct, variant = VARIANTS[family]
    assert variant_flags(struct, variant, torch.device("cpu")) == ()
