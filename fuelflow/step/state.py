"""The training state: one pytree with named fields."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from fuelflow._types import Array, Params, PyTree, Scalar, Variables
from fuelflow.model.definition import Definition

if TYPE_CHECKING:
    from fuelflow.step.flight import Flight
    from fuelflow.step.spec import StateSpec
    from fuelflow.step.tally import Tally


NO_RATE = -1.0


@dataclass(frozen=True, eq=False)
class TrainState:
    """Everything a run needs to go on, on the device.

    A pytree whose leaves are arrays. `TrainingLoop.step` takes over its buffers
    (donation), so a state can be stepped once; to keep one, copy it first.

    Attributes:
        params: Parameters by dotted name.
        variables: What the forward pass changes besides, by dotted name: BatchNorm
            statistics, RNG counters, linen's other collections.
        opt_state: The optimizer's state, over the trained parameters only.
        step: Completed updates, int32 ``[]``.
        num_skipped: Steps left out because they were not finite, int32 ``[]``.
        lr: The rate given by `TrainingLoop.set_lr`, float32 ``[]``; -1 if none was.
        lr_scale: Multiplies the rate, float32 ``[]``.
        key: The run's random key; the step folds its number in.
        sown: What the last step's forward pass created, such as values recorded with
            ``sow``, by dotted name. Empty before the first step; a step never reads it.
        sums: What the steps of an epoch added up so far, rank by rank; None unless a
            `Trainer` keeps account of the epoch.
        definition: The model without its arrays; static.
    """

    params: Params
    variables: Variables
    opt_state: PyTree
    step: Array
    num_skipped: Array
    lr: Scalar
    lr_scale: Scalar
    key: jax.Array
    sown: Variables
    sums: "Tally | None"
    definition: Definition
    # Of this process only, lost when the tree is rebuilt: the mark of a loop that has
    # seen the arrays to be as its programs expect, the steps on their way, and for a
    # loop that stops at a bad step how many the host has seen, int32 ``[]``.
    spec: "StateSpec | None" = field(
        default=None, init=False, repr=False, compare=False
    )
    flight: "Flight | None" = field(default=None, init=False, repr=False, compare=False)
    num_seen: Array | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "spec": None, "flight": None, "num_seen": None}

    def __repr__(self) -> str:
        size = sum(param.size for param in self.params.values())
        return (
            f"TrainState({type(self.definition).__name__.removesuffix('Definition')} "
            f"model, {len(self.params)} parameters, {size:,} values)"
        )


jax.tree_util.register_dataclass(
    TrainState,
    data_fields=[
        "params",
        "variables",
        "opt_state",
        "step",
        "num_skipped",
        "lr",
        "lr_scale",
        "key",
        "sown",
        "sums",
    ],
    meta_fields=["definition"],
)


def evolve(state: TrainState, **changes: Any) -> TrainState:
    """A state with some fields replaced, known to be as good as the one given.

    Unlike `dataclasses.replace` it keeps the marks of this process, and costs half a
    microsecond.
    """
    evolved = object.__new__(TrainState)
    object.__setattr__(evolved, "__dict__", vars(state) | changes)
    return evolved
