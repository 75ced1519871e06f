"""The course of a run: epoch after epoch, from wherever it is."""

import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, replace
from typing import Any

import jax

from fuelflow.checkpoint.checkpointer import Checkpointer, SavesRuns
from fuelflow.checkpoint.nothing import NoCheckpointer
from fuelflow.checkpoint.record import RunRecord
from fuelflow.devices.agreement import require_agreement
from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.history import History
from fuelflow.run.account import Clocks, longest, make_metrics
from fuelflow.run.callbacks import Callbacks
from fuelflow.run.evaluating import StoppedError, evaluate
from fuelflow.run.fingerprint import facts_of
from fuelflow.run.observer import Observer
from fuelflow.run.opening import Opening
from fuelflow.run.progress import Progress, means_of, require_best, require_same
from fuelflow.run.rank_pass import RankPass
from fuelflow.run.source import Source
from fuelflow.run.stopping import StopSign
from fuelflow.run.tempo import Tempo
from fuelflow.run.timed import Abandoned, Timed
from fuelflow.run.watchdog import watched
from fuelflow.run.watching import Dispatched, Watch
from fuelflow.step.dispatch import Sent
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.outcome import StepOutcome
from fuelflow.step.programs import Programs
from fuelflow.step.state import TrainState, evolve
from fuelflow.step.tally import totals_of


class Course:
    """A run: where it is, and how it goes on. Used by one thread at a time.

    Args:
        loop: The loop.
        state: A first state.
        data: The batches.
        eval_data: The batches of evaluations, or None.
        callbacks: The user's functions.
        checkpointer: Who keeps the run.
        epochs: How many there are to be.
        steps_per_call: Steps in a dispatch; None to find out.
        time_ranks: Whether ranks are timed alone.
        hang_after: Seconds without getting on that are a hang, or None.
        watch: Who is told of what the run does.

    Attributes:
        state: The state after the last step that was dispatched.
        history: The metrics of the epochs so far.
        stop_sign: Ends it early.
        watch: Who is told of what it does.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        state: TrainState,
        data: Source,
        eval_data: Source | None,
        *,
        callbacks: Callbacks,
        checkpointer: SavesRuns,
        epochs: int,
        steps_per_call: int | None,
        time_ranks: bool,
        hang_after: float | None,
        watch: Watch,
    ) -> None:
        self.loop = loop
        self.state = state
        self.history = History()
        self.stop_sign = StopSign()
        self._data = data
        self._eval_data = eval_data
        self._callbacks = callbacks
        self._checkpointer = checkpointer
        self._epochs = epochs
        self._steps_per_call = steps_per_call
        self._time_ranks = time_ranks
        self._hang_after = hang_after
        self.watch = watch
        self._epoch = 0
        self._so_far = Progress()
        self._num_updates = 0
        self._num_steps: int | None = None
        self._observer: Observer | None = None
        self._batches: Timed | None = None
        self._now: Callable[[], Progress] = Progress
        self._unevaluated: EpochMetrics | None = None

    def resume(self, checkpointer: Checkpointer) -> None:
        """Goes on from the newest good checkpoint, if there is one."""
        if checkpointer.latest() is None:
            return
        restored = checkpointer.restore(self.loop, self.state, skip_damaged=True)
        record = restored.record
        self.state = restored.state
        self.history = record.history
        self._epoch = record.epoch
        self._unevaluated = record.unevaluated
        self._so_far = Progress.of(record.clocks)
        if self._epoch < self._epochs:
            self._data.restore(record.position)

    def run(self, tell: Callable[[EpochMetrics], None]) -> None:
        """Goes on to the last epoch, or until the sign is up.

        Args:
            tell: Told of each epoch, after the callbacks.
        """
        try:
            with watched(self, self._hang_after):
                self._run(tell)
        except Abandoned:  # and somebody else has ended it
            raise
        except BaseException as error:
            self.watch.end("error", error)
            raise
        self.watch.end(self.stop_sign.reason or "done")

    def _run(self, tell: Callable[[EpochMetrics], None]) -> None:
        self.state, programs = self.loop._host.ready(self.state)
        require_agreement(self._facts())
        self._checkpointer.prepare()
        self._num_updates = int(self.state.step)
        self._num_steps = self._data.num_steps  # asked once: a step has no time for it
        tempo = Tempo(self._steps_per_call, self._num_steps, self._epochs - self._epoch)
        devices = programs.placement.rank_devices
        self._observer = observer = Observer([d for d in devices if _is_local(d)])
        rank_pass = RankPass(devices if self._time_ranks else devices[:1])
        self._begin_watch(programs)
        try:
            if self._checkpointer.missed is not None:
                self._save(self._checkpointer.missed)
            while self._epoch < self._epochs and not self.stop_sign.is_up():
                metrics = self._unevaluated or self._run_epoch(
                    programs, observer, rank_pass, tempo
                )
                metrics = metrics and self._evaluated(metrics)
                if metrics is None:
                    break
                self._conclude(metrics, tell)
                tempo.learn(metrics)
            if self.stop_sign.reason is not None:
                self._save(f"stopped: {self.stop_sign.reason}")
            self._checkpointer.wait()
        finally:
            observer.close()

    def _begin_watch(self, programs: Programs) -> None:
        directory = getattr(self._checkpointer, "directory", None)
        self.watch.begin(
            self.loop,
            self.state,
            programs,
            epochs=self._epochs,
            steps_per_epoch=self._num_steps,
            epoch=self._epoch,
            step=self._num_updates,
            epoch_step=self._so_far.num_steps,
            history=tuple(self.history),
            directory=None if directory is None else str(directory),
        )

    def _facts(self) -> dict[str, str]:
        """What must be the same on all processes."""
        if jax.process_count() == 1:
            return {}
        evaluation = self._eval_data.facts() if self._eval_data else {}
        return {
            **facts_of(self.loop, self.state),
            **self._data.facts(),
            **{f"evaluation: {name}": fact for name, fact in evaluation.items()},
            "epochs": str(self._epochs),
            "epochs done": str(self._epoch),
        }

    # For the watchdog, from its thread.

    def pulse(self) -> Hashable:
        """What is another one whenever a step was done or a batch was given."""
        batches = self._batches
        given = None if batches is None else batches.pulse()
        return self._epoch, self._last_step(), given

    def last_done(self) -> str:
        """The last step that was seen done."""
        step = self._last_step()
        return "none" if step is None else f"{step}, and the epoch is {self._epoch}"

    def _last_step(self) -> int | None:
        return None if self._observer is None else self._observer.last_step

    # For who ends it, from another thread.

    def is_waiting(self, secs: float) -> bool:
        """Whether its thread has waited so long for data."""
        return self._batches is not None and self._batches.is_waiting(secs)

    def leave_waiting(self, secs: float) -> bool:
        """Ends a run whose thread has waited so long for data, where it is, and saves.

        Its thread ends by itself once its batch comes. False if it must stay for that.
        """
        batches = self._batches
        if batches is None or not batches.claim(secs):
            return False
        is_left = False
        try:
            now, mark = self._now(), (0, None)
            if self._unevaluated is None:
                mark = batches.mark_at(now.num_steps - self._so_far.num_steps)
            place = self._epoch, now.num_steps, self._unevaluated and batches.num_given
            if mark is None or not self.stop_sign.is_up_where(str(place)):
                return False
            is_left = True
            if self._unevaluated is None:
                self._data.leave(batches, mark[1])
                self._so_far = self._so_far if self.state.sums is None else now
            self._save(f"stopped: {self.stop_sign.reason}")
            self._checkpointer.wait()
            self.watch.end(self.stop_sign.reason or "done")
        finally:
            batches.release(is_abandoned=is_left)
        return is_left

    # An epoch.

    def _run_epoch(
        self, programs: Programs, observer: Observer, rank_pass: RankPass, tempo: Tempo
    ) -> EpochMetrics | None:
        """One epoch, or the rest of it; None if it was stopped."""
        if self.state.sums is None:
            self.state = self._callbacks.before(self._epoch, self.state)
            self._so_far = Progress(num_skipped=int(self.state.num_skipped))
        num_compiles, tracing = len(self.loop.compiles), programs.secs_tracing
        observer.begin()
        start = time.perf_counter()
        batches = self._data.epoch(self._epoch, self._so_far.num_steps)
        batches.keep_marks(tempo.steps_per_call)
        self._batches = batches
        opening = Opening(rank_pass, programs.log, self._data.num_tail_rows)

        def so_far() -> Progress:
            """What the epoch has had, this part of it included."""
            before = self._so_far
            compiling = self._secs_compiling(num_compiles) + batches.secs_compiling
            compiling += programs.secs_tracing - tracing
            secs = time.perf_counter() - start - opening.secs - compiling
            return Progress(
                before.num_steps + num_steps,
                before.num_skipped,
                before.secs + secs,
                before.secs_waiting + batches.secs_waited,
                before.secs_compiling + compiling,
            )

        self._now = so_far
        last: StepOutcome | None = None
        num_steps = num_dispatches = 0
        dispatcher = self.loop._dispatcher
        try:
            for sent in dispatcher.each(
                self.state, batches, tempo.steps_per_call, prepare=opening
            ):
                before, last = last, sent.outcome
                self.state = sent.state  # whose step has taken the one before over
                num_steps += sent.num_steps
                batches.trained_on(num_steps)
                num_dispatches += 1
                self._num_updates += sent.num_steps
                self._note(sent, observer, num_steps, batches.secs_waited)
                if before is not None:
                    require_same(before, last)
                else:
                    require_best(self._checkpointer.best, last)
                if self._may_end_here(batches, num_steps, num_dispatches, so_far):
                    self._so_far = so_far()
                    return None
                assert self.state.flight is not None
                self.state.flight.await_room(self.loop.max_in_flight)
        except Abandoned:
            raise
        except BaseException:
            self._leave_epoch(batches, num_steps, so_far)
            raise
        finally:
            batches.close()
        return self._close_epoch(programs, observer, rank_pass, last, so_far)

    def _note(
        self, sent: Sent, observer: Observer, num_steps: int, waited: float
    ) -> None:
        """Has those who look at the steps take note of a dispatch."""
        output, started = sent.output, sent.started
        observer.note(output, started, self._num_updates, waited=waited)
        num_done = self._so_far.num_steps + num_steps
        place = self._epoch, num_done, self._num_updates
        self.watch.dispatched(
            Dispatched(
                output, sent.outcome.layout, sent.outcome.aside, *place, started, waited
            )
        )

    def _may_end_here(
        self,
        batches: Timed,
        num_steps: int,
        num_dispatches: int,
        so_far: Callable[[], Progress],
    ) -> bool:
        """Saves the run if it is time, and says whether it is to stop here.

        Not between batches that were taken from the data together: what the data says
        of its position then is of the last of them. Nor after the last one, whose epoch
        is about to be closed.
        """
        num_done = self._so_far.num_steps + num_steps
        if batches.num_given != num_steps or num_done == self._num_steps:
            return False
        reason = self._checkpointer.is_due(self._num_updates)
        is_to_stop = self.stop_sign.is_up(num_dispatches)
        if reason is None and not is_to_stop:
            return False
        position, is_endless = self._data.position(), self._num_steps is None
        if is_endless and batches.is_over():
            return False
        if reason is not None:
            self._save(reason, so_far(), position)
        if is_to_stop and is_endless:  # to know that, one was taken that comes again
            batches.close()
            self._data.restore(position)
        return is_to_stop

    def _leave_epoch(
        self, batches: Timed, num_steps: int, so_far: Callable[[], Progress]
    ) -> None:
        """After an error: the epoch goes on where it was, or else begins anew."""
        if self.state.sums is not None and batches.num_given == num_steps:
            self._so_far = so_far()
        else:
            self.state = evolve(self.state, sums=None)

    def _close_epoch(
        self,
        programs: Programs,
        observer: Observer,
        rank_pass: RankPass,
        last: StepOutcome | None,
        so_far: Callable[[], Progress],
    ) -> EpochMetrics:
        """The account of an epoch whose steps are dispatched, not evaluated yet."""
        seen = observer.finish()
        had = so_far()
        flight, sums = self.state.flight, self.state.sums
        assert last is not None
        assert flight is not None
        assert sums is not None
        try:
            flight.land()  # an epoch with a bad step raises here, if its loop does
        except BaseException:
            self.state = evolve(self.state, sums=None)  # which then begins anew
            raise
        self.watch.finished_steps()
        names = ("loss", *last.metric_names)
        totals = totals_of(programs.placement.fetched(sums), names)
        self.state = evolve(self.state, sums=None)
        *_, row = last.rows()
        # As if what came before an interruption had come right before the rest.
        start = max(seen.done.values()) - had.secs - had.secs_compiling
        clocks = Clocks(
            start=start,
            compiling=had.secs_compiling,
            waiting=had.secs_waiting,
            evaluating=0.0,
            calling_back=self._callbacks.time.reset(),
            seen=seen,
            passing=rank_pass.secs,
        )
        return make_metrics(
            programs.placement.rank_devices,
            totals,
            clocks,
            epoch=self._epoch,
            num_steps=had.num_steps,
            global_step=int(self.state.step),
            num_skipped=int(row["num_skipped"]) - had.num_skipped,
            lr=float(row["lr"]) if "lr" in row else None,
        )

    def _evaluated(self, metrics: EpochMetrics) -> EpochMetrics | None:
        """An epoch's metrics with its evaluation; None if that was stopped."""
        if self._eval_data is None:
            return metrics
        self._unevaluated = metrics
        self._batches = batches = self._eval_data.epoch(0)
        try:
            means, secs = evaluate(self.loop, self.state, batches, self.stop_sign)
        except StoppedError:
            return None
        self._unevaluated = None
        return replace(metrics, evaluation=means, eval_ms=1e3 * longest(secs))

    def _secs_compiling(self, after: int) -> float:
        return sum(record.seconds for record in self.loop.compiles[after:])

    def _conclude(
        self, metrics: EpochMetrics, tell: Callable[[EpochMetrics], None]
    ) -> None:
        """Keeps an epoch's metrics and tells everybody, callbacks first."""
        self._epoch += 1
        self._so_far = Progress()
        self.history.append(metrics)
        self.watch.finished_epoch(metrics)
        if self._callbacks.after(metrics, self.history):
            self.stop_sign.put_up("stop_when")
        tell(metrics)
        reason = self._checkpointer.is_due(self._num_updates, num_epochs=self._epoch)
        if reason is not None:
            self._save(reason)

    def _save(
        self, reason: str, so_far: Progress | None = None, position: Any = None
    ) -> None:
        """Has the run kept as it is now, or with the data in a position before that."""
        had = self._so_far if so_far is None else so_far
        is_between = self.state.sums is None
        is_measured = is_between and self._unevaluated is None
        record = RunRecord(
            epoch=self._epoch,
            position=self._data.position() if position is None else position,
            history=self.history,
            metrics=means_of(self.history[-1:]) if is_measured else {},
            clocks={} if is_between else asdict(had),
            unevaluated=self._unevaluated,
        )
        self._checkpointer.save(self.state, record, reason=reason)
        if not isinstance(self._checkpointer, NoCheckpointer):
            self.watch.saved(self._num_updates, reason)


def _is_local(device: Any) -> bool:
    return device.process_index == jax.process_index()
