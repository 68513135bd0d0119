"""Captured tensors: matrices of a person's own files in place of an input family."""

from __future__ import annotations

import io
import itertools
import json
import math
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import torch
from safetensors import safe_open

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import MOST_CASES
from narrowgauge.harness.cases.cost import gigabytes
from narrowgauge.harness.cases.keys import nearest, shown
from narrowgauge.harness.cases.operations import OPERATIONS
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import find_recipe

LARGEST = 4 << 30
"""Bytes of a tensor, and of all tensors that a run unpacks."""
LARGEST_DIRECTORY = 16 << 20
"""Bytes of the part of a file that lists its tensors: header of a .safetensors file, directory of an archive, pickle of
a .pt file."""
MOST_TENSORS = 100_000
"""Members of an archive, and values of a .pt file."""
LONGEST_NAME = 1000
"""Characters of the name of a tensor."""
DEEPEST = 64
"""Largest number of nested dictionaries and lists in a .pt file."""
_NPY_HEADER = 1 << 14
"""Bytes read for the header of a .npy file. NumPy refuses headers with more than 10 000 characters."""


class CaptureError(ValueError):
    """A file of captured tensors that cannot be used: the message names the file, the mistake and the remedy."""


@dataclass(frozen=True)
class Header:
    """A tensor of a file before it is read."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Reads or maps the tensor. Called only for a header without a problem."""
    member: str = ""
    """Member of a .npz file with the tensor."""
    compressed: bool = False

    @property
    def size(self) -> int:
        """Bytes of a tensor of a supported dtype."""
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize

    @property
    def problem(self) -> str:
        """Why the tensor cannot be the input of a case, or the empty string."""
        if self.dtype not in TORCH_DTYPES:
            return f"holds {self.dtype}; a case takes {', '.join(TORCH_DTYPES)}, so convert it first"
        if len(self.shape) != 2:
            return f"has shape {shown(self.shape)}; a case takes a matrix, so reshape it first"
        if self.size > LARGEST:
            return (
                f"has shape {self.shape} and {gigabytes(self.size)}; a tensor has at most {gigabytes(LARGEST)}, so "
                "save some of its rows"
            )
        return ""


@dataclass(frozen=True)
class Captured:
    """Matrices of a file: float32, bfloat16 or float16, on the CPU, contiguous, as stored. `captured[name]` reads one.

    Files other than a compressed .npz are mapped: processes that read the same tensor share its memory.
    """

    path: Path
    headers: Mapping[str, Header]
    left_out: Mapping[str, Header] = field(default_factory=dict)
    """Tensors of the file that are not used: not of two dimensions, of an unsupported dtype, or too large."""

    @classmethod
    def load(cls, path: str | Path, names: Sequence[str] | None = None) -> Captured:
        """The headers of the tensors `names` of a .safetensors, .npy, .npz, .pt or .pth file, or of all its matrices.

        A .npy file, or a .pt file of one tensor, has one name, the file's own without its suffix; tensors of nested
        dictionaries and lists are named with dots. No content of a file is executed. Raises CaptureError if the file is
        missing, of an unknown kind, not readable or beyond a limit of this module, if two tensors have the same name,
        if it lacks a name or a named tensor is no matrix, and if it has no matrix.
        """
        path = Path(path)
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise CaptureError(f"{path}: unknown suffix {path.suffix!r}; captured tensors are {', '.join(_READERS)}")
        if not path.is_file():
            raise CaptureError(f"{path}: there is no such file")
        with _readable(path):
            headers = _unique(reader(path))
        chosen = _choose(path, headers, names)
        left_out = {name: header for name, header in headers.items() if header.problem} if names is None else {}
        return cls(path, {name: headers[name] for name in chosen}, left_out)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor with a name. Raises CaptureError if it cannot be read."""
        with _readable(self.path):
            return self.headers[name].read()

    def name_of(self, inputs: str) -> str:
        """Name of the tensor in the field `inputs` of a case, `file:name`. Raises ValueError if unknown."""
        name = inputs.removeprefix(f"{self.path.name}:")
        if name == inputs or name not in self.headers:
            raise ValueError(f"{inputs!r} is not in {self.path}, which gave {_some(self.headers)}")
        return name

    def tensor(self, inputs: str) -> torch.Tensor:
        """The tensor with the name `file:name` in the field `inputs` of a case. Raises ValueError if unknown."""
        return self[self.name_of(inputs)]

    def note(self) -> str:
        """A sentence about the tensors that are not used, or the empty string."""
        if not self.left_out:
            return ""
        names = ", ".join(list(self.left_out)[:5]) + (", …" if len(self.left_out) > 5 else "")
        too_large = any(len(header.shape) == 2 and header.dtype in TORCH_DTYPES for header in self.left_out.values())
        kinds = ", ".join(TORCH_DTYPES) + (f" of at most {gigabytes(LARGEST)}" if too_large else "")
        return f"{self.path}: left out {len(self.left_out)} that are no matrix of {kinds}: {names}"


@contextmanager
def unpacked(path: str, cases: Iterable[Case]) -> Iterator[str]:
    """Path of the file from which all processes of a run map the tensors of its cases: `path`, or, if any of these
    tensors is compressed, a temporary .npz file of the same name with these tensors, not compressed.

    An empty path stays empty. Raises CaptureError if the tensors have more than `LARGEST` bytes or cannot be read.
    """
    if not path:
        yield path
        return
    captured = Captured.load(path)
    headers = [captured.headers[captured.name_of(inputs)] for inputs in dict.fromkeys(case.inputs for case in cases)]
    if not any(header.compressed for header in headers):
        yield path
        return
    if (total := sum(header.size for header in headers)) > LARGEST:
        raise CaptureError(
            f"{path}: its {len(headers)} compressed tensors have {gigabytes(total)}, and a run unpacks at most "
            f"{gigabytes(LARGEST)}; name fewer with --tensor, or save them with numpy.savez"
        )
    with TemporaryDirectory(prefix="narrowgauge-") as folder:
        target = Path(folder) / captured.path.name
        with _readable(captured.path), _archive(captured.path) as source, ZipFile(target, "w") as copy:
            for header in headers:
                with source.open(header.member) as packed, copy.open(header.member, "w", force_zip64=True) as plain:
                    shutil.copyfileobj(packed, plain, 1 << 20)
        yield str(target)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn every exception into a CaptureError: readers of damaged files raise exceptions of all kinds."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:500] or type(error).__name__
        raise CaptureError(f"{path}: cannot be read as {path.suffix}: {reason}") from error


def _unique(named: Iterable[tuple[str, Header]]) -> dict[str, Header]:
    """The headers by name. Raises ValueError for a doubled name, or a name that no report can show."""
    headers: dict[str, Header] = {}
    for name, header in named:
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise ValueError(
                f"the name {shown(name)} is longer than {LONGEST_NAME} or not printable; rename the tensor"
            )
        if name in headers:
            raise ValueError(f"two tensors are called {shown(name)}; save the file again, each with a name of its own")
        headers[name] = header
    return headers


def _choose(path: Path, headers: Mapping[str, Header], names: Sequence[str] | None) -> list[str]:
    if names is None:
        chosen = [name for name, header in headers.items() if not header.problem]
        if not chosen:
            raise CaptureError(
                f"{path}: none of its {len(headers)} tensors is a matrix of {', '.join(TORCH_DTYPES)} with at most "
                f"{gigabytes(LARGEST)}"
            )
        return chosen
    for name in names:
        if name not in headers:
            raise CaptureError(f"{path}: has no tensor {name!r}{nearest(name, headers)}; it holds {_some(headers)}")
        if headers[name].problem:
            raise CaptureError(f"{path}: {name} {headers[name].problem}")
    return list(names)


def _some(names: Mapping[str, Header]) -> str:
    given = list(names)[:10]
    return (", ".join(given) or "none") + (f" and {len(names) - 10} more" if len(names) > 10 else "")


# ---- .safetensors ----------------------------------------------------------------------------------------------------

_SAFETENSORS_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def _safetensors(path: Path) -> Iterator[tuple[str, Header]]:
    def read(name: str) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    for name, (dtype, shape) in safetensors_header(path).items():
        yield name, Header(_SAFETENSORS_DTYPES.get(dtype, dtype), shape, partial(read, name))


def safetensors_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a .safetensors file.

    Raises SafetensorError or ValueError for a damaged file, a header of more than `LARGEST_DIRECTORY` bytes, or a
    doubled name, of which safetensors uses the last.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            doubled = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ValueError(f"two tensors are called {shown(doubled)}; save the file again, each with its own name")
        return content

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST_DIRECTORY:
            raise ValueError(f"its header has {length} bytes, at most {LARGEST_DIRECTORY}; save fewer tensors")
        header = file.read(length)
    with safe_open(path, framework="pt"):  # checks header and offsets
        content = json.loads(header, object_pairs_hook=once)
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in content.items() if name != "__metadata__"}


# ---- .npy and .npz ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """Header of a .npy file or of a member of a .npz file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    offset: int
    """Bytes of the header."""

    @classmethod
    def of(cls, head: bytes, size: int) -> _Array:
        """The header at the beginning of a file with `size` bytes. Raises ValueError if the file cannot hold it."""
        file = io.BytesIO(head)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects, which are stored as a pickle; save numbers")
        declared, rest = math.prod(shape) * dtype.itemsize, size - file.tell()
        if min(shape, default=0) < 0 or declared != rest:
            raise ValueError(f"its header declares {shown(shape)} {dtype}, {declared} bytes; the file has {rest}")
        return cls(dtype, shape, "F" if fortran else "C", file.tell())

    def header(self, read: Callable[[], np.ndarray[Any, Any]], member: str = "", *, compressed: bool = False) -> Header:
        """The header of the tensor that `read` reads."""
        dtype = {"f4": "fp32", "f2": "fp16"}.get(self.dtype.str[1:], str(self.dtype.newbyteorder("=")))
        return Header(dtype, self.shape, lambda: self._tensor(read()), member, compressed)

    def mapped(self, path: Path, start: int) -> np.ndarray[Any, Any]:
        """The array of a file that begins at byte `start` of a file. Writes do not reach the file."""
        if 0 in self.shape:  # nothing to map
            return np.empty(self.shape, self.dtype)
        return np.memmap(path, self.dtype, "c", start + self.offset, self.shape, self.order)

    def inflated(self, path: Path, member: str) -> np.ndarray[Any, Any]:
        """The array of a compressed member."""
        content = bytearray(self.offset + math.prod(self.shape) * self.dtype.itemsize)
        with _archive(path) as archive, archive.open(member) as packed:
            done = 0
            while chunk := packed.read(1 << 20):  # to the end, where the checksum is compared
                content[done : done + len(chunk)] = chunk
                done += len(chunk)
        if done != len(content):
            raise ValueError(f"{member} declares {len(content)} bytes and has {done}")
        return np.frombuffer(content, self.dtype, offset=self.offset).reshape(self.shape, order=self.order)

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.require(array, self.dtype.newbyteorder("="), ["C", "A", "W"]))


def _npy(path: Path) -> Iterator[tuple[str, Header]]:
    with path.open("rb") as file:
        array = _Array.of(file.read(_NPY_HEADER), path.stat().st_size)
    yield path.stem, array.header(lambda: array.mapped(path, 0))


def _npz(path: Path) -> Iterator[tuple[str, Header]]:
    with _archive(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            with archive.open(info) as member:
                head = member.read(_NPY_HEADER)
            if not head.startswith(np.lib.format.MAGIC_PREFIX):
                continue  # no array
            array = _Array.of(head, info.file_size)
            read = partial(array.inflated, path, info.filename)
            compressed = info.compress_type != ZIP_STORED
            if not compressed:
                file.seek(info.header_offset + 26)
                start = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
                read = partial(array.mapped, path, start)
            yield info.filename.removesuffix(".npy"), array.header(read, info.filename, compressed=compressed)


class _ShortReads(io.FileIO):
    """A file without large reads. `ZipFile` reads the whole directory of an archive at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > LARGEST_DIRECTORY:
            raise ValueError(f"its directory has {size} bytes, at most {LARGEST_DIRECTORY}; save fewer tensors")
        return super().read(size) or b""


@contextmanager
def _archive(path: Path) -> Iterator[ZipFile]:
    """A zip archive with unique names of its members. Raises ValueError or BadZipFile."""
    with _ShortReads(path) as file, ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > MOST_TENSORS:
            raise ValueError(f"it has {len(members)} members, at most {MOST_TENSORS}; save fewer tensors")
        names = Counter(info.filename for info in members)
        if doubled := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"two members are called {shown(doubled[0])}; save the file again, each with its own name")
        if unknown := [info for info in members if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED)]:
            raise ValueError(f"{shown(unknown[0].filename)} is compressed by an unusual method; save with numpy.savez")
        yield archive


# ---- .pt and .pth ----------------------------------------------------------------------------------------------------


def _torch(path: Path) -> Iterator[tuple[str, Header]]:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is damaged, or older than torch 1.6; load it with torch and save it again")
    with _archive(path) as archive:
        for info in archive.infolist():
            if info.compress_type != ZIP_STORED:
                raise ValueError(f"{shown(info.filename)} is compressed, as torch.save never does; save it again")
            if info.filename.endswith(".pkl") and info.file_size > LARGEST_DIRECTORY:
                raise ValueError(
                    f"its pickle has {info.file_size} bytes, at most {LARGEST_DIRECTORY}; save the tensors alone"
                )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # damaged bytes raise any exception; the text of torch tells how to load unsafely
        reason = "it is damaged, or holds something else than tensors, numbers, dictionaries and lists"
        raise ValueError(reason) from error
    for name, tensor in _tensors_of(content):
        yield name or path.stem, _of_tensor(tensor)


def _of_tensor(tensor: torch.Tensor) -> Header:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    dtype = names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    for kind, usual in ((tensor.device.type, "cpu"), (str(tensor.layout).removeprefix("torch."), "strided")):
        dtype = dtype if kind == usual else f"{kind} {dtype}"
    return Header(dtype, tuple(tensor.shape), lambda: tensor.detach().resolve_neg().contiguous())


def _tensors_of(content: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dictionaries and lists, in order. A list may contain itself, so depth and count are
    limited."""
    waiting = [(content, "", 0)]
    for count in itertools.count():
        if not waiting:
            return
        value, name, depth = waiting.pop()
        if count > MOST_TENSORS or depth > DEEPEST or len(name) > LONGEST_NAME:
            raise ValueError(
                f"it has more than {MOST_TENSORS} values, {DEEPEST} dictionaries inside each other, or {LONGEST_NAME} "
                "characters in a name; save the tensors alone"
            )
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            below = [(part, f"{name}.{key}" if name else str(key), depth + 1) for key, part in items if _is_name(key)]
            waiting += reversed(below)


def _is_name(key: object) -> bool:
    """Whether the key of a dictionary can be part of the name of a tensor."""
    return isinstance(key, int) or (isinstance(key, str) and len(key) <= LONGEST_NAME)


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Header]]]] = {
    ".safetensors": _safetensors,
    ".npy": _npy,
    ".npz": _npz,
    ".pt": _torch,
    ".pth": _torch,
}


def captured_cases(captured: Captured, *, recipes: Sequence[str] = ("nvfp4",)) -> list[Case]:
    """Quick cases for all allowed pairs of a captured matrix and a recipe (`Case.of_matrix`); `refused` names the rest.

    Raises CaptureError if there are more than `MOST_CASES`.
    """
    cases = []
    for _, case in _cases(captured, recipes):
        if not case.problem():
            cases.append(case)
        if len(cases) > MOST_CASES:
            raise CaptureError(
                f"{captured.path}: its {len(captured.headers)} matrices and {len(recipes)} recipes make more than "
                f"{MOST_CASES} cases; name some with --tensor"
            )
    return cases


def refused(captured: Captured, *, recipes: Sequence[str] = ("nvfp4",)) -> list[str]:
    """A sentence with tensor, operation and reason for every pair left out by `captured_cases`."""
    sentences = (
        f"{captured.path}: {name} makes no {case.operation} case: {reason}"
        for name, case in _cases(captured, recipes)
        if (reason := case.problem())
    )
    return list(dict.fromkeys(sentences))


def _cases(captured: Captured, recipes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """The name of a tensor and a case for all tensors and recipes, also cases with a problem."""
    for name, header in captured.headers.items():
        inputs = f"{captured.path.name}:{name}"
        rows, columns = header.shape
        for recipe in map(find_recipe, recipes):
            for cls in OPERATIONS.values():
                for case in cls.of_matrix(recipe, (rows, columns), header.dtype, inputs, str(captured.path)):
                    yield name, case
