"""The machinery of one training under `MixedPrecision`.

It tries a batch, judges it, applies or skips it, changes the plan.

`mixed_precision.py` is what users call; `core/healing.py` is what happens after a failure that skipping cannot cure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfwise.core.demotion import demoted
from halfwise.core.diagnosis import Diagnosis, Incident, Suspect
from halfwise.core.guard import GuardState
from halfwise.core.healing import heal, judge
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.objective import Objective
from halfwise.core.plan import REASONS, Plan
from halfwise.core.profile import Profile
from halfwise.core.timing import TimingTable
from halfwise.errors import UsageError
from halfwise.torch.apply import AppliedPlan
from halfwise.torch.attempt import Attempt, Begun
from halfwise.torch.closure import Closure, split_loss
from halfwise.torch.closure_optimizers import needs_closure
from halfwise.torch.demote import ModuleTree
from halfwise.torch.evidence import Evidence, WholeStep
from halfwise.torch.gradients import Gradients
from halfwise.torch.healing import fix_lines, heal_later_steps
from halfwise.torch.localise import localise
from halfwise.torch.loss_scale import LossScale
from halfwise.torch.profile import profile_parameters
from halfwise.torch.region import device_type_of, region
from halfwise.torch.result import StepResult
from halfwise.torch.snapshot import BufferCopies, RandomState, devices_of, rehearsal
from halfwise.torch.suppress import can_suppress, step_unless_unsound
from halfwise.torch.tracing.armed import ArmedTrace

__all__ = ["Engine"]

_MANY_SKIPS = 20  # more than the loss scale's whole way down takes
_SAMPLE_EVERY = 100  # steps between two looks at weights and weight gradients


class Engine:
    """See `MixedPrecision` for the arguments; `unchecked` applies every step, as a plain loop does.

    Attributes:
        plan: the plan in force; None while evidence is gathered (everything is in float32 then).
        guard_state: the guard's memory.
        begun: the step under way, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan | None,
        *,
        guard: bool | Literal["report"],
        tolerance: float,
        objective: Objective,
        timing: TimingTable | None,
        log: Callable[[str], None],
        unchecked: bool = False,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.guard = guard
        self.unchecked = unchecked
        self.log = log
        self.device_type = device_type_of(model)
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.timing = timing
        self.incidents: list[Incident] = []
        self.guard_state = GuardState()
        self.steps = 0
        self._told_what_never_ran = False
        self.skipped_steps = 0
        self._skips_in_a_row = 0
        self.begun: Begun | None = None
        self.scale = LossScale(LossScaleSettings())
        self.evidence: Evidence | None = None
        on_device = self.device_type == "cuda"  # a CPU has nothing to wait for
        self.suppresses = on_device and not unchecked and can_suppress(self.optimizers)
        self.steps_in_optimizer = any(needs_closure(optimizer) for optimizer in self.optimizers)
        self.armed = False  # the next step without a closure is to be traced
        self._trace: ArmedTrace | None = None
        self._drawn: frozenset[str] = frozenset()  # what the closure draws from besides torch, seen in its rehearsal
        self._buffers = BufferCopies(model)
        self.devices = devices_of(model)
        trained = {id(p) for p in self.trained()}
        self._untrained = [p for p in model.parameters() if id(p) not in trained]
        self._applied = AppliedPlan(model, plan or Plan.manual(), whole_model=False)
        if plan is None:
            self.evidence = Evidence(model, tolerance=tolerance, timing=timing, objective=objective)
        else:
            self.use_plan(plan)

    # Precision

    @property
    def compute(self) -> str:
        """The format of the region around forward pass and loss."""
        return self.plan.default.compute if self.plan is not None else "float32"

    @property
    def scaled(self) -> bool:
        """True where the loss is scaled, because something computes in float16."""
        return self.plan is not None and self.plan.uses("float16")

    @property
    def loss_scale(self) -> float:
        """The loss scale in force; 1 where none is used."""
        return self.scale.value if self.scaled else 1.0

    @property
    def at_floor(self) -> bool:
        """True where the loss scale can go no lower."""
        return self.scale.at_floor

    def region(self) -> AbstractContextManager[object]:
        """The precision region."""
        return region(self.device_type, self.compute)

    def use_plan(self, plan: Plan) -> None:
        """Puts `plan` in force in place of the present one. A loss scale that is in use stays where it stands."""
        was_scaled = self.scaled
        self._applied.remove()
        self._applied = AppliedPlan(self.model, plan, whole_model=False)
        self.plan = plan
        self.evidence = None
        if plan.loss_scale is not None and not was_scaled:
            self.scale = LossScale(plan.loss_scale)

    def demoted(self, plan: Plan, suspect: Suspect) -> Plan:
        """`plan` with the suspect's own code in float32."""
        return demoted(plan, suspect, ModuleTree(self.model))

    def close(self) -> None:
        """Restores the model."""
        self.forget()
        self._applied.remove()
        self.evidence = None

    # One step

    def begin(self, *, may_trace: bool = False) -> Begun:
        """Starts a step, keeping what would have to be put back; traces it where that was asked for and `may_trace`."""
        self._buffers.save()
        if may_trace and self.armed and ArmedTrace.possible():
            self._trace = ArmedTrace(self.model)
            self.armed = False
        torch.clear_autocast_cache()  # inside a region of the caller's own it would keep casts of earlier weights
        self.begun = Begun(RandomState(self.devices, self._drawn))
        return self.begun

    def attempt(
        self, closures: tuple[Closure, ...], *, may_step: bool = False, max_norm: float | None = None
    ) -> Attempt:
        """Forward, backward and unscaling of one batch, from cleared gradients; see `measured` for `may_step`."""
        outputs = []
        with self.observing():
            for index, closure in enumerate(closures):
                with self._no_sync(last=index == len(closures) - 1):
                    with self.region():
                        loss, output = split_loss(closure())
                    self.backward(loss / len(closures) if len(closures) > 1 else loss)
                outputs.append(output)
        output = outputs[0] if len(outputs) == 1 else outputs
        return self.measured(output, may_step=may_step, max_norm=max_norm)

    def attempt_again(self, closures: tuple[Closure, ...]) -> Attempt:
        """The same batch once more, from the same generators, buffers and cleared gradients."""
        self.rewind()
        return self.attempt(closures)

    def rewind(self) -> None:
        """Back to the beginning of the step: buffers, generators, no gradients."""
        self._buffers.restore()
        self.clear_gradients()
        if self.begun is not None:
            self.begun.random_state.restore()
            self.begun.clear()

    def backward(self, loss: Tensor) -> None:
        """Scales the loss and goes backward."""
        begun = self.begun or self.begin()
        begun.losses.append(loss.detach())
        if self._trace is not None:
            self._trace.saw(loss)
        (self.scale.scaled(loss) if self.scaled else loss).backward()

    def unscale(self) -> tuple[Gradients, Tensor]:
        """Unscales and measures the gradients, once per step; returns them and their norm."""
        begun = self.begun or self.begin()
        if begun.unscaled is None:
            if self._trace is not None:
                parameters = list(self.trained())
                begun.diagnosis = self._trace.finish(parameters, loss_scale=self.loss_scale, device=self.device_type)
                self._trace = None
            gradients = Gradients(self.trained())
            if self.scaled:
                gradients.unscale_(self.scale.value)
            if self.evidence is not None:
                self.evidence.record_gradients()
            begun.unscaled = gradients, gradients.norm()
        return begun.unscaled

    def clip(self, max_norm: float) -> Tensor:
        """Clips the unscaled gradients; returns their norm before."""
        gradients, norm = self.unscale()
        gradients.clip_(norm, max_norm)
        return norm

    def measured(self, output: Any, *, may_step: bool = False, max_norm: float | None = None) -> Attempt:
        """What came out, read from the device once.

        Where the step `may_step` and the device can leave it out by itself, the optimizers' step is queued before the
        host waits for the numbers.
        """
        begun = self.begun or self.begin()
        gradients, norm = self.unscale()
        if not gradients.groups:
            raise UsageError(
                "no parameter of the optimizer got a gradient; "
                "call backward on a loss that is computed from the parameters that the optimizer was made from"
            )
        loss = begun.losses[0] if len(begun.losses) == 1 else torch.stack([x.reshape(()) for x in begun.losses]).sum()
        loss = loss.reshape(())
        numbers = torch.stack((norm.float(), loss.to(norm.device, torch.float32)))
        if may_step and self.suppresses:
            if max_norm is not None:
                self.clip(max_norm)
            step_unless_unsound(self.optimizers, *numbers)
            begun.stepped = True
        norm_value, loss_value = numbers.tolist()
        return Attempt(loss, output, loss_value, norm_value, unchecked=self.unchecked)

    def finish(self, attempt: Attempt, closures: tuple[Closure, ...] | None, max_norm: float | None) -> StepResult:
        """Applies or skips the step, after healing where the guard can, and ends it."""
        incident, retries = None, 0
        if judge(self, attempt) == "localise":
            if closures is not None:
                attempt, incident, retries = heal(self, closures, attempt)
            else:
                incident = heal_later_steps(self, self.begun.diagnosis if self.begun is not None else None)
        used_scale = self.loss_scale
        if attempt.sound:
            if self.begun is None or not self.begun.stepped:
                if max_norm is not None:
                    self.clip(max_norm)
                for optimizer in self.optimizers:
                    optimizer.step()
            self.applied(attempt)
        return self.ended(attempt, used_scale, incident, retries, closures)

    def ended(
        self,
        attempt: Attempt,
        used_scale: float,
        incident: Incident | None,
        retries: int,
        closures: tuple[Closure, ...] | None,
    ) -> StepResult:
        """Counts the step, moves the loss scale, and makes the plan where enough evidence was seen."""
        self._skips_in_a_row = 0 if attempt.sound else self._skips_in_a_row + 1
        if self._skips_in_a_row == _MANY_SKIPS and not self.guard:
            self.log(f"{_MANY_SKIPS} steps in a row were skipped; guard=True or hw.diagnose(model, closure) says why")
        if not attempt.sound:
            self._buffers.restore()
            self.skipped_steps += 1
            if self.evidence is not None:
                self.evidence.drop_step()
        if self.scaled:
            self.scale.update(not attempt.sound)
        self.steps += 1
        self.begun = None
        self._say_what_never_ran()
        if self.evidence is not None and self.evidence.complete:
            self._decide(self.evidence, closures)
        return StepResult(
            loss=attempt.loss,
            output=attempt.output,
            applied=attempt.sound,
            loss_scale=used_scale,
            grad_norm=attempt.norm_value,
            incident=incident,
            retries=retries,
        )

    def _say_what_never_ran(self) -> None:
        """After the first step under a plan: rules without effect, such as one for a child that is never called."""
        if self.plan is None or self._told_what_never_ran:
            return
        self._told_what_never_ran = True
        if idle := self._applied.never_ran():
            names = ", ".join(map(repr, idle[:5])) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
            self.log(f"the plan's rules for {names} had no effect: these modules' forward was not called in this step")

    def localise(self, closures: tuple[Closure, ...]) -> Diagnosis:
        """Looks for the culprit by replays of the batch from the beginning of the step."""
        self.rewind()

        def full() -> AbstractContextManager[object]:
            stack = ExitStack()
            stack.enter_context(self._applied.suspended())
            stack.enter_context(region(self.device_type, "float32"))
            return stack

        half = next(
            (name for name in ("float16", "bfloat16") if self.plan is not None and self.plan.uses(name)), "float32"
        )
        return localise(self.model, closures, half=self.region, full=full, half_format=half, loss_scale=self.loss_scale)

    def record(self, incident: Incident) -> Incident:
        """Keeps an incident and says it; one that only repeats an earlier one is kept and not said again."""
        if incident.same_as not in {earlier.same_as for earlier in self.incidents}:
            self.log(f"step {incident.step}, {incident.kind}: {incident.text}")
        self.incidents.append(incident)
        return incident

    def fix(self, modules: Sequence[str], *, done: bool) -> tuple[str, ...]:
        """Lines to paste: how to train with `modules` in float32."""
        return fix_lines(modules, compute=self.compute, done=done)

    def trained(self) -> Iterable[Tensor]:
        """The parameters of the optimizers, each once."""
        everything = (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])
        return everything if len(self.optimizers) == 1 else {id(p): p for p in everything}.values()

    def clear_gradients(self) -> None:
        """Sets all gradients to None, also those of parameters that no optimizer trains."""
        for parameter in self.trained():
            parameter.grad = None
        for parameter in self._untrained:
            parameter.grad = None

    def rehearsed_loss(self, closures: tuple[Closure, ...]) -> float:
        """The mean loss of the batch, computed without leaving a trace."""
        with rehearsal(self.model), self.region():
            before = RandomState(self.devices)
            losses = [split_loss(closure())[0].detach().float().reshape(()) for closure in closures]
            self._drawn = before.hosts_drawn_since()
        if self.evidence is not None:
            self.evidence.drop_step()  # a closure that enters the region itself was observed
        return float(torch.stack(losses).mean())

    def abandon(self) -> None:
        """After an exception: as if the step had not begun."""
        if self.begun is not None:
            self.rewind()
            self.forget()

    def forget(self) -> None:
        """Ends a step that was begun without applying or counting it."""
        self.begun, trace, self._trace = None, self._trace, None
        if trace is not None:
            trace.abandon()
            self.armed = True

    def stopped(self) -> None:
        """After the guard gave up: the step was skipped.

        Whoever catches the error may go on with the next batch.
        """
        self.abandon()
        self.steps += 1
        self.skipped_steps += 1
        if self.scaled:
            self.scale.update(True)

    def observing(self) -> AbstractContextManager[object]:
        """Around a forward pass, so that it yields evidence where some is wanted."""
        return self.evidence.observing() if self.evidence is not None else nullcontext()

    def applied(self, attempt: Attempt) -> None:
        """After the optimizers stepped: the guard's memory, and a look at the numbers where it is time."""
        self.guard_state = GuardState(settled=True)
        if self.evidence is not None:
            self.evidence.add_step(attempt.loss_value)
        elif self.guard and (self.steps + 1) % _SAMPLE_EVERY == 0:
            sampled = profile_parameters(self.model)
            earlier = self.profile.histograms if self.profile is not None else {}
            self.profile = Profile({**earlier, **sampled.histograms})

    def _decide(self, evidence: Evidence, closures: tuple[Closure, ...] | None) -> None:
        plan = evidence.plan(WholeStep(self.model, closures) if closures is not None else None)
        self.profile, self.timing = evidence.profile, evidence.timing
        self.use_plan(plan)
        half = sum(rule.compute != "float32" for rule in plan.layers)
        what = f"{plan.default.compute}, in {half} of {len(plan.layers)} layers" if half else "float32"
        self.log(f'"auto" chose {what}: {REASONS[plan.default.reason]} ({plan.default.detail})')

    def _no_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """Under data parallelism gradients are reduced after the last closure only."""
        if last or not isinstance(self.model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()
