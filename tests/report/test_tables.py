"""Tables that several screens share."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from halfwise.report.tables import plan_table


def shown(*layers: tuple[str, str, str]) -> list[str]:
    console = Console(width=100, file=StringIO())
    rows = [
        {"name": name, "compute": compute, "reason": "manual", "detail": detail} for name, compute, detail in layers
    ]
    console.print(plan_table(rows))
    assert isinstance(console.file, StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines() if line.strip()][1:]


def test_repeated_layers_share_a_row_where_the_same_is_said_of_them() -> None:
    found = shown(
        ("blocks.0.fc", "bfloat16", "a"),
        ("blocks.0.norm", "float32", "b"),
        ("blocks.1.fc", "bfloat16", "a"),
        ("blocks.1.norm", "float32", "c"),
        ("blocks.2.fc", "float32", "a"),
        ("head", "float32", "d"),
    )
    assert found == [
        "blocks.*.fc (2 layers) bfloat16 set by hand: a",
        "blocks.0.norm float32 set by hand: b",
        "blocks.1.norm float32 set by hand: c",
        "blocks.2.fc float32 set by hand: a",
        "head float32 set by hand: d",
    ]
