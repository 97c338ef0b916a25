"""`MixedPrecision`: the front door for whoever writes the training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfwise.core.diagnosis import Incident
from halfwise.core.objective import Objective
from halfwise.core.options import as_policy, check_options, plan_of_policy
from halfwise.core.plan import Plan
from halfwise.core.policy import disabled
from halfwise.core.profile import Profile
from halfwise.core.timing import TimingTable
from halfwise.errors import TrainingStopped, UsageError
from halfwise.torch import state
from halfwise.torch.closure import Closure, as_closures, check_replayed, split_loss
from halfwise.torch.closure_optimizers import step_inside_optimizer
from halfwise.torch.engine import Engine
from halfwise.torch.names import unwrap
from halfwise.torch.result import StepResult
from halfwise.torch.validate import as_optimizers, check_max_norm, check_model

__all__ = ["MixedPrecision"]

_LOG = logging.getLogger("halfwise")

_wrappings: WeakKeyDictionary[nn.Module, ref[MixedPrecision]] = WeakKeyDictionary()


class MixedPrecision:
    """Trains `model` in mixed precision, under guard.

    One step: zero gradients, run the closure in the precision region, scale, backward, unscale, check, clip,
    step or skip, update the loss scale.

    Args:
        model: the module to train, parameters in float32; compiled and data-parallel wrappers are seen through.
            Wrapping a model that is already wrapped replaces the old wrapping.
        optimizer: one optimizer, or a sequence; all of them step, or none.
        policy: `"auto"` (evidence from the first steps, which train in float32 meanwhile, then a plan),
            `"mixed_float16"`, `"mixed_bfloat16"`, `"float32"`, a `Plan`, or the path of a plan file.
        guard: True may change precision to heal a run, and says so; `"report"` diagnoses and never changes precision or
            stops; False is plain mixed precision with a bounded loss scale.
        tolerance: share of training's own noise that rounding may add under `"auto"`: of the loss's spread over batches
            for all layers together, of the variance of each layer's gradients; default a tenth.
        objective: what `"auto"` saves: `"time"`, `"memory"` (what is kept for the backward pass), or `"balanced"`.
        log: called with each message; default the logger `"halfwise"`.
        timing: seconds per layer and format for `"auto"`; default None measures them on this device.

    Raises:
        UsageError: something cannot be used as given; its subclasses PolicyError and PlanError for policies and plans.

    Environment: `HALFWISE_DISABLE=1` turns everything into plain float32 training.

    Source: the order of the parts is that of Micikevicius et al., "Mixed Precision Training",
    arXiv 1710.03740, section 3.

    Example:
        >>> import torch, halfwise.torch as hw
        >>> model = torch.nn.Linear(4, 2)
        >>> mp = hw.MixedPrecision(model, torch.optim.Adam(model.parameters()), policy="mixed_bfloat16")
        >>> x, y = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
        >>> result = mp.step(lambda: torch.nn.functional.cross_entropy(model(x), y), clip_grad_norm=1.0)
        >>> result.applied
        True
        >>> mp.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        policy: str | Plan | PathLike[str] = "auto",
        *,
        guard: bool | Literal["report"] = True,
        tolerance: float = 0.1,
        objective: Objective = "time",
        log: Callable[[str], None] | None = None,
        timing: TimingTable | None = None,
    ) -> None:
        check_options(guard=guard, tolerance=tolerance, objective=objective, timing=timing, log=log)
        optimizers = as_optimizers(optimizer)
        check_model(model, optimizers)
        name, plan = _name_and_plan(policy, model)
        if disabled():
            name, plan, guard = "float32", Plan.manual(), False
        self._policy = name
        self._closed = False
        self._stepping = False
        self._replay_checked = not guard
        self._engine: Engine
        _take_over(model, self)
        self._engine = Engine(
            model,
            optimizers,
            plan,
            guard=guard,
            tolerance=tolerance,
            objective=objective,
            timing=timing,
            log=log or _LOG.warning,
            unchecked=disabled(),
        )

    def __repr__(self) -> str:
        plan = "gathering evidence" if self.plan is None else self.plan.default.compute
        return (
            f"MixedPrecision(policy={self._policy!r}, {plan}, loss_scale={self.loss_scale:g}, "
            f"steps={self.steps}, skipped_steps={self.skipped_steps}, incidents={len(self.incidents)})"
        )

    # What it knows

    @property
    def policy(self) -> str:
        """The policy's name; `"plan"` where a plan was given."""
        return self._policy

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while `"auto"` still gathers evidence."""
        return self._engine.plan

    @property
    def profile(self) -> Profile | None:
        """Exponent histograms: the evidence of `"auto"`; weights and their gradients anew every 100 steps.

        None before.
        """
        return self._engine.profile

    @property
    def timing(self) -> TimingTable | None:
        """The timing table that `"auto"` decided from, or None."""
        return self._engine.timing

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What the guard healed, reported or stopped, in order."""
        return tuple(self._engine.incidents)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1.0 where none is used."""
        return self._engine.loss_scale

    @property
    def steps(self) -> int:
        """How many steps there were, the skipped ones included."""
        return self._engine.steps

    @property
    def skipped_steps(self) -> int:
        """How many of the steps were skipped."""
        return self._engine.skipped_steps

    # A whole step

    def step(self, closure: Closure | Sequence[Closure], *, clip_grad_norm: float | None = None) -> StepResult:
        """One training step. Afterwards the gradients are readable and unscaled.

        Args:
            closure: runs forward and returns the loss, or `(loss, anything)`. On trouble it is run again on the same
                batch, so the batch must be drawn outside; in the first step it is run twice to make sure. A list
                accumulates: the loss is the mean over its closures, and on a retry all of them are run again.
            clip_grad_norm: largest 2-norm over all gradients (unscaled); None does not clip.

        Raises:
            UsageError: the closure returns no loss, draws a new batch at each call, or reaches
                no parameter of the optimizer.
            TrainingStopped: the guard gave up. Weights, optimizer and buffers are those of the last applied step.
        """
        self._check_open()
        closures = as_closures(closure)
        check_max_norm(clip_grad_norm)
        engine = self._engine
        if self._stepping:
            raise UsageError("step() was called inside a closure of step(); call it once per batch, outside")
        self._stepping = True
        try:
            expected = None if self._replay_checked else engine.rehearsed_loss(closures)
            if engine.steps_in_optimizer:
                result = step_inside_optimizer(engine, closures, clip_grad_norm, expected)
            else:
                engine.begin()
                engine.clear_gradients()
                attempt = engine.attempt(closures, may_step=expected is None, max_norm=clip_grad_norm)
                if expected is not None:
                    check_replayed(expected, attempt.loss_value)
                result = engine.finish(attempt, closures, clip_grad_norm)
        except TrainingStopped:
            engine.stopped()
            raise
        except BaseException:
            engine.abandon()
            raise
        finally:
            self._stepping = False
        self._replay_checked = True
        return result

    # The parts of a step

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision region, for forward pass and loss, or for evaluation (under `torch.no_grad()`)."""
        self._check_open()
        engine = self._engine
        training = torch.is_grad_enabled() and (engine.model.training or engine.armed)
        if training and engine.begun is None:
            engine.begin(may_trace=True)
        try:
            with engine.observing() if training else nullcontext(), engine.region():
                yield
        except BaseException:
            if not self._stepping:
                engine.abandon()
            raise

    def backward(self, loss: Tensor) -> None:
        """Scales the loss and goes backward; the gradients of several calls add up.

        Raises:
            UsageError: `loss` is no loss, or this step's gradients are unscaled already.
        """
        self._check_open()
        begun = self._engine.begun
        if begun is not None and begun.unscaled is not None:
            raise UsageError(
                "backward() after unscale_() or clip_grad_norm_() in one step would add scaled to unscaled gradients; "
                "call backward() for all losses first, then clip_grad_norm_(), then optimizer_step()"
            )
        loss, _ = split_loss(loss)
        try:
            self._engine.backward(loss)
        except BaseException:
            self._engine.abandon()
            raise

    def unscale_(self) -> None:
        """Divides the gradients by the loss scale, once per step, however often it is called."""
        self._check_begun("unscale_")
        self._engine.unscale()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the unscaled gradients to a 2-norm of at most `max_norm`.

        Returns the norm before as a float32 scalar.
        """
        self._check_begun("clip_grad_norm_")
        check_max_norm(max_norm)
        return self._engine.clip(max_norm)

    def optimizer_step(self) -> StepResult:
        """Checks the gradients, steps or skips, updates the loss scale.

        Without a closure the batch cannot be tried again: on trouble the step is skipped, and
        the following one is traced.

        Raises:
            UsageError: no gradients, or no `backward()` before.
            TrainingStopped: the guard gave up.
        """
        self._check_begun("optimizer_step")
        try:
            return self._engine.finish(self._engine.measured(None, may_step=True), None, None)
        except TrainingStopped:
            self._engine.stopped()
            raise
        except BaseException:
            self._engine.abandon()
            raise

    def zero_grad(self) -> None:
        """Sets the gradients to None; a step that went backward already is forgotten."""
        self._check_open()
        self._engine.clear_gradients()
        if self._engine.begun is not None and self._engine.begun.losses:
            self._engine.forget()

    # Keeping and ending

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs besides model and optimizer.

        Loss scale (under GradScaler's keys), plan, guard, incidents, counters, generators.
        Nested dicts and lists of tensors, numbers, strings and None.
        """
        return state.state_dict(self._engine, self._policy)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, or the state dict of a `torch.amp.GradScaler` (its scale and settings).

        Raises:
            UsageError: it is neither; PlanError: its plan does not fit the model.
        """
        self._check_open()
        self._policy = state.load_state_dict(self._engine, saved) or self._policy

    def close(self) -> None:
        """Restores the model exactly. Doing so twice is harmless."""
        if not self._closed:
            self._closed = True
            self._engine.close()
            if (entry := _wrappings.get(unwrap(self._engine.model))) is not None and entry() is self:
                del _wrappings[unwrap(self._engine.model)]

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(
                "this MixedPrecision is closed (by close(), by leaving its with block, "
                "or because the model was wrapped again); make a new one"
            )

    def _check_begun(self, call: str) -> None:
        self._check_open()
        if self._engine.begun is None or not self._engine.begun.losses:
            raise UsageError(f"{call}() without gradients; call mp.backward(loss) before it in each step")


def _name_and_plan(policy: str | Plan | PathLike[str], model: nn.Module) -> tuple[str, Plan | None]:
    """The policy's name, and its plan: None for `"auto"`, which makes one later."""
    wanted = as_policy(policy)
    if isinstance(wanted, Plan):
        return "plan", wanted
    if wanted == "auto":
        return wanted, None
    return wanted, plan_of_policy(wanted, framework="torch", model=type(unwrap(model)).__name__)


def _take_over(model: nn.Module, wrapping: MixedPrecision) -> None:
    """Makes `wrapping` the model's one wrapping."""
    plain = unwrap(model)
    earlier = _wrappings.get(plain)
    if earlier is not None and (old := earlier()) is not None:
        old.close()
    _wrappings[plain] = ref(wrapping)
