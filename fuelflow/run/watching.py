"""What a run tells whoever watches it, which can neither stop it nor hold it up."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, final

import jax

from fuelflow.data.loader import DataLoader
from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.packing import Layout
from fuelflow.step.program import CompileRecord
from fuelflow.step.programs import Programs
from fuelflow.step.state import TrainState

logger = logging.getLogger("fuelflow")
_FAILURE = "the monitor failed, and training goes on without it"
_MAX_TEXT = 120


@dataclass(frozen=True)
class ParamFacts:
    """A parameter: its name, and what is to be known of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_trained: bool


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run when it begins, or goes on.

    Attributes:
        epochs: How many there are to be.
        steps_per_epoch: Steps of an epoch, if that is known.
        epoch: The epoch it begins with.
        step: The updates done before.
        epoch_step: Those of them that are of that epoch.
        batch_size: Rows of a batch, if the data says so.
        history: The metrics of the epochs before.
        settings: Of the loop, the data and the trainer, as short texts by name.
        params: The parameters.
        devices: The device of each rank.
        directory: Where the run is kept, if it is.
        compiles: The loop's compilations, a list that grows as they come.
        observe_every: Steps from one that is observed to the next, if any is.
    """

    epochs: int
    steps_per_epoch: int | None
    epoch: int
    step: int
    epoch_step: int
    batch_size: int | None
    history: Sequence[EpochMetrics]
    settings: Mapping[str, str]
    params: Sequence[ParamFacts]
    devices: Sequence[Any]
    directory: str | None
    compiles: Sequence[CompileRecord]
    observe_every: int | None


class Dispatched(NamedTuple):
    """A dispatch, as it was told of, by the newest of which a run is followed.

    Attributes:
        output: What its steps say, packed, on the devices.
        layout: How it is packed.
        aside: Histograms that wait aside, if the loop makes any.
        epoch: Its epoch.
        epoch_step: The steps of the epoch up to its last one.
        step: The updates up to its last one.
        started: When it began, by `time.perf_counter`.
        secs_waited: Seconds of the epoch so far that were spent waiting for data.
    """

    output: jax.Array
    layout: Layout
    aside: jax.Array | None
    epoch: int
    epoch_step: int
    step: int
    started: float
    secs_waited: float


class NotWatchingError(Exception):
    """Raised by a watcher that cannot watch a run, with the reason: nothing failed."""


class Watcher(Protocol):
    """Who watches a run. But for `open`, all is called by the thread that trains.

    So each takes note and returns at once, except for `end`, which may take a moment.
    """

    def open(self) -> None:
        """A run is about to begin, says the thread that has it begin."""
        ...

    def begin(self, facts: RunFacts) -> None:
        """A run begins, or goes on."""
        ...

    def dispatched(self, dispatched: Dispatched) -> None:
        """Steps were sent to the devices. Reading what they say would wait."""
        ...

    def finished_steps(self) -> None:
        """The steps of the epoch are done; its evaluation comes next, if there is one.

        A partial epoch, after a stop, has no such end.
        """
        ...

    def finished_epoch(self, metrics: EpochMetrics) -> None:
        """An epoch is over, its evaluation too; callbacks come next."""
        ...

    def saved(self, step: int, reason: str) -> None:
        """The run was kept, or is being written in the background."""
        ...

    def end(self, reason: str, error: BaseException | None) -> None:
        """The run is over.

        Args:
            reason: ``"done"``, ``"error"``, or by what it was stopped.
            error: What ended it, if something did.
        """
        ...


@final
class NoWatcher:
    """Looks away: what a run without a monitor has."""

    def open(self) -> None:
        """Nothing."""

    def begin(self, facts: RunFacts) -> None:
        """Nothing."""
        del facts

    def dispatched(self, dispatched: Dispatched) -> None:
        """Nothing."""
        del dispatched

    def finished_steps(self) -> None:
        """Nothing."""

    def finished_epoch(self, metrics: EpochMetrics) -> None:
        """Nothing."""
        del metrics

    def saved(self, step: int, reason: str) -> None:
        """Nothing."""
        del step, reason

    def end(self, reason: str, error: BaseException | None) -> None:
        """Nothing."""
        del reason, error


@final
class Watch:
    """What a run tells its watcher, whose errors end the watching and nothing else.

    Args:
        watcher: Who watches; None for nobody.
        data: The batches, as the trainer was given them.
        options: The settings of the trainer, by name.
    """

    def __init__(
        self, watcher: Watcher | None, data: Any, options: Mapping[str, Any]
    ) -> None:
        if watcher is not None and not hasattr(watcher, "finished_epoch"):
            raise TypeError(
                f"`monitor` must be a Monitor, got a {type(watcher).__name__}: "
                "ff.Monitor()"
            )
        if isinstance(watcher, type):
            raise TypeError("`monitor` must be a Monitor, not its class: ff.Monitor()")
        self._is_on = watcher is not None
        self._watcher = NoWatcher() if watcher is None else watcher
        self._data = data
        self._options = options

    def open(self) -> None:
        """The run is about to begin."""
        self._tell(self._watcher.open)

    def begin(
        self, loop: TrainingLoop, state: TrainState, programs: Programs, **facts: Any
    ) -> None:
        """The run begins, or goes on.

        Args:
            loop: The loop.
            state: Its state.
            programs: The programs for it.
            **facts: What else `RunFacts` has.
        """

        def begin() -> None:
            loader = self._data if isinstance(self._data, DataLoader) else None
            self._watcher.begin(
                RunFacts(
                    batch_size=None if loader is None else loader.batch_size,
                    settings=settings_of(loop, loader, self._options),
                    params=params_of(state, programs),
                    devices=programs.placement.rank_devices,
                    compiles=programs.log.records,
                    observe_every=loop.observe.every_steps if loop.observe else None,
                    **facts,
                )
            )

        if self._is_on:  # nobody else asks for all that
            self._tell(begin)

    def dispatched(self, dispatched: Dispatched) -> None:
        """Steps were sent to the devices."""
        self._tell(self._watcher.dispatched, dispatched)

    def finished_steps(self) -> None:
        """The steps of the epoch are done."""
        self._tell(self._watcher.finished_steps)

    def finished_epoch(self, metrics: EpochMetrics) -> None:
        """An epoch is over."""
        self._tell(self._watcher.finished_epoch, metrics)

    def saved(self, step: int, reason: str) -> None:
        """The run was kept."""
        self._tell(self._watcher.saved, step, reason)

    def end(self, reason: str, error: BaseException | None = None) -> None:
        """The run is over."""
        self._tell(self._watcher.end, reason, error)

    def _tell(self, listener: Callable[..., None], *what: Any) -> None:
        try:
            listener(*what)
        except NotWatchingError as error:
            logger.warning("this run is not watched: %s", error)
            self._look_away()
        except Exception:
            logger.exception(_FAILURE)
            self._look_away()

    def _look_away(self) -> None:
        self._is_on, self._watcher = False, NoWatcher()


def settings_of(
    loop: TrainingLoop, loader: DataLoader | None, options: Mapping[str, Any]
) -> dict[str, str]:
    """What a run was set to, as short texts by name; what is None is left out."""
    values = {
        f"loop.{each.name}": getattr(loop, each.name)
        for each in fields(loop)
        if each.init
    }
    if loader is not None:
        names = ("num_rows", "batch_size", "seed", "field_names")
        values |= {f"data.{name}": getattr(loader, name) for name in names}
    values |= {f"trainer.{name}": value for name, value in options.items()}
    return {k: short_text(v) for k, v in values.items() if v is not None}


def short_text(value: Any) -> str:
    """A value as a few words: a function's name, or the beginning of its text."""
    if isinstance(value, jax.sharding.Mesh):
        return " × ".join(f"{name} {size}" for name, size in value.shape.items())
    function = getattr(value, "func", value)  # of a partial
    name = getattr(function, "__qualname__", None)
    if callable(function) and name is not None:
        keywords = getattr(value, "keywords", {})
        given = ", ".join(f"{k}={short_text(v)}" for k, v in keywords.items())
        text = name.replace("<locals>.", "") + (f"({given})" if given else "")
    else:
        text = str(value)
        if " object at 0x" in text:
            text = type(value).__name__
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def params_of(state: TrainState, programs: Programs) -> list[ParamFacts]:
    """The parameters of a state."""
    trained = frozenset(programs.engine.trained_names)
    return [
        ParamFacts(
            name,
            tuple(param.shape),
            str(param.dtype),
            param.size * param.dtype.itemsize,
            name in trained,
        )
        for name, param in state.params.items()
    ]
