"""What users test their runs with finds what does not resume, and names it."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fuelflow as ff
from fuelflow.testing import assert_resumes_exactly

NUM_ROWS, SIZE = 24, 8


def loss_fn(params: Any, batch: Any) -> Any:
    error = batch["x"] @ params["w"] - batch["y"]
    return error**2, {"absolute": jnp.abs(error)}


def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_ROWS, 3)).astype(np.float32)
    return {"x": x, "y": random.normal(size=NUM_ROWS).astype(np.float32)}


LOOP = ff.TrainingLoop(loss_fn, optax.adam, schedule=0.1)


def make_trainer(
    checkpointer: Any,
    resume: bool,
    make_data: Any = lambda: ff.DataLoader(rows(), SIZE, seed=1),
    loop: ff.TrainingLoop = LOOP,
    **options: Any,
) -> ff.Trainer:
    return ff.Trainer(
        loop,
        {"w": np.zeros(3, np.float32)},
        make_data(),
        epochs=2,
        checkpointer=checkpointer,
        resume=resume,
        **{"steps_per_call": 1, **options},
    )


class Wandering:
    """Batches that begin elsewhere in every pass of the process."""

    def __init__(self, passes: Any) -> None:
        self._passes = passes

    def __len__(self) -> int:
        return NUM_ROWS // SIZE

    def __iter__(self) -> Any:
        shift = next(self._passes)
        for start in range(0, NUM_ROWS, SIZE):
            yield {
                name: np.roll(part, shift, axis=0)[start : start + SIZE]
                for name, part in rows().items()
            }


def test_a_run_that_resumes_passes_with_steps_of_its_own_choice():
    assert_resumes_exactly(make_trainer)


def test_checkpoints_stay_where_they_are_asked_for(tmp_path: Path):
    assert_resumes_exactly(make_trainer, at_steps=[2, 3], directory=tmp_path)

    assert ff.Checkpointer(tmp_path / "step-2").steps() == (2,)
    assert ff.Checkpointer(tmp_path / "step-3").steps() == (3,)


def test_other_rows_are_named_by_their_steps():
    # The passes that begin are: whole 0 and 1; first 2; second 3 and 4.
    make_data = partial(Wandering, itertools.count())

    with pytest.raises(AssertionError) as caught:
        assert_resumes_exactly(partial(make_trainer, make_data=make_data), at_steps=[2])

    text = str(caught.value)
    assert text.startswith("a run that was stopped after step 2 and resumed is not")
    assert "step 1, before the stop, had other rows" in text
    assert "step 3, after the stop, had other rows" in text
    assert "more" in text


def test_arrays_and_metrics_that_differ_are_named():
    rates = iter([0.1, 0.1, 0.2])

    def make(checkpointer: Any, resume: bool) -> ff.Trainer:
        rate = next(rates)
        loop = LOOP.replace(schedule=lambda step: jnp.where(step < 4, 0.1, rate))
        return make_trainer(checkpointer, resume, loop=loop)

    with pytest.raises(AssertionError) as caught:
        assert_resumes_exactly(make, at_steps=[2])

    text = str(caught.value)
    assert "had other rows" not in text
    assert "`params.w`: 3 of 3 values differ, the first is" in text
    assert "`avg_loss` of epoch 1 is" in text
    assert "epoch 0" not in text


def test_a_run_that_forgets_where_its_data_was_is_caught():
    class Forgetful:
        """An iterator that says where it is, and goes elsewhere."""

        def __init__(self) -> None:
            self._count = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self._count += 1
            shift = self._count % 5
            return {
                name: np.roll(part, shift, 0)[:SIZE] for name, part in rows().items()
            }

        def get_state(self) -> dict[str, int]:
            return {"count": self._count}

        def set_state(self, state: dict[str, int]) -> None:
            self._count = state["count"] + 1

    make = partial(make_trainer, make_data=Forgetful, steps_per_epoch=3)

    with pytest.raises(AssertionError, match="step 3, after the stop, had other rows"):
        assert_resumes_exactly(make, at_steps=[2])


@pytest.mark.parametrize("given", ["nothing", "no resume", "another"])
def test_a_trainer_that_ignores_what_it_is_given_is_refused(tmp_path: Path, given: str):
    def make(checkpointer: Any, resume: bool) -> ff.Trainer:
        if given == "nothing":
            return make_trainer(None, resume=False)
        if given == "another":
            return make_trainer(ff.Checkpointer(tmp_path), resume)
        return make_trainer(checkpointer, resume=False)

    refusal = "`make_trainer` must give its trainer the|it has some of an earlier run"
    with pytest.raises(ValueError, match=refusal):
        assert_resumes_exactly(make, at_steps=[1])


def test_steps_that_are_none_of_the_run_are_refused():
    with pytest.raises(ValueError, match="`at_steps` must be before the last of 6"):
        assert_resumes_exactly(make_trainer, at_steps=[6])
    with pytest.raises(ValueError, match="`at_steps` must be at least 1, got 0"):
        assert_resumes_exactly(make_trainer, at_steps=[0])
    with pytest.raises(ValueError, match="cannot be stopped after step 5"):
        assert_resumes_exactly(partial(make_trainer, steps_per_call=3), at_steps=[5])
