"""Captured tensors: matrices of a person's own files in place of an input family."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.gemm import GemmCase
from narrowgauge.harness.cases.keys import DTYPES, Dtype, Layout, Orientation, nearest
from narrowgauge.harness.cases.quantize import QuantizeCase
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import find_recipe

GEMM_ROWS = 128
"""M of the gemm cases of a captured weight."""
ORIENTATIONS: tuple[Orientation, ...] = ("rowwise", "columnwise")
OUTPUTS: tuple[Dtype, ...] = ("bf16", "fp32")


class CaptureError(ValueError):
    """A file of captured tensors that cannot be used: the message names the file, the mistake and the remedy."""


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file, read later if the format of the file allows a late read."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def problem(self) -> str:
        """Why the tensor cannot be the input of a case, or the empty string."""
        if self.dtype not in TORCH_DTYPES:
            return f"holds {self.dtype}; a case takes {', '.join(TORCH_DTYPES)}, so convert it first"
        if len(self.shape) != 2:
            return f"has shape {self.shape}; a case takes a matrix, so reshape it first"
        return ""


@dataclass(frozen=True)
class Captured:
    """Matrices of a file: float32, bfloat16 or float16, on the CPU, contiguous, as stored."""

    path: Path
    tensors: Mapping[str, torch.Tensor]
    left_out: tuple[str, ...] = ()
    """Names of tensors of the file that are not used: not of two dimensions, or of an unsupported dtype."""

    @classmethod
    def load(cls, path: str | Path, names: Sequence[str] | None = None) -> Captured:
        """The tensors `names` of a .safetensors, .npy, .npz, .pt or .pth file, or all its matrices.

        A .npy file, or a .pt file of one tensor, has one name, the file's own without its suffix; tensors of nested
        dictionaries and lists are named with dots. No content of a file is executed. Raises CaptureError if the file is
        missing, of an unknown kind or not readable, if it lacks a name or a named tensor is no matrix, and if it has no
        matrix.
        """
        path = Path(path)
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise CaptureError(f"{path}: unknown suffix {path.suffix!r}; captured tensors are {', '.join(_READERS)}")
        if not path.is_file():
            raise CaptureError(f"{path}: there is no such file")
        try:
            entries = reader(path)
            chosen = _choose(path, entries, names)
            tensors = {name: entries[name].read() for name in chosen}
        except CaptureError:
            raise
        except _UNREADABLE as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise CaptureError(f"{path}: cannot be read as {path.suffix}: {reason}") from error
        left_out = [name for name, entry in entries.items() if entry.problem] if names is None else []
        return cls(path, tensors, tuple(left_out))

    def tensor(self, inputs: str) -> torch.Tensor:
        """The tensor with the name `file:name` in the field `inputs` of a case. Raises ValueError if unknown."""
        name = inputs.removeprefix(f"{self.path.name}:")
        if name == inputs or name not in self.tensors:
            raise ValueError(f"{inputs!r} is not in {self.path}, which gave {', '.join(self.tensors)}")
        return self.tensors[name]

    def note(self) -> str:
        """A sentence about the tensors that are not used, or the empty string."""
        if not self.left_out:
            return ""
        shown = ", ".join(self.left_out[:5]) + (", …" if len(self.left_out) > 5 else "")
        kinds = ", ".join(TORCH_DTYPES)
        return f"{self.path}: left out {len(self.left_out)} that are no matrix of {kinds}: {shown}"


def _choose(path: Path, entries: Mapping[str, _Entry], names: Sequence[str] | None) -> list[str]:
    if names is None:
        chosen = [name for name, entry in entries.items() if not entry.problem]
        if not chosen:
            raise CaptureError(f"{path}: none of its {len(entries)} tensors is a matrix of {', '.join(TORCH_DTYPES)}")
        return chosen
    for name in names:
        if name not in entries:
            raise CaptureError(f"{path}: has no tensor {name!r}{nearest(name, entries)}; it holds {_some(entries)}")
        if entries[name].problem:
            raise CaptureError(f"{path}: {name} {entries[name].problem}")
    return list(names)


def _some(names: Mapping[str, _Entry]) -> str:
    shown = list(names)[:10]
    return (", ".join(shown) or "none") + (f" and {len(names) - 10} more" if len(names) > 10 else "")


_SAFETENSORS_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def _safetensors(path: Path) -> dict[str, _Entry]:
    def read(name: str) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def entry(file: Any, name: str) -> _Entry:
        header = file.get_slice(name)
        dtype = header.get_dtype()
        return _Entry(_SAFETENSORS_DTYPES.get(dtype, dtype), tuple(header.get_shape()), lambda: read(name))

    with safe_open(path, framework="pt") as file:
        return {name: entry(file, name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)


def _of_tensor(tensor: torch.Tensor) -> _Entry:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    dtype = names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    if tensor.layout != torch.strided:
        dtype = f"{str(tensor.layout).removeprefix('torch.')} {dtype}"
    return _Entry(dtype, tuple(tensor.shape), lambda: tensor.detach().contiguous())


def _of_array(array: np.ndarray[Any, Any]) -> _Entry:
    if array.dtype.kind == "f" and array.dtype.itemsize <= 8:
        return _of_tensor(torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))))
    # Refused because of the dtype, and never read.
    return _Entry(str(array.dtype), array.shape, lambda: torch.empty(0))


def _npy(path: Path) -> dict[str, _Entry]:
    with path.open("rb") as file:
        return {path.stem: _of_array(np.lib.format.read_array(file, allow_pickle=False))}


def _npz(path: Path) -> dict[str, _Entry]:
    if not zipfile.is_zipfile(path):  # np.load would report a pickle
        raise ValueError("it is no archive of arrays")
    with np.load(path, allow_pickle=False) as archive:
        members = {name: archive[name] for name in archive.files}
    return {name: _of_array(array) for name, array in members.items() if isinstance(array, np.ndarray)}


def _torch(path: Path) -> dict[str, _Entry]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise any exception; the text of torch tells how to load unsafely
        reason = "it is damaged, or holds something else than tensors, numbers, dictionaries and lists"
        raise ValueError(reason) from error
    return {name or path.stem: _of_tensor(tensor) for name, tensor in _tensors_of(content, "")}


def _tensors_of(content: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(content, torch.Tensor):
        yield name, content
    elif isinstance(content, Mapping | list | tuple):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            yield from _tensors_of(value, f"{name}.{key}" if name else str(key))


_READERS: dict[str, Callable[[Path], dict[str, _Entry]]] = {
    ".safetensors": _safetensors,
    ".npy": _npy,
    ".npz": _npz,
    ".pt": _torch,
    ".pth": _torch,
}
# Exceptions of the readers for a damaged file or a file of another kind.
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, SafetensorError)


def captured_cases(
    captured: Captured, *, operations: Sequence[str] = ("quantize", "gemm"), recipes: Sequence[str] = ("nvfp4",)
) -> list[Case]:
    """Quick cases for all allowed pairs of a captured matrix and a recipe; `refused` names the rest.

    quantize: rowwise and columnwise. gemm: the matrix is w (N, K), x is normal (128, K) of the same dtype, the output
    bf16 and fp32; the recipe decides the layout.
    """
    return [case for _, case in _cases(captured, operations, recipes) if not case.problem()]


def refused(
    captured: Captured, *, operations: Sequence[str] = ("quantize", "gemm"), recipes: Sequence[str] = ("nvfp4",)
) -> list[str]:
    """A sentence with tensor, operation and reason for every pair left out by `captured_cases`."""
    sentences = (
        f"{captured.path}: {name} makes no {case.operation} case: {reason}"
        for name, case in _cases(captured, operations, recipes)
        if (reason := case.problem())
    )
    return list(dict.fromkeys(sentences))


def _cases(captured: Captured, operations: Sequence[str], recipes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """The name of a tensor and a case for all tensors and recipes, also cases with a problem."""
    names = {TORCH_DTYPES[name]: name for name in DTYPES}
    file = str(captured.path)
    for name, tensor in captured.tensors.items():
        dtype = names[tensor.dtype]
        rows, columns = tensor.shape
        inputs = f"{captured.path.name}:{name}"
        for recipe in recipes:
            if "quantize" in operations:
                shape = (rows, columns)
                for usage in ORIENTATIONS:
                    yield (
                        name,
                        QuantizeCase(recipe=recipe, shape=shape, dtype=dtype, inputs=inputs, usage=usage, file=file),
                    )
            if "gemm" in operations:
                product = (GEMM_ROWS, columns, rows)
                layout: Layout = "nt" if find_recipe(recipe).transform else "tn"
                for out in OUTPUTS:
                    yield (
                        name,
                        GemmCase(
                            recipe=recipe,
                            shape=product,
                            x=dtype,
                            w=dtype,
                            out=out,
                            inputs=inputs,
                            layout=layout,
                            file=file,
                        ),
                    )
