"""The hardware models against the mma and wgmma instructions of a Hopper GPU: every bit, NaN and infinity included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from narrowgauge.native.runtime.launch import launch
from narrowgauge.reference.accumulators.hardware import find_hardware
from narrowgauge.reference.accumulators.product import product
from tests.native.devices import needs_hopper
from tests.native.launching import Source

# An instruction multiplies 32 bytes of each row of a with 32 bytes of each row of b. A thread of either instruction
# holds the same bytes of a, and the same outputs: PTX ISA, fragments of mma.m16n8k16 and of wgmma.m64n8.
TEXT = """
extern "C" __global__ void KERNEL(
    const unsigned char* a, const unsigned char* b, const void* c, void* d, int row_bytes, int columns
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = ROWS * blockIdx.x + 16 * warp + lane / 4;
    const int column = 8 * blockIdx.y + 2 * (lane % 4);
    const long long upper = (long long)row * columns + column, lower = upper + 8LL * columns;
    OUT s[COUNT];
    LOAD
    for (int k = 0; k < row_bytes; k += 32) {
        const unsigned char* x = a + (long long)row * row_bytes + k + 4 * (lane % 4);
        unsigned r[4];
        r[0] = *(const unsigned*)x;
        r[1] = *(const unsigned*)(x + 8LL * row_bytes);
        r[2] = *(const unsigned*)(x + 16);
        r[3] = *(const unsigned*)(x + 8LL * row_bytes + 16);
        MULTIPLY
    }
    STORE
}
"""
MMA = """
        const unsigned char* y = b + (long long)(8 * blockIdx.y + lane / 4) * row_bytes + k + 4 * (lane % 4);
        const unsigned q0 = *(const unsigned*)y, q1 = *(const unsigned*)(y + 16);
        asm volatile("mma.sync.aligned.SHAPE.row.col.TYPES {D}, {A}, {B}, {D};"
                     : OPERANDS : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(q0), "r"(q1));
"""
# Two core matrices of 8 rows and 16 bytes lie one after the other in shared memory, without swizzle.
WGMMA = """
        __shared__ alignas(128) unsigned char tile[256];
        __syncthreads();
        if (threadIdx.x < 16) {
            const int half = threadIdx.x / 8, n = threadIdx.x % 8;
            const unsigned char* y = b + (long long)(8 * blockIdx.y + n) * row_bytes + k + 16 * half;
            *(uint4*)(tile + 128 * half + 16 * n) = *(const uint4*)y;
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        const unsigned long long address = (unsigned long long)__cvta_generic_to_shared(tile);
        const unsigned long long matrix = (address & 0x3FFFF) >> 4 | (128ULL >> 4) << 16 | (256ULL >> 4) << 32;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; "
                     "wgmma.mma_async.sync.aligned.SHAPE.TYPES {D}, {A}, B, p, 1, 1TRANSPOSED; }"
                     : OPERANDS : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(matrix) : "memory");
        asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
"""
FLOAT = {
    "OUT": "float", "COUNT": "4", "OPERANDS": '"+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])',
    "LOAD": "const float* start = (const float*)c; s[0] = start[upper]; s[1] = start[upper + 1]; s[2] = start[lower]; "
            "s[3] = start[lower + 1];",
    "STORE": "float* out = (float*)d; out[upper] = s[0]; out[upper + 1] = s[1]; out[lower] = s[2]; "
             "out[lower + 1] = s[3];",
}  # fmt: skip
HALF = {
    "OUT": "unsigned", "COUNT": "2", "OPERANDS": '"+r"(s[0]), "+r"(s[1])',
    "LOAD": "const unsigned* start = (const unsigned*)c; s[0] = start[upper / 2]; s[1] = start[lower / 2];",
    "STORE": "unsigned* out = (unsigned*)d; out[upper / 2] = s[0]; out[lower / 2] = s[1];",
}  # fmt: skip
DTYPES = {
    "tf32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}  # fmt: skip
FORMATS = {"f16": "fp16"}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True)
class Instruction:
    """An instruction, `mma` or `wgmma`, and the name of its model."""

    kind: str
    a: str
    b: str
    out: str
    model: str

    @property
    def text(self) -> str:
        """Source of the kernel, which multiplies matrices by this instruction alone."""
        k = 32 // DTYPES[self.a].itemsize
        wgmma = self.kind == "wgmma"
        count = 4 if self.out == "f32" else 2
        names = [f"%{n}" for n in range(2 * count + 6)]
        types = [self.out, self.a, self.b] + ([] if wgmma else [self.out])
        parts = {
            "{D}": "{" + ", ".join(names[:count]) + "}", "{A}": "{" + ", ".join(names[count : count + 4]) + "}",
            "{B}": "{" + ", ".join(names[count + 4 : count + 6]) + "}", " B,": f" {names[count + 4]},",
            "SHAPE": f"m64n8k{k}" if wgmma else f"m16n8k{k}", "TYPES": ".".join(types),
            "TRANSPOSED": ", 0" if self.a in ("f16", "bf16") else "",
        }  # fmt: skip
        text = TEXT.replace("MULTIPLY", WGMMA if wgmma else MMA).replace("ROWS", "64" if wgmma else "16")
        for name, value in {**(FLOAT if self.out == "f32" else HALF), **parts}.items():
            text = text.replace(name, value)
        return text.replace("KERNEL", "multiply")


FP8 = ("e4m3", "e5m2")
INSTRUCTIONS = [
    *(Instruction(kind, x, x, "f32", f"hopper-{FORMATS.get(x, x)}") for kind in ("mma", "wgmma")
      for x in ("tf32", "bf16", "f16")),
    *(Instruction(kind, "f16", "f16", "f16", "hopper-fp16-fp16") for kind in ("mma", "wgmma")),
    *(Instruction("wgmma", a, b, out, "hopper-fp8" + "-fp16" * (out == "f16")) for a in FP8 for b in FP8
      for out in ("f32", "f16")),
]  # fmt: skip
FAMILIES = ("normal", "wide", "sparse", "subnormal", "codes")


def random_bits(dtype: torch.dtype, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Numbers with random bits: every code, infinities and NaN among them."""
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8, device="cuda")
    return bits.view(shape[0], -1).view(dtype)


def numbers(dtype: torch.dtype, family: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    if family == "codes":
        return random_bits(dtype, shape, generator)
    x = torch.randn(shape, generator=generator, device="cuda")
    if family == "wide":
        largest = {torch.float16: 7, torch.float8_e4m3fn: 4, torch.float8_e5m2: 6}.get(dtype, 20)
        x *= torch.exp2(torch.randint(-largest, largest + 1, shape, generator=generator, device="cuda").float())
    if family == "sparse":
        x *= torch.rand(shape, generator=generator, device="cuda") < 0.2
    if family == "subnormal":
        x *= 2 * float(torch.finfo(dtype).tiny)
    return x.to(dtype)


def pairs(instruction: Instruction, rows: int, columns: int, depth: int) -> Iterator[tuple[str, torch.Tensor, ...]]:
    """Family, a, b and start of the accumulator."""
    generator = torch.Generator("cuda").manual_seed(9)
    out = torch.float32 if instruction.out == "f32" else torch.float16
    for family in FAMILIES:
        a = numbers(DTYPES[instruction.a], family, (rows, depth), generator)
        b = numbers(DTYPES[instruction.b], "normal" if family == "subnormal" else family, (columns, depth), generator)
        for start in ("zero", family):
            shape = (rows, columns)
            c = torch.zeros(shape, device="cuda") if start == "zero" else numbers(out, start, shape, generator)
            yield f"{family}, from {start}", a, b, c.to(out)


def multiply(source: str, instruction: Instruction, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    rows, threads = (64, 128) if instruction.kind == "wgmma" else (16, 32)
    d = torch.empty_like(c)
    row_bytes = a.shape[1] * a.dtype.itemsize
    arguments = [a.view(torch.uint8), b.view(torch.uint8), c, d, np.int32(row_bytes), np.int32(len(b))]
    launch(source, "multiply", (len(a) // rows, len(b) // 8), (threads,), arguments, device=a.device)
    return d


@needs_hopper
@pytest.mark.parametrize("chained", [1, 3], ids=["one step", "3 steps"])
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: f"{i.kind} {i.a} x {i.b} to {i.out}")
def test_every_bit_is_the_models(instruction: Instruction, chained: int, cuda_source: Source) -> None:
    model = find_hardware(instruction.model)
    source = cuda_source(instruction.text)
    depth = chained * 32 // DTYPES[instruction.a].itemsize
    formats = tuple(FORMATS.get(x, x) for x in (instruction.a, instruction.b))
    for name, a, b, c in pairs(instruction, 256, 256, depth):
        y = multiply(source, instruction, a, b, c)
        expected = product(a, b, model, operands=formats, c=c)
        bits = BITS[y.dtype]
        wrong = (y.view(bits) != expected.view(bits)) & ~(y.isnan() & expected.isnan())
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()}, {y[wrong][:4]} not {expected[wrong][:4]}"
        )
