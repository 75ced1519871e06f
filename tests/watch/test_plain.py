"""A run as plain lines, and where such a view is chosen."""

import io
import os
import subprocess
import sys

import pytest
from watched_stories import (
    START,
    end_record,
    epoch_record,
    event_record,
    records_of,
    run_record,
    step_record,
    story_of,
)

from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.plain import PlainView
from fuelflow.watch.screens.views import choose_view

PIPED = """
from fuelflow.watch.monitor import Monitor

with Monitor() as monitor:
    for epoch in range(3):
        for i in monitor.track(range(4)):
            monitor.log({"loss": 0.5, "accuracy": 0.25})
"""


def pass_record(epoch, **fields):
    usual = {
        "kind": "pass",
        "time": START + 30,
        "epoch": epoch,
        "step": 50 * (epoch + 1),
        "num_steps": 50,
        "secs": 2.5,
        "means": {"loss": 0.58, "accuracy": 0.93},
    }
    return usual | fields


def test_a_run_is_a_line_at_its_start_for_each_epoch_and_at_its_end(capsys):
    view, story = PlainView(), Story()

    for record in records_of(2, num_ranks=4):
        story.add(record)
        view.show(story)
    story.add(end_record(time=START + 75))
    view.show(story)
    view.close(story)
    view.close(story)
    view.show(story)

    ranks = "4 ranks, gpu:0 to gpu:3"
    # 12800 rows less 8 for each of 0, 7, 14 and 5; of 1000 ms rank 3 waited for 147.
    speed = "12592 samples/s, 1 s, 4 ranks; 15 % lost to input"
    # The first loss is 2.3 exp(-1/9) + 0.05, and so on.
    first = "loss 2.108, accuracy 0.2198; eval loss 2.339, accuracy 0.1998"
    second = "loss 1.892, accuracy 0.3237; eval loss 2.101, accuracy 0.3037"
    assert capsys.readouterr().out.splitlines() == [
        f"digits: 640 parameters (2.56 kB); {ranks}; 40 epochs of 100 steps",
        f"epoch 0: {first}; {speed}",
        f"epoch 1: {second}; {speed}",
        "done: 2 epochs, 230 steps in 1:15, 3.9 s of it compiling",
    ]


def test_a_pass_of_a_loop_written_by_hand_is_a_line_too(capsys):
    view = PlainView()
    story = story_of([run_record(params=[], ranks=[], epochs=None), pass_record(0)])

    view.show(story)

    assert capsys.readouterr().out.splitlines() == [
        "digits",
        "epoch 0: loss 0.58, accuracy 0.93; 50 steps, 2.5 s",
    ]


def test_warnings_are_told_in_order_and_what_is_no_warning_is_not(capsys):
    view = PlainView()
    records = [
        run_record(),
        event_record("saved: every_epochs", "info", "checkpoint"),
        event_record("step 7 was left out", time=START + 1),
        epoch_record(0),
        event_record("disk full", "error", "sink", time=START + 90),
    ]

    view.show(story_of(records))

    heads = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert heads == ["digits", "warning", "epoch 0", "error"]


def test_a_run_that_goes_on_says_from_where(capsys):
    view = PlainView()

    view.show(story_of([run_record(epoch=12, step=1200)]))

    text = capsys.readouterr().out
    assert "goes on with epoch 12 after step 1,200" in text


def test_what_a_run_had_before_it_goes_on_is_not_told_again(capsys):
    view = PlainView()
    before = [
        run_record(),
        *records_of(1)[1:],
        event_record("stopped: SIGTERM", time=START + 50),
        end_record(reason="SIGTERM", time=START + 50),
    ]
    goes_on = run_record(epoch=1, step=100, time=START + 1000)
    after = [goes_on, {**epoch_record(1), "time": START + 1060}]

    story = story_of([*before, *after])
    view.show(story)
    story.add(end_record(time=START + 1075))
    view.close(story)

    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["digits", "epoch 1", "done"]
    assert said[-1].endswith(" steps, the last part in 1:15")


def test_a_name_moves_no_cursor(capsys):
    view = PlainView()
    story = story_of([run_record(name="a\x1b[2J\nb\r"), pass_record(0)])
    story.add(pass_record(1, means={"\x1b[5A\n": "NaN"}))

    view.show(story)

    text = capsys.readouterr().out
    assert len(text.splitlines()) == 3
    assert all(letter.isprintable() for letter in text.replace("\n", ""))


def test_a_log_without_its_letters_gets_others():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = PlainView(stream)
    story = story_of([run_record(name="Größe"), pass_record(0, means={"loss": None})])

    view.show(story)

    # Flushed, so that a log can be followed.
    assert isinstance(stream.buffer, io.BytesIO)
    assert stream.buffer.getvalue().startswith(b"Gr??e: ")


def test_a_thousand_epochs_at_once_are_a_thousand_lines(capsys):
    view = PlainView()
    story = story_of([run_record(epochs=1000), *map(pass_record, range(1000))])

    view.show(story)
    view.show(story)

    assert len(capsys.readouterr().out.splitlines()) == 1001


def test_epochs_that_are_done_anew_are_told_anew(capsys):
    view = PlainView()
    story = story_of([run_record(), pass_record(0), pass_record(1)])
    view.show(story)

    story.add(run_record(epoch=1, step=50))
    story.add(pass_record(1))
    view.show(story)

    heads = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert heads == ["digits", "epoch 0", "epoch 1", "digits", "epoch 1"]


# Which view it is.


def test_a_pipe_gets_plain_lines_whatever_is_said_of_colours():
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_INTERACTIVE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PIPED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert [line for line in lines if line.startswith("epoch")] == [
        line for line in lines if "loss 0.5, accuracy 0.25; 4 steps" in line
    ]
    assert len([line for line in lines if line.startswith("epoch")]) == 3
    assert lines[-1].startswith("done: 3 epochs, 12 steps in 0:0")


def test_none_shows_nothing(capsys):
    view = choose_view("none")
    story = story_of([*records_of(1), end_record()])

    view.show(story)
    view.close(story)

    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("display", ["screen", None, True])
def test_another_display_is_refused(display):
    with pytest.raises(ValueError, match="^`display` must be") as caught:
        choose_view(display)

    for known in ('"auto"', '"console"', '"notebook"', '"plain"', '"none"'):
        assert known in str(caught.value)


def test_a_notebook_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="must be asked for in a notebook"):
        choose_view("notebook")


def test_steps_that_were_left_out_were_taken_too(capsys):
    view = PlainView()
    # The fifth step, of which two before and this one were left out.
    step = step_record(0, 5, 2, num_skipped=3, loss=float("nan"))

    view.close(story_of([run_record(), step, end_record()]))

    assert "5 steps in" in capsys.readouterr().out
