"""Checkpoints of a training run: complete at every moment, exact to the bit, and free of pickles.

A checkpoint is a directory with `model.safetensors` (the weights, readable by any tool), `state.safetensors` and
`state.json` (optimizers, loss scale, plan, guard, generators, progress).

A directory cannot be replaced in one step, so `save_checkpoint` goes through neighbours:

1. everything is written into `checkpoint.new` and flushed to the disk;
2. `checkpoint` is renamed to `checkpoint.old`;
3. `checkpoint.new` is renamed to `checkpoint`;
4. `checkpoint.old` is removed.

Whenever the process dies, `checkpoint` is complete if it exists, and `checkpoint.old` is complete if it does not (a
kill between 2 and 3). `load_checkpoint` looks in that order; a `checkpoint.new` is never read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from halfwise.core.files import sync_directory, write_file
from halfwise.errors import DataError, UsageError
from halfwise.torch.generators import generator_states, set_generator_states
from halfwise.torch.names import unwrap
from halfwise.torch.tree import SAFETENSORS_DTYPES, decode, encode, stored

__all__ = ["find_checkpoint", "load_checkpoint", "save_checkpoint", "tidy_checkpoint"]

FORMAT_VERSION = 1


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    mp: _Stateful | None = None,
    progress: Mapping[str, Any],
) -> None:
    """Replaces the checkpoint at `directory`. A kill at any moment leaves the old one or the new one, complete.

    Args:
        directory: such as `runs/first/checkpoint`. Its neighbours `checkpoint.new` and `checkpoint.old` are used too.
        model: its parameters and persistent buffers, under names without wrappers' prefixes; tied ones are stored once.
        optimizer: one or several.
        mp: the `MixedPrecision` in use: loss scale, plan, guard, counters. None where there is none.
        progress: numbers, strings, lists, dicts, tensors that say where training stands: epoch, position in the data.

    Raises:
        UsageError: a state holds something that is neither of these.
    """
    target = Path(directory)
    new, old = _neighbour(target, "new"), _neighbour(target, "old")
    weights, aliases, others = _split(_state_of(model))
    tensors: dict[str, Tensor] = {}
    state = {
        "format_version": FORMAT_VERSION,
        "model": type(unwrap(model)).__name__,
        "others": encode(others, tensors, "model"),
        "optimizers": encode(
            [{"kind": type(o).__name__, "state": o.state_dict()} for o in _optimizers(optimizer)], tensors, "optimizers"
        ),
        "mp": encode(mp.state_dict() if mp is not None else None, tensors, "mp"),
        "generators": encode(generator_states(), tensors, "generators"),
        "progress": encode(dict(progress), tensors, "progress"),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    # Names of tied tensors are kept in the header, as Hugging Face's `save_model` does: loaders find them there.
    write_file(new / "model.safetensors", safetensors.torch.save(weights, {"format": "pt", **aliases}))
    write_file(new / "state.safetensors", safetensors.torch.save(tensors, {"format": "pt"}))
    write_file(new / "state.json", json.dumps(state, allow_nan=False, separators=(",", ":")))
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    new.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint at `directory`, or the one that a kill left beside it; None where there is none."""
    target = Path(directory)
    for candidate in (target, _neighbour(target, "old")):
        if (candidate / "state.json").is_file():
            return candidate
    return None


def tidy_checkpoint(directory: str | os.PathLike[str]) -> None:
    """Finishes what a kill interrupted: the complete checkpoint stands at `directory`, and nothing beside it."""
    target, found = Path(directory), find_checkpoint(directory)
    if found is None:
        return
    if found != target:
        found.rename(target)
    for suffix in ("new", "old"):
        shutil.rmtree(_neighbour(target, suffix), ignore_errors=True)


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    mp: _Stateful | None = None,
) -> dict[str, Any]:
    """Puts model, optimizers, `mp` and the generators back to where `save_checkpoint` found them, bit for bit.

    Everything is read and compared before anything is changed.

    Returns:
        The `progress` that was saved.

    Raises:
        DataError: there is no checkpoint, or it is damaged.
        UsageError: it belongs to another model or to other optimizers.
    """
    found = find_checkpoint(directory)
    if found is None:
        raise DataError(f"there is no checkpoint at {str(directory)!r}; give a directory that save_checkpoint wrote.")
    weights = _read_weights(found)
    tensors, _ = _read_tensors(found / "state.safetensors")
    state = _read_state(found / "state.json", tensors)
    optimizers = _optimizers(optimizer)
    expected, kinds = _state_of(model), [type(o).__name__ for o in optimizers]
    saved = {**weights, **state["others"]}
    _compare_names(expected, saved, state["model"], model, found)
    if [entry["kind"] for entry in state["optimizers"]] != kinds:
        given = ", ".join(entry["kind"] for entry in state["optimizers"])
        raise UsageError(
            f"the checkpoint {str(found)!r} holds {given}; here is {', '.join(kinds)}: use the same optimizers."
        )
    if (state["mp"] is None) != (mp is None):
        raise UsageError(
            f"the checkpoint {str(found)!r} was saved {'without' if mp is not None else 'with'} a MixedPrecision; "
            f"load it {'without' if mp is not None else 'with'} one (mp=...)."
        )
    raw = {_portable(name): name for name in unwrap(model).state_dict()}
    unwrap(model).load_state_dict({raw[name]: value for name, value in saved.items()})
    for each, entry in zip(optimizers, state["optimizers"], strict=True):
        try:
            each.load_state_dict(entry["state"])
        except ValueError as error:
            raise UsageError(
                f"the checkpoint {str(found)!r} does not fit the {type(each).__name__}: {error}."
            ) from error
    if mp is not None:
        mp.load_state_dict(state["mp"])
    set_generator_states(state["generators"])
    progress: dict[str, Any] = state["progress"]
    return progress


def _neighbour(target: Path, suffix: str) -> Path:
    return target.with_name(f"{target.name}.{suffix}")


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    return (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)


def _portable(name: str) -> str:
    return name.replace("_orig_mod.", "")  # a compiled submodule; wrappers of the whole model are taken off before


def _state_of(model: nn.Module) -> dict[str, Any]:
    return {_portable(name): value for name, value in unwrap(model).state_dict().items()}


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """The tensors that safetensors takes, `{tied name: name it is stored under}`, and the rest."""
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dtype not in SAFETENSORS_DTYPES:
            others[name] = value
            continue
        # Tied means the very same elements. Mere overlap (views of one flat buffer) is stored apart.
        key = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if value.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            weights[name] = stored(value)
    return weights, aliases, others


def _read_weights(found: Path) -> dict[str, Tensor]:
    weights, header = _read_tensors(found / "model.safetensors")
    aliases = {name: kept for name, kept in header.items() if kept in weights}
    return {**weights, **{name: weights[kept] for name, kept in aliases.items()}}


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Cloned into memory of torch's own alignment: that of a mapped file changes the last bits of dot products.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise DataError(f"{str(path)!r} is missing or damaged ({error}); use another checkpoint.") from error


def _read_state(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r} is missing or damaged ({error}); use another checkpoint.") from error
    version = state.get("format_version") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{str(path)!r} has the format version {version!r}; this version of halfwise reads {FORMAT_VERSION}."
        )
    names = ("model", "others", "optimizers", "mp", "generators", "progress")
    missing = [name for name in names if name not in state]
    if missing:
        raise DataError(f"{str(path)!r} lacks {', '.join(missing)}; use another checkpoint.")
    return {name: decode(state[name], tensors) for name in names}


def _compare_names(
    expected: Mapping[str, Any], saved: Mapping[str, Any], kind: str, model: nn.Module, found: Path
) -> None:
    shapes: Callable[[Any], Any] = lambda value: tuple(value.shape) if isinstance(value, Tensor) else None  # noqa: E731
    parts = {
        "missing in the checkpoint": sorted(expected.keys() - saved.keys()),
        "unknown to the model": sorted(saved.keys() - expected.keys()),
        "of another shape": [
            f"{name} ({shapes(saved[name])} saved, {shapes(expected[name])} here)"
            for name in sorted(expected.keys() & saved.keys())
            if shapes(saved[name]) != shapes(expected[name])
        ],
    }
    wrong = [
        f"{what}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for what, names in parts.items()
        if names
    ]
    if wrong:
        raise UsageError(
            f"the checkpoint {str(found)!r} holds another model ({kind}) than the {type(unwrap(model)).__name__} here. "
            f"{'; '.join(wrong)}. Build the model as it was when the checkpoint was saved."
        )
