"""Monitor: what a run says, for whoever looks, without the run waiting for it."""

import atexit
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, final, get_args
from weakref import WeakMethod, finalize

import jax

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.run.watching import Dispatched, NotWatchingError, RunFacts
from fuelflow.step.checks import checked_choice, checked_flag
from fuelflow.step.outcome import StepOutcome
from fuelflow.watch.following import Follower, TrainerFollower
from fuelflow.watch.hub import Hub
from fuelflow.watch.logged import checked_numbers
from fuelflow.watch.passes import HandFollower
from fuelflow.watch.record.log import RecordLog
from fuelflow.watch.record.making import (
    make_end,
    make_event,
    make_record,
    make_run,
    run_name,
)
from fuelflow.watch.record.reading import FILE_NAME, read_records
from fuelflow.watch.record.records import Record, folded
from fuelflow.watch.record.sampler import Sampler
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.views import Display, View, choose_view
from fuelflow.watch.sinks.delivery import Delivery, checked_sinks
from fuelflow.watch.sinks.jsonl import JsonLines
from fuelflow.watch.uncaught import Uncaught

T = TypeVar("T")

STOP_SECS = 4.0
CLOSE_SECS = 2.0


@final
class Monitor:
    """Shows a run while it goes on, and keeps records of it.

    Given to a `Trainer`, it follows its run. Around a loop written by hand, `track`
    gives the batches and `log` takes what the steps say::

        with ff.Monitor() as monitor:
            for epoch in range(10):
                for batch in monitor.track(loader.epoch(epoch)):
                    state, outcome = loop.step(state, batch)
                    monitor.log(outcome)

    A thread of its own reads one step a few times a second, and the thread that trains
    waits for none of it, nor fails by it. In a terminal there is a live display, in a
    notebook a plot and a table, and elsewhere a line for each epoch. `serve` shows a
    page that is live, `save_html` keeps one.

    Of several processes the first one shows and writes, and the others do nothing.

    Args:
        directory: Where records are kept, in ``records.jsonl``, which ``fuelflow
            report`` reads. By default beside a trainer's checkpoints; without them
            nothing is kept.
        sinks: What else is given every record: `fuelflow.sinks.Csv`,
            `fuelflow.sinks.TensorBoard`, or anything that can be called with a
            `fuelflow.sinks.Record`, each in a thread of its own.
        display: ``"console"``, ``"notebook"``, ``"plain"`` for lines, ``"none"``, or
            ``"auto"`` for what suits where the output goes.
        all_processes: Whether each process shows and writes what it knows, into files
            of its own.

    Raises:
        TypeError: If a sink cannot be called.
        ValueError: If there is no such display.

    Example:
        >>> monitor = Monitor(display="none")
        >>> with monitor:
        ...     for x in monitor.track([1.0, 2.0, 3.0]):
        ...         monitor.log({"loss": 1 / x})
        >>> [(r["num_steps"], r["means"]) for r in monitor.records if r.kind == "pass"]
        [(3, {'loss': 0.611111111111111})]
    """

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None = None,
        sinks: Iterable[Callable[[Record], Any]] = (),
        display: Display = "auto",
        all_processes: bool = False,
    ) -> None:
        self._sinks = checked_sinks(sinks)
        checked_choice("display", display, get_args(Display))
        checked_flag("all_processes", all_processes)
        self._make_view = partial(choose_view, display)
        self._directory = None if directory is None else Path(directory)
        self._all_processes = all_processes
        self._log = RecordLog()
        self._story = Story()
        self._deliveries: list[Delivery] = []
        self._kept_in: Path | None = None
        self._keeper: Delivery | None = None
        self._view: View | None = None
        self._follower: TrainerFollower | HandFollower | None = None
        self._hub: Hub | None = None
        self._server: Any = None
        self._is_closed = False
        self._uncaught = Uncaught(partial(_call, WeakMethod(self._close)))
        finalize(self, self._uncaught.leave).atexit = False
        self._at_exit = self._uncaught.end

    @property
    def records(self) -> list[Record]:
        """The records so far, steps thinned out if there are many."""
        return folded(Record(record) for _, record in self._log.since())

    # Loops written by hand.

    def track(self, batches: Iterable[T], epoch: int | None = None) -> Iterable[T]:
        """The batches of one pass, as they come; the pass ends with the last of them.

        Args:
            batches: An epoch of a loader or a graph, or anything to iterate over. If it
                has a length, that is shown.
            epoch: The number of the pass; by default the one after the last.
        """
        follower = self._by_hand()
        return batches if follower is None else follower.track(batches, epoch)

    def log(self, outcome: StepOutcome | Mapping[str, Any], **scalars: Any) -> None:
        """Takes note of a step, or several, without waiting for it.

        Args:
            outcome: What `TrainingLoop.step`, `TrainingLoop.run` or `Graph.step`
                returned; or numbers by name, such as ``{"loss": loss}``, which may be
                arrays of JAX that are not there yet.
            **scalars: Further numbers.

        Raises:
            TypeError: If it is neither, or a number is none.
        """
        if not isinstance(outcome, StepOutcome | Mapping):
            raise TypeError(
                "`outcome` must be a StepOutcome, or numbers by name, got a "
                f"{type(outcome).__name__}"
            )
        if isinstance(outcome, Mapping):
            outcome = checked_numbers(outcome)
        scalars = checked_numbers(scalars)
        follower = self._by_hand()
        if follower is not None:
            follower.log(outcome, scalars)

    # What there is to see.

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the page of the run so far: one file, which needs no other.

        Raises:
            ImportError: If the extra ``report`` is not installed.
            OSError: If the file cannot be written.
        """
        from fuelflow.watch.pages.page import save_page

        save_page(path, self.records, title=self._title())

    def serve(self, port: int = 0, host: str = "127.0.0.1") -> str:
        """Serves the page, live, until the monitor is closed; returns its address.

        Args:
            port: 0 for any that is free.
            host: On anything but loopback the address has a token, without which
                nothing is served.

        Raises:
            ImportError: If the extra ``report`` is not installed.
            OSError: If the port is taken.
        """
        from fuelflow.watch.pages.server import Server

        self._require_open()
        if self._server is None:
            server = Server(self._log, title=self._title())
            url = server.start(host, port)
            self._server = server, url
            self._close_at_exit()
        return self._server[1]

    def close(self) -> None:
        """Ends it all, waiting a few seconds at most for sinks to be done."""
        self._close("done", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close("done" if error is None else "error", error)

    # What a trainer tells.

    def open(self) -> None:
        """A trainer's run is about to begin: there will be something to see.

        Raises:
            NotWatchingError: If the monitor is closed, or watches another run.
        """
        self._require_free()
        if self._is_watching_here():
            self._view = self._make_view()

    def begin(self, facts: RunFacts) -> None:
        """A trainer's run begins, or goes on.

        Raises:
            NotWatchingError: If the monitor is closed, or watches another run.
        """
        self._require_free()
        if not self._is_watching_here():
            return
        if isinstance(self._follower, HandFollower):
            self._finish("done", None)
        directory = self._directory
        if directory is None and facts.directory and "://" not in facts.directory:
            directory = Path(facts.directory)
        here = jax.process_index()
        devices = [each for each in facts.devices if each.process_index == here]
        follower = TrainerFollower(
            facts.compiles,
            Sampler(devices, facts.batch_size),
            facts.step,
            facts.observe_every,
        )
        self._follower = follower
        run = make_run(facts, directory)
        self._start(follower, directory, partial(_opening, run, facts))

    def dispatched(self, dispatched: Dispatched) -> None:
        """Steps were sent to the devices."""
        if isinstance(self._follower, TrainerFollower):
            self._follower.note(dispatched)

    def finished_steps(self) -> None:
        """The steps of an epoch are done."""
        if isinstance(self._follower, TrainerFollower):
            self._follower.note_done()

    def finished_epoch(self, metrics: EpochMetrics) -> None:
        """An epoch is over."""
        self._tell(make_record, "epoch", metrics=metrics.to_dict())

    def saved(self, step: int, reason: str) -> None:
        """The run was kept."""
        why = reason.removeprefix("stopped: ")
        text = f"saved: {reason}"
        if why != reason:
            by = "" if why == "stop" else f": {why}"
            text = f"saved, as the run was stopped{by}"
        self._tell(make_event, "info", "checkpoint", text, step)

    def end(self, reason: str, error: BaseException | None) -> None:
        """A trainer's run is over."""
        if isinstance(self._follower, TrainerFollower):
            self._finish(reason, error)
        view, self._view = self._view, None
        if view is not None:  # of a run that did not even begin
            view.close(self._story)

    def _tell(self, make: Callable[..., Record], *what: Any, **values: Any) -> None:
        if isinstance(self._follower, TrainerFollower):
            self._follower.tell(make(*what, **values))

    # Beginning and ending.

    def _is_watching_here(self) -> bool:
        return self._all_processes or jax.process_index() == 0

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this monitor was closed: make another")

    def _require_free(self) -> None:
        if self._is_closed:
            raise NotWatchingError("its monitor was closed: make another")
        if isinstance(self._follower, TrainerFollower):
            raise NotWatchingError(
                "a monitor can watch one run at a time, give each its own"
            )

    def _by_hand(self) -> HandFollower | None:
        if isinstance(self._follower, HandFollower):
            return self._follower
        self._require_open()
        if not self._is_watching_here():
            return None
        if self._hub is not None:
            raise RuntimeError("this monitor watches a trainer: make another")
        self._view = self._make_view()
        follower = self._follower = HandFollower(self._directory)
        self._start(follower, self._directory, _nothing)
        self._uncaught.wait()
        return follower

    def _start(
        self,
        follower: Follower,
        directory: Path | None,
        opening: Callable[[Story], Iterable[Record]],
    ) -> None:
        if not self._deliveries:
            self._deliveries = [self._deliver_to(sink) for sink in self._sinks]
        path = self._keep_in(directory)
        view, self._view = self._view or self._make_view(), None
        self._hub = Hub(
            follower,
            self._log,
            self._story,
            deliveries=self._deliveries,
            view=view,
            prepare=partial(self._earlier, path, opening),
        )
        self._close_at_exit()
        self._hub.start()

    def _keep_in(self, directory: Path | None) -> Path | None:
        """Has records kept in a directory, if they are not yet."""
        if directory is None or directory == self._kept_in:
            return None
        self._kept_in = directory
        number = jax.process_index()
        path = directory / (f"records.{number}.jsonl" if number else FILE_NAME)
        self._keeper = self._deliver_to(JsonLines(path))
        self._deliveries.append(self._keeper)
        return path

    def _earlier(
        self, path: Path | None, opening: Callable[[Story], Iterable[Record]]
    ) -> Iterator[Record]:
        """The beginning of a run, after what its file has of an earlier part."""
        if path is not None and path.is_file():
            for record in read_records(path):
                self._remember(record)
        for record in opening(self._story):
            if record.kind != "epoch":
                yield record
                continue
            # Trackers have it from the earlier part, and want no step twice.
            self._remember(record)
            if self._keeper is not None:
                self._keeper.put(record)

    def _remember(self, record: Record) -> None:
        self._log.append(record)
        self._story.add(record)

    def _finish(self, reason: str, error: BaseException | None) -> None:
        """Ends the watching of one run."""
        hub, follower = self._hub, self._follower
        if hub is None:
            return
        if isinstance(follower, HandFollower):
            follower.end_pass()
        step = self._story.steps[-1]["step"] if self._story.steps else None
        end = make_end(reason, error)
        if end["reason"] != "done":
            level = "error" if end["reason"] == "error" else "warning"
            what = end["text"] or f"stopped: {end['reason']}"
            hub.post(make_event(level, "stopped", what, step))
        hub.post(end)
        hub.stop(STOP_SECS)
        self._hub = self._follower = None

    def _close(self, reason: str, error: BaseException | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._uncaught.leave()
        self._finish(reason, error)
        for delivery in self._deliveries:
            delivery.finish()
        deadline = time.monotonic() + CLOSE_SECS
        for delivery in self._deliveries:
            delivery.join(max(deadline - time.monotonic(), 0.0))
        self._log.close()
        if self._server is not None:
            self._server[0].stop()

    def _close_at_exit(self) -> None:
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _deliver_to(self, sink: Callable[[Record], Any]) -> Delivery:
        """What brings records to a sink, and ends when nobody has this monitor more."""
        delivery = Delivery(sink, partial(_call, WeakMethod(self._report)))
        finalize(self, delivery.finish).atexit = False
        return delivery

    def _report(self, text: str) -> None:
        hub = self._hub
        if hub is not None:
            hub.post(make_event("warning", "sink", text, None))

    def _title(self) -> str:
        run = self._story.run
        return run_name(self._directory) if run is None else run["name"]


def _call(method: WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    """Calls a method, if there is still somebody to have it."""
    function = method()
    if function is not None:
        function(*arguments)


def _nothing(story: Story) -> Iterable[Record]:
    del story
    return ()


def _opening(run: Record, facts: RunFacts, story: Story) -> Iterator[Record]:
    """What a trainer's run begins with, after what is known of it already."""
    known = {
        each["metrics"]["epoch"] for each in story.epochs if each["kind"] == "epoch"
    }
    yield run
    for metrics in facts.history:
        if metrics.epoch not in known:
            yield make_record("epoch", at=run["time"], metrics=metrics.to_dict())
    if facts.step:
        text = f"goes on after step {facts.step}, in epoch {facts.epoch}"
        yield make_event("info", "resumed", text, facts.step, run["time"])
