"""Saving the arguments of a failed assertion, and the command that repeats it in a fresh process."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from narrowgauge.adapt import tensor
from narrowgauge.harness.cases.operations import VARIABLE as OPERATIONS_VARIABLE
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import VARIABLE as RULES_VARIABLE
from narrowgauge.spec.recipes import Recipe, find_recipe

VARIABLE = "NARROWGAUGE_FAILURES"
"""Environment variable with the folder of saved arguments."""
LARGEST = 256 << 20
"""Largest number of bytes of tensors in a file."""
LARGEST_FOLDER = 2 << 30
"""Largest number of bytes of all files in the folder: a test suite with many failures does not fill the disk."""


class NotSavedError(Exception):
    """Arguments cannot be saved. The message names the reason and the remedy."""


def reproduction(assertion: str, arguments: Mapping[str, Any], label: str) -> str:
    """Save the arguments of an assertion; the line with the command that runs it on them, or why there is none.

    `label`: begin of the file's name, such as `nvfp4-2048x2048`.
    """
    try:
        path = save_arguments(arguments, label)
    except NotSavedError as error:
        return f"not saved: {error}"
    except Exception as error:  # a failed report must not replace the failure
        return f"not saved: {type(error).__name__}: {error}"
    code = f"import narrowgauge, torch; narrowgauge.{assertion}(**torch.load({json.dumps(str(path))}))"
    return with_variables(shlex.join(["python", "-c", code]))


def with_variables(command: str) -> str:
    """A command behind the environment variables with a user's operations and rules, if they are set."""
    given = {name: os.environ.get(name) for name in (OPERATIONS_VARIABLE, RULES_VARIABLE)}
    return " ".join([*(f"{name}={shlex.quote(paths)}" for name, paths in given.items() if paths), command])


def save_arguments(arguments: Mapping[str, Any], label: str) -> Path:
    """Write arguments to a file that `torch.load` reads with weights_only=True, and return its path.

    Tensors are copied to the CPU. Equal arguments have the same file. The file is replaced atomically. Raises
    NotSavedError for arguments that are too large or cannot be written as data, and OSError.
    """
    plain = {name: _plain(value, name) for name, value in arguments.items()}
    if (size := _bytes(plain)) > LARGEST:
        raise NotSavedError(
            f"the tensors have {size >> 20} MiB, more than {LARGEST >> 20}; a part of the rows may show the failure too"
        )
    folder = _folder()
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    data = buffer.getbuffer()
    digest = hashlib.blake2b(data, digest_size=4).hexdigest()
    path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', label)[:100].strip('-')}-{digest}.pt"
    if path.exists():
        return path
    held = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".pt"))
    if held + len(data) > LARGEST_FOLDER:
        raise NotSavedError(
            f"{folder} holds {held >> 20} MiB of saved failures; delete files there, or name another folder in "
            f"${VARIABLE}"
        )
    handle, temporary = tempfile.mkstemp(dir=folder)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _folder() -> Path:
    """The folder of saved arguments, made if it is missing."""
    if named := os.environ.get(VARIABLE):
        folder = Path(named).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    user = os.getuid()
    base = Path(tempfile.gettempdir()) / f"narrowgauge-{user}"
    for folder in (base, base / "failures"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o022:
            raise NotSavedError(
                f"{folder} is a link, belongs to another user or can be written by other users; name another folder "
                f"in ${VARIABLE}"
            )
    return folder


def _plain(value: Any, name: str) -> Any:
    """An argument as data: a tensor on the CPU, a number, a text, a dtype, or a list, tuple or dict of these."""
    if value is None or isinstance(value, (str, int, float, bool, torch.dtype)):
        return value
    if isinstance(value, Recipe):
        text = str(value)
        if find_recipe(text) != value:
            raise NotSavedError(f"the recipe {text} has changed fields, which no name stands for")
        return text
    if isinstance(value, Quantized):
        return {field.name: _plain(getattr(value, field.name), f"{name}.{field.name}") for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_plain(entry, name) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    return _on_cpu(tensor(value))


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU whose memory has no other elements. Strides are kept, also strides of 0."""
    value = value.detach()
    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
        value = value.contiguous() if not value.is_contiguous() else value.clone()
    return value.cpu()


def _bytes(value: Any) -> int:
    """Bytes of the tensors in plain arguments."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_bytes, entries))
