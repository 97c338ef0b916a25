"""What the tracer has to know about an operation: its short name, whether it only makes a view, what it writes to.

Read from the operator's schema once and remembered. The few tables of names below hold what no schema says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CONTRACTIONS", "SIGN_CHANGING", "SOFTMAX_LIKE", "Operation", "operation_of"]

_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
"""In-place operations that do not read what they replace."""

_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})

_CONSTANTS = frozenset({"lift_fresh", "lift", "full_like", "ones_like", "zeros_like"})
"""Operations whose result does not depend on the values of their tensor inputs: `torch.tensor([...])` arrives as
`lift_fresh`.
"""

_NOT_FLOATING = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "equal", "is_same_size"}
    | {"isnan", "isinf", "isfinite", "isneginf", "isposinf", "signbit"}
    | {"logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "any", "all"}
    | {"argmax", "argmin", "argsort", "nonzero", "count_nonzero", "_local_scalar_dense"}
)

SIGN_CHANGING = frozenset({"neg", "neg_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "reciprocal"})
"""Through these an intended infinity may come out with the other sign."""

CONTRACTIONS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "mkldnn_rnn_layer", "sum", "mean", "var"}
    | {"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"}
)
"""Operations that mix values; an infinity in data (unlike one in a mask) turns bad here."""

SOFTMAX_LIKE = ("softmax", "logsumexp", "scaled_dot_product")
"""Parts of the names of operations for which -inf means "not this one"."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The facts about one operator.

    Attributes:
        name: namespace and name without the overload, such as `"aten.addmm"`.
        short: the name alone, such as `"addmm"`.
        ignored: its result shares its input's memory, or never holds floating-point numbers.
        uninitialised: its result is whatever the memory held.
        constant: its result does not depend on tensor values.
        overwrites: what it writes to it does not read first.
        written: positions of the arguments that it writes to.
        written_names: names of the keyword arguments that it writes to.
    """

    name: str
    short: str
    ignored: bool = False
    uninitialised: bool = False
    constant: bool = False
    overwrites: bool = False
    written: tuple[int, ...] = ()
    written_names: tuple[str, ...] = ()


_KNOWN: dict[Any, Operation] = {}


def operation_of(func: Any) -> Operation:
    """The facts about `func`, an `OpOverload` (or a higher-order operator, which has no schema)."""
    known = _KNOWN.get(func)
    if known is None:
        known = _KNOWN[func] = _read(func)
    return known


def _read(func: Any) -> Operation:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Operation(name=str(func), short=str(func))
    namespace, _, short = str(schema.name).partition("::")
    writes = [
        (index, argument)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    return Operation(
        name=f"{namespace}.{short}",
        short=short,
        ignored=(bool(getattr(func, "is_view", False)) and not writes) or short in _NOT_FLOATING,
        uninitialised=short in _UNINITIALISED,
        constant=short in _CONSTANTS,
        overwrites=short in _OVERWRITING or (bool(writes) and all(argument.kwarg_only for _, argument in writes)),
        written=tuple(index for index, argument in writes if not argument.kwarg_only),
        written_names=tuple(argument.name for _, argument in writes),
    )
