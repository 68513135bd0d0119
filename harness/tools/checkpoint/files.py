"""Tensors of .safetensors and .gguf files. A header is checked against the size of its file before anything is read.

Sources: the safetensors format (https://github.com/huggingface/safetensors#format), and the page on GGUF in the
repository of ggml (https://github.com/ggml-org/ggml). Rows are read with `pread`, not mapped: the memory of a process
then shows the memory that the judgement needs, whatever the size of the files.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch

from narrowgauge.harness.machine.plain_text import unique_keys

LARGEST_HEADER = 64 << 20
"""Bytes of the header of a .safetensors file, of the header of a .gguf file, and of a JSON file."""
MOST_TENSORS = 1 << 20
"""Tensors of a file, and metadata of a .gguf file."""
LONGEST_NAME = 1000
"""Characters of the name of a tensor."""
MOST_DIMENSIONS = 8

_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U8": 8, "I8": 8, "BOOL": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of an element by the dtype name of safetensors."""
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_GGML = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 39: ("GGML_MXFP4", 32, 17), 40: ("GGML_NVFP4", 64, 36)}
"""GGML types that are read: name, elements of a block, bytes of a block."""
_METADATA_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of GGUF metadata by its type. Types 8 and 9 are a string and an array."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: the message names the file, the mistake and the remedy."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, before it is read: a matrix of bytes, all dimensions but the last being rows."""

    name: str
    dtype: str
    """Name in safetensors (F8_E4M3), or GGML_MXFP4, GGML_NVFP4, or `GGML type 12` for a type that is not read."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int

    @property
    def rows(self) -> int:
        """Product of all dimensions but the last; 1 for a scalar."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Last dimension; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def is_float(self) -> bool:
        """Whether `numbers` can read the tensor: float32, bfloat16 or float16."""
        return self.dtype in _FLOATS

    def part(self, number: int) -> StoredTensor:
        """The part with this number along the first dimension: `experts.w1[3]`."""
        size = self.size // self.shape[0]
        name, offset = f"{self.name}[{number}]", self.offset + number * size
        return replace(self, name=name, shape=self.shape[1:], offset=offset, size=size)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The bytes of rows `start` to `stop`: uint8 (rows, bytes of a row). Raises CheckpointError."""
        stop = self.rows if stop is None else stop
        width = self.size // max(1, self.rows)
        content = bytearray((stop - start) * width)
        view, done = memoryview(content), 0
        try:
            with self.path.open("rb") as file:
                while done < len(content):
                    count = os.preadv(
                        file.fileno(), [view[done : done + (1 << 28)]], self.offset + start * width + done
                    )
                    if not count:
                        raise CheckpointError(
                            f"{self.path}: ends inside {self.name}; the file changed while it was read"
                        )
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
        if not content:
            return torch.empty(stop - start, width, dtype=torch.uint8)
        return torch.frombuffer(content, dtype=torch.uint8).view(stop - start, width)

    def numbers(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor of numbers, in its dtype: (rows, columns)."""
        stored = self.read(start, stop)
        return stored.view(-1).view(_FLOATS[self.dtype]).view(stored.shape[0], self.columns)


@dataclass
class Checkpoint:
    """The tensors of all files of a checkpoint, by name."""

    path: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """`quantization_config` of config.json, else the content of hf_quant_config.json, else empty."""
    files: int = 0
    partial: bool = False
    """Whether the file is a shard of several without the others: a tensor may lie in another shard."""
    scale_names: str = ""
    """Pattern of the names of scales of a user, with {weight} for the name of a matrix without `.weight`."""
    lost: dict[str, str] = field(default_factory=dict)
    """Shards by the names of tensors that the index names and the shard lacks."""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())


def open_checkpoint(path: str | Path, *more: str | Path, scales: str = "") -> Checkpoint:
    """The headers of a .safetensors or .gguf file, of several shards, or of all files of a folder.

    A folder with `model.safetensors.index.json` has the shards that the index names; a name with a folder inside is
    refused. `scales`: pattern of the names of scales, with {weight}. Raises CheckpointError for a missing or damaged
    file, a tensor that lies in two files, an index with a missing shard, a folder without such a file, and a pattern
    without {weight}.
    """
    if scales and "{weight}" not in scales:
        raise CheckpointError(f"scales is {scales!r}; a pattern names the matrix as {{weight}}: {{weight}}.scale")
    first = Path(path)
    paths, expected = _files_of(first) if first.is_dir() and not more else ([first, *map(Path, more)], {})
    folder = first if first.is_dir() else first.parent
    checkpoint = Checkpoint(
        first, config=_config(folder), files=len(paths), partial=_is_partial(paths), scale_names=scales
    )
    for file in paths:
        for tensor in _read_header(file):
            if tensor.name in checkpoint.tensors:
                other = checkpoint.tensors[tensor.name].path
                raise CheckpointError(f"{file}: {tensor.name} is also in {other}; give the files of one checkpoint")
            checkpoint.tensors[tensor.name] = tensor
    for name, shard in expected.items():
        if name not in checkpoint.tensors or checkpoint.tensors[name].path.name != shard:
            checkpoint.lost[name] = shard
    return checkpoint


def _files_of(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a folder, and the shard of each tensor if the folder has an index."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
        if not files:
            raise CheckpointError(f"{folder}: has no .safetensors file and no .gguf file; give the file")
        return files, {}
    content = _json(indexes[0])
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError(f"{indexes[0]}: has no weight_map from tensors to files; give the shards themselves")
    for shard in set(shards.values()):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{indexes[0]}: {shard!r} is no .safetensors file of the folder; give the shards")
        if not (folder / shard).is_file():
            raise CheckpointError(
                f"{folder}: the index names {shard}, which is missing; download it, or give the others"
            )
    return sorted(folder / shard for shard in set(shards.values())), shards


def _is_partial(paths: Sequence[Path]) -> bool:
    """Whether the names count more shards (`-00001-of-00003`) than are given."""
    counts = {int(match[1]) for path in paths if (match := re.search(r"-of-(\d{1,6})\.", path.name))}
    return bool(counts) and max(counts) > len(paths)


def _config(folder: Path) -> dict[str, Any]:
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        path = folder / name
        if path.is_file():
            content = _json(path)
            found = content.get(key) if isinstance(content, dict) else None
            if isinstance(found, dict):
                return found
    return {}


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > LARGEST_HEADER:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes, at most {LARGEST_HEADER}")
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read as JSON: {type(error).__name__}; remove or repair it") from error


def _read_header(path: Path) -> Iterator[StoredTensor]:
    readers = {".safetensors": _safetensors, ".gguf": _gguf}
    if path.suffix not in readers:
        raise CheckpointError(f"{path}: unknown suffix {path.suffix!r}; a checkpoint is {' or '.join(readers)}")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    try:
        with path.open("rb") as file:
            yield from readers[path.suffix](path, file, path.stat().st_size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


# ---- .safetensors ----------------------------------------------------------------------------------------------------


def _safetensors(path: Path, file: BinaryIO, size: int) -> Iterator[StoredTensor]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"{path}: its header has {length} bytes, and the file {size}; download it again")
    if length > LARGEST_HEADER:
        raise CheckpointError(f"{path}: its header has {length} bytes, at most {LARGEST_HEADER}; save fewer tensors")
    try:
        content = json.loads(file.read(length), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is damaged: {str(error)[:200]}; download it again") from error
    if not isinstance(content, dict) or len(content) > MOST_TENSORS:
        raise CheckpointError(f"{path}: its header is no list of at most {MOST_TENSORS} tensors; save it again")
    content.pop("__metadata__", None)
    found = [_entry(path, name, entry, 8 + length, size) for name, entry in content.items()]
    end = 8 + length
    for tensor in sorted(found, key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset != end:
            raise CheckpointError(f"{path}: {tensor.name} begins at byte {tensor.offset}, not {end}; download it again")
        end += tensor.size
    if end != size:
        raise CheckpointError(f"{path}: its tensors end at byte {end}, and the file has {size}; download it again")
    yield from found


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    """A checked tensor of a .safetensors header."""
    _check_name(path, name)
    dtype, shape, offsets = (entry.get(key) if isinstance(entry, dict) else None for key in
                             ("dtype", "shape", "data_offsets"))  # fmt: skip
    if dtype not in _BITS:
        raise CheckpointError(f"{path}: {name} has dtype {str(dtype)[:50]!r}; known are {', '.join(_BITS)}")
    if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name} has a shape or offsets that are no lists of counts; download it again")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if begin > end or start + end > size:
        raise CheckpointError(
            f"{path}: {name} has bytes {begin} to {end}, beyond the file of {size}; download it again"
        )
    if bits != 8 * (end - begin):
        raise CheckpointError(
            f"{path}: {name} of {dtype} {shape} needs {bits} bits and has {end - begin} bytes; download it again"
        )
    return StoredTensor(name, dtype, tuple(shape), path, start + begin, end - begin)


def _check_name(path: Path, name: str) -> None:
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise CheckpointError(f"{path}: the name {name[:100]!r} is empty, longer than {LONGEST_NAME} or not printable")


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


# ---- .gguf -----------------------------------------------------------------------------------------------------------


class _Fields:
    """Fields of a GGUF header, each checked against the rest of the file before it is read."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size

    def bytes(self, count: int) -> bytes:
        at = self.file.tell()
        if count > self.size - at or at + count > LARGEST_HEADER:
            raise CheckpointError(
                f"{self.path}: its header asks for {count} bytes at byte {at}, beyond the file of {self.size} or the "
                f"limit of {LARGEST_HEADER}; download it again"
            )
        return self.file.read(count)

    def number(self, form: str) -> int:
        return int(struct.unpack("<" + form, self.bytes(struct.calcsize(form)))[0])

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> int | None:
        """An integer of 32 bits; None for further types, which are skipped."""
        if kind == 4:
            return self.number("I")
        if kind == 8:
            self.text()
        elif kind == 9 and depth < 4:
            inner, count = self.number("I"), self.number("Q")
            if inner in _METADATA_SIZES:
                self.bytes(count * _METADATA_SIZES[inner])
            else:
                for _ in range(count):  # every string takes bytes, so the limit of the header ends the loop
                    self.value(inner, depth + 1)
        elif kind in _METADATA_SIZES:
            self.bytes(_METADATA_SIZES[kind])
        else:
            raise CheckpointError(f"{self.path}: its metadata have the unknown type {kind}; download it again")
        return None


def _gguf(path: Path, file: BinaryIO, size: int) -> Iterator[StoredTensor]:
    fields = _Fields(path, file, size)
    if fields.bytes(4) != b"GGUF" or (version := fields.number("I")) not in (2, 3):
        raise CheckpointError(f"{path}: is no GGUF file of version 2 or 3; convert it again")
    tensors, metadata = fields.number("Q"), fields.number("Q")
    if max(tensors, metadata) > MOST_TENSORS:
        raise CheckpointError(
            f"{path}: version {version}, counts {tensors} tensors and {metadata} metadata, at most {MOST_TENSORS}"
        )
    alignment = 32
    for _ in range(metadata):
        key = fields.text()
        value = fields.value(fields.number("I"))
        if key == "general.alignment" and value is not None:
            alignment = value
    if not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"{path}: its alignment is {alignment}; convert it again")
    listed = []
    for _ in range(tensors):
        name = fields.text()
        _check_name(path, name)
        if (count := fields.number("I")) > MOST_DIMENSIONS:
            raise CheckpointError(f"{path}: {name} has {count} dimensions, at most {MOST_DIMENSIONS}")
        shape = tuple(fields.number("Q") for _ in range(count))[::-1]
        listed.append((name, shape, fields.number("I"), fields.number("Q")))
    start = -(-file.tell() // alignment) * alignment
    seen: set[str] = set()
    for name, shape, kind, offset in listed:
        if name in seen:
            raise CheckpointError(f"{path}: the name {name} occurs twice; convert it again")
        seen.add(name)
        yield _ggml_tensor(path, name, shape, kind, start + offset, size)


def _ggml_tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> StoredTensor:
    if kind not in _GGML:
        return StoredTensor(name, f"GGML type {kind}", shape, path, offset, 0)
    dtype, elements, width = _GGML[kind]
    columns = shape[-1] if shape else 1
    if columns % elements:
        raise CheckpointError(f"{path}: {name} of {dtype} has {columns} columns, no multiple of {elements}")
    length = math.prod(shape) // elements * width
    if length > size or offset > size - length:
        raise CheckpointError(
            f"{path}: {name} has bytes {offset} to {offset + length}, beyond the file of {size}; download it again"
        )
    return StoredTensor(name, dtype, shape, path, offset, length)


def scalar(tensor: StoredTensor) -> torch.Tensor:
    """The numbers of a small tensor, such as a tensor scale, float32 (numbers,)."""
    return tensor.numbers().float().view(-1)


def summary(tensors: Mapping[str, StoredTensor]) -> str:
    """`U8 12, F8_E4M3 12, BF16 30`: number of tensors by dtype."""
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
    return ", ".join(f"{dtype} {count}" for dtype, count in counts.items())
