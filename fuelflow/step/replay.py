"""A step that was not finite, run again outside of its program to see why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, tree_flatten_with_path

from fuelflow._errors import NonFiniteError
from fuelflow._types import PyTree
from fuelflow.devices.ranks import AXIS, ROWS, MeshRanks, OneRank, Ranks, Spec
from fuelflow.step.batch import Batch, Pick, Rows, Stretch, rows_here, spec_of
from fuelflow.step.engine import Engine, Fixed, Moving
from fuelflow.step.programs import fixed_part, moving_part
from fuelflow.step.state import TrainState
from fuelflow.step.suspects import Mark, Suspect, follow, has_nan, is_bad

Kind = Literal[
    "parameter",
    "variable",
    "batch",
    "rate",
    "operation",
    "constant",
    "weights",
    "norm",
    "nothing",
]
_MAX_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a step that was run again says of the first value that went bad.

    Attributes:
        step: The 1-based number of the step.
        kind: What it was: a ``"parameter"``, ``"variable"`` or field of the ``"batch"``
            that was not finite before the step; the ``"rate"``; an ``"operation"`` of
            finite inputs; a ``"constant"`` of the program; ``"weights"`` of the loss
            that sum to 0; the ``"norm"`` of finite gradients; or ``"nothing"``.
        name: The parameter, variable, field, or operation.
        place: Where an operation is written, such as ``"loss_fn (train.py:12)"``.
        ranges: The smallest and largest finite value of each of its first inputs.
        rows: The first eight rows of the batch that are not finite.
        reaches: What it made bad: ``"the loss"`` or ``"the gradient of `x`"``.
        loss: The loss of the step as it was run again.
        text: All of it in a sentence.
    """

    step: int
    kind: Kind
    name: str = ""
    place: str = ""
    ranges: tuple[tuple[float, float], ...] = ()
    rows: tuple[int, ...] = ()
    reaches: str = ""
    loss: float = float("nan")
    text: str

    def __str__(self) -> str:
        return self.text


class InTurn(MeshRanks):
    """The ranks of a mesh, all run by one device, with keys and sums as on the mesh.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def spread(self, function: Any, inputs: Sequence[Spec], outputs: Spec) -> Any:
        """The function over a leading axis of ranks."""

        def is_spec(spec: Any) -> bool:
            return isinstance(spec, PartitionSpec) or spec is None

        def part(spec: Any, tree: PyTree) -> PyTree:
            if spec != ROWS:
                return tree
            return jax.tree.map(lambda x: x.reshape(self.count, -1, *x.shape[1:]), tree)

        def whole(spec: Any, tree: PyTree) -> PyTree:
            if spec != ROWS:
                return jax.tree.map(lambda x: x[0], tree)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

        def axis_of(spec: Any) -> int | None:
            return 0 if spec == ROWS else None

        axes = tuple(jax.tree.map(axis_of, each, is_leaf=is_spec) for each in inputs)

        def run(*arguments: PyTree) -> PyTree:
            parted = [
                jax.tree.map(part, spec, argument, is_leaf=is_spec)
                for spec, argument in zip(inputs, arguments, strict=True)
            ]
            made = jax.vmap(function, in_axes=axes, axis_name=AXIS)(*parted)
            return jax.tree.map(whole, outputs, made, is_leaf=is_spec)

        return run

    def keep_whole(self, tree: PyTree) -> PyTree:
        """The tree itself."""
        return tree

    def keep_rows(self, tree: PyTree) -> PyTree:
        """The tree itself."""
        return tree


class Cause:
    """What a bad step took, and how it is run again.

    Args:
        engine: The pure functions that it ran.
        taken: Its batch, or the stacked batches of its dispatch.
        index: Which of the dispatch's steps it was; None if it was the only one.
        error: What was seen of it.
    """

    def __init__(
        self, engine: Engine, taken: Any, *, index: int | None, error: NonFiniteError
    ) -> None:
        self._engine = engine
        self._taken = taken
        self._index = index
        self._step = error.step
        self._seen = error.loss, error.lr

    @property
    def batch(self) -> Any:
        """The batch as the loss was given it."""
        rows = self._rows()
        return Batch.held(rows.fields, rows.weight) if isinstance(rows, Rows) else rows

    def _ranks(self) -> Ranks:
        ranks = self._engine.ranks
        is_one = ranks.count == 1 or self._engine.rules.loss.sees_all_rows
        return OneRank() if is_one else InTurn(ranks.count)

    def _rows(self) -> Any:
        """The batch of the step alone, on one device."""
        taken = self._taken
        if isinstance(taken, Stretch):
            step = jax.tree.map(lambda x: x[self._index], taken.steps())
            taken = taken.pick(step)
        elif self._index is not None:
            taken = jax.tree.map(lambda x: x[self._index], taken)
        taken = _on_one_device(taken)
        if not isinstance(taken, Pick):
            return taken
        ranks = self._ranks()
        gathered = ranks.spread(
            lambda batch: rows_here(batch, ranks), (spec_of(taken),), ROWS
        )
        return gathered(taken)

    def replay(self, state: TrainState | None) -> Replay:
        """Runs the step again.

        Raises:
            RuntimeError: If the state or batch is not to be had.
        """
        if state is None:
            raise RuntimeError(
                f"step {self._step} cannot be run again: nobody has its state any more"
            )
        if state.step.is_deleted():
            raise RuntimeError(
                f"step {self._step} cannot be run again: a step has taken over its "
                "state since. Call `replay()` before going on"
            )
        with jax.debug_nans(False), jax.disable_jit(False):
            return self._replay(state)

    def _replay(self, state: TrainState) -> Replay:
        moving = _on_one_device(moving_part(state)._replace(sums=None, opt_state=None))
        fixed = _on_one_device(fixed_part(state)._replace(num_seen=None))
        rows = self._rows()
        engine = replace(self._engine, ranks=self._ranks())

        def look(moving: Moving, fixed: Fixed, rows: Any) -> Any:
            found = engine.harvest(moving, fixed, rows)
            grads = {name: found.grads[name] for name in engine.trained_names}
            return found.loss, list(grads.values())

        arguments = moving, fixed, rows
        traced = jax.make_jaxpr(look)(*arguments)
        paths = tree_flatten_with_path(arguments)[0]
        values = [leaf for _, leaf in paths]
        marks = [_mark_of_input(path, leaf) for path, leaf in paths]
        made, found = follow(traced.jaxpr, traced.consts, values, marks)
        (loss, weight, *grads), (mark, _, *grad_marks) = made, found
        told = self._told(float(loss), mark, grads, grad_marks)
        told = told or self._other(float(loss), float(weight), grads, state)
        if int(state.step) + 1 != self._step:
            text = f"{told.text} (with the state of step {int(state.step) + 1})"
            told = replace(told, text=text)
        return told

    def _told(
        self, loss: float, mark: Mark | None, grads: list[Any], marks: list[Mark | None]
    ) -> Replay | None:
        """What made the loss bad, or else the first gradient that is."""
        if mark is not None:
            return self._report(mark, "the loss", loss)
        for name, grad, found in zip(
            self._engine.trained_names, grads, marks, strict=True
        ):
            if found is not None and is_bad(grad):
                return self._report(found, f"the gradient of `{name}`", loss)
        return None

    def _report(self, mark: Mark, reaches: str, loss: float) -> Replay:
        suspect = mark.suspect
        is_derivative = suspect.is_derivative or reaches != "the loss"
        text = f"step {self._step}, {reaches}: " + _text_of(
            suspect, is_derivative=is_derivative
        )
        if mark.turned is not None:
            turned = _text_of(mark.turned, is_derivative=is_derivative, is_first=False)
            text += f"; it became NaN in {turned}"
        return Replay(
            step=self._step,
            kind=suspect.kind,
            name=suspect.name,
            place=suspect.place,
            ranges=suspect.ranges,
            rows=suspect.rows,
            reaches=reaches,
            loss=loss,
            text=text,
        )

    def _other(
        self, loss: float, weight: float, grads: list[Any], state: TrainState
    ) -> Replay:
        """Why a step with a finite loss and finite gradients was not applied."""
        kind, name, text = "nothing", "", ""
        _, lr = self._seen
        squares = [float(jnp.sum(jnp.square(g.astype(jnp.float32)))) for g in grads]
        largest = int(np.argmax(squares)) if squares else 0
        if weight == 0:
            kind, text = "weights", "the weights of the loss sum to 0"
        elif lr is not None and not (np.isfinite(lr) and lr >= 0):
            kind, name = "rate", "learning rate"
            scale = float(state.lr_scale)
            of = "" if scale == 1 else f", a factor of {scale:g} in it"
            text = f"the learning rate was {lr:g}{of}; loss and gradients were finite"
        elif not np.isfinite(sum(squares)):
            kind, name = "norm", self._engine.trained_names[largest]
            top = float(jnp.max(jnp.abs(grads[largest])))
            text = (
                f"the gradient of `{name}` is finite, up to {top:g}, but its squares "
                "do not sum to a number"
            )
        else:
            text = (
                f"run one operation at a time nothing is bad, the loss is {loss:g}; "
                f"in the compiled step it was {self._seen[0]:g}: that may round "
                "otherwise, or the batch was written into since"
            )
        return Replay(
            step=self._step,
            kind=kind,
            name=name,
            loss=loss,
            text=f"step {self._step}: {text}",
        )


def _text_of(suspect: Suspect, *, is_derivative: bool, is_first: bool = True) -> str:
    """A suspect in words."""
    if suspect.kind in ("parameter", "variable"):
        return f"the {suspect.kind} `{suspect.name}` was not finite before the step"
    if suspect.kind == "batch":
        listed = ", ".join(map(str, suspect.rows))
        more = suspect.num_rows - len(suspect.rows)
        listed += f" and {more} more" if more else ""
        rows = f" in row{'s' * (suspect.num_rows > 1)} {listed}" if listed else ""
        return f"the batch's `{suspect.name}` is not finite{rows}"
    where = f" of {suspect.place}" if suspect.place else ""
    if suspect.kind == "constant":
        return f"a constant{where} is not finite"
    if is_derivative:
        where = f" in the backward pass{where}"
    elif suspect.place:
        where = f" in {suspect.place}"
    ranges = " and ".join(_range_text(*each) for each in suspect.ranges)
    inputs = f", from inputs in {ranges}" if ranges else ""
    first = "the first bad value is made by " if is_first else ""
    return f"{first}`{suspect.name}`{where}{inputs}"


def _range_text(low: float, high: float) -> str:
    return f"[{low:.6g}, {high:.6g}]"


def _mark_of_input(path: Any, leaf: Any) -> Mark | None:
    if not is_bad(leaf):
        return None
    kind, name = _named(path)
    rows = np.array([], int)
    if kind == "batch" and leaf.ndim:
        flags = ~np.isfinite(np.asarray(leaf, np.float32))
        rows = np.flatnonzero(flags.reshape(len(flags), -1).any(-1))
    suspect = Suspect(
        kind=kind,
        name=name,
        rows=tuple(rows[:_MAX_ROWS].tolist()),
        num_rows=len(rows),
    )
    return Mark(suspect, has_nan(leaf))


def _named(path: Any) -> tuple[Any, str]:
    """The kind of an input, and the name a user knows it by."""
    argument, *rest = path
    keys = [_key_text(key) for key in rest]
    if argument.idx == 0:
        kind = "parameter" if keys[0] == "params" else "variable"
        return kind, ".".join(keys[1:]) or keys[0]
    if argument.idx == 1:
        return "rate", keys[0]
    if keys[:1] == ["fields"]:
        keys = keys[1:]
    return "batch", ".".join(keys) or "batch"


def _key_text(key: Any) -> str:
    if isinstance(key, DictKey):
        return str(key.key)
    return key.name if isinstance(key, GetAttrKey) else str(getattr(key, "idx", key))


def _on_one_device(tree: PyTree) -> PyTree:
    """Arrays of any devices on one of them."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
            return leaf
        if leaf.is_fully_replicated:
            return _first_part(leaf)
        if not leaf.is_fully_addressable:
            raise RuntimeError(
                "a step of several processes cannot be run again: each of them has "
                "rows of its own of the batch. Run it in one process"
            )
        return jax.device_put(np.asarray(leaf), jax.local_devices()[0])

    return jax.tree.map(move, tree)


def _first_part(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _first_part(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jax.device_put(np.asarray(leaf), jax.local_devices()[0])
