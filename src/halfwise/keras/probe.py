"""One training step under observation, leaving no trace: what each layer gets and gives, and every gradient.

The step is the model's own `train_step`, run eagerly. Layers are observed by *taps*, identities that hand on values and
gradients, which are put around `call` of the single layer object. Instead of its optimizer the step finds one that
only writes down the gradients. Afterwards everything that a step changes is put back: batch-norm statistics, metrics,
random seeds; the weights never changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import keras
import numpy as np
from keras import Layer

from halfwise.errors import UsageError
from halfwise.keras.restore import attribute, put_back
from halfwise.keras.taps import Observer, Taps, ignore, tap, tapped_call, tapped_layers, to_numpy
from halfwise.keras.training_step import OwnStep

__all__ = ["Observer", "Probed", "as_in_fit", "built", "probe", "tap", "tapped_layers", "to_numpy"]

_backend = import_module(f"halfwise.keras.backends.{keras.backend.backend()}")


@dataclass(frozen=True)
class Probed:
    """What one step did.

    Attributes:
        loss: the unscaled loss; NaN too where the step showed none.
        predictions: the model's output as the loss got it; None where the step showed none.
        gradients: `(variable, gradient)` of each trainable variable that got one, in the order of the step; **times the
            loss scale**. Sparse gradients are as the backend gives them; `to_numpy` gives their values.
        weights: `(variable, value)` of all variables of the model, metrics left out.
        logs: what the step returned.
    """

    loss: float
    predictions: Any
    gradients: tuple[tuple[keras.Variable, Any], ...]
    weights: tuple[tuple[keras.Variable, Any], ...]
    logs: Mapping[str, Any]


def probe(
    model: keras.Model,
    data: Any,
    observer: Observer | None = None,
    *,
    layers: Mapping[str, Layer] | None = None,
    step: Callable[..., Any] | None = None,
    state: tuple[Any, ...] | None = None,
    loss_scale: float = 1.0,
) -> Probed:
    """Runs one training step that changes nothing, and tells `observer` what happens in it.

    Args:
        model: the model; it is built if it is not.
        data: `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays or tensors, as `train_step` gets them.
        observer: is told what layers do. Default None: no layer is touched.
        layers: `path -> layer` to observe. Default: `tapped_layers(model)`.
        step: the training step. Default: `model.train_step`. Others have its signature, and an attribute `optimizer` if
            they do not use the model's, as `OwnStep`.
        state: JAX only: the training state, where the model's variables are empty, as they are during `fit`.
        loss_scale: what the loss is multiplied with, in float32. Default 1.

    Returns:
        Loss, predictions, gradients and weights.

    Raises:
        UsageError: the model is not compiled and no step is given.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile(loss="mse")
        >>> probed = probe(model, (np.ones((8, 4)), np.ones((8, 1))))
        >>> probed.loss, [to_numpy(gradient).shape for _, gradient in probed.gradients]
        (1.0, [(4, 1), (1,)])
    """
    model = built(model, data, step)
    step = model.train_step if step is None else step
    data = keras.tree.map_structure(as_in_fit, data)
    record = _Record(model, loss_scale)
    with ExitStack() as stack:
        stack.enter_context(put_back(model))
        stack.enter_context(_backend.gradient_fields_kept(model.variables))
        for holder in (model, step):
            stack.enter_context(_optimizers_replaced(holder, record))
        stack.enter_context(attribute(model, "compute_loss", _recording_loss(model.compute_loss, record)))
        if observer is not None:
            for path, layer in (tapped_layers(model) if layers is None else layers).items():
                stack.enter_context(attribute(layer, "call", tapped_call(layer.call, path, observer)))
        logs = _backend.run_step(step, model, data, state)
    loss = logs.get("loss") if record.loss is None else record.loss
    return Probed(
        loss=float("nan") if loss is None else float(to_numpy(loss)),
        predictions=logs.get("output", record.predictions),
        gradients=tuple(record.gradients.values()),
        weights=tuple(_backend.current_values(model, state)),
        logs=logs,
    )


def built(model: keras.Model, data: Any, step: Callable[..., Any] | None = None) -> keras.Model:
    """`model`, with everything built that a training step on `data` makes in its first call.

    Raises:
        UsageError: the model is not compiled and no step is given.
    """
    if step is None and not model.compiled:
        raise UsageError(
            f"the model {model.name!r} is not compiled, so it has no training step: call model.compile(...) before, "
            "or give the loss, such as loss='mse'"
        )
    data = keras.tree.map_structure(as_in_fit, data)
    if isinstance(step, OwnStep):
        step.build(data)
    elif model.compiled:
        try:
            model._symbolic_build(data_batch=data)
        except Exception:
            if keras.backend.backend() != "tensorflow":
                raise
            with _optimizers_replaced(model, _Record(model, 1.0)):  # as TensorFlow's `fit` does, whatever the data are
                _backend.trace(model.train_step, data)
    return model


class _Record:
    """What the stand-in optimizers and the loss write down."""

    def __init__(self, model: keras.Model, loss_scale: float) -> None:
        self.loss_scale = loss_scale
        self.loss: Any = None
        self.predictions: Any = None
        self.gradients: dict[int, tuple[keras.Variable, Any]] = {}
        self._variables = {id(key): v for v in model.variables for key in (v, v._value)}
        self._trainable = model.trainable_variables

    def add_gradients(self, gradients: Any, variables: Any, known: Any) -> None:
        """`variables` as the step named them; else `known`, the real optimizer's; else the model's."""
        gradients = list(gradients)
        if variables is None:
            variables = known if len(known) == len(gradients) else self._trainable
        for gradient, variable in zip(gradients, variables, strict=True):
            found = self._variables.get(id(variable))
            if gradient is not None and found is not None:
                self.gradients[id(found)] = (found, gradient)


class _StandIn:
    """Takes an optimizer's place for one step: writes down and changes nothing. All else it asks of the real one."""

    def __init__(self, real: Any, record: _Record) -> None:
        self._real = real
        self._record = record
        self.variables: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def scale_loss(self, loss: Any) -> Any:
        record = self._record
        tap(loss, lambda value: setattr(record, "loss", value), ignore)
        return keras.ops.cast(loss, "float32") * record.loss_scale

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self._record.add_gradients(grads, trainable_variables, self._known())

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
        return getattr(self._real, "iterations", None)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        self._record.add_gradients(grads, None, self._known())
        return trainable_variables, optimizer_variables

    def finalize_variable_values(self, var_list: Any) -> None:
        """Nothing to do: no variable was changed."""

    def _known(self) -> list[Any]:
        return getattr(self._real, "_trainable_variables", [])


def _recording_loss(compute_loss: Callable[..., Any], record: _Record) -> Callable[..., Any]:
    """`model.compute_loss`, for steps that compute the loss by it and scale it themselves, or not at all."""
    signature = inspect.signature(compute_loss)

    @functools.wraps(compute_loss)
    def recording(*args: Any, **kwargs: Any) -> Any:
        predictions = signature.bind(*args, **kwargs).arguments.get("y_pred")
        _, record.predictions = Taps().on(predictions)
        loss = compute_loss(*args, **kwargs)
        tap(loss, lambda value: setattr(record, "loss", value), ignore)
        return loss

    return recording


@contextmanager
def _optimizers_replaced(holder: Any, record: _Record) -> Iterator[None]:
    """A step may use several optimizers (a GAN's), so all that the holder has are replaced."""
    own = vars(holder) if hasattr(holder, "__dict__") else {}
    with ExitStack() as stack:
        for name, value in list(own.items()):
            if name == "optimizer" or isinstance(value, keras.optimizers.Optimizer):
                stack.enter_context(attribute(holder, name, _StandIn(value, record)))
        yield


def as_in_fit(array: Any) -> Any:
    """A tensor of a numpy array of numbers; `fit` makes floating ones of Keras' default precision."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
        return array
    return keras.ops.convert_to_tensor(array, dtype=keras.config.floatx() if array.dtype.kind == "f" else None)
