from __future__ import annotations

from pathlib import Path

import pytest

from halfwise.report.words import command_name, count, evidence_text, ratio_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (4.4e-9, "4.4 ns"),
        (2.5e-5, "25 µs"),
        (0.0123456, "12.3 ms"),
        (1.0, "1 s"),
        (59.94, "59.9 s"),
        (60.0, "1 min 0 s"),
        (3725.4, "62 min 5 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_ratios() -> None:
    assert ratio_text(0.4999) == "0.50x"
    assert ratio_text(9.5) == "9.50x"
    assert ratio_text(13.4) == "13x"
    assert ratio_text(2.0, at_least=True) == "at least 2.00x"


def test_counts() -> None:
    assert count(1, "step") == "1 step"
    assert count(0, "step") == "0 steps"
    assert count(1437, "image") == "1,437 images"


def test_evidence() -> None:
    evidence = {
        "largest": 1.1e5,
        "underflow": 0.0123,
        "seconds_float32": 2.1e-3,
        "seconds_float16": 1e-3,
        "relative_time_float16": 13.0,
        "score_bfloat16": 1.5e-6,
        "gradient_error": 0.004,
        "saved_values": 123456.0,
        "new_one": 2,
    }
    assert evidence_text(evidence) == [
        ("largest value", "1.1e+05"),
        ("rounds to zero", "1.23%"),
        ("time in float32", "2.1 ms"),
        ("time in float16", "1 ms"),
        ("time in float16 relative to float32", "13"),
        ("squared change of the loss in bfloat16", "1.5e-06"),
        ("error of its weight gradients", "0.40%"),
        ("values kept for backward", "123,456"),
        ("new one", "2"),
    ]


def test_the_command_is_named_as_it_can_be_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert command_name() == "halfwise"
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.argv", [str(tmp_path / ".venv" / "bin" / "halfwise")])
    assert command_name() == ".venv/bin/halfwise"
    monkeypatch.setattr("sys.argv", ["somewhere/__main__.py"])
    assert command_name() == "python -m halfwise"
