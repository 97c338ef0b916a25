"""Lets somebody see every operation that runs: Keras', the backend's own, and operators between tensors.

Keras looks its operations up when it calls them (`backend.numpy.matmul`), and so does most code (`ops.exp`,
`tf.math.exp`, `jnp.exp`). So the functions of these modules are replaced for a while, and the methods behind `x * y`.
On torch a `TorchFunctionMode` sees operators, functions and methods alike. Layers are seen through `Layer.__call__`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import keras

__all__ = ["Seen", "operations_seen"]

Seen = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called as `seen(name, function, args, kwargs)` in place of `function(*args, **kwargs)`."""

_KERAS = (
    *("keras.ops", "keras.ops.image", "keras.ops.linalg", "keras.ops.nn", "keras.ops.numpy"),
    *(f"keras.src.ops{part}" for part in ("", ".core", ".image", ".linalg", ".math", ".nn", ".numpy")),
)
_BACKENDS = ("", ".core", ".image", ".linalg", ".math", ".nn", ".numpy", ".random")
_FRAMEWORKS = {
    "tensorflow": ("tensorflow", "tensorflow.math", "tensorflow.nn", "tensorflow.linalg"),
    "jax": ("jax.numpy", "jax.numpy.linalg", "jax.nn", "jax.lax", "jax.scipy.special"),
    "torch": (),
}

_NO_OPERATIONS = frozenset({"convert_to_numpy", "is_tensor", "name_scope", "device_scope", "shape"})

_OPERATORS = {
    **{f"__{side}add__": "add" for side in ("", "r")},
    **{f"__{side}sub__": "subtract" for side in ("", "r")},
    **{f"__{side}mul__": "multiply" for side in ("", "r")},
    **{f"__{side}truediv__": "divide" for side in ("", "r")},
    **{f"__{side}pow__": "power" for side in ("", "r")},
    **{f"__{side}matmul__": "matmul" for side in ("", "r")},
    "__neg__": "negative",
    "__abs__": "absolute",
    "__getitem__": "getitem",
}
_KERAS_NAMES = {
    **dict.fromkeys(("convert_to_tensor", "to", "half", "float", "bfloat16"), "cast"),
    **dict.fromkeys(("true_divide", "truediv", "div"), "divide"),
    **dict.fromkeys(("sub", "rsub"), "subtract"),
    "abs": "absolute",
    "mul": "multiply",
    "neg": "negative",
    "pow": "power",
    "reduce_logsumexp": "logsumexp",
    "reduce_max": "max",
    "reduce_mean": "mean",
    "reduce_sum": "sum",
}
"""Other spellings of operations, and what Keras calls them."""


@contextmanager
def operations_seen(seen: Seen, layer_seen: Seen, unseen: Seen) -> Iterator[None]:
    """Within the block operations run through `seen`, calls of layers through `layer_seen`, and what computes gradients
    through `unseen`.
    """
    with ExitStack() as stack:
        replaced = _Replaced()
        stack.callback(replaced.put_back)
        operands = _operand_classes()
        for module, names in _functions():
            for name in names:
                replaced.function(module, name, seen)
        for cls in operands:
            for method, name in _OPERATORS.items():
                if method in vars(cls):
                    replaced.method(cls, method, name, seen)
        replaced.method(keras.Layer, "__call__", "call", layer_seen)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            replaced.method(tf.GradientTape, "gradient", "gradient", unseen)
        stack.enter_context(_torch_functions_seen(seen, unseen))
        yield


class _Replaced:
    """Attributes of modules and classes that were replaced, and what stood there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._stand_ins: dict[int, _Function] = {}

    def function(self, module: ModuleType, name: str, seen: Seen) -> None:
        """Replaces a module's function; one that several modules hold becomes the same one in all of them."""
        function = getattr(module, name)
        stand_in = self._stand_ins.setdefault(id(function), _Function(_KERAS_NAMES.get(name, name), function, seen))
        self._set(module, name, stand_in)

    def method(self, cls: type, method: str, name: str, seen: Seen) -> None:
        """Replaces a method that the class defines itself."""
        function = vars(cls)[method]

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return seen(name, function, args, kwargs)

        self._set(cls, method, stand_in)

    def put_back(self) -> None:
        """Puts everything back."""
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)


class _Function:
    """Stands in for a function, which may have attributes: `jnp.add.at`."""

    def __init__(self, name: str, function: Callable[..., Any], seen: Seen) -> None:
        self._name, self._function, self._seen = name, function, seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # one that is handed to another is taken back: jax.lax.reduce_window knows lax.max by its identity
        args = tuple(arg._function if type(arg) is _Function else arg for arg in args)
        return self._seen(self._name, self._function, args, kwargs)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._function, attribute)


def _functions() -> Iterator[tuple[ModuleType, list[str]]]:
    backend = keras.backend.backend()
    own = ("keras.src.ops.", f"keras.src.backend.{backend}.")
    in_keras = (*_KERAS, "keras.src.backend", *(f"keras.src.backend.{backend}{part}" for part in _BACKENDS))
    for name in (*in_keras, *_FRAMEWORKS[backend]):
        module = sys.modules.get(name) or _attribute(name)
        if module is None:
            continue
        of_keras = name.startswith("keras")
        yield (
            module,
            [
                key
                for key, value in vars(module).items()
                if _is_function(key, value) and (not of_keras or f"{getattr(value, '__module__', '')}.".startswith(own))
            ],
        )


def _attribute(name: str) -> ModuleType | None:
    """A module that is known as an attribute of another one only, such as `tf.math`."""
    package, _, part = name.partition(".")
    return getattr(sys.modules.get(package), part, None)


def _is_function(name: str, value: Any) -> bool:
    public = not name.startswith("_") and name not in _NO_OPERATIONS
    return public and not issubclass(type(value), type | ModuleType) and callable(value)


def _operand_classes() -> tuple[type, ...]:
    """The classes whose methods are the operators between tensors."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return (tf.Tensor,)
    if backend == "jax":
        import jax

        return (type(jax.numpy.zeros(())), jax.core.Tracer)
    return ()


def _torch_functions_seen(seen: Seen, unseen: Seen) -> AbstractContextManager[Any]:
    if keras.backend.backend() != "torch":
        return nullcontext()
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = getattr(function, "__name__", "")
            name = _OPERATORS.get(name, _KERAS_NAMES.get(name, name))
            hidden = not name or name.endswith("_") or name in ("backward", "retain_grad")  # in place, or no operation
            return (unseen if hidden else seen)(name, function, args, kwargs or {})

    return Mode()
