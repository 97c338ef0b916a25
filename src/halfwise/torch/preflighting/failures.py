"""What code raises under a policy and not in float32, as a hazard: which operation, whose, and what to do."""

from __future__ import annotations

import os
import re
from traceback import extract_tb
from typing import NamedTuple

from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from halfwise.core.diagnosis import Direction
from halfwise.core.hazards import Hazard, HazardKind
from halfwise.torch.names import named_layers
from halfwise.torch.preflighting.observe import Run
from halfwise.torch.preflighting.regions import Setting
from halfwise.torch.preflighting.samples import SampledTrace
from halfwise.torch.tracing.attribution import Place, is_users

__all__ = ["hazard_of_failure"]

_MODULE_CALLS = frozenset({nn.Module.__call__.__code__, nn.Module._call_impl.__code__})

_REFUSED = re.compile(r"unsafe to autocast")
_MASK = re.compile(r"cannot be converted to type .* without overflow")
_DTYPES_DIFFER = re.compile(r"same d(ata )?type|expected .*dtype|expected scalar type|dtype.*mismatch", re.IGNORECASE)
_MISSING = re.compile(
    r"not implemented for '?(Half|BFloat16)|Unsupported dtype|not supported.*(Half|BFloat16|half|bfloat16)|"
    r"Low precision dtypes|(Half|BFloat16).*not supported|does not support.*(half|Half|BFloat16)"
)


def hazard_of_failure(model: nn.Module, run: Run, setting: Setting) -> Hazard:
    """The hazard that `run.error` is."""
    error = run.error
    assert error is not None
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    operation, direction, place, function = _where(model, run)
    name = function.__name__ if function is not None else ""
    kind, fix = _kind_and_fix(message, setting, place, name)
    detail = f"it raises: {message[:200]}"
    if "fft." in _user_code(error) and setting.device_type == "cuda" and setting.half == "float16":
        detail += "; CUDA transforms float16 too, where sizes are powers of two"
    if kind == "custom_function":
        detail = f"{name}.{direction} gets {setting.half} beside float32: {message[:160]}"
    return Hazard(
        kind=kind,
        module=place.module,
        module_class=place.module_class,
        operation=operation,
        direction=direction,
        source=place.source,
        detail=detail,
        fix=fix,
    )


def _kind_and_fix(message: str, setting: Setting, place: Place, function: str) -> tuple[HazardKind, tuple[str, ...]]:
    device = setting.autocast_device
    in_float32 = f'with torch.autocast("{device}", enabled=False): ...  # its inputs cast by .float()'
    at = f"  # at {place.source}" if place.source else ""
    if _REFUSED.search(message):
        return "unsupported", (
            "loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)  # and no sigmoid before it",
        )
    if _MASK.search(message):
        return "mask", (f'scores = scores.masked_fill(hidden, float("-inf")){at}',)
    if function:
        return "custom_function", (
            f'@torch.amp.custom_fwd(device_type="{device}", cast_inputs=torch.float32)  # over {function}.forward',
            f'@torch.amp.custom_bwd(device_type="{device}")  # over {function}.backward',
        )
    if _MISSING.search(message) or not _DTYPES_DIFFER.search(message):
        return "unsupported", (in_float32,)
    return "unsupported", (f"cast both sides to one dtype{at}", in_float32)


def _where(model: nn.Module, run: Run) -> tuple[str, Direction, Place, type | None]:
    """Operation, direction, place, and the custom autograd function within which it happened, if one."""
    seen = _read_traceback(model, run.error)
    failure = run.trace.failure if run.trace is not None else None
    if failure is None:
        return seen.operation, seen.direction, seen.place, seen.function
    place = failure.place._replace(source=failure.place.source or seen.place.source)
    if seen.function is not None:
        direction = seen.direction
        place = place if place.module_class else _caller(run.trace, seen.function, place)
    else:
        direction = failure.direction
        place = place if place.module_class or direction == "backward" else seen.place
    return failure.operation, direction, place, seen.function


class _Seen(NamedTuple):
    """What a traceback tells: the innermost module, user's line and function of `torch.nn.functional`."""

    operation: str
    direction: Direction
    place: Place
    function: type | None


def _read_traceback(model: nn.Module, error: Exception | None) -> _Seen:
    modules = {id(module): (path, type(module).__name__) for path, module in named_layers(model)}
    owner, source, operation = ("", ""), "", ""
    direction: Direction = "forward"
    function: type | None = None
    traceback = error.__traceback__ if error is not None else None
    while traceback is not None:
        frame = traceback.tb_frame
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
        if code in _MODULE_CALLS:
            owner = modules.get(id(first), owner)
        if is_users(code.co_filename):
            source = f"{code.co_filename}:{traceback.tb_lineno}".rpartition(os.sep)[2]
            if isinstance(first, FunctionCtx) and code.co_name in ("forward", "backward"):
                function = getattr(type(first), "_forward_cls", type(first))
                direction = "backward" if code.co_name == "backward" else "forward"
        elif frame.f_globals.get("__name__") == functional.__name__:
            operation = f"{functional.__name__}.{code.co_name}"
        traceback = traceback.tb_next
    return _Seen(operation, direction, Place(*owner, source), function)


def _user_code(error: Exception) -> str:
    """The text of the innermost line of the user's code."""
    lines = [frame.line or "" for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    return lines[-1] if lines else ""


def _caller(trace: SampledTrace | None, function: type, place: Place) -> Place:
    """The module whose forward ran the function, for a backward of it that autograd cannot attribute."""
    code = getattr(getattr(function, "forward", None), "__code__", None)
    if trace is None or code is None:
        return place
    file = code.co_filename.rpartition(os.sep)[2]
    lines = {f"{file}:{line}" for _, _, line in code.co_lines()}
    for record in reversed(trace.records):
        if record.direction == "forward" and record.place.source in lines:
            return place._replace(module=record.place.module, module_class=record.place.module_class)
    return place
