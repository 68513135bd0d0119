"""Parameter structs of kernels, declared once, in C++: Python reads the declaration and packs the fields by name.

A kernel with many parameters takes one struct by value:

    struct Epilogue {
        const void* c;     // (M, N), or null
        int c_type;
        OutputType type;   // enum OutputType : int { FLOAT32 = 0, BFLOAT16 = 1 };
    };
    struct GemmParameters {
        Epilogue epilogue;
        i64 m, n, k;
        u32 keys[20];
    };
    extern "C" __global__ void gemm(GemmParameters parameters);

and the launch in Python:

    PARAMETERS = KernelStruct("gemm/portable/gemm.cuh", "GemmParameters")
    launch("gemm", "gemm", grid, block,
           [PARAMETERS(epilogue={"c": c, "c_type": 0, "type": "FLOAT32"}, m=m, n=n, k=k, keys=keys)], device=device)

Values: a tensor or None for a pointer, the name of an enumerator for an enum, a dict for a nested struct, a sequence
for an array, and a number of Python or numpy for a number.

A line of the declaration is `type name;` or `type name, name;`, without default values. The type is in `TYPES`, a
pointer, an enum with explicit values, or a struct of the same file or its includes. Fields end at the first
function. The C++ ABIs of the GPU and of x86-64 have the same layout and padding;
`tests/native/runtime/test_structs.py` compares sizeof and offsetof of every struct with the compiler."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple, Union

import numpy as np

from narrowgauge.native.runtime.sources import expanded

if TYPE_CHECKING:
    import torch

Scalar = Union["torch.Tensor", np.generic, int, float, None]
Value = Union[Scalar, str, Sequence["Value"], Mapping[str, "Value"]]  # noqa: UP007

TYPES = {
    "bool": "?", "u8": "B", "u16": "H", "int": "i", "u32": "I", "i64": "q", "u64": "Q", "float": "f", "double": "d",
}  # fmt: skip
"""C++ type of a field to the letter of Python's `struct` in native mode, with the alignment of the C++ ABI."""
_POINTER = "P"

_COMMENT = re.compile(r"//[^\n]*")
_FIELD = re.compile(r"(?:const )?(\w+)((?: ?(?:const ?)?\*)*) ?(\w+(?:, \*?\w+)*)(?:\[(\w+)\])?;")


class StructValue(NamedTuple):
    """Fields of a struct in the order of memory. `launch` replaces tensors by their addresses."""

    layout: struct.Struct
    fields: list[Scalar]


@dataclass(frozen=True)
class _Field:
    name: str
    letters: str
    alignment: str
    """Letter of the part of the field with the largest alignment."""
    struct: KernelStruct | None = None
    enumerators: Mapping[str, int] | None = None
    count: int | None = None
    """Length of an array."""


class KernelStruct:
    """A struct of a kernel file or its headers. `file`: path in native/kernels.

    Raises ValueError if the file does not declare the struct, or a field has an unsupported type or form.
    """

    def __init__(self, file: str, name: str) -> None:
        self.file, self.name = file, name
        self.fields = _fields(file, name)
        self.alignment = max((field.alignment for field in self.fields), key=struct.calcsize)
        # A count of 0 pads to the alignment of the type: before a nested struct and behind the last field.
        self.letters = f"0{self.alignment}" + "".join(f.letters for f in self.fields) + f"0{self.alignment}"
        self.layout = struct.Struct(self.letters)
        self._names = {field.name for field in self.fields}
        # Compiled once: an interpreted walk over the fields would double the time of a launch.
        enums: dict[str, Mapping[str, int]] = {}
        self._values = eval(f"lambda fields: [{self._expression('fields', enums)}]", enums)

    def __call__(self, **fields: Value) -> StructValue:
        """A value of the struct. Raises TypeError for missing or unknown fields, KeyError for unknown enumerators
        and for missing fields of a nested struct."""
        try:
            if len(fields) == len(self._names):
                return StructValue(self.layout, self._values(fields))
        except KeyError:
            if fields.keys() == self._names:
                raise
        raise TypeError(
            f"{self.name} of {self.file} has fields {', '.join(f.name for f in self.fields)}; "
            f"given are {', '.join(fields)}"
        )

    def initializer(self, **fields: Value) -> str:
        """The same value as a braced C++ initializer, for a macro: a variant that is known when a kernel is compiled.

        All fields are integers, bool or enumerators. Raises as a call does.
        """
        self(**fields)
        values = (fields[field.name] for field in self.fields)
        return "{" + ", ".join(v if isinstance(v, str) else str(int(v)) for v in values) + "}"  # type: ignore[arg-type]

    def offsets(self) -> dict[str, int]:
        """Offset in bytes of every field, also of fields of nested structs, named by path: `epilogue.c`."""
        offsets, before = {}, f"0{self.alignment}"
        for field in self.fields:
            offset = struct.calcsize(f"{before}0{field.alignment}")
            offsets[field.name] = offset
            if field.struct is not None:
                offsets |= {f"{field.name}.{name}": offset + inner for name, inner in field.struct.offsets().items()}
            before += field.letters
        return offsets

    @cached_property
    def leaf_offsets(self) -> list[int]:
        """Offset of each number and address, in the order of `StructValue.fields`, of a struct without arrays."""
        offsets = self.offsets()
        return [offset for name, offset in offsets.items() if not any(n.startswith(f"{name}.") for n in offsets)]

    def _expression(self, fields: str, enums: dict[str, Mapping[str, int]]) -> str:
        """Python expression of the values in the order of memory. `fields`: expression of the mapping of fields."""
        parts = []
        for field in self.fields:
            value = f"{fields}[{field.name!r}]"
            if field.struct is not None:
                parts.append(field.struct._expression(value, enums))
            elif field.enumerators is not None:
                enums[name := f"enum_{len(enums)}"] = field.enumerators
                parts.append(f"{name}[{value}]")
            else:
                parts.append(value if field.count is None else f"*{value}")
        return ", ".join(parts)


@cache
def _declarations(file: str) -> str:
    return _COMMENT.sub("", expanded(file))


@cache
def enumerators(file: str, name: str) -> Mapping[str, int]:
    """Name and value of every enumerator of an enum of a kernel file or its headers.

    Raises ValueError if the file does not declare the enum, or an enumerator has no explicit value.
    """
    match = re.search(rf"enum (?:class )?{name}\b[^{{;]*{{([^}}]*)}}", _declarations(file))
    if match is None:
        raise ValueError(f"{file} declares no enum {name}")
    values = {}
    for enumerator in filter(None, map(str.strip, match.group(1).split(","))):
        key, equals, value = enumerator.partition(" = ")
        if not equals:
            raise ValueError(f"enum {name} of {file}: write out the value of {key}, which Python reads")
        values[key] = int(value, 0)
    return values


def _fields(file: str, name: str) -> list[_Field]:
    # A pattern that begins with letters is found 50 times as fast as one that begins with \b.
    match = re.search(rf"struct (?:alignas\(\w+\) )?{name} {{\n(.*?)\n}};", _declarations(file), re.DOTALL)
    if match is None:
        raise ValueError(f"{file} declares no struct {name}")
    fields: list[_Field] = []
    for line in filter(None, map(str.strip, match.group(1).splitlines())):
        if "(" in line:  # the first function
            break
        field = _FIELD.fullmatch(line)
        if field is None:
            raise ValueError(f"struct {name} of {file}: {line!r} is no field of the form `type name, name;`")
        kind, pointer, names, count = field.groups()
        fields += [_field(file, kind, pointer, each, count) for each in names.split(", ")]
    return fields


def _field(file: str, kind: str, pointer: str, name: str, count: str | None) -> _Field:
    letter = _POINTER if "*" in pointer or name.startswith("*") else TYPES.get(kind)
    name = name.lstrip("*")
    if letter is not None:
        if count is None:
            return _Field(name, letter, letter)
        return _Field(name, f"{int(count)}{letter}", letter, count=int(count))
    if count is None and re.search(rf"enum (?:class )?{kind}\b", _declarations(file)):
        return _Field(name, "i", "i", enumerators=enumerators(file, kind))
    if count is None:
        nested = KernelStruct(file, kind)
        return _Field(name, nested.letters, nested.alignment, struct=nested)
    raise ValueError(f"{file}: field {name} is an array of {kind}; arrays are of {', '.join(TYPES)}")
