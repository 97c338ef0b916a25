"""The Keras adapter in torch's own terms. Every function here has its twin in `jax.py` and `tensorflow.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import ml_dtypes
import numpy as np
import torch

if TYPE_CHECKING:
    from halfwise.keras.training_step import OwnStep

__all__ = ["current_values", "gradient_fields_kept", "keep", "layer_pass", "own_step", "run_step", "tap", "to_numpy"]


def tap(tensor: Any, forward: Callable[[Any], None], backward: Callable[[Any], None]) -> Any:
    """`tensor`, whose value is handed to `forward` now, and its gradient to `backward` when it is known.

    Only the gradient of what is computed from the tensor that is returned counts. What is no floating tensor with a
    value (an integer, a tensor on the meta device) is returned as it is, and nothing is called.
    """
    if not _has_value(tensor):
        return tensor
    forward(tensor.detach())
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(lambda gradient: backward(gradient.detach()))
    return alias


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """The values, without loss: bfloat16 as ml_dtypes' type; of sparse gradients the values that are there."""
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # numpy knows no such type
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def keep(variables: Iterable[Any]) -> Callable[[], None]:
    """Remembers the variables' values; the function that is returned puts them back."""
    kept = [(tensor := variable.value, tensor.detach().clone(), tensor._version) for variable in variables]
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        with torch.no_grad():
            for tensor, value, version in kept:
                if tensor._version != version:
                    tensor.copy_(value)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return put_back


@contextmanager
def gradient_fields_kept(variables: Iterable[Any]) -> Iterator[None]:
    """Within the block the variables have no `.grad`; afterwards the one that they had before."""
    kept = [(variable.value, variable.value.grad) for variable in variables]
    for tensor, _ in kept:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in kept:
            tensor.grad = gradient


def current_values(model: Any, _state: Any) -> list[tuple[Any, Any]]:
    """Each variable of the model with its value, except metrics."""
    return [(variable, variable.value.detach()) for variable in model.variables]


def run_step(step: Callable[..., Any], _model: Any, data: Any, _state: Any) -> dict[str, Any]:
    """Calls a training step eagerly; returns its logs."""
    with torch.enable_grad():
        return step(data)


def own_step(own: OwnStep, data: Any) -> dict[str, Any]:
    """One step of `OwnStep`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    variables = own.trainable_variables()
    own.model.zero_grad()
    loss, output = own.forward(x, y, sample_weight)
    own.optimizer.scale_loss(loss).backward()
    with torch.no_grad():
        own.optimizer.apply([variable.value.grad for variable in variables], variables)
    return {"loss": loss.detach(), "output": keras.tree.map_structure(lambda tensor: tensor.detach(), output)}


def layer_pass(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _values: Any, *, input_gradients: bool
) -> Callable[[float], float]:
    """A function that runs one forward and backward of the layer and returns its seconds.

    It takes a limit in seconds: where the forward pass alone took longer, its time is returned.
    """
    weights = [variable.value for variable in layer.trainable_variables]
    device = next((v.value.device for v in layer.variables), torch.device("cpu"))

    def own_copy(leaf: Any) -> Any:
        """One that the layer may write into: no leaf of autograd's graph."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        return leaf.requires_grad_().clone() if input_gradients and _has_value(leaf) else leaf.clone()

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def run(limit: float) -> float:
        own_args, own_kwargs = keras.tree.map_structure(own_copy, (args, kwargs))
        inputs = [leaf for leaf in keras.tree.flatten((own_args, own_kwargs)) if _needs_gradient(leaf)]
        with torch.enable_grad():
            start = now()
            outputs = [leaf for leaf in keras.tree.flatten(layer(*own_args, **own_kwargs)) if _needs_gradient(leaf)]
            if not outputs:
                return now() - start
            if limit != float("inf") and (forward := now() - start) > limit:
                return forward
            ones = [torch.ones_like(output) for output in outputs]
            torch.autograd.grad(outputs, [*inputs, *weights], ones, allow_unused=True)
            return now() - start

    return run


def local_gradients(
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: Sequence[tuple[Any, Any]],
    others: Sequence[tuple[Any, Any]],
    gradients: Mapping[int, Any],
) -> tuple[list[Any], list[Any]]:
    """One forward and backward of a layer by itself, run eagerly, which changes no variable; see `tensorflow.py`."""
    values = [value.detach().clone().requires_grad_() for _, value in weights]
    mapping = [*others, *((variable, value) for (variable, _), value in zip(weights, values, strict=True))]
    args, kwargs = keras.tree.map_structure(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
    )
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(0)  # Keras' dropout draws from torch's generators here, and each pass shall drop the same
        with keras.StatelessScope(state_mapping=mapping):
            outputs = [leaf for leaf in keras.tree.flatten(layer(*args, **kwargs)) if _has_value(leaf)]
        pairs = [(outputs[index], gradient) for index, gradient in gradients.items() if outputs[index].requires_grad]
        if not pairs or not values:
            return [output.detach() for output in outputs], []
        targets = [target for target, _ in pairs]
        upstream = [gradient.to(target.dtype) for target, gradient in pairs]
        found = torch.autograd.grad(targets, values, upstream, allow_unused=True)
    return [output.detach() for output in outputs], [gradient for gradient in found if gradient is not None]


def _needs_gradient(leaf: Any) -> bool:
    return _has_value(leaf) and bool(leaf.requires_grad)


def _has_value(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_floating_point()
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
    )
