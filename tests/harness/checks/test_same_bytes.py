"""`same_bytes`: equality of bytes, whatever the size and the place in memory."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.harness.checks.bit_equality import same_bytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (3, 5), (4, 8), (7, 9)])
def test_every_byte_is_compared(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.arange(size + 16, dtype=torch.uint8)
    for offset in (0, 8):
        one = memory[offset : offset + size].clone().view(dtype).view(shape)
        other = torch.cat([memory[:offset], one.view(-1).view(torch.uint8)])[offset:]
        if offset % dtype.itemsize:
            continue
        assert same_bytes(one, other.view(dtype).view(shape))
        for place in range(size):
            changed = other.clone()
            changed[place] ^= 0x80
            assert not same_bytes(one, changed.view(dtype).view(shape))
    assert not same_bytes(torch.zeros(3, 2, dtype=dtype), torch.zeros(2, 3, dtype=dtype))


def test_bytes_at_odd_places_and_strides() -> None:
    memory = torch.arange(70, dtype=torch.uint8)
    assert same_bytes(memory[3:60], memory[3:60].clone())
    assert not same_bytes(memory[3:60], memory[4:61])
    square = memory[:64].view(8, 8)
    assert same_bytes(square.T, square.T.contiguous())
    assert not same_bytes(square.T, square)


def test_signs_of_zeros_and_payloads_of_nans_count() -> None:
    zero, nan = torch.zeros(16), torch.full((16,), torch.nan)
    assert not same_bytes(zero, -zero)
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(nan, (nan.view(torch.int32) + 1).view(torch.float32))
