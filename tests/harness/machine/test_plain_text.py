"""Text of a backend: no character and no line of it does anything but show itself."""

from __future__ import annotations

import pytest

from narrowgauge.harness.machine.plain_text import LONGEST, escape, plain_value
from narrowgauge.harness.records.record import Record

CHARACTERS = [
    *range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0xAD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029,
    0x202A, 0x202D, 0x202E, 0x2066, 0x2069, 0xD800, 0xDFFF, 0xFEFF, 0xFFFE, 0xFFFF, 0xE0001, 0xE007F,
]  # fmt: skip


@pytest.mark.parametrize("code", CHARACTERS, ids=hex)
def test_a_character_executed_by_a_terminal_is_shown_as_its_code(code: int) -> None:
    escaped = escape(f"a{chr(code)}b")
    assert escaped == f"a{ascii(chr(code))[1:-1]}b"
    assert escaped.isascii()
    assert escaped.isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("::error::x", r"\::error::x"),
        ("one\n::set-env name=A::b", "one\n\\::set-env name=A::b"),
        ("one\n \t ::stop-commands::x", "one\n \t \\::stop-commands::x"),
        ("one\r\n::debug::x", "one\n\\::debug::x"),
        ("one\r::debug::x", r"one\r::debug::x"),
        ("\u3000::error::x", "\u3000\\::error::x"),
        ("\x1b[0m::error::x", r"\x1b[0m::error::x"),
        ("\u2028::error::x", r"\u2028::error::x"),
        ("a word ::error::x", r"a word \::error::x"),  # a terminal can wrap the line before it
        (":::error::x", r"\:::error::x"),
        ("a ##[error]x", r"a #\#[error]x"),
        ("###[group]x", r"##\#[group]x"),
        ("##vso[task.setvariable]x", r"#\#vso[task.setvariable]x"),
        ("\x1b]8;;http://x\x07link", r"\x1b]8;;http://x\x07link"),
    ],
)
def test_a_line_that_is_a_command_is_divided(text: str, expected: str) -> None:
    assert escape(text) == expected
    assert escape(expected) == expected


def test_every_text_of_a_record_is_plain() -> None:
    nasty = "\x1b[2J\n::error::\u202e"
    record = Record(
        *(nasty for _ in range(11)), seed=0, stage=nasty, message=nasty * LONGEST, known=nasty, save_note=nasty,
        stages=[{"stage": nasty, "sentence": nasty}], explanations=[{"cause": nasty}],
        findings=[{"elements": [{nasty: [nasty, 1.5, None, True]}]}], notes=[{"cause": nasty, "sentence": nasty}],
    ).to_dict()  # fmt: skip
    texts: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, dict):
            collect([*value, *value.values()])
        elif isinstance(value, list):
            for inner in value:
                collect(inner)
        elif isinstance(value, str):
            texts.append(value)

    collect(record)
    assert sum("\\x1b[2J\n\\::error::\\u202e" in text for text in texts) == 22
    assert not any(set(text) & set("\x1b\u202e") or "\n::" in text for text in texts)
    assert max(len(text) for text in texts) <= LONGEST
    assert record["findings"][0]["elements"][0].popitem()[1][1:] == [1.5, None, True]
    assert plain_value(record) == record
