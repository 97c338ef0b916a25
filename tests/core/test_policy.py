"""Policies: spellings, and one clear error for the rest."""

from __future__ import annotations

import pytest

from halfwise.core.policy import POLICIES, compute_format, parse_policy
from halfwise.errors import PolicyError


@pytest.mark.parametrize("name", POLICIES)
def test_canonical_names_stay(name: str) -> None:
    assert parse_policy(name) == name


@pytest.mark.parametrize(("given", "meant"), [("16-mixed", "mixed_float16"), ("bf16-mixed", "mixed_bfloat16")])
def test_lightnings_spellings(given: str, meant: str) -> None:
    assert parse_policy(given) == meant
    assert compute_format(given) == meant.removeprefix("mixed_")


@pytest.mark.parametrize("bare", ["float16", "bfloat16"])
def test_bare_half_is_refused_with_the_way_out(bare: str) -> None:
    with pytest.raises(PolicyError, match=f"mixed_{bare}"):
        parse_policy(bare)


def test_unknown_policy_lists_what_is_allowed() -> None:
    with pytest.raises(PolicyError, match=r"'fast'.*'auto'.*'mixed_float16'.*plan\.toml"):
        parse_policy("fast")
