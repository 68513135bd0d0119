"""Every dialect of NVFP4 in a function, transcribed from the code of its library.

NumPy float32 arithmetic rounds every operation. Roundings to E4M3 and E2M1 look for the nearest point of a list, in
float64, in which all compared distances are exact. No function imports `reference`.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

f32 = np.float32
Codes = np.ndarray
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
)
SIXTH = f32(1) / f32(6)
DTYPES = {"float32": f32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def nearest(values: np.ndarray, points: np.ndarray, *, tie: str = "even") -> np.ndarray:
    """Index of the point nearest to every |value|; ties to even or toward zero. NaN: -1."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), points[-1])
    distance = np.abs(magnitude[..., None] - points)
    low = distance.argmin(-1)
    high = len(points) - 1 - distance[..., ::-1].argmin(-1)
    found = np.where((low % 2 == 1) & (tie == "even"), high, low)
    return np.where(np.isnan(values), -1, found)


def e4m3(values: np.ndarray, *, tie: str = "even") -> tuple[np.ndarray, np.ndarray]:
    """Bytes of values from 0 on, saturating, and the values of the bytes; 0x7F for NaN."""
    index = nearest(values, E4M3, tie=tie)
    stored = np.where(index < 0, np.nan, E4M3[index]).astype(f32)
    return np.where(index < 0, 0x7F, index).astype(np.uint8), stored


def e2m1(scaled: np.ndarray, *, sign: str, nan: int, tie: str = "even") -> Codes:
    """Codes. `sign`: the bit is kept, belongs to numbers below 0, or is left out of zeros."""
    index = nearest(scaled, E2M1, tie=tie)
    negative = scaled < 0 if sign == "below 0" else np.signbit(scaled)
    if sign == "not of 0":
        negative = negative & (index != 0)
    return np.where(index < 0, nan, index | negative << 3).astype(np.uint8)


def reciprocal(a: np.ndarray | f32) -> np.ndarray:
    """r(a): 1/a, and 0 for 0."""
    return np.where(a == 0, f32(0), f32(1) / a).astype(f32)


class Blocks:
    """x (M, K) as blocks of 16, padded with zeros, their amaxes v (M, B, 1) and that of all, t."""

    def __init__(self, x: np.ndarray) -> None:
        dtype = x.dtype
        padded = np.pad(x.astype(f32), ((0, 0), (0, -x.shape[1] % 16)))
        self.x = padded.reshape(x.shape[0], -1, 16)
        self.v = np.abs(self.x).max(-1, keepdims=True)
        self.t = self.v.max()
        self.tiny = f32(ml_dtypes.finfo(dtype).tiny)
        self.round: Callable[[np.ndarray], np.ndarray] = lambda a: np.asarray(a, f32).astype(dtype).astype(f32)


Twin = Callable[[Blocks], tuple[Codes, np.ndarray]]


def trtllm(b: Blocks) -> tuple[Codes, np.ndarray]:
    enc = reciprocal(b.t) * f32(2688)
    scale, s = e4m3(enc * (b.v * SIXTH))
    return e2m1(b.x * reciprocal(s * reciprocal(enc)), sign="below 0", nan=0), scale


def torchao(b: Blocks) -> tuple[Codes, np.ndarray]:
    dec = b.t / f32(2688)
    scale, s = e4m3(np.maximum((b.v / f32(6)) / dec, f32(2**-6)))
    return e2m1(b.x * ((f32(1) / dec) / s), sign="kept", nan=12), scale


def modelopt(b: Blocks) -> tuple[Codes, np.ndarray]:
    dec = b.t / f32(2688)
    q = b.v / (f32(6) * dec)
    q = np.where(q == 0, f32(1), q)
    scale, s = e4m3(np.maximum(q, f32(2**-9)))
    return e2m1(b.x / (s * dec), sign="below 0", nan=7), scale


def compressed_tensors(b: Blocks) -> tuple[Codes, np.ndarray]:
    enc = b.round(b.round(f32(1) / np.maximum(b.t, b.tiny)) * f32(2688))
    enc = enc if np.isfinite(enc) else f32(1)
    scale, s = e4m3(enc * b.round(b.v / f32(6)))
    scale, s = np.where(scale == 0, np.uint8(0x20), scale), np.where(scale == 0, f32(0.125), s)
    return e2m1(b.x / (s / enc), sign="below 0", nan=0), scale


def fouroversix(b: Blocks) -> tuple[Codes, np.ndarray]:
    enc = f32(2688) / b.t
    scale, s = e4m3((b.v / f32(6)) * enc if b.t else np.zeros_like(b.v))
    scaled = np.where(s == 0, f32(0), b.x * (f32(1) / ((f32(1) / enc) * s)))
    a = np.abs(scaled)
    rounded = np.where(a < 2, np.round(2 * a) / 2, np.where(a < 4, np.round(a), 2 * np.round(a / 2))).astype(f32)
    bits = rounded.view(np.uint32)  # as the library packs: exponent - 126 and one mantissa bit
    code = (((bits >> 23).astype(np.int64) - 126) << 1) | (bits >> 22 & 1)
    code = np.where(rounded == 0.5, 1, np.where(rounded == 0, 0, code)) & 15 | (scaled < 0) << 3
    return np.where(np.isfinite(scaled), code, 11).astype(np.uint8), scale


def quark(b: Blocks) -> tuple[Codes, np.ndarray]:
    eps = f32(2**-23)
    dec = b.t / f32(2688)
    dec = eps if dec == 0 else dec
    q = b.v / f32(6)
    scale, s = e4m3(np.where(q == 0, eps, q) / dec)
    e = s * dec
    return e2m1(b.x / np.where(e == 0, eps, e), sign="not of 0", nan=7), scale


def flashinfer_trace(b: Blocks) -> tuple[Codes, np.ndarray]:
    enc = (f32(1) / np.maximum(b.t, f32(1e-12))) * f32(2688)
    scale, s = e4m3((b.v / f32(6)) * enc)
    return e2m1((b.x * enc) / np.where(s > 0, s, f32(1)), sign="below 0", nan=0, tie="zero"), scale


def fireworks(b: Blocks) -> tuple[Codes, np.ndarray]:
    enc = (f32(1) / b.t) * f32(2688) if b.t else f32(0)
    scaled = b.x * enc
    scale, s = e4m3(np.nanmax(np.abs(scaled), -1, keepdims=True) / f32(6))
    y = scaled * reciprocal(s)
    distance = np.abs(np.abs(y)[..., None] - E2M1.astype(f32))
    code = (distance - np.array([1e-6, 0] * 4, f32)).argmin(-1)
    code = np.where(np.isfinite(y), code, 7) | np.signbit(y) << 3
    return np.where(np.isnan(y), 7, code).astype(np.uint8), scale


def jax(b: Blocks) -> tuple[Codes, np.ndarray]:
    dec = b.t / f32(2688)
    scaled = b.x * (f32(1) / dec)
    scale, s = e4m3(np.nanmax(np.abs(scaled), -1, keepdims=True) * SIXTH if dec else np.full_like(b.v, np.nan))
    return e2m1(scaled * (f32(1) / s), sign="kept", nan=8), scale


def fp_quant(b: Blocks) -> tuple[Codes, np.ndarray]:
    enc = (f32(1) / b.t) * f32(2688)
    if enc == 0 or not np.isfinite(enc):
        raise ValueError("Global scale is not finite")
    scale, s = e4m3(b.round(b.round(f32(2) * b.v) / f32(12)) * enc)
    e = b.round(s * (f32(1) / enc))
    return e2m1(b.round(b.x / np.where(e == 0, f32(1), e)), sign="below 0", nan=7), scale


def qwantize(b: Blocks) -> tuple[Codes, np.ndarray]:
    scale, s = e4m3(np.maximum(b.v / f32(6), f32(1e-12)))
    y = np.where(b.x == 0, f32(0), b.x / s)
    return e2m1(y, sign="below 0", nan=7, tie="zero"), scale


def breccia(b: Blocks) -> tuple[Codes, np.ndarray]:
    scale, s = e4m3(np.maximum(b.v, f32(1e-10)) / f32(6), tie="zero")
    return e2m1(b.x / np.where(s > 0, s, f32(2**-9)), sign="not of 0", nan=0, tie="zero"), scale


def qwix(b: Blocks) -> tuple[Codes, np.ndarray]:
    q = b.round(b.v * SIXTH)
    scale, s = e4m3(np.where(q < b.round(np.sqrt(b.tiny)), f32(1), q))
    return e2m1(b.round(b.x / s), sign="kept", nan=8), scale


def te_reference(b: Blocks) -> tuple[Codes, np.ndarray]:
    enc = min(f32(2688) / b.t, np.finfo(f32).max)
    enc = f32(1) if b.t == 0 or enc == 0 else enc
    scale, s = e4m3(b.v * (enc * SIXTH))
    e = np.minimum(f32(1) / (s * (f32(1) / enc)), np.finfo(f32).max)
    return e2m1(b.x * e, sign="below 0", nan=0), scale


def torchao_one_level(b: Blocks) -> tuple[Codes, np.ndarray]:
    scale, s = e4m3(np.maximum(b.v / f32(6), f32(2**-6)))
    return e2m1(b.x * (f32(1) / s), sign="kept", nan=12), scale


def comfy_kitchen(b: Blocks) -> tuple[Codes, np.ndarray]:
    dec = b.t / f32(2688)
    scale, s = e4m3((b.v / f32(6)) / dec)
    e = dec * s
    return e2m1(np.where(e == 0, f32(0), b.x / e), sign="kept", nan=12), scale


def mlx(b: Blocks) -> tuple[Codes, np.ndarray]:
    enc = f32(2688) / b.t
    scale, s = e4m3(b.round(b.v / f32(6)) * enc)
    y = b.round(np.where(s == 0, f32(0), b.x / s)) * enc
    return e2m1(y, sign="not of 0", nan=0, tie="zero"), scale


def mlx_one_level(b: Blocks) -> tuple[Codes, np.ndarray]:
    scale, s = e4m3(b.round(b.v / f32(6)))
    return e2m1(b.round(np.where(s == 0, f32(0), b.x / s)), sign="not of 0", nan=0, tie="zero"), scale


TWINS: dict[str, Twin] = {
    twin.__name__.replace("_", "-"): twin
    for twin in (
        trtllm, torchao, modelopt, compressed_tensors, fouroversix, quark, flashinfer_trace, fireworks, jax, fp_quant,
        qwantize, breccia, qwix, te_reference, torchao_one_level, comfy_kitchen, mlx, mlx_one_level,
    )
}  # fmt: skip


def quantize(x: np.ndarray, dialect: str) -> tuple[Codes, np.ndarray]:
    """Codes (M, K), one a byte, and scale bytes (M, ⌈K/16⌉). Raises ValueError like the library."""
    with np.errstate(all="ignore"):
        codes, scales = TWINS[dialect](Blocks(x))
    return codes.reshape(x.shape[0], -1)[:, : x.shape[1]], scales[..., 0]
