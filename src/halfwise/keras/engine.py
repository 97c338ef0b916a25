"""The machinery of one training under a guard: runs a batch, judges it, heals, changes the plan.

`guard.py` (the callback of `fit`) and `step.py` (loops of the user's own) are what users call; `core/healing.py` is
what happens after a failure that skipping cannot cure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras

from halfwise.core.demotion import demoted, float32_everywhere
from halfwise.core.diagnosis import Diagnosis, Incident, Suspect
from halfwise.core.guard import LARGEST_NORM, GuardState
from halfwise.core.healing import heal, judge
from halfwise.core.loss_scale import LossScaleState, initial_state, update
from halfwise.core.objective import Objective
from halfwise.core.plan import REASONS, Plan
from halfwise.core.profile import Profile
from halfwise.core.timing import TimingTable
from halfwise.errors import TrainingStopped, UsageError
from halfwise.keras.apply import AppliedPlan, applied_plan, forget_compiled_code
from halfwise.keras.evidence import Evidence, set_by_hand
from halfwise.keras.execution import Execution, LoopExecution
from halfwise.keras.guarded_step import BEFORE, VITALS, Step, Vitals, read_vitals
from halfwise.keras.heads import half_heads, half_heads_text
from halfwise.keras.localise import localise
from halfwise.keras.loss_scale import LossScaleOptimizer
from halfwise.keras.names import children, named_layers, whole
from halfwise.keras.optimizer import UNSCALED, scale_settings, set_optimizer
from halfwise.keras.result import StepResult

__all__ = ["Engine"]

_LOG = logging.getLogger("halfwise")
_UNTOUCHED = -1.0  # no norm of a gradient
_MANY_SKIPS = 20  # more than the loss scale's whole way down takes
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class _Attempt:
    """One try at a batch."""

    vitals: Vitals

    @property
    def loss_finite(self) -> bool:
        return math.isfinite(self.vitals.loss)

    @property
    def gradients_sound(self) -> bool:
        return self.vitals.grad_norm <= LARGEST_NORM  # False for NaN

    @property
    def sound(self) -> bool:
        return self.gradients_sound  # the gradients of a loss that is not finite never are


class Engine:
    """A patient of `core/healing.py`.

    Args:
        model: built and compiled, or built and trained by a step of its own.
        optimizer: the one that the step goes through.
        execution: runs the steps.
        plan: the plan to train under; None to gather evidence first.
        in_force: the plan is what the layers' own policies say already.
        undecided: `path -> policy` that layers held before the training began, as marks that they are to be decided on.
        guard, tolerance, objective, timing, log: see `PrecisionGuard`.

    Attributes:
        plan: the plan in force; None while evidence is gathered (everything is in float32 then).
        state: what `fit` passes along on JAX; else None.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: LossScaleOptimizer,
        execution: Execution,
        plan: Plan | None,
        *,
        in_force: bool,
        undecided: Mapping[str, keras.DTypePolicy],
        guard: bool | Literal["report"],
        tolerance: float,
        objective: Objective,
        timing: TimingTable | None,
        log: Callable[[str], None],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.execution = execution
        self.guard = guard
        self.log = log
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.timing = timing
        self.incidents: list[Incident] = []
        self.guard_state = GuardState()
        self.steps = 0
        self.skipped_steps = 0
        self.scale = LossScaleState(scale=1.0)
        self.state: Any = None
        self.last: StepResult | None = None
        self._applied: AppliedPlan | None = None
        self._skips_in_a_row = 0
        self._applied_in_epoch = False
        self._logs: dict[str, Any] = {}
        self._before = self.scale
        self._batch: Any = None
        self._undecided = undecided
        self.evidence: Evidence | None = None
        if plan is None:
            by_hand = set_by_hand(model, undecided)
            self.evidence = Evidence(
                model, execution.step, tolerance=tolerance, timing=timing, by_hand=by_hand, objective=objective
            )
            self._settle()
        elif in_force:
            self.plan = plan
            self._settle()
        else:
            self.use_plan(plan)
        self._put(optimizer.gradient_norm, _UNTOUCHED)
        self._tell_half_heads()

    # Precision

    @property
    def scaled(self) -> bool:
        """True where the loss is scaled, because something computes in float16."""
        return self.plan is not None and self.plan.uses("float16")

    @property
    def at_floor(self) -> bool:
        """True where the loss scale can go no lower."""
        return self.scale.scale <= self.optimizer.settings.floor

    @property
    def loss_scale(self) -> float:
        """The loss scale in force; 1 where none is used."""
        return self.scale.scale if self.scaled else 1.0

    def use_plan(self, plan: Plan) -> None:
        """Puts `plan` in force in place of the present one. A loss scale that is in use stays where it stands."""
        earlier, self._applied = self._applied, AppliedPlan(self.model, plan, settle=False)
        if earlier is not None:
            earlier.remove()
        forget_compiled_code(self.model)
        self.plan, self.evidence = self._applied.plan, None
        self._settle()

    def use_step(self, step: Step) -> None:
        """Goes on with another training step, such as one with another loss, in a loop of the user's own."""
        step.optimizer = self.optimizer  # type: ignore[attr-defined]
        self.execution = LoopExecution(self.model, step)
        if self.evidence is not None:
            self.evidence.use_step(step)
        self.execution.compile(self.optimizer)

    def end_evidence(self, plan: Plan) -> None:
        """Goes on under `plan`, which is in force on the model already."""
        self.plan, self.evidence = plan, None
        self._settle()

    def epoch_begins(self) -> None:
        """The metrics begin anew."""
        self._applied_in_epoch = False

    def ended(self) -> None:
        """Training is over: where no plan was made, the layers are to be decided on again next time."""
        self.state = None
        if self.plan is None:
            layers = named_layers(self.model)
            for path, policy in self._undecided.items():
                layers[path]._dtype_policy = policy

    def go_on_from(self, earlier: Engine) -> None:
        """Counts on from an earlier training of the same guard."""
        self.incidents = [*earlier.incidents]
        self.steps, self.skipped_steps = earlier.steps, earlier.skipped_steps
        self.guard_state = earlier.guard_state
        if earlier.model is self.model:  # another model's evidence says nothing about this one
            self.profile = self.profile or earlier.profile
            self.timing = self.timing or earlier.timing

    def _settle(self) -> None:
        """Fits the loss scale and the compiled step to the plan."""
        settings = scale_settings(self.plan, self.optimizer) if self.plan is not None else UNSCALED
        if settings != self.optimizer.settings:
            self.optimizer.use(settings)
            if getattr(self.model, "optimizer", None) is self.optimizer:
                set_optimizer(self.model, self.optimizer)  # a file of the model is to name the optimizer as it now is
            self.put_scale(initial_state(settings))
        else:
            self.scale = self._scale_on_device()
        self.execution.compile(self.optimizer)

    def put_scale(self, scale: LossScaleState) -> None:
        """Sets the loss scale's variables."""
        self.scale = scale
        variables = (self.optimizer.dynamic_scale, self.optimizer.step_counter, self.optimizer.hysteresis_left)
        for variable, value in zip(variables, (scale.scale, scale.growth_tracker, scale.hysteresis_left), strict=True):
            self._put(variable, value)

    def _put(self, variable: keras.Variable, value: Any) -> None:
        if self.state is None:
            variable.assign(value)
            return
        groups = [list(group) for group in self.state]
        group, index = self._place(variable)
        groups[group][index] = keras.ops.cast(value, variable.dtype)
        self.state = tuple(groups)

    def _get(self, variable: keras.Variable) -> Any:
        if self.state is None or self.model._jax_state_synced:  # between two epochs the model has its variables
            return keras.ops.convert_to_numpy(variable)
        group, index = self._place(variable)
        return keras.ops.convert_to_numpy(self.state[group][index])

    def _place(self, variable: keras.Variable) -> tuple[int, int]:
        """Where the state that `fit` passes along on JAX has a variable."""
        for group, variables in ((1, self.model.non_trainable_variables), (2, self.optimizer.variables)):
            for index, candidate in enumerate(variables):
                if candidate is variable:
                    return group, index
        raise KeyError(variable.path)

    def seeds(self) -> dict[str, list[list[int]]]:
        """`path -> states` of the layers' random seeds, which Keras does not save."""
        return {path: [self._get(g.state).tolist() for g in found] for path, found in self._generators().items()}

    def put_seeds(self, seeds: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """The inverse of `seeds`."""
        for path, found in self._generators().items():
            for generator, value in zip(found, seeds.get(path, ()), strict=False):
                self._put(generator.state, value)

    def _generators(self) -> dict[str, list[Any]]:
        layers = named_layers(self.model)
        return {path: layer._seed_generators for path, layer in layers.items() if layer._seed_generators}

    def _scale_on_device(self) -> LossScaleState:
        optimizer = self.optimizer
        values = (optimizer.dynamic_scale, optimizer.step_counter, optimizer.hysteresis_left)
        scale, tracker, hysteresis = (float(self._get(value)) for value in values)
        return LossScaleState(scale=scale, growth_tracker=int(tracker), hysteresis_left=int(hysteresis))

    # One step

    def run(self, batch: Any, state: Any = None) -> tuple[dict[str, Any], Any]:
        """One training step on `batch`: `(logs, state)`, the logs with `loss_scale` and `skipped_steps`.

        Raises:
            TrainingStopped: the guard gave up. Weights and optimizer are those of the last applied step.
        """
        self.state = state
        if self.evidence is not None:
            self.evidence.observe(batch, state)
        attempt = self._attempt(batch)
        incident, retries = None, 0
        if judge(self, attempt) == "localise":
            try:
                attempt, incident, retries = heal(self, self._batch, attempt)
            except TrainingStopped:
                self._ended(attempt, None, retries)
                raise
            if self.scaled:
                self.put_scale(update(self.optimizer.settings, self._before, not attempt.sound))
        used_scale = self._before.scale if self.scaled else 1.0
        self._ended(attempt, incident, retries, used_scale)
        if self.evidence is not None and self.evidence.complete:
            self._decide(self.evidence, self._batch)
        logs = self._logs if attempt.sound else {**self._logs, **self._metrics()}
        return {**logs, "loss_scale": self.loss_scale, "skipped_steps": self.skipped_steps}, self.state

    def _attempt(self, batch: Any) -> _Attempt:
        logs, self.state, self._batch = self.execution.run(batch, self.state)
        vitals = read_vitals(logs.pop(VITALS))
        if vitals.grad_norm == _UNTOUCHED and self.model.trainable_variables:
            raise UsageError(
                f"the training step of {self.model.name!r} does not go through its optimizer ({self.optimizer.name}), "
                "so there is nothing to guard. A train_step with optimizers of its own (a GAN's) cannot train under "
                "PrecisionGuard; use hw.LossScaleOptimizer for each of them"
            )
        attempt = _Attempt(vitals)
        before = logs.pop(BEFORE, None)
        if before is not None and not attempt.sound:
            self.execution.undo(before)
        self._logs = logs
        if vitals.before is not None:
            self._before = vitals.before
            self.scale = update(self.optimizer.settings, vitals.before, not attempt.sound)
        return attempt

    def _ended(self, attempt: _Attempt, incident: Incident | None, retries: int, used_scale: float = 1.0) -> None:
        if attempt.sound:
            self.guard_state = GuardState(settled=True)
            self._skips_in_a_row = 0
            self._applied_in_epoch = True
            if self.evidence is not None:
                self.evidence.keep_step()
        else:
            self.skipped_steps += 1
            self._skips_in_a_row += 1
            if self.evidence is not None:
                self.evidence.drop_step()
            if self._skips_in_a_row == _MANY_SKIPS and not self.guard:
                self.log(f"{_MANY_SKIPS} steps in a row were skipped; guard=True or hw.diagnose(model, x, y) says why")
        self.steps += 1
        self.last = StepResult(
            loss=attempt.vitals.loss,
            output=self._logs.get("output"),
            applied=attempt.sound,
            loss_scale=used_scale,
            grad_norm=attempt.vitals.grad_norm,
            incident=incident,
            retries=retries,
        )

    def _metrics(self) -> dict[str, Any]:
        """The metrics as they stand without a step that was skipped; NaN where no step of the epoch was applied."""
        if not self.model.compiled or "output" in self._logs:
            return {}
        if not self._applied_in_epoch:
            return {name: float("nan") for name in self._logs}
        if self.state is None:
            found = self.model.get_metrics_result()
        else:
            mapping = list(zip(self.model.metrics_variables, self.state[3], strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                found = self.model.get_metrics_result()
        return {name: value for name, value in found.items() if name in self._logs}

    # What the guard asks for

    def localise(self, batch: Any) -> Diagnosis:
        """Looks for the culprit by replays of the batch that leave no trace."""
        try:
            return self._localised(batch)
        except Exception as error:  # what cannot be looked into must not end a training
            _LOG.info("the failed step could not be looked into", exc_info=True)
            what = "".join(str(error).strip().splitlines()[:1])
            return Diagnosis("not_reproducible", detail=f"the step could not be inspected: {what}")

    def _localised(self, batch: Any) -> Diagnosis:
        half = next((name for name in _HALF if self.plan is not None and self.plan.uses(name)), "float32")
        return localise(
            self.model,
            batch,
            plan=self.plan or Plan(framework="keras"),
            apply_plan=lambda plan: AppliedPlan(self.model, plan, settle=False),
            loss_scale=self._before.scale if self.scaled else 1.0,
            half_format=half,
            state=self.state,
            step=self.execution.step,
        )

    def demoted(self, plan: Plan, suspect: Suspect) -> Plan:
        """`plan` with the suspect's own code in float32."""
        if not suspect.module and not suspect.module_class:  # losses are in float32: their input is to blame
            return float32_everywhere(plan, f"{suspect.operation} outside all layers gave {suspect.found}")
        return demoted(plan, suspect, _Tree(self.model))

    def attempt_again(self, batch: Any) -> _Attempt:
        """The same batch once more; the step that failed has left nothing behind but the loss scale."""
        if self.scaled:
            self.put_scale(self._before)
        return self._attempt(batch)

    def record(self, incident: Incident) -> Incident:
        """Keeps an incident and says it; one that only repeats an earlier one is kept and not said again."""
        if incident.same_as not in {earlier.same_as for earlier in self.incidents}:
            self.log(f"step {incident.step}, {incident.kind}: {incident.text}")
        self.incidents.append(incident)
        return incident

    def fix(self, modules: Sequence[str], *, done: bool) -> tuple[str, ...]:
        """Lines to paste."""
        if done:
            again = 'guard.plan.save("plan.toml"), then hw.apply(model, "plan.toml")'
            return ("done. To begin like this next time:", again)
        plan = self.plan or Plan(framework="keras")
        default = plan.default.compute
        kept = [str(rule.path) for rule in plan.layers if rule.compute == "float32" and rule.path is not None]
        modules = list(dict.fromkeys([*modules, *kept]))
        rules = ", ".join(f'"{module}": "float32"' for module in modules)
        return (f'hw.apply(model, hw.Plan.manual({{{rules}}}, default="{default}", framework="keras"))',)

    def _decide(self, evidence: Evidence, batch: Any) -> None:
        plan = evidence.plan(batch, self.state)
        self.profile, self.timing = evidence.profile, evidence.timing
        self.use_plan(plan)
        half = sum(rule.compute != "float32" for rule in plan.layers)
        what = f"{plan.default.compute}, in {half} of {len(plan.layers)} layers" if half else "float32"
        self.log(f'"auto" chose {what}: {REASONS[plan.default.reason]} ({plan.default.detail})')

    def _tell_half_heads(self) -> None:
        if self.plan is None or not (heads := half_heads(self.model, applied_plan(self.model) or self.plan)):
            return
        self.log(half_heads_text(heads))


class _Tree:
    """The model's layers as `core/demotion.py` asks for them."""

    def __init__(self, model: keras.Model) -> None:
        self._layers = named_layers(model)
        self._paths = {id(layer): path for path, layer in self._layers.items()}

    def names(self, path: str) -> Sequence[str]:
        return [path] if path in self._layers else []

    def children(self, path: str) -> Sequence[str]:
        layer = self._layers.get(path)
        if layer is None or whole(layer):
            return []
        return [self._paths[id(child)] for child in children(layer) if id(child) in self._paths]
