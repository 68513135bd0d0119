"""Files of captured tensors that cost memory or time, or that name two tensors alike: each is a single clear error."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs import capture
from narrowgauge.harness.inputs.capture import Captured, CaptureError, captured_cases, unpacked
from narrowgauge.harness.operations.registry import make_inputs
from tests.harness.refusals import refusal

SMALL = np.ones((16, 32), np.float32)
ZEROS = bytes(64 << 20)


def npy(
    array: Any = SMALL, *, header: str = "", version: int = 1, length: int | None = None, data: bytes = b""
) -> bytes:
    """A .npy file: of an array, or with this text as header."""
    if not header:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        return file.getvalue()
    field = struct.pack("<H" if version == 1 else "<I", len(header) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + field + header.encode() + data


def described(shape: str, descr: str = "'<f4'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n"


def archive(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as made:
        warnings.simplefilter("ignore")  # of a doubled name
        for name, content in members:
            made.writestr(name, content)
    return file.getvalue()


def safetensors(header: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header.encode())) + header.encode() + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [start, end]})


def torch_file(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def changed(content: bytes, change: Callable[[bytes], bytes] = lambda data: data, **options: Any) -> bytes:
    """A file of torch with a replaced pickle."""
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        members = [(name, source.read(name)) for name in source.namelist()]
    return archive(*((n, change(d) if n.endswith("data.pkl") else d) for n, d in members), **{"method": 0, **options})


def nested(depth: int) -> Any:
    content: Any = torch.ones(16, 32)
    for _ in range(depth):
        content = [content]
    return content


def doubled(depth: int) -> Any:
    """A list of 2^depth lists, in depth + 1 objects."""
    content: Any = [torch.ones(16, 32)]
    for _ in range(depth):
        content = [content, content]
    return content


def endless() -> Any:
    content: list[Any] = []
    content.append(content)
    return content


def many_members(count: int) -> bytes:
    return archive(*((f"{n}.npy", b"") for n in range(count)), method=zipfile.ZIP_STORED)


def large_directory() -> bytes:
    content = bytearray(archive(("w.npy", npy())))
    start = content.rindex(b"PK\x05\x06") + 12
    content[start : start + 4] = struct.pack("<I", 0xFFFFFFF0)
    return bytes(content)


def encrypted() -> bytes:
    content = bytearray(archive(("w.npy", npy())))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + offset] |= 1
    return bytes(content)


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


Malformed = dict[str, tuple[Callable[[], bytes], str]]
WIDE = torch.ones(1).expand(1 << 16, 1 << 16)
NPZ: Malformed = {
    "bomb without a header": (lambda: archive(("w.npy", ZEROS)), "none of its 0 tensors is a matrix"),
    "bomb as header": (
        lambda: archive(("w.npy", npy(header="x", version=2, length=1 << 26) + ZEROS)),
        "cannot be read as .npz: ",
    ),
    "bomb behind an array": (lambda: archive(("w.npy", npy() + ZEROS)), "the file has 67110912"),
    "declares too much": (
        lambda: archive(("w.npy", npy(header=described("(99999999, 99999999)"), data=ZEROS))),
        "its header declares (99999999, 99999999) float32, 39999999200000004 bytes; the file has 67108864",
    ),
    "doubled members": (lambda: archive(("w.npy", npy()), ("w.npy", npy())), "two members are called 'w.npy'"),
    "doubled names": (lambda: archive(("w.npy", npy()), ("w", npy())), "two tensors are called 'w'; save"),
    "objects": (lambda: archive(("w.npy", npy(np.array([Malicious()])))), "holds Python objects, which are st"),
    "objects in fields": (
        lambda: archive(("w.npy", npy(header=described("(1, 1)", "[('a', '|O')]"), data=bytes(8)))),
        "holds Python objects",
    ),
    "bzip2": (lambda: archive(("w.npy", npy()), method=zipfile.ZIP_BZIP2), "'w.npy' is compressed by an unusual"),
    "lzma": (lambda: archive(("w.npy", npy()), method=zipfile.ZIP_LZMA), "'w.npy' is compressed by an unusual"),
    "escape in a name": (lambda: archive(("\x1b[2Jw.npy", npy())), r"the name '\x1b[2Jw' is longer than 1000 or"),
    "long name": (lambda: archive(("w" * 60_000, npy())), "characters) is longer than 1000 or not printable"),
    "many members": (lambda: many_members(1001), "it has 1001 members, at most 1000; save"),
    "damaged directory": (lambda: archive(("w.npy", npy()))[:-30], "cannot be read as .npz: "),
    "directory of 4 GB": (large_directory, "cannot be read as .npz: "),
    "encrypted": (encrypted, "encrypted"),
}
NPY: Malformed = {
    "objects alone": (lambda: npy(np.array([Malicious()])), "holds Python objects, which are stored as a pickle"),
    "truncated": (lambda: npy()[:-4], "its header declares (16, 32) float32, 2048 bytes; the file has 2044"),
    "negative": (lambda: npy(header=described("(-16, -32)"), data=bytes(2048)), "its header declares (-16, -32)"),
    "overflow": (lambda: npy(header=described(f"({2**62}, 4)")), "bytes; the file has 0"),
    "parentheses": (lambda: npy(header="(" * 9000), "cannot be read as .npy: "),
    "signs": (lambda: npy(header="-" * 9000 + "1"), "cannot be read as .npy: "),
    "long header": (lambda: npy(header=" " * 60_000), "cannot be read as .npy: "),
    "4 GB of header": (lambda: npy(header="{}", version=2, length=2**32 - 1), "cannot be read as .npy: "),
    "many dimensions": (lambda: npy(header=described("(" + "1," * 3000 + ")"), data=bytes(4)), "none of its 1 "),
    "wide dtype": (lambda: npy(header=described("(1, 1)", "'|V2147483647'")), "2147483647 bytes; the file has 0"),
    "another version": (lambda: npy(header=described("(1, 1)"), version=9), "cannot be read as .npy: "),
}
PT: Malformed = {
    "pickle": (lambda: pickle.dumps(Malicious()), "it is damaged, or older than torch 1.6; load it with torch"),
    "code": (lambda: torch_file({"a": Malicious()}), "holds something else than tensors, numbers, dictionaries"),
    "expanded": (lambda: torch_file({"a": WIDE, "b": WIDE}), "is a matrix of fp32, bf16, fp16 with at most 4.29 GB"),
    "beyond its storage": (
        lambda: changed(torch_file({"a": torch.ones(4, 4)}), lambda d: d.replace(b"K\x04K\x04", b"M\xff\xffM\xff\xff")),
        "it is damaged, or holds something else",
    ),
    "compressed": (
        lambda: changed(torch_file({"a": torch.zeros(999, 999)}), method=zipfile.ZIP_DEFLATED),
        "is compressed, as ",
    ),
    "long pickle": (lambda: torch_file({"a": "x" * (17 << 20)}), "its pickle has 17"),
    "deep": (lambda: torch_file(nested(200)), "1000 values, 64 dictionaries inside each other"),
    "shared lists": (lambda: torch_file(doubled(40)), "it has more than 1000 values"),
    "a list in itself": (lambda: torch_file(endless()), "64 dictionaries inside each other"),
    "meta": (lambda: torch_file({"a": torch.empty(1 << 20, 1 << 20, device="meta")}), "none of its 1 tensors"),
    "doubled keys": (
        lambda: torch_file({"a": {"b": torch.ones(2, 2)}, "a.b": torch.ones(2, 2)}),
        "two tensors are called 'a.b'",
    ),
}
SAFETENSORS: Malformed = {
    "header of 2^63 bytes": (lambda: struct.pack("<Q", 1 << 63) + b"{}", "its header has 9223372036854775808"),
    "header of 17 MiB": (lambda: safetensors(" " * (17 << 20)), "bytes, at most 16777216; save fewer"),
    "doubled tensors": (
        lambda: safetensors(f'{{"a": {entry([16, 1], 0, 64)}, "a": {entry([4, 4], 0, 64)}}}', bytes(64)),
        "two tensors are called 'a'; save the file again",
    ),
    "deep header": (lambda: safetensors('{"a":' * 5000), "cannot be read as .safetensors: "),
    "declares 16 EiB": (lambda: safetensors(f'{{"a": {entry([2**32, 2**30], 0, 2**64 - 4)}}}'), "cannot be r"),
    "product overflows": (lambda: safetensors(f'{{"a": {entry([2**40, 2**40], 0, 64)}}}', bytes(64)), "cannot"),
    "beyond the file": (lambda: safetensors(f'{{"a": {entry([4, 4], 0, 64)}}}', bytes(8)), "cannot be read"),
    "newline in a name": (
        lambda: safetensors(f'{{"a\\n::error": {entry([4, 4], 0, 64)}}}', bytes(64)),
        r"the name 'a\n::error'",
    ),
}
MALICIOUS = {
    f"{suffix}, {name}": (suffix, *content)
    for suffix, files in ((".npz", NPZ), (".npy", NPY), (".pt", PT), (".safetensors", SAFETENSORS))
    for name, content in files.items()
}


@pytest.mark.sampled(25)
@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_file_is_one_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capture, "MOST_TENSORS", 1000)
    suffix, make, message = MALICIOUS[name]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(make())
    said = refusal("list", "--input", path)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert not (tmp_path / "executed").exists()


def test_the_limit_of_a_tensor_is_stated_before_it_is_read(tmp_path):
    """A file of 4 GiB and a row, of which the file system stores the header alone."""
    path = tmp_path / "large.npy"
    content = npy(header=described("(32769, 32768)"))
    with path.open("wb") as file:
        file.write(content)
        file.truncate(len(content) + 32769 * 32768 * 4)
    kinds = "fp32, bf16, fp16 with at most 4.29 GB"
    assert refusal("list", "--input", path) == f"{path}: none of its 1 tensors is a matrix of {kinds}"
    assert refusal("run", "--input", path, "--tensor", "large") == (
        f"{path}: large has shape (32769, 32768) and 4.3 GB; a tensor has at most 4.29 GB, so save some of its rows"
    )


# ---- only the named tensor, once per run -----------------------------------------------------------------------------

MATRIX = np.linspace(-3, 3, 48 * 32, dtype=np.float32).reshape(48, 32)


def cases_of(path: Path, *names: str) -> list[Case]:
    return captured_cases(Captured.load(path, names or None))


def test_compressed_tensors_are_unpacked_once_and_deleted(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, w=MATRIX, half=MATRIX.astype(">f2"), other=MATRIX)
    cases = cases_of(path, "w", "half")
    with unpacked(str(path), cases) as copy:
        assert Path(copy).name == path.name
        with zipfile.ZipFile(copy) as made:
            members = {info.filename: info.compress_type for info in made.infolist()}
        assert members == {"w.npy": zipfile.ZIP_STORED, "half.npy": zipfile.ZIP_STORED}
        again, first = Captured.load(copy), Captured.load(path)
        for case in cases:
            one, other = make_inputs(case, captured=again).tensors, make_inputs(case, captured=first).tensors
            assert all(torch.equal(one[name], other[name]) for name in other)
        with unpacked(copy, cases) as same:
            assert same == copy
    assert not Path(copy).parent.exists()


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt", ".safetensors"])
def test_files_that_can_be_mapped_are_not_copied(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    write = {".npy": lambda: np.save(path, MATRIX), ".npz": lambda: np.savez(path, w=MATRIX),
             ".pt": lambda: torch.save({"w": torch.from_numpy(MATRIX)}, path),
             ".safetensors": lambda: save_file({"w": torch.from_numpy(MATRIX)}, path)}  # fmt: skip
    write[suffix]()
    stored = path.read_bytes()
    captured = Captured.load(path)
    with unpacked(str(path), captured_cases(captured)) as same:
        assert same == str(path)
    captured["w"].zero_()
    assert path.read_bytes() == stored
    with unpacked("", []) as nothing:
        assert nothing == ""


def test_what_a_run_unpacks_is_limited(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=SMALL, b=SMALL)
    monkeypatch.setattr(capture, "LARGEST", 2 * SMALL.nbytes - 1)
    with unpacked(str(path), cases_of(path, "a")) as copy:
        assert copy != str(path)
    message = (
        r"a\.npz: its 2 compressed tensors have 4\.1e-06 GB, and a run unpacks at most .*; name fewer with --tensor"
    )
    with pytest.raises(CaptureError, match=message), unpacked(str(path), cases_of(path)):
        pass


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("array", [
    np.asfortranarray(MATRIX), MATRIX.astype(">f4"), MATRIX[:0], MATRIX[:, :0], MATRIX.astype(np.float16)
])  # fmt: skip
def test_arrays_of_every_layout(tmp_path, save, array):
    save(tmp_path / "a.npz", odd_name=array)
    np.save(tmp_path / "b.npy", array)
    for tensor in (Captured.load(tmp_path / "a.npz")["odd_name"], Captured.load(tmp_path / "b.npy")["b"]):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % tensor.element_size() == 0
        assert np.array_equal(tensor.numpy(), array)
