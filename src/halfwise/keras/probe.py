"""One training step under observation, leaving no trace: what each layer gets and gives, and every gradient.

The step is the model's own `train_step`, run eagerly. Layers are observed by *taps*, identities that hand on values and
gradients, which are put around `call` of the single layer object. Instead of its optimizer the step finds one that
only writes down the gradients. Afterwards everything that a step changes is put back: batch-norm statistics, metrics,
random seeds; the weights never changed.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from typing import Any, Literal

import keras
import numpy as np
from keras import Layer
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from halfwise.errors import UsageError
from halfwise.keras.names import named_layers, whole
from halfwise.keras.training_step import OwnStep

__all__ = ["Observer", "Probed", "built", "probe", "tap", "tapped_layers", "to_numpy"]

_backend = import_module(f"halfwise.keras.backends.{keras.backend.backend()}")

to_numpy: Callable[[Any], np.ndarray[Any, Any]] = _backend.to_numpy


class Observer:
    """What is told during a probe. Override what is needed; tensors are the backend's, with values.

    `path` names the layer, `call` counts its calls in this step from 0. A layer's floating arguments are its inputs,
    whether given by position or by name, except those whose name ends in `mask`: masks hold -inf on purpose.
    """

    def arguments(self, path: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """All arguments that the layer's `call` gets, as it gets them: inputs are cast to its precision already."""

    def forward(self, path: str, call: int, inputs: list[Any], outputs: list[Any]) -> None:
        """The layer returned. Layers inside it were told before it."""

    def backward(self, path: str, call: int, where: Literal["input", "output"], index: int, gradient: Any) -> None:
        """The scaled loss's gradient with respect to one of the inputs or outputs, `index` being its place in the list.

        Outputs come before inputs, and later layers before earlier ones. An input's gradient is the part that flows
        through this layer; what the tensor gets elsewhere is not in it.
        """


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
    data = keras.tree.map_structure(_as_in_fit, data)
    record = _Record(model, loss_scale)
    with ExitStack() as stack:
        stack.enter_context(_put_back(model))
        stack.enter_context(_backend.gradient_fields_kept(model.variables))
        for holder in (model, step):
            stack.enter_context(_optimizers_replaced(holder, record))
        stack.enter_context(_attribute(model, "compute_loss", _recording_loss(model.compute_loss, record)))
        if observer is not None:
            for path, layer in (tapped_layers(model) if layers is None else layers).items():
                stack.enter_context(_attribute(layer, "call", _tapped(layer.call, path, observer)))
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
    data = keras.tree.map_structure(_as_in_fit, data)
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


def tap(tensor: Any, forward: Callable[[Any], None], backward: Callable[[Any], None]) -> Any:
    """`tensor`, whose value is handed to `forward` now, and its gradient to `backward` when it is known.

    Only the gradient of what is computed from the tensor that is returned counts: a tensor that is tapped twice gives
    two. What is no floating tensor with a value (an integer, what a compiler is tracing) is returned as it is.
    """
    tapped = _backend.tap(tensor, forward, backward)
    if tapped is not tensor and (mask := keras.src.backend.get_keras_mask(tensor)) is not None:
        keras.src.backend.set_keras_mask(tapped, mask)
    return tapped


def tapped_layers(model: Layer) -> dict[str, Layer]:
    """`path -> layer` of the layers that can be observed: all but those inside a layer that is one whole."""
    inside: set[int] = set()
    found = {}
    for path, layer in named_layers(model).items():
        if id(layer) not in inside:
            found[path] = layer
            if whole(layer):
                inside.update(map(id, named_layers(layer).values()))
    return found


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
        tap(loss, lambda value: setattr(record, "loss", value), _ignore)
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
        _, record.predictions = _Taps().on(predictions)
        loss = compute_loss(*args, **kwargs)
        tap(loss, lambda value: setattr(record, "loss", value), _ignore)
        return loss

    return recording


class _Taps:
    """Puts taps on the floating tensors of structures.

    Attributes:
        seen: the values of the tapped tensors, in order.
    """

    def __init__(self, backward: Callable[[int, Any], None] | None = None) -> None:
        self.seen: list[Any] = []
        self._backward = backward

    def on(self, structure: Any) -> tuple[Any, Any]:
        """The structure with each floating tensor tapped, and with the values of these: in JAX tensors hide them."""
        pairs = [self._tap(leaf) for leaf in keras.tree.flatten(structure)]
        tapped, values = ([pair[i] for pair in pairs] for i in (0, 1))
        return keras.tree.pack_sequence_as(structure, tapped), keras.tree.pack_sequence_as(structure, values)

    def _tap(self, leaf: Any) -> tuple[Any, Any]:
        index, backward = len(self.seen), self._backward
        tapped = tap(leaf, self.seen.append, _ignore if backward is None else functools.partial(backward, index))
        return tapped, self.seen[-1] if len(self.seen) > index else leaf


def _tapped(call: Callable[..., Any], path: str, observer: Observer) -> Callable[..., Any]:
    """A layer's `call`, with taps on what it gets and gives."""
    names = list(inspect.signature(call).parameters)
    calls = 0

    @functools.wraps(call)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        number = calls
        inputs, outputs = (
            _Taps(functools.partial(observer.backward, path, number, where)) for where in ("input", "output")
        )

        def on(name: str, argument: Any) -> tuple[Any, Any]:
            return (argument, argument) if name.endswith("mask") else inputs.on(argument)

        by_place = [on(name, argument) for name, argument in zip_longest(names[: len(args)], args, fillvalue="")]
        by_name = {name: on(name, argument) for name, argument in kwargs.items()}
        observer.arguments(path, number, tuple(v for _, v in by_place), {name: v for name, (_, v) in by_name.items()})
        result = call(*(t for t, _ in by_place), **{name: t for name, (t, _) in by_name.items()})
        result, _ = outputs.on(result)
        if inputs.seen or outputs.seen:
            calls = number + 1
            observer.forward(path, number, inputs.seen, outputs.seen)
        return result

    return tapped


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block the object itself has the attribute, past what its class does when attributes are set."""
    before = vars(owner).get(name, _ABSENT)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


@contextmanager
def _optimizers_replaced(holder: Any, record: _Record) -> Iterator[None]:
    """A step may use several optimizers (a GAN's), so all that the holder has are replaced."""
    own = vars(holder) if hasattr(holder, "__dict__") else {}
    with ExitStack() as stack:
        for name, value in list(own.items()):
            if name == "optimizer" or isinstance(value, keras.optimizers.Optimizer):
                stack.enter_context(_attribute(holder, name, _StandIn(value, record)))
        yield


@contextmanager
def _put_back(model: keras.Model) -> Iterator[None]:
    """Puts back what a step changes besides the weights."""
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    variables = [*model.non_trainable_variables, *model.metrics_variables, *([] if seeds is None else [seeds.state])]
    put_back = _backend.keep(variables)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        put_back()
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if seeds is None:  # made meanwhile from Python's generator: the next one will be the same
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)


def _as_in_fit(array: Any) -> Any:
    """A tensor of a numpy array of numbers; `fit` makes floating ones of Keras' default precision."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
        return array
    return keras.ops.convert_to_tensor(array, dtype=keras.config.floatx() if array.dtype.kind == "f" else None)


def _ignore(_gradient: Any) -> None:
    pass


_ABSENT = object()
