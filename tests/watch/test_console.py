"""A run in a terminal: laid out to its size, and the terminal left as it was."""

import io
import re
import signal
import tempfile
import time

import pytest
from rich.console import Console
from terminals import Screen, Terminal
from watched_stories import (
    START,
    compile_record,
    end_record,
    epoch_record,
    event_record,
    records_of,
    run_record,
    step_record,
    story_of,
)

from fuelflow.watch.screens.console import ConsoleView
from fuelflow.watch.screens.epoch_rows import EpochRows
from fuelflow.watch.screens.frame import Frame
from fuelflow.watch.screens.glyphs import ASCII, UNICODE
from fuelflow.watch.screens.styled import width_of

# Until 12 epochs and 30 steps of the next are done.
NOW = START + 4 + 0.02 * 1230
RECOMPILED = 'batch["image"]: f32[64,28,28] → f32[17,28,28]'

LOOP = """
import logging, sys, threading
logging.basicConfig(format="%(levelname)s: %(message)s")
from fuelflow.watch.monitor import Monitor

pace, num_epochs = threading.Event(), int(sys.argv[1])
with Monitor() as monitor:
    for epoch in range(num_epochs):
        for i in monitor.track(range(20)):
            monitor.log({"loss": 1.0 / (1 + epoch)})
            pace.wait(0.02)
        print("printed", epoch)
        logging.warning("logged %d", epoch)
print("over")
"""


def text_of(lines):
    return "\n".join("".join(text for text, _ in line) for line in lines)


def drawn(records, width, height, now=NOW, glyphs=UNICODE):
    lines = Frame(glyphs).draw(story_of(records), now, width, height)
    assert all(width_of(line) < width for line in lines)
    assert len(lines) < height
    return text_of(lines)


def busy_records(**run):
    return [
        *records_of(12, num_ranks=8, **run),
        compile_record(0.8, is_first=False, reason=RECOMPILED, time=START + 11),
        event_record("step 512 was left out"),
    ]


@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (80, 50), (200, 24), (200, 50)]
)
def test_the_key_facts_are_there_in_every_size(width, height):
    text = drawn(busy_records(), width, height)

    for fact in (
        "digits",
        "training",
        "12 of 40",
        "30 of 100",
        "0:29 elapsed",
        " left",
        "0.6075",  # loss
        "0.8447",  # accuracy
        "0.7419",  # loss of the evaluation
        "0.0007843",  # rate
        "0.8606",  # gradient norm
        "412",  # steps/s
        "52,736",  # samples/s
        "3 %",  # data wait
        "1.20 of 16.0 GB",
        "812 MB, 43 % cpu",
        "2, 4.7 s",  # compiles
        "8 ranks in epoch 11",
        "step 512 was left out",
    ):
        assert fact in text, f"{fact}\n{text}"


def test_the_reason_of_a_second_compile_is_told():
    assert RECOMPILED in drawn(busy_records(), 200, 50)


def test_a_large_terminal_has_a_bar_for_each_rank():
    text = drawn(busy_records(), 200, 50)

    assert re.findall(r"rank (\d)  gpu:\d", text) == [*"01234567"]


@pytest.mark.parametrize("width", [80, 200])
def test_of_256_ranks_the_slowest_the_median_and_the_fastest_are_shown(width):
    records = records_of(2, num_ranks=256)

    text = drawn(records, width, 24)

    speeds = records[-5]["metrics"]["per_rank_throughput"]
    assert records[-5]["kind"] == "epoch"
    found = {
        role: int(rank)
        for role, rank in re.findall(r"(slowest|median|fastest) +rank (\d+)", text)
    }
    assert set(found) == {"slowest", "median", "fastest"}
    assert speeds[found["fastest"]] == max(speeds)
    assert speeds[found["median"]] == sorted(speeds)[128]
    # Named by the epoch's bottleneck, which is told below.
    assert f"rank {found['slowest']} took" in text


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("width", [1, 10, 40, 79, 80, 116, 117, 118, 200, 300])
def test_no_line_is_longer_and_no_picture_higher_than_the_terminal(width, glyphs):
    name = "encoder.layers.0." + "attention" * 20 + "日本語"
    records = busy_records(name="a run " * 40, epochs=None)
    records[0]["steps_per_epoch"] = None
    for record in records:
        if record["kind"] == "step":
            record["metrics"][name] = 1.0
            record["metrics"]["\x1b[2J\n\r"] = 2.0
    records.append(event_record("line\nline\x1b[5A" * 30, level="error"))

    for height in (5, 8, 10, 16, 24, 30, 50, 80):
        text = drawn(records, width, height, glyphs=glyphs)
        assert "\x1b" not in text
    rows = EpochRows(glyphs).lines(epoch_record(3, num_ranks=2), width)
    assert all(width_of(row) < max(width, 3) for row in rows)


def test_a_loss_that_is_not_finite_is_a_mark_in_the_curve():
    records = records_of(1)
    for record in records:
        if record["kind"] == "step" and record["step"] in (40, 50):
            record["loss"] = "NaN"

    (line,) = re.findall(r"loss +0\.\S+|loss +\d.*", drawn(records, 80, 24))[:1]

    assert re.search(r"[▁-█]{3}××[▁-█]+", line), line


def test_the_names_in_a_long_error_are_told_in_the_narrowest_terminal():
    error = (
        "NonFiniteError: the gradients of encoder.layers.0.kernel and "
        "head.bias are not finite in step 7 of epoch 0; "
    )
    end = end_record("error", text=error + "remedies: " * 30, time=NOW)
    records = [*records_of(1), event_record(end["text"], "error", "stopped")]

    live = drawn(records, 80, 24)
    last = text_of(Frame().draw_end(story_of([*records, end]), NOW, 80))

    for text in (live, last):
        told = re.sub(r"\s+", " ", text)
        assert error[:-14] in told, text
        assert all(len(line) <= 80 for line in text.splitlines())


def test_figures_say_of_what_they_are():
    going_on = records_of(2)
    over = [*going_on, end_record(time=NOW)]

    live = drawn(going_on, 80, 24)
    last = text_of(Frame().draw_end(story_of(over), NOW, 80))

    step, mean = going_on[-2], epoch_record(1)["metrics"]["avg_loss"]
    assert "last step" in live
    assert f"{step['loss']:.4g}" in live
    assert "samples/s now" in live
    assert "last epoch" in last
    assert re.search(rf"loss +{mean:.4g}", last), last


def test_many_checkpoints_push_out_nothing_that_must_be_known():
    resumed = event_record("resumed from step 0", "info", "resumed")
    saves = [event_record("saved: every_steps", "info", "checkpoint")] * 400
    another = [event_record(f"note {at}", "info", "note") for at in range(9)]
    records = [*records_of(1), resumed, event_record("left out"), *another, *saves]

    for height in (24, 50):
        text = drawn(records, 80, height)
        assert "resumed from step 0" in text
        assert "left out" in text
        assert "saved: every_steps (× 400)" in text


def test_a_short_epoch_has_its_time_in_a_unit_that_suits_it():
    def told(epoch_ms):
        record = epoch_record(0)
        record["metrics"]["epoch_ms"] = epoch_ms
        return text_of(EpochRows(UNICODE).lines(record, 80))

    assert "29.8 µs" in told(0.0298)
    assert "1.25 ms" in told(1.25)
    assert "0.0125 s" in told(12.5)


def test_a_run_without_a_known_end_shows_no_bar_and_no_time_left():
    text = drawn(records_of(2, epochs=None), 80, 24, now=START + 9)
    first, second = text.splitlines()[1:3]

    assert first.split() == ["epochs", "2"]
    assert "30 of 100" in second
    assert " left" not in text


def test_a_run_that_has_only_begun_can_be_shown():
    text = drawn([run_record()], 80, 24, now=START + 2)

    assert "0 of 40" in text
    assert "0:02 elapsed" in text


def test_letters_that_cannot_be_shown_are_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=stream, force_terminal=True, width=80, height=40)
    view = ConsoleView(console, clock=lambda: NOW)

    view.show(story_of(busy_records()))

    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    view.close(story_of([run_record(), end_record()]))
    # Wrapped behind the arrow.
    assert "f32[64,28,28] >" in text
    assert "####" in text


def test_without_colour_no_colour_is_written():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, no_color=True)
    view = ConsoleView(console, clock=lambda: NOW)
    story = story_of(busy_records())

    view.show(story)
    view.close(story)

    colours = re.findall(r"\x1b\[[\d;]*[34]\d[\d;]*m", stream.getvalue())
    assert colours == []


def test_finished_epochs_stay_as_rows_under_one_heading():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24)
    view = ConsoleView(console, clock=lambda: NOW)
    story = story_of(records_of(2))
    view.show(story)
    screen = Screen(80)
    screen.feed(stream.getvalue().replace("\n", "\r\n"))
    # So even a process that is killed leaves it so.
    assert screen.is_cursor_shown
    assert stream.getvalue().count("\x1b[?25l") > 1

    story.add(step_record(2, 100, 300))
    story.add(epoch_record(2))
    story.add(end_record(time=NOW))
    view.close(story)

    screen = Screen(80)
    screen.feed(stream.getvalue().replace("\n", "\r\n"))
    heads = [at for at, row in enumerate(screen.rows) if row.startswith("    epoch")]
    assert len(heads) == 1
    rows = [row.split() for row in screen.rows[heads[0] : heads[0] + 4]]
    assert rows[0][:3] == ["epoch", "loss", "accuracy"]
    assert [row[0] for row in rows[1:]] == ["0", "1", "2"]
    assert rows[1][1] == "2.108"  # 2.3 exp(-1/9) + 0.05
    # One picture is left, of the end, with nothing of those before.
    assert [row for row in screen.rows if row.startswith("─ digits")] == [
        f"─ digits {'─' * 63} done ─"
    ]
    assert "3 epochs, 300 steps in 0:29" in "\n".join(screen.rows)
    assert screen.is_cursor_shown


def test_a_closed_view_shows_nothing_until_another_run_begins():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24)
    view = ConsoleView(console, clock=lambda: NOW)
    story = story_of(records_of(2))
    story.add(end_record(time=NOW))
    view.close(story)
    written = stream.getvalue()

    view.close(story)
    view.show(story)
    assert stream.getvalue() == written

    story.add(run_record(name="another"))
    view.show(story)
    view.close(story)
    assert "another" in stream.getvalue().removeprefix(written)


def test_only_what_is_new_is_read_for_a_drawing():
    story = story_of(records_of(190, every=10, epochs=400))
    kept, secs = Frame(), {"kept": [], "fresh": []}

    for step in range(20):
        story.add(step_record(190, 40 + step, 19_040 + step))
        for name, frame in (("fresh", Frame()), ("kept", kept)):
            start = time.thread_time()
            frame.draw(story, NOW, 200, 50)
            secs[name].append(time.thread_time() - start)

    # About a third; by the clock of this thread alone, so others' work is not in it.
    assert sorted(secs["kept"])[10] < 0.7 * sorted(secs["fresh"])[10]


# In a terminal.


def test_what_is_printed_and_logged_scrolls_by_above_the_picture():
    terminal = Terminal(LOOP, "4")

    status = terminal.read_to_the_end()

    screen = terminal.screen
    assert status == 0, "\n".join(screen.rows)
    for epoch in range(4):
        assert screen.rows.count(f"printed {epoch}") == 1
        assert screen.rows.count(f"WARNING: logged {epoch}") == 1
    pictures = [row for row in screen.rows if re.match(r"─ .* ─", row)]
    assert len(pictures) == 1, "\n".join(screen.rows)
    assert pictures[0].endswith(" done ─")
    assert screen.rows[-1] == "over"
    assert screen.is_cursor_shown
    assert terminal.output.count(b"\x1b[?25l") > 4


def test_an_interrupt_leaves_the_terminal_clean():
    terminal = Terminal(LOOP, "100000")
    terminal.read_until("logged 0")
    # Not while the thread to be interrupted prints: that would cut its line off.
    terminal.read_to_rest()

    terminal.process.send_signal(signal.SIGINT)
    status = terminal.read_to_the_end()

    screen = terminal.screen
    assert status == -signal.SIGINT
    assert screen.is_cursor_shown
    assert screen.rows[-1] == "KeyboardInterrupt"
    assert len([row for row in screen.rows if re.match(r"─ .* ─", row)]) == 1


def test_errors_that_go_to_a_file_still_do():
    with tempfile.TemporaryFile() as file:
        terminal = Terminal(LOOP, "2", stderr=file)
        status = terminal.read_to_the_end()
        file.seek(0)
        errors = file.read().decode()

    assert status == 0
    assert errors.splitlines() == ["WARNING: logged 0", "WARNING: logged 1"]
    assert "logged" not in terminal.output.decode()


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines():
    terminal = Terminal(LOOP, "2", TERM="dumb")

    status = terminal.read_to_the_end()

    assert status == 0
    assert b"\x1b" not in terminal.output
    assert [row[:8] for row in terminal.screen.rows if row.startswith("epoch")] == [
        "epoch 0:",
        "epoch 1:",
    ]
