"""A run in a notebook: one output that is replaced, and stays when it is over."""

import re
from html.parser import HTMLParser

import nbclient
import nbclient.exceptions
import nbformat
import pytest
import watch_browser
from watched_stories import (
    START,
    end_record,
    epoch_record,
    event_record,
    records_of,
    run_record,
    story_of,
)

from fuelflow.watch.screens.curves import Curves
from fuelflow.watch.screens.newest import NewestMetrics
from fuelflow.watch.screens.panel import panel_html

NAME = "<script>alert('&amp;')</script>"
BY_HAND = """
from fuelflow.watch.monitor import Monitor

monitor = Monitor()
for epoch in range(3):
    for i in monitor.track(range(4)):
        monitor.log({"loss": 0.5 - 0.125 * epoch, NAME: 7.0})
"""


class Page(HTMLParser):
    """The texts of a page and its elements, all of which must be closed."""

    def __init__(self, html):
        super().__init__()
        self.texts, self.tags, self._open = [], [], []
        self.attributes = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def panel_of(records, now=START + 30):
    story = story_of(records)
    html = panel_html(story, Curves().of(story), NewestMetrics().of(story), now)
    return Page(html), html


def executed(*sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_cell_s_output_ends_with_the_last_values():
    first, other, last = executed(
        f"NAME = {NAME!r}\n" + BY_HAND, "print('meanwhile')", "monitor.close()"
    )

    (output,) = first
    assert output.output_type == "display_data"
    assert [each.get("text") for each in other] == ["meanwhile\n"]
    assert last == []
    page = Page(output.data["text/html"])
    rows = " ".join(page.texts)
    assert "done" in page.texts
    assert "3 epochs" in rows
    # The mean of each pass, and of the metric.
    for value in ("0.5", "0.375", "0.25", "7"):
        assert value in page.texts
    assert NAME in page.texts
    assert "script" not in page.tags
    *_, epoch, end = output.data["text/plain"].splitlines()
    assert epoch.startswith(f"epoch 2: loss 0.25, {NAME} 7; 4 steps, ")
    assert end.startswith("done: 3 epochs, 12 steps in 0:0")


def test_the_last_picture_comes_however_early_it_is():
    source = """
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.views import choose_view

view, story = choose_view(), Story()
for record in records:
    story.add(record)
    view.show(story)
story.add(end)
view.close(story)
print(type(view).__name__)
"""
    records, end = records_of(2, num_ranks=2), end_record("stop")

    ((output, name),) = executed(f"records, end = {records!r}, {end!r}\n{source}")

    page = Page(output.data["text/html"])
    assert name.text == "NotebookView\n"
    assert "stopped" in page.texts
    assert "2 ranks in epoch 1" in page.texts
    # The mean losses of both epochs.
    assert {"2.108", "1.892"} <= set(page.texts)


def test_a_cell_that_is_run_again_has_an_output_of_its_own():
    again = f"NAME = 'x'\n{BY_HAND}"
    first, second, _ = executed(again, again, "monitor.close()")

    assert len(first) == len(second) == 1
    assert "3 epochs" in second[0].data["text/html"]


def test_an_interrupted_cell_keeps_its_picture():
    source = """
from fuelflow.watch.monitor import Monitor

with Monitor() as monitor:
    for i in monitor.track(range(100)):
        monitor.log({"loss": 0.5})
        if i == 10:
            raise KeyboardInterrupt
"""
    cells = [nbformat.v4.new_code_cell(source)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120)
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        client.execute()

    pictures = [each for each in notebook.cells[0].outputs if "data" in each]
    (html,) = [each.data["text/html"] for each in pictures]
    assert "interrupted" in html
    assert "0.5" in Page(html).texts


def test_names_with_html_in_them_are_text():
    records = records_of(2, num_ranks=2, name=NAME)
    for record in records:
        if record["kind"] == "step":
            record["metrics"][NAME] = 1.0 if record["step"] > 50 else "NaN"
        if record["kind"] == "epoch":
            record["metrics"]["evaluation"][NAME] = 2.0
            record["metrics"]["scalars"][NAME] = 3.0
    records[0]["ranks"][0]["device"] = NAME
    records.append(event_record(NAME))
    records.append(end_record("error", text=NAME + "!"))

    page, html = panel_of(records)

    assert "script" not in page.tags
    assert "<script" not in html
    assert NAME in page.texts
    # Of the run, of the event after its time, of the end after its reason.
    assert f" {NAME}" in page.texts
    assert f"failed: {NAME}!" in page.texts


def test_what_is_not_finite_is_a_gap_with_a_mark():
    records = records_of(1, every=10)
    for record in records:
        if record["kind"] == "step" and record["step"] in (30, 40, 110):
            record["loss"] = {30: "NaN", 40: "Infinity", 110: "-Infinity"}[
                record["step"]
            ]

    page, html = panel_of(records)

    marks = [text for text in page.texts if " at step " in text]
    assert marks == ["steps is nan at step 30" if False else mark for mark in marks]
    assert len(marks) == 3
    assert [mark.split(" is ")[1] for mark in marks] == [
        "nan at step 30",
        "inf at step 40",
        "-inf at step 110",
    ]
    # The line of the steps starts anew after each gap.
    paths = [value for name, value in page.attributes if name == "d" and "L" in value]
    assert paths[0].count("M") == 3
    assert "nan" not in re.sub("is nan at", "", html)


def test_the_panel_takes_its_text_colour_from_the_page():
    page, html = panel_of(records_of(3, num_ranks=8))

    fills = {value for name, value in page.attributes if name == "fill"}
    assert "currentColor" in fills
    assert not fills & {"black", "white", "#000", "#fff"}
    colours = set(re.findall(r"[^-]color:([^;\"]+)", html))
    assert colours <= {"#3d8bd4", "#e0912f", "#9a78c9", "inherit", "#c98a1b"}


def test_a_thousand_epochs_on_256_ranks_are_a_small_picture():
    records = records_of(999, every=20, epochs=1000)
    records.append(epoch_record(999, num_ranks=256))

    page, html = panel_of(records)

    assert len(html) < 80_000
    assert "256 ranks in epoch 999" in page.texts
    assert {"slowest", "median", "fastest"} <= set(page.texts)


@pytest.mark.parametrize(
    "records",
    [
        [run_record()],
        [run_record(epochs=None, steps_per_epoch=None)],
        records_of(0)[:3],
    ],
    ids=["begun", "without an end", "one step"],
)
def test_a_run_that_has_hardly_begun_can_be_shown(records):
    page, _ = panel_of(records)

    assert "digits" in page.texts


def test_an_error_is_said_once():
    end = end_record("error", text="ValueError: no such thing")
    told = event_record(end["text"], "error", "stopped")

    page, html = panel_of([*records_of(1), told, end])
    untold, _ = panel_of([*records_of(1), end])

    assert html.count("no such thing") == 1
    assert "failed" in page.texts
    assert "failed: ValueError: no such thing" in untold.texts


def test_where_nothing_is_finite_a_note_stands_instead_of_a_chart():
    records = records_of(1)
    for record in records:
        if record["kind"] == "step":
            record["metrics"]["accuracy"] = "NaN"
        if record["kind"] == "epoch":
            record["metrics"]["scalars"]["accuracy"] = "NaN"
            record["metrics"]["evaluation"] = {}

    page, _ = panel_of(records)

    charts = [value for name, value in page.attributes if name == "aria-label"]
    assert charts == ["loss", "lr", "grad norm"]
    assert "no finite value yet (nan)" in page.texts


def test_figures_say_whether_they_are_of_a_step_or_an_epoch():
    records = records_of(2)
    step, mean = records[-2]["loss"], epoch_record(1)["metrics"]["avg_loss"]

    live, _ = panel_of(records)
    over, _ = panel_of([*records, end_record()])

    for page, name, value in (
        (live, "loss, last step", step),
        (over, "loss, last epoch", mean),
    ):
        at = page.texts.index(name)
        assert page.texts[at + 1] == f"{value:.4g}"


def test_small_charts_flow_beside_the_large_one_and_below_it(tmp_path):
    records = records_of(2)
    for record in records:
        if record["kind"] == "step":
            record["metrics"] |= {f"metric {at}": 0.5 + record["loss"] for at in "abc"}
    path = tmp_path / "panel.html"
    body = '<body style="margin:0"><div style="width:860px">'
    path.write_text(f"{body}{panel_of(records)[1]}</div></body>")

    with watch_browser.chromium() as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 800})
        page.goto(path.as_uri())
        boxes = page.eval_on_selector_all(
            "svg", "all => all.map(each => each.getBoundingClientRect().toJSON())"
        )

    large, *small = boxes
    assert len(small) == 6
    beside = [box for box in small if box["top"] < large["bottom"]]
    assert len({round(box["left"]) for box in beside}) == 2
    assert len(beside) == 4
    assert small[4]["left"] == large["left"]
