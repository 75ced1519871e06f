"""The story: how far a run is, and how long it will take, from its records alone."""

import pytest
from metric_records import make_metrics

from fuelflow.watch.record.story import MAX_STEPS, Story

START = 1_000.0


def run(*, epochs=10, steps=100, first_epoch=0, after=0, at=START):
    return {
        "kind": "run",
        "time": at,
        "epochs": epochs,
        "steps_per_epoch": steps,
        "epoch": first_epoch,
        "step": after,
    }


class Course:
    """Records of a steady run, with all of its delays, and when it will end."""

    def __init__(self, *, epochs, steps, secs_per_step, between, first_epoch=0):
        self.epochs, self.steps = epochs, steps
        self.secs_per_step, self.between = secs_per_step, between
        self.first_epoch = first_epoch
        self.now = START
        self.compiled = 0.0

    def compile(self, secs):
        self.now += secs
        self.compiled += secs
        return {"kind": "compile", "time": self.now, "seconds": secs}

    def records(self, *, compiling=(), every=5):
        """The whole run; ``compiling`` says after which updates it takes how long."""
        compiling = dict(compiling)
        yield run(
            epochs=self.epochs,
            steps=self.steps,
            first_epoch=self.first_epoch,
            after=self.first_epoch * self.steps,
        )
        for epoch in range(self.first_epoch, self.epochs):
            for step in range(1, self.steps + 1):
                done = epoch * self.steps + step
                if done in compiling:
                    yield self.compile(compiling[done])
                self.now += self.secs_per_step
                if step % every == 0:
                    yield {
                        "kind": "step",
                        "time": self.now,
                        "epoch": epoch,
                        "epoch_step": step,
                        "step": done,
                    }
            self.now += self.between
            metrics = make_metrics(epoch=epoch, num_steps=self.steps).to_dict()
            metrics["epoch_ms"] = 1e3 * self.steps * self.secs_per_step
            metrics["eval_ms"] = 1e3 * self.between
            metrics["callback_ms"] = 0.0
            yield {"kind": "epoch", "time": self.now, "metrics": metrics}


def told(course, fraction, **options):
    """A story after a part of a run, the time then, and how long the rest took."""
    story = Story()
    left: tuple[float, float] | None = None
    for record in course.records(**options):
        if left is None:
            story.add(record)
            done = story.progress.fraction
            if done is not None and done >= fraction:
                left = course.now, course.compiled
    assert left is not None
    now, compiled = left
    return story, now, course.now - now - (course.compiled - compiled)


@pytest.mark.parametrize(
    ("epochs", "steps", "between"),
    [(1, 1000, 0.0), (10, 100, 3.0), (40, 20, 0.4), (100, 5, 2.0)],
    ids=["one long epoch", "an evaluation each", "short epochs", "mostly evaluation"],
)
# A tenth, and a little, as nobody knows of evaluations before the first one.
@pytest.mark.parametrize("fraction", [0.11, 0.5, 0.9])
def test_the_time_left_of_a_steady_run_is_told(epochs, steps, between, fraction):
    course = Course(epochs=epochs, steps=steps, secs_per_step=0.05, between=between)
    story, now, left = told(course, fraction, compiling={1: 30.0})

    assert story.eta_secs(now) == pytest.approx(left, rel=0.1)


def test_compiling_in_the_middle_does_not_count():
    course = Course(epochs=4, steps=500, secs_per_step=0.01, between=0.0)
    story, now, left = told(course, 0.3, compiling={1: 20.0, 450: 60.0})

    assert story.eta_secs(now) == pytest.approx(left, rel=0.1)


def test_what_the_first_epoch_did_but_once_does_not_count():
    course = Course(epochs=20, steps=10, secs_per_step=0.2, between=0.0)
    story = Story()
    for record in course.records(every=1000):
        story.add(record)
        if record["kind"] == "epoch":
            course.secs_per_step = 0.1
            if record["metrics"]["epoch"] == 1:
                break

    assert story.eta_secs(course.now) == pytest.approx(18 * 10 * 0.1, rel=0.1)


def test_a_run_that_got_slower_takes_the_longer():
    course = Course(epochs=1, steps=4000, secs_per_step=0.01, between=0.0)
    story = Story()
    for record in course.records():
        story.add(record)
        if record["kind"] == "step" and record["step"] == 1000:
            course.secs_per_step = 0.04
        if record["kind"] == "step" and record["step"] == 2000:
            break

    assert story.eta_secs(course.now) == pytest.approx(2000 * 0.04, rel=0.1)


@pytest.mark.parametrize("has_times", [True, False], ids=["a file", "a history"])
def test_a_resumed_run_knows_its_evaluations_from_before(has_times):
    before = Course(epochs=5, steps=100, secs_per_step=0.02, between=4.0)
    story = Story()
    known = list(before.records()) if has_times else []
    for record in known:
        story.add(record)
    after = Course(epochs=10, steps=100, secs_per_step=0.02, between=4.0, first_epoch=5)
    after.now = before.now + 5000
    for record in after.records():
        if record["kind"] == "run":
            record["time"] = after.now
        story.add(record)
        if record["kind"] == "run" and not has_times:
            for epoch in before.records():
                if epoch["kind"] == "epoch":
                    story.add(epoch | {"time": record["time"]})
        if record["kind"] == "step" and record["step"] == 550:
            break

    expected = 450 * 0.02 + 5 * 4.0
    assert story.eta_secs(after.now) == pytest.approx(expected, rel=0.1)


def test_the_time_left_runs_down_between_two_looks():
    course = Course(epochs=2, steps=100, secs_per_step=0.1, between=0.0)
    story, now, left = told(course, 0.5)

    assert story.eta_secs(now + 4) == pytest.approx(left - 4, rel=0.1)
    assert story.eta_secs(now + 1e6) == 0


def test_the_time_left_is_not_made_up():
    story = Story()
    assert story.eta_secs(START) is None
    story.add(run() | {"epochs": None})
    story.add({**step(0, 1, 1), "time": START + 1})
    story.add({**step(0, 2, 2), "time": START + 2})
    assert story.eta_secs(START + 3) is None


def step(epoch, epoch_step, number):
    return {
        "kind": "step",
        "time": START + number,
        "epoch": epoch,
        "epoch_step": epoch_step,
        "step": number,
    }


def test_progress_is_of_the_epoch_under_way():
    story = Story()
    story.add(run(epochs=4, steps=10))
    assert (story.progress.epoch, story.progress.epoch_step) == (0, 0)
    story.add(step(0, 10, 10))
    assert (story.progress.epoch, story.progress.epoch_step) == (0, 10)
    story.add(epoch_record(0))
    assert (story.progress.epoch, story.progress.epoch_step) == (1, 0)
    story.add(step(1, 5, 15))

    assert story.progress.fraction == 15 / 40


def epoch_record(number, at=START):
    metrics = make_metrics(epoch=number, num_steps=10).to_dict()
    return {"kind": "epoch", "time": at, "metrics": metrics}


def test_progress_is_full_after_the_last_epoch():
    story = Story()
    story.add(run(epochs=1, steps=10))
    story.add(step(0, 10, 10))
    story.add(epoch_record(0))

    assert (story.progress.epoch, story.progress.epoch_step) == (0, 10)
    assert story.progress.fraction == 1


def test_a_run_that_goes_on_inside_an_epoch_stands_there():
    story = Story()
    story.add(run(epochs=4, steps=10))
    story.add(step(0, 10, 10))
    story.add(epoch_record(0))
    story.add(step(1, 6, 16))
    story.add(step(1, 8, 18))
    story.add({"kind": "end", "time": START, "reason": "SIGTERM", "text": ""})
    story.add(run(epochs=4, steps=10, first_epoch=1, after=16))

    assert (story.progress.epoch, story.progress.epoch_step) == (1, 6)
    assert [each["step"] for each in story.steps] == [10, 16]
    assert story.end is None
    assert len(story.epochs) == 1


def test_a_story_has_a_bounded_number_of_steps():
    story = Story()
    story.add(run())
    for number in range(3 * MAX_STEPS):
        story.add(step(0, number, number))

    assert len(story.steps) <= MAX_STEPS
    assert story.steps[-1]["step"] == 3 * MAX_STEPS - 1
