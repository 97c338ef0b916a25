"""Plans as TOML: round trips of every field, and hostile files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfwise.core.formats import FORMATS
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import REASONS, Default, Plan, Rule
from halfwise.core.plan_file import dumps, loads
from halfwise.errors import PlanError

formats = st.sampled_from(sorted(FORMATS))
reasons = st.sampled_from(sorted(REASONS))
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=30)
numbers = st.dictionaries(st.text(min_size=1, max_size=8), st.floats(allow_nan=False), max_size=3)
defaults = st.builds(
    Default,
    compute=formats,
    parameters=formats,
    saved_activations=formats,
    optimizer_state=formats,
    reason=reasons,
    detail=texts,
    evidence=numbers,
)
optional = st.none() | formats
names = st.text(min_size=0, max_size=12)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    named = {draw(st.sampled_from(["path", "pattern"])): draw(names)}
    return Rule(
        **named,
        compute=draw(formats),
        parameters=draw(optional),
        saved_activations=draw(optional),
        optimizer_state=draw(optional),
        reason=draw(reasons),
        detail=draw(texts),
        evidence=draw(numbers),
    )


loss_scales = st.builds(
    LossScaleSettings,
    initial=st.floats(2.0, 1024.0),
    floor=st.floats(2.0**-14, 2.0),
    ceiling=st.floats(1024.0, 2.0**24),
    growth_factor=st.floats(1.5, 8.0),
    backoff_factor=st.floats(0.1, 0.9),
    growth_interval=st.integers(1, 10_000),
    hysteresis=st.integers(1, 9),
    growth_delay=st.integers(0, 9),
)
plans = st.builds(
    Plan,
    framework=st.sampled_from(["torch", "keras"]),
    model=texts,
    target=texts,
    default=defaults,
    loss_scale=st.none() | loss_scales,
    layers=st.lists(rules(), max_size=4, unique_by=lambda rule: rule.name).map(tuple),
)


@given(plans)
def test_every_field_survives(plan: Plan) -> None:
    assert loads(dumps(plan)) == plan


def test_save_and_load(tmp_path: Path) -> None:
    plan = Plan.manual({"head": "float32"}, default="float16")
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert [f.name for f in tmp_path.iterdir()] == ["plan.toml"]


def test_infinite_evidence_survives() -> None:
    plan = Plan(layers=(Rule(path="a", compute="float32", evidence={"largest": math.inf}),))
    assert loads(dumps(plan)) == plan


HEAD = "format_version = 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "not valid TOML"),
        ("a = " + "[" * 100_000, "not valid TOML"),
        ("", "format_version is None"),
        ("format_version = 2", "reads format_version = 1"),
        ("format_version = true", "format_version is True"),
        (HEAD + "surprise = 1", "unknown fields 'surprise'"),
        (HEAD + "framework = 'mxnet'", "allowed: 'torch', 'keras'"),
        (HEAD + "model = 3", "must be a string"),
        (HEAD + "default = 3", "must be a table"),
        (HEAD + "default = { compute = 'float64' }", "allowed: float32"),
        (HEAD + "default = { reason = 'luck' }", "reason is 'luck'"),
        (HEAD + "layers = 3", "must be"),
        (HEAD + "layers = [3]", "entry 1 of layers"),
        (HEAD + "[[layers]]\npath = 'a'", "has no compute"),
        (HEAD + "[[layers]]\ncompute = 'float32'", "a path or a pattern"),
        (HEAD + "[[layers]]\npath = 'a'\ncompute = 'float32'\nevidence = { x = 'y' }", "must be a number"),
        (HEAD + "[[layers]]\npath = 'a'\ncompute = 'float32'\nevidence = { x = 1" + "0" * 400 + " }", "too large"),
        (HEAD + "[loss_scale]\ninitial = nan", "must be finite"),
        (HEAD + "[loss_scale]\ninitial = 1e30", "out of range"),
        (HEAD + "[loss_scale]\nhysteresis = 1.5", "must be an integer"),
        (HEAD + "[loss_scale]\nspeed = 1", "unknown fields 'speed'"),
        (HEAD + "model = '" + "x" * 20_000 + "'", "at most 10,000"),
    ],
)
def test_broken_and_hostile_text_gives_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=r"^some\.toml") as caught:
        loads(text, source="some.toml")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00" * 100], ids=["not utf-8", "zeros"])
def test_binary_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.toml").write_bytes(content)
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.toml")


def test_missing_and_huge_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "none.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (17 * 1024 * 1024))
    with pytest.raises(PlanError, match="at most"):
        Plan.load(tmp_path / "huge.toml")
