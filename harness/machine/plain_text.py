"""Text of unknown origin, made safe for terminals, logs of CI jobs and files: escaped, and limited in length.

A backend chooses the text of its exceptions, and a journal may be foreign. Records are escaped when they are made
(`Record.to_dict`) and when they are read (`harness.records.journal`), so code that prints a record needs no escape.
"""

from __future__ import annotations

import re
from functools import lru_cache
from sys import intern
from typing import Any

LONGEST = 1 << 16
"""Largest size of a text in bytes of UTF-8."""
_NOTE_SIZE = 64
"""Largest size of the note at the end of a cut text in bytes."""
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
"""Characters that a terminal executes or that change the order of text: control characters except tab and line feed,
bidirectional and invisible formatting, and line separators. Also lone surrogates, which UTF-8 cannot encode."""
_COMMAND = re.compile(r"(?<!\S)::|##(?=\w*\[)")
"""Start of a command of a CI service: `::error` on GitHub, `##[error]` and `##vso[…]` on Azure. A `::` inside a line
counts if it begins a word, because a terminal wraps lines between words."""

RELATIVE_FROM = 100
"""Steps of a format from which on a text gives a distance as a relative difference: the count has no meaning."""


def escape(text: str) -> str:
    r"""`text` with unsafe characters as `\x1b` or `\u202e`, and with a backslash inside each start of a command.

    Escaping twice changes nothing more.
    """
    if text.isascii() and text.isprintable() and "::" not in text and "##" not in text:
        return text
    text = _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text.replace("\r\n", "\n"))
    return _COMMAND.sub(lambda match: "\\::" if match[0] == "::" else "#\\#", text)


def plain_text(text: str) -> str:
    """`text`, escaped and at most `LONGEST` bytes long. The end of a cut text says how many characters are missing."""
    kept = text[:LONGEST]
    escaped = escape(kept)
    if escaped is text and text.isascii():  # most texts
        return text
    if len(kept) == len(text) and _fits(escaped, LONGEST):
        return escaped
    while not _fits(escaped, LONGEST - _NOTE_SIZE):
        kept = kept[: len(kept) * 7 // 8]
        escaped = escape(kept)
    return f"{escaped} … [cut: {len(text) - len(kept)} more characters]"


def _fits(text: str, size: int) -> bool:
    return 4 * len(text) <= size or len(text.encode()) <= size


def plain_value(value: Any) -> Any:
    """A value of JSON whose texts, also keys, are `plain_text`."""
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, str):
        return plain_text(value) if value else value
    if isinstance(value, dict):
        return {
            _plain_key(str(key)): inner if type(inner) in _NUMBERS else plain_value(inner)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [inner if type(inner) in _NUMBERS else plain_value(inner) for inner in value]
    return value


_NUMBERS = frozenset((type(None), bool, int, float))
_plain_key = lru_cache(plain_text)
"""Most keys occur in every record."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON: `object_pairs_hook` of json.loads. Raises ValueError if a key occurs twice: programs differ in
    the value that they take. Objects share their keys: 40 000 records have the same."""
    value = {intern(key): inner for key, inner in pairs}
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"the key {next(key for key in keys if keys.count(key) > 1)[:100]!r} occurs twice in an object"
        )
    return value
