"""The errors of fuelflow's runs.

A wrong value is a `ValueError` and a wrong kind a `TypeError`, as everywhere in Python.
What goes wrong with a run has a class of its own, with its facts as attributes::

    FuelflowError
    ├── NonFiniteError        a loss or gradient was NaN or infinite
    ├── RecompileError        a program would be compiled again, and must not
    ├── UsedStateError        a state whose buffers a step has already taken
    ├── StateMismatchError    a state of another loop or model   (also a ValueError)
    ├── RowError              a row unlike the others of its source
    │                                                             (also a ValueError)
    ├── PositionError         a position in other data, or in another order
    │                                                             (also a ValueError)
    ├── SaveError             a checkpoint could not be written
    │                                                           (also a RuntimeError)
    ├── DamagedCheckpointError
    │                         a checkpoint that is not as it was written
    │                                                             (also a ValueError)
    ├── StaleGraphError       a recorded value whose parameters have moved on
    ├── NotWrappedError       a lazy array given to a function that does not record
    ├── UnwiredInputError     an input that is no field of the data
    │                                                             (also a ValueError)
    ├── InitializeError       a process that could not join the others of its run
    │                                                           (also a RuntimeError)
    ├── DisagreementError     processes of one run that differ in what they run
    │                                                             (also a ValueError)
    └── MissingFieldError     the loss asks for a field the batch lacks
                                                                  (also a KeyError)
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any


class FuelflowError(Exception):
    """The root of every error of a run."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By its facts and not by calling the class again, whose arguments differ.
        return _restore, (type(self), self.args, vars(self))


def _restore(
    kind: type[FuelflowError], arguments: tuple[Any, ...], facts: dict[str, Any]
) -> FuelflowError:
    error = kind.__new__(kind, *arguments)
    vars(error).update(facts)
    return error


class NonFiniteError(FuelflowError, ArithmeticError):
    """A step met a NaN or infinite loss, gradient or rate; the state is as it was.

    Steps that were dispatched after it, before it was seen, left the state as it was
    too, so `state` is what the step met, until another step takes it over.

    Attributes:
        step: The 1-based number of the step.
        loss: The loss of that step.
        grad_norm: The gradient's global norm.
        lr: The learning rate; None if the optimizer keeps its own.
        names: The first parameters, at most eight, whose gradient is not finite.
        num_names: How many there are.
        num_skipped: Steps of the run left out by the end of the dispatch it was in.
        state: The state before the step; None if nobody had it any more.
    """

    def __init__(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        *,
        lr: float | None,
        names: Sequence[str],
        num_names: int,
        num_skipped: int,
    ) -> None:
        self.step = step
        self.lr = lr
        self.loss = loss
        self.grad_norm = grad_norm
        self.names = tuple(names)
        self.num_names = num_names
        self.num_skipped = num_skipped
        self.state: Any = None
        self._cause: Any = None
        super().__init__(self._describe())

    def hold(self, cause: Any) -> None:
        """Keeps what the step took, and how it is run again."""
        self._cause = cause

    @property
    def batch(self) -> Any:
        """The batch of the step, of a loader as `Batch`; None if it was not kept."""
        return None if self._cause is None else self._cause.batch

    def replay(self) -> Any:
        """Runs the step again, one operation at a time, for what went bad first.

        Slow: each operation is waited for. Uses nothing up. To be called before a step
        is taken from `state`.

        Returns:
            A `fuelflow.step.replay.Replay`, which prints as one line.

        Raises:
            RuntimeError: If the step cannot be run again; it says why.
        """
        if self._cause is None:
            raise RuntimeError(
                f"step {self.step} cannot be run again: its batch was not kept. They "
                "are kept in the process of the run, but for gradients of "
                "`graph.backward`, and a copied error has none"
            )
        return self._cause.replay(self.state)

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {**vars(self), "state": None, "_cause": None}
        return _restore, (type(self), self.args, facts)

    def _describe(self) -> str:
        text = (
            f"step {self.step} is not finite: loss {self.loss:g}, gradient norm "
            f"{self.grad_norm:g}"
        )
        if self.lr is not None:
            text += f", learning rate {self.lr:g}"
        if self.names:
            more = self.num_names - len(self.names)
            listed = ", ".join(f"`{name}`" for name in self.names)
            text += f"; the gradient's squares do not sum to a number in {listed}"
            text += f" and {more} more" if more else ""
        elif math.isnan(self.loss) and self.grad_norm == 0:
            text += "; the weights of its loss sum to 0"
        return (
            text + ". The state was left as it was before that step. `replay()` of "
            "this error names what went bad first; "
            '`nonfinite="skip"` counts such steps and goes on'
        )


class RecompileError(FuelflowError):
    """A program of a loop with ``strict_compile=True`` would be compiled again.

    Attributes:
        program: The program, such as ``"step"`` or ``"evaluate"``.
        changes: One text for each leaf that changed, old → new.
    """

    def __init__(self, program: str, changes: Sequence[str]) -> None:
        self.program = program
        self.changes = tuple(changes)
        super().__init__(
            f"the program `{program}` would be compiled again: " + "; ".join(changes)
        )


class UsedStateError(FuelflowError):
    """A state was used a second time after a step had taken its buffers.

    Attributes:
        name: A leaf of the state whose buffer is gone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"this state has been used up: a step took over its buffers (`{name}` is "
            "gone). Go on with the state that step returned, "
            "`state, outcome = loop.step(state, batch)`; to keep one to come back to, "
            "copy it first with `jax.tree.map(jnp.copy, state)`"
        )


class StateMismatchError(FuelflowError, ValueError):
    """A state, or a checkpoint of one, does not fit the loop it was given to.

    Attributes:
        missing: Names the loop expects and the state lacks.
        unexpected: Names the state has and the loop does not know.
        different: Name, what the state has, and what the loop expects.
    """

    def __init__(
        self,
        missing: Sequence[str],
        unexpected: Sequence[str],
        different: Sequence[tuple[str, str, str]],
        *,
        subject: str = "this state",
        remedy: str = "",
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.different = tuple(different)
        parts = [
            f"missing {_some(missing)}" if missing else "",
            f"unexpected {_some(unexpected)}" if unexpected else "",
            _some(
                [f"{n} is {had} where {want} is expected" for n, had, want in different]
            )
            if different
            else "",
        ]
        super().__init__(
            f"{subject} belongs to another loop or model: "
            + "; ".join(part for part in parts if part)
            + remedy
        )


def _some(items: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


class MissingFieldError(FuelflowError, KeyError):
    """The loss asked for a field that the batch does not have.

    Attributes:
        name: The field asked for.
        fields: The fields there are.
    """

    def __init__(self, name: str, fields: Sequence[str]) -> None:
        self.name = name
        self.fields = tuple(fields)
        super().__init__(name)

    def __str__(self) -> str:
        there = ", ".join(f"`{field}`" for field in self.fields)
        return f"the batch has no field `{self.name}`; its fields are {there}"


class StaleGraphError(FuelflowError):
    """A recorded value was asked for after its parameters had moved on.

    Attributes:
        step: Steps the graph had taken when the value was recorded.
        what: The recorded call.
    """

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        self.what = what
        super().__init__(
            f"{what} belongs to the parameters after {step} steps, which have moved "
            "on: record it anew, read it before the step, or have the step fetch it, "
            "`graph.step(loss, fetch=(value,))`"
        )


class NotWrappedError(FuelflowError):
    """A lazy array was passed to a function that does not record.

    No TypeError, which JAX would replace by one of its own.

    Attributes:
        function: The function's name, as far as it can be told.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        super().__init__(
            f"a lazy array was passed to `{function}`, which runs at once and would "
            "cut its gradient: wrap the function, `f = ff.lazy(f)` or "
            "`jnp = ff.lazy(jax.numpy)`, or read the value first, `x.realize()`"
        )


class UnwiredInputError(FuelflowError, ValueError):
    """An input of a model is no field of the data, or the other way round.

    Attributes:
        name: The input or field.
        inputs: The inputs of the model.
        fields: The fields of the data.
    """

    def __init__(
        self, name: str, what: str, inputs: Sequence[str], fields: Sequence[str]
    ) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self.fields = tuple(fields)
        super().__init__(
            f"{what} `{name}` is no field of the data: the model's inputs are "
            f"{_named(inputs)}; the data's fields are {_named(fields)}"
        )


def _named(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


class RowError(FuelflowError, ValueError):
    """A row of a source is not like the others, or is missing.

    Attributes:
        row: The row's number in its source.
    """

    def __init__(self, row: int, fault: str) -> None:
        self.row = row
        super().__init__(f"row {row} of the source {fault}")


class PositionError(FuelflowError, ValueError):
    """A position to continue from belongs to other data, or to another order of them.

    Attributes:
        different: What differs, what the position has, and what the loader has.
    """

    def __init__(self, different: Sequence[tuple[str, object, object]]) -> None:
        self.different = tuple(different)
        listed = [f"`{n}` is {had}, here {has}" for n, had, has in different]
        super().__init__(
            f"this position is one of another loader: {_some(listed)}. Restore it into "
            "a loader of the same data, seed and sampler"
        )


class SaveError(FuelflowError, RuntimeError):
    """A checkpoint could not be written; the state in memory is as it was.

    Attributes:
        directory: Where checkpoints are written.
        last_good: The newest checkpoint there that is whole; None if there is none.
    """

    def __init__(self, directory: str, fault: str, last_good: str | None) -> None:
        self.directory = directory
        self.last_good = last_good
        held = f"the last good one is {last_good}" if last_good else "there is none yet"
        super().__init__(
            f"a checkpoint could not be written to {directory}: {fault}; {held}"
        )


class DamagedCheckpointError(FuelflowError, ValueError):
    """A checkpoint is not as it was written.

    Attributes:
        path: The checkpoint.
        faults: What is wrong, a text for each file or array.
    """

    def __init__(self, path: str, faults: Sequence[str]) -> None:
        self.path = path
        self.faults = tuple(faults)
        super().__init__(
            f"the checkpoint {path} is damaged: {_some(faults)}. Restore an earlier "
            "one with `step=`, or the newest good one with `skip_damaged=True`"
        )


class InitializeError(FuelflowError, RuntimeError):
    """A process could not join the others of its run.

    Attributes:
        coordinator_address: Where process 0 was to be met; None if JAX was to find it.
    """

    def __init__(self, fault: str, coordinator_address: str | None = None) -> None:
        self.coordinator_address = coordinator_address
        super().__init__(fault)


class DisagreementError(FuelflowError, ValueError):
    """The processes of a run differ in facts that must be the same for all of them.

    Attributes:
        different: Name → what each process has, in order; None where it has nothing.
    """

    def __init__(self, different: Mapping[str, Sequence[str | None]]) -> None:
        self.different = {name: tuple(values) for name, values in different.items()}
        listed = [
            f"`{name}` is {_by_process(values)}"
            for name, values in self.different.items()
        ]
        super().__init__(
            f"the processes of this run do not agree: {_some(listed)}. Start all of "
            "them with the same code, data and options"
        )


def _by_process(values: Sequence[str | None], width: int = 60) -> str:
    processes: dict[str | None, list[str]] = {}
    for process, value in enumerate(values):
        processes.setdefault(value, []).append(str(process))
    return " and ".join(
        f"{_short(value, width)} on process{'es'[: 2 * len(numbers[1:])]} "
        + _some(numbers)
        for value, numbers in processes.items()
    )


def _short(value: str | None, width: int) -> str:
    if value is None:
        return "missing"
    # Both ends, as paths and versions differ in the last of them.
    half = width // 2
    return value if len(value) <= width else f"{value[:half]}…{value[-half:]}"
