"""Trainer: epochs in the background, each with its account."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import jax

from fuelflow.devices.agreement import require_agreement
from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.history import History
from fuelflow.run.account import Clocks, Stopwatch, make_metrics
from fuelflow.run.fingerprint import facts_of
from fuelflow.run.handle import Mailbox, TrainedState, TrainHandle
from fuelflow.run.observer import Observer
from fuelflow.run.probe import Probe
from fuelflow.run.source import make_source
from fuelflow.run.stopping import StopSign
from fuelflow.run.tempo import Tempo
from fuelflow.step.batch import Pick
from fuelflow.step.checks import checked_count
from fuelflow.step.dispatch import Sent
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.outcome import StepOutcome
from fuelflow.step.program import CompileLog
from fuelflow.step.programs import Programs
from fuelflow.step.state import TrainState, evolve
from fuelflow.step.tally import totals_of

logger = logging.getLogger("fuelflow")


class Trainer:
    """Epochs of a loop over data, trained in the background and accounted for.

    Everything that uses a device is done by one thread, in one order, the same on every
    process. After each epoch come the evaluation, then ``metrics_fn``, then the queue
    of the handle. An error in a callback is logged with its traceback and stops
    nothing; an error in the loss, the data or a device ends the run and is raised by
    `TrainHandle.join` and whoever waits for metrics.

    A trainer that was stopped goes on from there when it is run again.

    Args:
        loop: The loop. With a ``mesh`` the data is spread over it.
        model: The model to begin with, as `TrainingLoop.init` takes it, or a
            `TrainState` to go on from, whose buffers are taken over.
        data: A `DataLoader`; an iterable of batches, gone through once an epoch; or
            with ``steps_per_epoch`` an iterator, such as one of grain's.
        epochs: How many to train for.
        eval_data: Batches to evaluate on after each epoch, as `data`.
        metrics_fn: Called with each epoch's `EpochMetrics`, such as `print`.
        epoch_fn: ``(epoch, state)``, called before each epoch. It may return a state to
            go on with, such as one with another rate, or None.
        stop_when: Called with the `History` after each epoch; true ends the run.
        steps_per_epoch: Batches of an epoch, for data that does not end by itself.
        steps_per_call: Steps in one dispatch, as in `TrainingLoop.run`. By default the
            first epochs find out whether several pay.
        seed: As in `TrainingLoop.init`.
        probe_ranks: Whether, with several ranks, a pass of each over its own rows is
            timed before each epoch, which tells a slow rank from those that wait for
            it. That compiles one more program, and takes about as long as a step.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If it is out of range, or the data can be gone through only once.

    Example:
        >>> import fuelflow as ff, numpy as np, jax.numpy as jnp, optax
        >>> def loss_fn(params, batch):
        ...     return (params["w"] * batch["x"] - batch["y"]) ** 2
        >>> x = np.arange(8, dtype=np.float32)
        >>> data = ff.DataLoader({"x": x, "y": 2 * x}, batch_size=4)
        >>> loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.01)
        >>> trained = Trainer(loop, {"w": jnp.float32(0)}, data, epochs=20).fit()
        >>> len(trained.history), round(float(trained.model["w"]), 3)
        (20, 2.0)
    """

    def __init__(
        self,
        loop: TrainingLoop,
        model: Any,
        data: Any,
        *,
        epochs: int,
        eval_data: Any = None,
        metrics_fn: Callable[[EpochMetrics], Any] | None = None,
        epoch_fn: Callable[[int, TrainState], TrainState | None] | None = None,
        stop_when: Callable[[History], Any] | None = None,
        steps_per_epoch: int | None = None,
        steps_per_call: int | None = None,
        seed: SupportsIndex | jax.Array = 0,
        probe_ranks: bool = True,
    ) -> None:
        if not isinstance(loop, TrainingLoop):
            raise TypeError(
                f"`loop` must be a TrainingLoop, got a {type(loop).__name__}"
            )
        self.loop = loop
        self.epochs = checked_count("epochs", epochs, least=1)
        for name, value in (
            ("steps_per_epoch", steps_per_epoch),
            ("steps_per_call", steps_per_call),
        ):
            if value is not None:
                checked_count(name, value, least=1)
        for name, function in (
            ("metrics_fn", metrics_fn),
            ("epoch_fn", epoch_fn),
            ("stop_when", stop_when),
        ):
            if function is not None and not callable(function):
                raise TypeError(
                    f"`{name}` must be a function, got a {type(function).__name__}"
                )
        self._metrics_fn = metrics_fn
        self._epoch_fn = epoch_fn
        self._stop_when = stop_when
        self._steps_per_call = steps_per_call
        self._data = make_source(
            "data",
            data,
            mesh=loop.mesh,
            steps_per_epoch=steps_per_epoch,
            epochs=self.epochs,
        )
        self._eval_data = None
        if eval_data is not None:
            self._eval_data = make_source(
                "eval_data",
                eval_data,
                mesh=loop.mesh,
                steps_per_epoch=None,
                epochs=self.epochs,
            )
        is_state = isinstance(model, TrainState)
        self._state = model if is_state else loop.init(model, seed=seed)
        self._history = History()
        self._epoch = 0
        self._stop_sign = StopSign()
        self._thread: threading.Thread | None = None
        self._mailbox: Mailbox | None = None
        self._calling_back = Stopwatch()
        self._probe_ranks = probe_ranks

    @property
    def state(self) -> TrainState:
        """The state after the last step that was dispatched.

        While the run goes on, the next step takes it over.
        """
        return evolve(self._state, sums=None)

    @property
    def history(self) -> History:
        """The metrics of the epochs so far."""
        return self._history

    def run(self) -> TrainHandle:
        """Starts training in the background.

        Raises:
            RuntimeError: If it is under way already.
        """
        if self._mailbox is not None and not self._mailbox.is_over:
            raise RuntimeError(
                "this trainer is running already: wait for it with `handle.join()`, "
                "or end it with `handle.stop()`"
            )
        if self._thread is not None:  # its last act is to end its mailbox
            self._thread.join()
        self._stop_sign.take_down()
        self._mailbox = mailbox = Mailbox()
        self._thread = threading.Thread(
            target=self._train, args=(mailbox,), name="fuelflow trainer"
        )
        self._thread.start()
        return TrainHandle(mailbox, self._result, self.stop)

    def fit(self) -> TrainedState:
        """Trains to the end, and waits for it.

        Interrupted, as by the stop button of a notebook, it ends the current step and
        leaves a usable `state`; another `fit` goes on from there.

        Raises:
            BaseException: What ended the run.
        """
        handle = self.run()
        try:
            return handle.join()
        except KeyboardInterrupt:
            handle.stop()
            assert self._thread is not None
            self._thread.join()
            raise

    def stop(self) -> None:
        """Has the run end after its current step; does not wait for it.

        One process is enough; then all of them end within some tens of steps.
        """
        self._stop_sign.put_up()

    def _result(self) -> TrainedState:
        return TrainedState(self.state, self._history, self.loop)

    # What the thread does.

    def _train(self, mailbox: Mailbox) -> None:
        try:
            epochs_left = self.epochs - self._epoch
            tempo = Tempo(self._steps_per_call, self._data.num_steps, epochs_left)
            state, programs = self.loop._host.ready(self._state)
            self._state = state
            require_agreement(self._facts())
            devices = programs.placement.rank_devices
            observer = Observer([d for d in devices if _is_local(d)])
            probe = Probe(devices if self._probe_ranks else devices[:1])
            try:
                while self._epoch < self.epochs and not self._stop_sign.is_up():
                    metrics = self._run_epoch(programs, observer, probe, tempo)
                    if metrics is None:
                        break
                    self._conclude(metrics, mailbox)
                    tempo.learn(metrics)
            finally:
                observer.close()
        except BaseException as error:  # noqa: BLE001 - raised where the run is held
            mailbox.end(error)
        else:
            mailbox.end()

    def _facts(self) -> dict[str, str]:
        """What must be the same on all processes."""
        if jax.process_count() == 1:
            return {}
        evaluation = self._eval_data.facts() if self._eval_data else {}
        return {
            **facts_of(self.loop, self._state),
            **self._data.facts(),
            **{f"evaluation: {name}": fact for name, fact in evaluation.items()},
            "epochs": str(self.epochs),
            "epochs done": str(self._epoch),
        }

    def _run_epoch(
        self, programs: Programs, observer: Observer, probe: Probe, tempo: Tempo
    ) -> EpochMetrics | None:
        """One epoch and its evaluation; None if it was stopped inside."""
        self._call_epoch_fn()
        num_compiles = len(self.loop.compiles)
        skipped_before = int(self._state.num_skipped)
        observer.begin()
        start = time.perf_counter()
        batches = self._data.epoch(self._epoch)
        last: StepOutcome | None = None
        num_steps = num_dispatches = 0
        opening = Opening(probe, programs.log)
        try:
            for sent in self._steps(batches, tempo.steps_per_call, opening):
                last = sent.outcome
                num_steps += sent.num_steps
                num_dispatches += 1
                observer.note(sent.output, sent.started)
                if self._stop_sign.is_up(num_dispatches):
                    return None
        finally:
            batches.close()
        seen = observer.finish()
        assert last is not None
        flight = self._state.flight
        assert flight is not None
        flight.land()  # an epoch with a bad step raises here, if its loop does
        compiling = self._secs_compiling(num_compiles) + batches.secs_compiling
        sums = self._state.sums
        assert sums is not None
        names = ("loss", *last.metric_names)
        totals = totals_of(programs.placement.fetched(sums), names)
        self._state = evolve(self._state, sums=None)
        *_, row = last.rows()
        evaluation, evaluating = self._evaluate()
        clocks = Clocks(
            start=start + opening.secs,
            compiling=compiling,
            waiting=batches.secs_waited,
            evaluating=evaluating,
            calling_back=self._calling_back.reset(),
            seen=seen,
            passing=probe.secs,
        )
        return make_metrics(
            programs.placement.rank_devices,
            totals,
            clocks,
            epoch=self._epoch,
            num_steps=num_steps,
            global_step=int(row["global_step"]),
            num_skipped=int(row["num_skipped"]) - skipped_before,
            lr=float(row["lr"]) if "lr" in row else None,
            evaluation=evaluation,
        )

    def _steps(
        self, batches: Iterable[Any], steps_per_call: int, opening: "Opening"
    ) -> Iterator[Sent]:
        dispatcher = self.loop._dispatcher
        for sent in dispatcher.each(
            self._state, batches, steps_per_call, prepare=opening
        ):
            self._state = sent.state
            yield sent
            flight = sent.state.flight
            assert flight is not None
            error = flight.make_room(self.loop.max_in_flight)
            if error is not None:
                flight.raise_once(error)

    def _evaluate(self) -> tuple[dict[str, float], float]:
        """The evaluation of the state, and the seconds it took."""
        if self._eval_data is None:
            return {}, 0.0
        num_compiles = len(self.loop.compiles)
        start = time.perf_counter()
        batches = self._eval_data.epoch(0)
        try:
            means = dict(self.loop.evaluate(self._state, batches))
        finally:
            batches.close()
        secs = time.perf_counter() - start - self._secs_compiling(num_compiles)
        return means, secs - batches.secs_compiling

    def _secs_compiling(self, after: int) -> float:
        return sum(record.seconds for record in self.loop.compiles[after:])

    def _conclude(self, metrics: EpochMetrics, mailbox: Mailbox) -> None:
        """Tells everybody of an epoch, callbacks first."""
        self._epoch += 1
        self._history.append(metrics)
        if self._metrics_fn is not None:
            with self._guarded("metrics_fn"):
                self._metrics_fn(metrics)
        if self._stop_when is not None:
            with self._guarded("stop_when"):
                if self._stop_when(self._history):
                    self._stop_sign.put_up()
        mailbox.put(metrics)

    def _call_epoch_fn(self) -> None:
        if self._epoch_fn is None:
            return
        with self._guarded("epoch_fn"):
            changed = self._epoch_fn(self._epoch, self._state)
            if isinstance(changed, TrainState):
                self._state = changed

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Runs a callback: its time is kept, and its error is logged."""
        with self._calling_back:
            try:
                yield
            except Exception:
                logger.exception(
                    "`%s` failed after epoch %d, and training goes on",
                    name,
                    self._epoch - 1,
                )


class Opening:
    """What is done before an epoch's first step, once its batch is there.

    Attributes:
        secs: How long that took, compiling apart.
    """

    def __init__(self, probe: Probe, log: CompileLog) -> None:
        self.secs = 0.0
        self._probe = probe
        self._log = log

    def __call__(self, programs: Programs, state: TrainState, batch: Any) -> TrainState:
        """The state with an account of nothing, unless it has one that goes on."""
        if state.sums is not None:
            return state
        start, num_compiles = time.perf_counter(), len(self._log.records)
        if not isinstance(batch, Pick):
            batch = programs.placed(batch)
        self._probe.run(programs, state, batch)
        state = evolve(state, sums=programs.zero_sums())
        made = self._log.records[num_compiles:]
        secs = time.perf_counter() - start
        self.secs = secs - sum(record.seconds for record in made)
        return state


def _is_local(device: Any) -> bool:
    return device.process_index == jax.process_index()
