"""Timing tables: what they answer and what they refuse."""

from __future__ import annotations

import pytest

from halfwise.core.timing import TimingTable
from halfwise.errors import PolicyError, UsageError

TABLE = TimingTable(
    {"a": {"float32": 2.0, "bfloat16": 1.0, "float16": 4.0}, "b": {"float32": 1.0, "bfloat16": 0.5}},
    frozenset({("a", "float16")}),
)


def test_answers() -> None:
    assert TABLE.formats == ("bfloat16", "float16")
    assert TABLE.get("a", "float16") == 4.0
    assert TABLE.get("b", "float16") is None
    assert TABLE.get("c", "float32") is None
    assert TABLE.is_lower_bound("a", "float16")
    assert not TABLE.is_lower_bound("a", "bfloat16")
    assert TABLE.total("float32") == 3.0
    assert TABLE.total("float16") == 5.0  # b was not measured in float16 and counts as in float32
    assert TABLE.total("bfloat16", ["b"]) == 0.5
    assert TABLE.ratio("bfloat16") == 0.5
    assert TimingTable({}).ratio("float16") == 1.0


def test_uniform() -> None:
    table = TimingTable.uniform(["a", "b"], relative={"float16": 0.5}, float32=2.0)
    assert table.seconds == {"a": {"float32": 2.0, "float16": 1.0}, "b": {"float32": 2.0, "float16": 1.0}}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_times_are_positive(seconds: float) -> None:
    with pytest.raises(UsageError, match="positive"):
        TimingTable({"a": {"float32": seconds}})


def test_every_layer_has_float32_and_formats_exist() -> None:
    with pytest.raises(UsageError, match="'a' has no time for 'float32'"):
        TimingTable({"a": {"bfloat16": 1.0}})
    with pytest.raises(PolicyError, match="half"):
        TimingTable({"a": {"float32": 1.0, "half": 1.0}})


@pytest.mark.parametrize("seconds", [{"a": 1.0}, [("a", 1.0)], 3])
def test_other_shapes_are_refused(seconds: object) -> None:
    with pytest.raises(UsageError, match="does not map layers to times"):
        TimingTable(seconds)  # type: ignore[arg-type]


def test_layers_that_the_model_does_not_have_are_named() -> None:
    TABLE.check_paths(["", "a", "b", "c"], "Net")
    with pytest.raises(UsageError, match=r"the timing table names layers that 'Net' does not have: 'b'$"):
        TABLE.check_paths(["", "a"], "Net")
