"""Policies: the few words in which a user says what precision to train in."""

from __future__ import annotations

import os

from halfwise.errors import PolicyError

__all__ = ["POLICIES", "compute_format", "disabled", "parse_policy"]

POLICIES = ("auto", "float32", "mixed_bfloat16", "mixed_float16")

_COMPUTE = {"float32": "float32", "mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
_SPELLINGS = {"16-mixed": "mixed_float16", "bf16-mixed": "mixed_bfloat16"}  # Lightning's
_BARE_HALF = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


def parse_policy(name: str) -> str:
    """The canonical spelling of a policy's name.

    Raises:
        PolicyError: the name is unknown, or asks for weights in half precision as well.

    >>> parse_policy("bf16-mixed")
    'mixed_bfloat16'
    """
    if name in POLICIES:
        return name
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    if name in _BARE_HALF:
        raise PolicyError(
            f"policy {name!r} means weights in {name} too, as in Keras; halfwise cannot train that yet. "
            f"Use {_BARE_HALF[name]!r}: computation in {name}, weights in float32."
        )
    raise PolicyError(
        f"unknown policy {name!r}. Allowed: {', '.join(map(repr, POLICIES))}, a Plan, "
        "or the path of a plan file (plan.toml)."
    )


def compute_format(policy: str) -> str:
    """The format in which a policy other than `"auto"` computes.

    >>> compute_format("mixed_float16")
    'float16'
    """
    return _COMPUTE[parse_policy(policy)]


def disabled() -> bool:
    """True where the environment says `HALFWISE_DISABLE=1`: everything is plain float32 training."""
    return os.environ.get("HALFWISE_DISABLE", "") not in ("", "0")
