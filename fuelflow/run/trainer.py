"""Trainer: epochs in the background, each with its account."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, SupportsIndex

import jax

from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.nothing import NoCheckpointer
from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.history import History
from fuelflow.run.attendant import Attendant
from fuelflow.run.callbacks import Callbacks
from fuelflow.run.course import Course
from fuelflow.run.handle import Mailbox, TrainedState, TrainHandle
from fuelflow.run.source import make_source
from fuelflow.run.timed import Abandoned
from fuelflow.run.watching import Watch, Watcher
from fuelflow.step.checks import checked_count, checked_flag, checked_positive
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.state import TrainState, evolve


class Trainer:
    """Epochs of a loop over data, trained in the background and accounted for.

    Everything that uses a device is done by one thread, in one order, the same on every
    process. After each epoch come the evaluation, then ``metrics_fn``, then the queue
    of the handle. An error in a callback is logged with its traceback and stops
    nothing; an error in the loss, the data or a device ends the run and is raised by
    `TrainHandle.join` and whoever waits for metrics.

    A trainer that was stopped goes on from there when it is run again. After an error
    it goes on too; if a batch was taken and not trained on, its epoch begins anew.

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
            go on with, such as one from `TrainingLoop.set_lr_scale`, or None. It must
            not use the state up.
        stop_when: Called with the `History` after each epoch; true ends the run.
        steps_per_epoch: Batches of an epoch, for data that does not end by itself.
        steps_per_call: Steps in one dispatch, as in `TrainingLoop.run`. By default the
            first epochs find out whether several pay. That is a matter of the clock,
            and calls of another length may round the last bit otherwise: give a number
            where two runs are to be the same to the bit.
        seed: As in `TrainingLoop.init`.
        time_ranks: Whether, with several ranks, a pass of each over its own rows is
            timed before each epoch, which tells a slow rank from those that wait for
            it. That compiles one more program, and takes about as long as a step; what
            the loss does besides, such as printing, it does then too.
        checkpointer: Keeps the run as often as it says, and when it is stopped: also by
            SIGTERM, which then ends the run after its current step, or where it waits
            for data, without an error. Of several processes all must wait for the same
            step; else it ends soon after the batch came. A second SIGTERM ends it.
        resume: Whether the newest good checkpoint, if there is one, is gone on from.
        hang_after: After how many seconds in which no step was done and no batch came,
            compiling apart, the stack of every thread is logged as a warning, with what
            the run was doing. Longer than a dispatch takes, and a callback. The run
            goes on waiting. By default it is not watched.
        monitor: A `Monitor`, which shows the run while it goes on and keeps records of
            it, by default beside the checkpoints. It reads a step a few times a second,
            in a thread of its own, and never stops the run or holds it up.

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
        time_ranks: bool = True,
        checkpointer: Checkpointer | None = None,
        resume: bool = False,
        hang_after: float | None = None,
        monitor: Watcher | None = None,
    ) -> None:
        if not isinstance(loop, TrainingLoop):
            raise TypeError(
                f"`loop` must be a TrainingLoop, got a {type(loop).__name__}"
            )
        epochs = checked_count("epochs", epochs, least=1)
        for name, value in (
            ("steps_per_epoch", steps_per_epoch),
            ("steps_per_call", steps_per_call),
        ):
            if value is not None:
                checked_count(name, value, least=1)
        if hang_after is not None:
            checked_positive("hang_after", hang_after)
        checked_flag("time_ranks", time_ranks)
        checked_flag("resume", resume)
        _check_checkpointer(
            checkpointer, resume=resume, evaluates=eval_data is not None
        )
        callbacks = Callbacks(
            metrics_fn=metrics_fn, epoch_fn=epoch_fn, stop_when=stop_when
        )
        source = partial(make_source, mesh=loop.mesh, epochs=epochs)
        batches = source("data", data, steps_per_epoch=steps_per_epoch)
        if eval_data is not None:
            eval_data = source("eval_data", eval_data, steps_per_epoch=None)
        options = {"epochs": epochs, "steps_per_call": steps_per_call, "seed": seed}
        is_state = isinstance(model, TrainState)
        self.loop = loop
        self.epochs = epochs
        self._is_kept = checkpointer is not None
        self._resumes = checkpointer if resume else None
        self._course = Course(
            loop,
            model if is_state else loop.init(model, seed=seed),
            batches,
            eval_data,
            callbacks=callbacks,
            checkpointer=checkpointer or NoCheckpointer(),
            epochs=epochs,
            steps_per_call=steps_per_call,
            time_ranks=time_ranks,
            hang_after=hang_after,
            watch=Watch(monitor, data, options),
        )
        self._thread: threading.Thread | None = None
        self._attendant: Attendant | None = None
        self._mailbox: Mailbox | None = None
        self._signals = ExitStack()

    @property
    def state(self) -> TrainState:
        """The state after the last step that was dispatched.

        Raises:
            RuntimeError: If the run is under way, whose next step takes the state over,
                and another thread asks.
        """
        is_ours = threading.current_thread() is self._thread
        if self._is_running() and not is_ours:
            raise RuntimeError(
                "the state belongs to the run while it is under way: wait for it with "
                "`handle.join()`, end it with `handle.stop()`, or look at the state in "
                "`epoch_fn`"
            )
        return evolve(self._course.state, sums=None)

    @property
    def history(self) -> History:
        """The metrics of the epochs so far."""
        return self._course.history

    def run(self) -> TrainHandle:
        """Starts training in the background.

        A program that ends waits for it; on Python 3.12.0 and 3.12.1, where nothing can
        be saved then, wait for the handle.

        Raises:
            RuntimeError: If it is under way already.
        """
        if self._is_running():
            raise RuntimeError(
                "this trainer is running already: wait for it with `handle.join()`, "
                "or end it with `handle.stop()`"
            )
        if self._attendant is not None:  # whose run's end it was that ended it
            self._attendant.wait()
        self._course.stop_sign.take_down()
        self._course.watch.open()
        self._mailbox = mailbox = Mailbox()
        self._thread = threading.Thread(
            target=self._train, args=(mailbox,), name="fuelflow trainer", daemon=True
        )
        if self._is_kept:
            self._signals.enter_context(self._course.stop_sign.held_up_by_sigterm())
        self._thread.start()
        self._attendant = Attendant(self._course, mailbox, self._signals.close)
        return TrainHandle(mailbox, self._result, self.stop, self._signals.close)

    def _is_running(self) -> bool:
        return self._mailbox is not None and not self._mailbox.is_over

    def fit(self) -> TrainedState:
        """Trains to the end, and waits for it.

        Interrupted, as by the stop button of a notebook, it ends the current step and
        leaves a usable `state`, which a checkpointer has kept; another `fit` goes on
        from there. Interrupted once more, it waits for nothing.

        Raises:
            BaseException: What ended the run.
        """
        handle = self.run()
        try:
            return handle.join()
        except KeyboardInterrupt:
            handle.stop()
            try:
                handle.join()  # a save that failed comes before the interruption
            except KeyboardInterrupt:
                assert self._attendant is not None
                self._attendant.give_up()
                raise
            raise

    def stop(self) -> None:
        """Has the run end after its current step; does not wait for it.

        One process is enough; then all of them end within some tens of steps. Before
        the run is started it does nothing.
        """
        self._course.stop_sign.put_up()

    def _result(self) -> TrainedState:
        return TrainedState(
            self.state, History(self.history), self.loop, self._course.stop_sign.reason
        )

    def _train(self, mailbox: Mailbox) -> None:
        """What the thread does."""
        try:
            if self._resumes is not None:
                self._course.resume(self._resumes)
                self._resumes = None
            self._course.run(mailbox.put)
        except Abandoned:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the run is held
            mailbox.end(error)
        else:
            mailbox.end()
        self._course.stop_sign.tell()


def _check_checkpointer(
    checkpointer: Checkpointer | None, *, resume: bool, evaluates: bool
) -> None:
    """Refuses what keeps no runs, or would write over the checkpoints of another."""
    if checkpointer is None:
        if resume:
            raise ValueError("`resume` needs a `checkpointer` to resume from")
        return
    if not hasattr(checkpointer, "is_due"):
        raise TypeError(
            "`checkpointer` must be a Checkpointer, got a "
            f"{type(checkpointer).__name__}: ff.Checkpointer(directory)"
        )
    best = checkpointer.best
    if best is not None and best.startswith("eval.") and not evaluates:
        raise ValueError(
            f"`best` of the checkpointer is {best!r}, a metric of the evaluation, and "
            "there is no `eval_data`"
        )
    if not resume and checkpointer.latest() is not None:
        raise ValueError(
            "`checkpointer` must have a directory without checkpoints, and it has "
            f"some of an earlier run, up to step {checkpointer.latest()}: go on from "
            "them with `resume=True`, or take another directory"
        )
