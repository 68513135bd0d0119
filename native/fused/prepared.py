"""Launches prepared once for operands of a form: a further call fills in the addresses alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import ScaleLayout

_MOST = 4096
"""Largest number of kept forms; then all are dropped: a program with ever new shapes does not grow."""


@dataclass(frozen=True)
class Launch:
    """A launch with a single struct of parameters."""

    source: str
    kernel: str
    blocks: int
    threads: int
    flags: tuple[str, ...]
    shared_bytes: int
    packer: struct.Struct
    constants: list[bytes | int]
    """Bytes of the struct between its addresses, and 0 for an address, in turn."""
    places: list[int]
    """Number of the tensor of each address."""


@dataclass(frozen=True)
class Prepared:
    """The calls of a fused kernel with quantization, for operands of the same form."""

    recipe: Recipe
    shape: tuple[int, int]
    layout: ScaleLayout
    device: torch.device
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    stored: torch.dtype
    padded: bool
    """Whether the scales have padding, not written by any thread."""
    encodes: bool
    """Whether the kernel stores a factor of the tensor."""
    amax: int | None
    """Number of the amax among the operands; None: the kernel makes the amax, if the recipe has an amax."""
    launches: Sequence[Launch] = ()

    def outputs(self) -> list[torch.Tensor]:
        """New codes and scales, and if the recipe has them the factor and an own amax of the tensor, set to 0."""
        device = self.device
        scales = (torch.zeros if self.padded else torch.empty)(self.scales, dtype=self.stored, device=device)
        made = [torch.empty(self.codes, dtype=torch.uint8, device=device), scales]
        if self.encodes:
            made.append(torch.empty(1, dtype=torch.float32, device=device))
            if self.amax is None:
                made.append(torch.zeros(1, dtype=torch.float32, device=device))
        return made

    def __call__(self, operands: Sequence[torch.Tensor | None]) -> Quantized:
        """Launch for operands of the same form, in the order of `form_of`."""
        outputs = self.outputs()
        tensors = [*operands, *outputs]
        for one in self.launches:
            parameters = one.constants.copy()
            parameters[1::2] = [tensors[place].data_ptr() for place in one.places]  # type: ignore[union-attr]
            launch(
                one.source, one.kernel, (one.blocks,), (one.threads,), (one.packer.pack(*parameters),),
                device=self.device, extra_flags=one.flags, shared_bytes=one.shared_bytes,
            )  # fmt: skip
        return self.result(operands, outputs)

    def result(self, operands: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor]) -> Quantized:
        """The result in these outputs."""
        amax = (outputs[3] if self.amax is None else operands[self.amax]) if self.encodes else None
        encode = outputs[2] if self.encodes else None
        return Quantized(outputs[0], outputs[1], amax, self.recipe, self.shape, encode, self.layout)


PREPARED: dict[object, Prepared] = {}
"""Form of a call to its launches."""


def form_of(operands: Sequence[torch.Tensor | None], *options: object) -> object:
    """Key of `PREPARED`: all that a launch depends on but the addresses of the operands."""
    return (*options, *[None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16, t.device)
                        for t in operands])  # fmt: skip


def keep(form: object, prepared: Prepared) -> None:
    """Keep the launches of a form."""
    if len(PREPARED) >= _MOST:
        PREPARED.clear()
    PREPARED[form] = prepared


def addresses_of(tensors: Sequence[torch.Tensor | None]) -> dict[int, int] | None:
    """Addresses of the tensors to their numbers; None if two tensors share an address, or a tensor is empty: a later
    call of the same form may then have different addresses in their places."""
    found = {t.data_ptr(): number for number, t in enumerate(tensors) if t is not None}
    whole = all(t is None or t.numel() > 0 for t in tensors)
    return found if whole and len(found) == sum(t is not None for t in tensors) else None


def template(
    kind: KernelStruct, value: StructValue, addresses: dict[int, int]
) -> tuple[struct.Struct, list[bytes | int], list[int]] | None:
    """The packer, constants and places of `Launch` for the parameters of a launch. None if a field is the address of a
    tensor not among `addresses`, for example of a contiguous copy of an operand."""
    fields = [field.data_ptr() if isinstance(field, torch.Tensor) else field or 0 for field in value.fields]
    packed, places, letters = value.layout.pack(*fields), [], "="
    constants: list[bytes | int] = []
    end = 0
    for field, offset in zip(value.fields, kind.leaf_offsets, strict=True):
        if not isinstance(field, torch.Tensor):
            continue
        if field.data_ptr() not in addresses:
            return None
        places.append(addresses[field.data_ptr()])
        constants += [packed[end:offset], 0]
        letters += f"{offset - end}sQ"
        end = offset + struct.calcsize("P")
    constants.append(packed[end:])
    return struct.Struct(f"{letters}{len(packed) - end}s"), constants, places
