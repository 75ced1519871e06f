"""The private memory of a TrainingLoop: its programs, and the states they take."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import tree_flatten_with_path

from fuelflow._errors import StateMismatchError, UsedStateError
from fuelflow.devices.placement import OnMesh, Placement, SingleDevice, device_of
from fuelflow.model.definition import Definition
from fuelflow.model.functional import make_functional
from fuelflow.model.names import path_name, select_names
from fuelflow.step.engine import Engine
from fuelflow.step.flight import Flight
from fuelflow.step.observe import resolve
from fuelflow.step.optimizer import initial_state, rate_multipliers
from fuelflow.step.program import CompileLog
from fuelflow.step.programs import Programs, arrays_of
from fuelflow.step.rules import StepRules
from fuelflow.step.spec import StateSpec, leaf_text, make_spec, same_definition
from fuelflow.step.state import NO_RATE, TrainState, evolve


class Host:
    """What a loop remembers between calls: nothing that changes a number.

    Args:
        rules: What a step does.
        log: Where compilations are accounted for.
        mesh: The devices to train on; None for the one that the model is on.
    """

    def __init__(
        self, rules: StepRules, log: CompileLog, mesh: Mesh | None = None
    ) -> None:
        self.rules = rules
        self.log = log
        self._on_mesh = None if mesh is None else OnMesh(mesh)
        self._programs: Programs | None = None

    def init(self, model: Any, key: jax.Array) -> TrainState:
        """A first state for a model, whose own arrays are copied."""
        functional = make_functional(model)
        trained = self._trained_names(functional.definition)
        placement = self.placement_of({**functional.params, **functional.variables})
        params, variables = placement.place(
            (functional.params, functional.variables), copy=True
        )
        lr = placement.put(np.float32(NO_RATE))
        opt_state = initial_state(
            self.rules.optimizer, {name: params[name] for name in trained}, lr
        )
        state = TrainState(
            params=params,
            variables=variables,
            opt_state=opt_state,
            step=jnp.int32(0),
            num_skipped=jnp.int32(0),
            lr=lr,
            lr_scale=jnp.float32(1),
            key=key,
            sown={},
            sums=None,
            definition=functional.definition,
        )
        state = evolve(state, **placement.place(arrays_of(state)))
        self._require_programs(make_spec(state.definition, arrays_of(state)), placement)
        flight = Flight(0, 0, stops=self.rules.stops_at_bad)
        return self._marked(evolve(state, flight=flight), placement)

    def placement_of(self, arrays: Any) -> Placement:
        """Where a model with such arrays is trained.

        Raises:
            ValueError: If they are on several devices, and the loop has no mesh.
        """
        return self._on_mesh or SingleDevice(device_of(arrays))

    def adopt(self, state: TrainState, *, keep: bool) -> TrainState:
        """A state of another loop over the same model, as this one goes on with it.

        Args:
            state: The state, which stays usable only through the one returned.
            keep: Whether optimizer state of the same name, shape and dtype is kept; all
                else starts anew.

        Raises:
            UsedStateError: If a step has taken over its buffers.
        """
        _require_state(state)
        trained = self._trained_names(state.definition)
        if state.step.is_deleted():
            raise UsedStateError("step")
        params = {name: state.params[name] for name in trained}
        opt_state = initial_state(self.rules.optimizer, params, state.lr)
        if keep:
            opt_state = _with_kept(opt_state, state.opt_state)
        flight = state.flight
        state = evolve(state, opt_state=opt_state, spec=None)
        placement = self.placement_of(state.params)
        state = evolve(state, **placement.place(arrays_of(state)))
        self._require_programs(make_spec(state.definition, arrays_of(state)), placement)
        return evolve(state, flight=flight)

    def _require_programs(self, spec: StateSpec, placement: Placement) -> None:
        """Sees to programs for such states, if there are none."""
        known = self._programs
        if (
            known is None
            or known.placement != placement
            or not known.spec.matches(spec)
        ):
            self._programs = self._make_programs(spec, placement)

    def ready(
        self, state: TrainState, *, will_step: bool = False
    ) -> tuple[TrainState, Programs]:
        """A state as this loop's programs expect it, and those programs.

        A state that the loop's own step returned is known to be. Any other is checked
        by name, put in place, and marked.

        Raises:
            StateMismatchError: If it belongs to another loop or model.
            TypeError: If it is no `TrainState`.
            UsedStateError: If a step has taken over its buffers.
            ValueError: If a step is to be taken and the rate was never given.
        """
        programs = self._programs
        if programs is None or getattr(state, "spec", None) is not programs.spec:
            state, programs = self._admit(state)
            if will_step and self.rules.needs_lr and float(state.lr) < 0:
                raise ValueError(
                    "the learning rate must be given before the first step: pass "
                    "`schedule=` (a number will do), or call "
                    "`state = loop.set_lr(state, lr)`"
                )
            return state, programs
        if state.step.is_deleted():
            raise UsedStateError("step")
        assert state.flight is not None
        is_unmarked = (state.num_seen is None) is self.rules.stops_at_bad
        if is_unmarked or state.flight.is_over:
            state = self._marked(state, programs.placement)
        return state, programs

    def _admit(self, state: TrainState) -> tuple[TrainState, Programs]:
        _require_state(state)
        arrays = arrays_of(state)
        for path, leaf in jax.tree_util.tree_flatten_with_path(arrays)[0]:
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise UsedStateError(path_name(path))
        programs = self._programs
        if programs is None:
            programs = self._bind(state)
        arrays = programs.spec.arrange(arrays)
        if not same_definition(state.definition, programs.spec.definition):
            raise StateMismatchError([], [], [_OTHER_MODEL])
        arrays = programs.placement.place(arrays)
        self._programs = programs
        state = evolve(state, **arrays, spec=programs.spec)
        return self._marked(state, programs.placement), programs

    def _marked(self, state: TrainState, placement: Placement) -> TrainState:
        """A state with what is known of its steps on their way.

        Raises:
            NonFiniteError: If it was stepped by a loop that does otherwise with bad
                steps, and the host now sees that one was bad.
        """
        stops = self.rules.stops_at_bad
        flight = state.flight
        if flight is not None and flight.stops is not stops:
            flight.land()
            flight = None
        if flight is None or flight.is_over:
            flight = Flight(int(state.step), int(state.num_skipped), stops=stops)
        num_seen = placement.put(np.int32(flight.num_seen)) if stops else None
        return evolve(state, flight=flight, num_seen=num_seen)

    def _bind(self, state: TrainState) -> Programs:
        """Programs for the model that a state of some other loop brings along."""
        placement = self.placement_of(state.params)
        trained = self._trained_names(state.definition)
        missing = [
            name for name in state.definition.param_names if name not in state.params
        ]
        if missing:
            raise StateMismatchError([f"params.{name}" for name in missing], [], [])
        expected = dict(arrays_of(state))
        expected["opt_state"] = jax.eval_shape(
            self.rules.optimizer.init,
            {name: state.params[name] for name in trained},
            jnp.float32(0),
        )
        spec = make_spec(state.definition, expected)
        # Loops whose states are alike share one spec, so that a state can go from one
        # to the other and back without being looked at again.
        if state.spec is not None and state.spec.matches(spec):
            spec = state.spec
        return self._make_programs(spec, placement)

    def _make_programs(self, spec: StateSpec, placement: Placement) -> Programs:
        names = spec.definition.param_names
        trained = self._trained_names(spec.definition)
        multipliers = rate_multipliers(self.rules.lr_groups, names, frozenset(trained))
        engine = Engine(
            self.rules,
            spec.definition,
            trained,
            multipliers,
            can_branch=placement.platform != "gpu",
            ranks=placement.ranks,
            observing=resolve(self.rules.observe, names, trained),
        )
        return Programs(engine, spec, placement, self.log)

    def _trained_names(self, definition: Definition) -> tuple[str, ...]:
        names = definition.param_names
        selected = select_names(self.rules.trainable, names, "trainable")
        if not selected:
            raise ValueError("`trainable` must leave at least one parameter to train")
        return tuple(name for name in names if name in selected)


def _with_kept(fresh: Any, old: Any) -> Any:
    """A fresh optimizer state with what an older one has of the same name and kind."""
    known = {path_name(path): leaf for path, leaf in tree_flatten_with_path(old)[0]}
    paths, treedef = tree_flatten_with_path(fresh)
    kept = []
    for path, leaf in paths:
        had = known.get(path_name(path))
        is_alike = had is not None and leaf_text(had) == leaf_text(leaf)
        kept.append(had if is_alike else leaf)
    return jax.tree.unflatten(treedef, kept)


_OTHER_MODEL = ("the model", "of another structure", "the one this loop was given")


def _require_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            "`state` must be a TrainState from loop.init or loop.step, "
            f"got a {type(state).__name__}"
        )
