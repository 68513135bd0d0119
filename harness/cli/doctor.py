"""`narrowgauge doctor`: what this machine can do."""

from __future__ import annotations


def doctor() -> None:
    """Say what this machine can do, and what to install."""
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.harness.records.environment import facts
    from narrowgauge.harness.tools.doctor import tool_facts

    table = Table(show_header=False, box=None)
    for fact in [*facts(), *tool_facts()]:
        table.add_row(
            "✓" if fact.ok else "–", fact.name, fact.value + (f"\n{fact.remedy}" if fact.remedy and not fact.ok else "")
        )
    Console().print(table, markup=False)
