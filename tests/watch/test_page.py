"""The page of a run, opened in a browser."""

import os
import re
import subprocess
import sys

import pytest
import watch_browser
from watch_records import (
    compile_record,
    end_record,
    epoch_record,
    event_record,
    make_run,
    pass_record,
    run_record,
    step_record,
)

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.watch.pages.page import make_comparison, make_page, save_page
from fuelflow.watch.pages.server import Server
from fuelflow.watch.record.log import RecordLog

MINUS = "\u2212"
TAGS = "<img src=x onerror=fail()>%{x}&lt;$a$</script><!--\u2028{{title}}"


@pytest.fixture(scope="module")
def browser():
    with watch_browser.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def usual(browser, tmp_path_factory):
    """The page of six epochs on four ranks, one of which waits for data."""
    path = tmp_path_factory.mktemp("usual") / "page.html"
    save_page(path, make_run(6, 4, slow_rank=2), title="a run")
    return watch_browser.Opened(browser, path.as_uri())


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of some records, or of several runs by name."""

    pages = []

    def opened(records, *, title="a run", **window):
        is_one = isinstance(records, list)
        make = make_page if is_one else make_comparison
        path = tmp_path / "page.html"
        path.write_text(make(records, title=title))
        pages.append(watch_browser.Opened(browser, path.as_uri(), **window))
        return pages[-1]

    yield opened
    for each in pages:
        each.page.close()


def test_curves_end_with_the_last_values(usual):
    last_step = step_record(120)
    last_epoch = epoch_record(5, num_ranks=4, slow_rank=2)["metrics"]

    steps = usual.trace("Loss", "steps")
    mean = usual.trace("Loss", "epoch mean")
    assert len(steps["y"]) == 120
    assert steps["x"][-1] == mean["x"][-1] == 120
    assert steps["y"][-1] == pytest.approx(last_step["loss"], rel=1e-6)
    assert mean["y"][-1] == pytest.approx(last_epoch["avg_loss"], rel=1e-6)
    assert usual.trace("accuracy", "evaluation")["y"][-1] == 0.93
    rate = usual.chart("Learning rate")["traces"][0]
    assert rate["y"][0] == pytest.approx(1e-3 / 40)
    throughput = usual.trace("Throughput of each rank", "rank 3")["y"]
    expected = 1e3 * last_epoch["per_rank_throughput"][3]
    assert throughput[-1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [1, 12])
def test_a_page_asks_for_nothing_and_complains_of_nothing(show, num_ranks):
    opened = show(make_run(3, num_ranks))

    assert [url.partition(":")[0] for url in opened.requests] == ["file"]
    assert opened.complaints == []


def test_the_browser_refuses_what_the_page_did_not_bring(show):
    opened = show(make_run(1))
    opened.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "document.title = 'taken over'";
            document.body.append(script);
        }"""
    )
    fetched = opened.page.evaluate(
        "fetch('http://127.0.0.1:9/').then(() => 'done', () => 'refused')"
    )

    assert opened.page.title() == "a run"
    assert fetched == "refused"
    assert len(opened.complaints) >= 2
    assert all("Content Security Policy" in each for each in opened.complaints[:2])


def test_what_is_no_finite_number_is_a_gap_with_a_mark(show):
    records = make_run(4)
    for record in records:
        if record["kind"] == "step" and record["step"] in {30, 31}:
            record["loss"] = "NaN"
        if record["kind"] == "step" and record["step"] == 40:
            record["loss"] = "Infinity"
        if record["kind"] == "epoch" and record["metrics"]["epoch"] == 3:
            record["metrics"]["evaluation"]["loss"] = "-Infinity"

    opened = show(records)
    opened.page.click("nav >> text=log")

    line, marks = [
        each for each in opened.chart("Loss")["traces"] if each["key"] == "steps"
    ]
    gaps = [x for x, y in zip(line["x"], line["y"], strict=True) if y is None]
    assert gaps == marks["x"] == [30, 31, 40]
    texts = [f"steps: Loss is {word}" for word in ("NaN", "NaN", "∞")]
    assert marks["text"] == texts
    assert opened.chart("Loss")["scale"] == "log"
    evaluation = opened.chart("Loss")["traces"][-1]
    assert evaluation["x"] == [80]
    assert evaluation["text"] == ["evaluation: Loss is -∞"]
    assert "-∞" in opened.text(".tiles")


@pytest.mark.parametrize("num_ranks", [2, 12], ids=["lines", "heat map"])
def test_a_rank_without_a_finite_loss_has_a_mark(show, num_ranks):
    records = make_run(3, num_ranks)
    for record in records:
        if record["kind"] == "epoch" and record["metrics"]["epoch"] == 1:
            record["metrics"]["per_rank_loss"][1] = "NaN"
            record["metrics"]["per_rank_loss"][0] = None

    marks = show(records).chart("Loss on the rank's own rows")["traces"][-1]

    assert marks["x"] == [1]
    assert marks["text"] == ["loss of rank 1 is NaN"]


def test_names_with_tags_in_them_are_shown_as_text(show):
    records = make_run(2, name=TAGS)
    records[0]["settings"] = {TAGS: TAGS}
    records[0]["params"][0]["name"] = TAGS
    records[-1] = end_record("error", TAGS, epochs=2)
    records.insert(-1, event_record(TAGS, TAGS))
    records.insert(-1, compile_record(TAGS, reason=TAGS, is_first=False))
    for record in records:
        if record["kind"] == "step":
            record["metrics"][TAGS] = record["loss"]

    opened = show(records, title=TAGS)

    shown = TAGS.split()  # browsers show line separators as they please
    assert opened.page.title().split() == shown
    assert opened.page.query_selector_all("img[src=x]") == []
    assert opened.complaints == []
    cells = ("#settings tbody th", "#settings tbody td", "#params code")
    for selector in ("h1", ".failure", *cells):
        assert opened.text(selector).split() == shown
    for name in ("events", "compiles"):
        assert opened.text(f"#{name}").count("<img") >= 2
    assert opened.chart(TAGS) is not None


def test_names_with_tags_in_them_are_text_in_labels_too(show):
    name = "<b>one</b><img src=x>%{x}&amp;"
    opened = show({name: make_run(2), "other": make_run(2)})
    opened.chart("Loss")

    box = opened.page.locator("#curves .plot").first.bounding_box()
    opened.page.mouse.move(box["x"] + 300, box["y"] + 130)
    opened.page.wait_for_selector("#curves .hoverlayer .legendtext")

    labels = opened.page.eval_on_selector_all(
        ".hoverlayer .legendtext", "all => all.map(each => each.textContent)"
    )
    assert any(label.startswith(name) for label in labels)
    assert opened.page.query_selector_all("img[src=x]") == []
    assert opened.text("#curves .legend li") == name


def test_axes_are_steps_epochs_and_time(usual):
    usual.page.click("nav >> text=epoch")
    steps = usual.trace("Loss", "steps")["x"]
    by_epoch = usual.trace("Loss", "epoch mean")["x"]
    usual.page.click("nav >> text=time")
    by_time = usual.trace("Loss", "epoch mean")["x"]
    usual.page.click("nav >> text=step")

    assert steps[:2] == [1 / 20, 2 / 20]
    assert by_epoch == [1, 2, 3, 4, 5, 6]
    assert by_time == [10, 20, 30, 40, 50, 60]
    assert usual.trace("Loss", "epoch mean")["x"][0] == 20


def test_time_between_two_sittings_is_no_time_of_the_run(show):
    records = make_run(4)
    first, second = records[: len(records) // 2], records[len(records) // 2 :]
    for record in second:
        record["time"] += 86400
    goes_on = run_record(epochs=4, epoch=2, step=40, time=first[-1]["time"] + 86400)

    opened = show([*first, goes_on, *second])
    opened.page.click("nav >> text=time")

    assert opened.trace("Loss", "epoch mean")["x"] == pytest.approx([10, 20, 30, 40])


def test_what_was_done_anew_is_shown_once(show):
    records = [*make_run(4)[:-1], run_record(epochs=4, epoch=2, step=50)]
    records += [step_record(51, loss=9.0), epoch_record(2, avg_loss=8.0)]

    opened = show(records)

    assert opened.trace("Loss", "steps")["x"] == list(range(1, 52))
    assert opened.trace("Loss", "steps")["y"][-1] == 9.0
    assert opened.trace("Loss", "epoch mean")["y"][-1] == 8.0
    assert opened.text(".pill") == "no end recorded"


def test_it_says_what_held_the_epochs_back(usual):
    last = epoch_record(5, num_ranks=4, slow_rank=2)["metrics"]
    found = EpochMetrics.from_dict(last).bottleneck

    assert str(found) in usual.text("#held")
    assert "6 epochs: data" in usual.text("#held")
    assert re.search(
        r"epochs 0 to 5, at worst in \d: input: 4\d %", usual.text("#held")
    )


def test_parameters_are_searched_and_sorted(usual):
    names = "all => all.map(each => each.textContent)"

    usual.page.fill("input[type=search]", "KERNEL layers")
    found = usual.page.eval_on_selector_all("#params tbody code", names)
    usual.page.fill("input[type=search]", "")
    usual.page.click("#params th >> text=values")
    by_size = usual.page.eval_on_selector_all("#params tbody code", names)

    assert found == ["encoder.layers.0.kernel", "encoder.layers.1.kernel"]
    assert by_size[0] == "encoder.layers.1.kernel"
    assert by_size[-1] == "encoder.layers.0.bias"
    assert "25,984 values" in usual.text("#params")
    assert "9,600 of them trained" in usual.text("#params")


@pytest.mark.parametrize("num_ranks", [4, 300])
def test_a_phone_scrolls_only_down(show, num_ranks):
    records = make_run(2, num_ranks, name="a_name_without_any_space" * 4)
    records[0]["settings"]["a_long_setting" * 5] = "value" * 40

    opened = show(records, width=375, height=800)

    width = "document.documentElement.scrollWidth"
    assert opened.page.evaluate(width) <= 375


def test_dark_and_light_follow_the_browser_and_the_switch(show):
    colour = "getComputedStyle(document.body).backgroundColor"
    opened = show(make_run(2), scheme="dark")
    dark, dark_ink = opened.page.evaluate(colour), opened.chart("Loss")["ink"]
    opened.page.click("nav .theme")
    light, light_ink = opened.page.evaluate(colour), opened.chart("Loss")["ink"]

    def brightness(rgb):
        return sum(int(part) for part in re.findall(r"\d+", rgb)[:3])

    assert brightness(dark) < 100 < 700 < brightness(light)
    assert int(dark_ink[1:3], 16) > 200 > 100 > int(light_ink[1:3], 16)


def test_a_legend_leaves_lines_out(usual):
    usual.page.click("#curves .legend >> text=evaluation")
    left_out = usual.trace("Loss", "evaluation")["visible"]
    others = usual.trace("Loss", "steps")["visible"]
    usual.page.click("#curves .legend >> text=evaluation")

    assert (left_out, others) == (False, True)
    assert usual.trace("Loss", "evaluation")["visible"] is True


def test_a_histogram_keeps_its_counts(show):
    counts = {"low": -1.0, "high": 1.0, "counts": [1, 2, 3, 4]}
    wider = {"low": -2.0, "high": 2.0, "counts": [5, 5]}
    records = [run_record(), step_record(1, histograms={"head.kernel": counts})]
    records.append(step_record(2, histograms={"head.kernel": wider}))

    drawn = show(records).chart("Values by step")["traces"][0]

    assert drawn["x"] == [1, 2]
    assert [sum(row) for row in drawn["z"]] == pytest.approx([10, 10])
    # The first spans the middle half: the levels outside of it are empty.
    assert sum(drawn["z"][0][:14]) == sum(drawn["z"][0][46:]) == 0


def test_a_loop_written_by_hand_has_its_passes(show):
    records = [run_record(epochs=None, steps_per_epoch=None)]
    for epoch in range(2):
        records.append(step_record(20 * epoch + 5))
        records.append(pass_record(epoch, loss=0.5 - epoch / 4, accuracy=0.75))

    opened = show(records)

    assert opened.trace("Loss", "epoch mean")["y"] == [0.5, 0.25]
    assert opened.trace("accuracy", "epoch mean")["y"] == [0.75, 0.75]
    assert opened.complaints == []


def test_a_run_that_has_only_begun_has_a_page(show):
    opened = show([run_record()])

    assert opened.text("h1") == "digits"
    assert opened.complaints == []
    assert show([]).text("h1") == "a run"


def test_it_says_that_nothing_is_recorded_yet(show):
    begun = show([run_record()])
    usual = show(make_run(1))

    assert begun.text(".pill") == "nothing recorded yet"
    assert begun.text("#nothing").startswith("Nothing has been recorded yet")
    assert usual.page.query_selector("#nothing") is None


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_number_that_never_changes_has_a_range_of_its_own_size(show, scale):
    records = make_run(2)
    for record in records:
        if record["kind"] == "step":
            record["lr"] = 0.01

    opened = show(records)
    opened.page.click(f"nav >> text={scale}")

    low, high = opened.chart("Learning rate")["yrange"]
    if scale == "log":
        low, high = 10**low, 10**high
    assert (low, high) == pytest.approx((0.009, 0.011))


def test_a_log_axis_has_whole_numbers_at_its_ticks(show):
    opened = show(make_run(4))
    opened.page.click("nav >> text=log")

    chart = opened.chart("Learning rate")  # from 2.5e-5 to 1e-3
    low, high = (10**end for end in chart["yrange"])
    ticks = [float(text.replace(MINUS, "-")) for text in chart["yticks"]]
    assert len(ticks) >= 2
    assert all(low <= tick <= high for tick in ticks)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_few_steps_have_whole_numbers_below_them(show, num_steps):
    steps = [step_record(step) for step in range(1, num_steps + 1)]

    ticks = show([run_record(), *steps]).chart("Loss")["xticks"]

    assert {str(step) for step in range(1, num_steps + 1)} <= set(ticks)
    assert all(tick.lstrip(MINUS).isdigit() for tick in ticks)


def test_steps_that_were_left_out_are_steps_of_the_axis(show):
    records = [run_record(epochs=1)]
    for step in range(1, 21):
        skipped = {"step": 1, "num_skipped": step - 1, "loss": "NaN"}
        records.append(step_record(step) | (skipped if step > 1 else {}))
    found = {"global_step": 1, "num_skipped": 19, "avg_loss": 0.5}
    records.append(epoch_record(0, **found))

    opened = show(records)

    assert opened.trace("Loss", "epoch mean")["x"] == [20]
    assert opened.chart("Gradient norm, before clipping")["traces"][0]["x"] == [
        *range(1, 21)
    ]
    assert "20 steps" in opened.text(".facts-line")
    assert "19" in opened.text(".tiles")


def test_a_live_page_counts_the_steps_left_out_before(browser):
    first, second = make_run(1)[:-1], []
    for step in range(21, 41):
        skipped = {"step": 20, "num_skipped": step - 20, "grad_norm": "NaN"}
        second += [step_record(step) | skipped]
    second.append(epoch_record(1, global_step=20, num_skipped=20))
    third = [epoch_record(2, global_step=40, num_skipped=0)]
    log = RecordLog()
    for record in [*first, *second]:
        log.append(record)
    server = Server(log, title="a run")
    opened = watch_browser.Opened(browser, server.start())
    opened.page.wait_for_selector("#curves .scatterlayer")

    for record in third:
        log.append(record)
    opened.page.wait_for_selector("text=3 of 1 epoch done")

    assert opened.trace("Loss", "epoch mean")["x"] == [20, 40, 60]
    assert opened.trace("Loss", "steps")["x"] == list(range(1, 41))
    assert "60 steps" in opened.text(".facts-line")
    opened.page.close()
    server.stop()


def test_events_near_each_other_have_times_of_their_own(show):
    times = (61.0, 62.5, 64.2)
    events = [event_record("note", time=run_record()["time"] + at) for at in times]

    opened = show([*make_run(1)[:-1], *events])

    shown = opened.page.eval_on_selector_all(
        "#events td:first-child", "all => all.map(each => each.textContent)"
    )
    assert shown[:3] == ["01:04.2", "01:02.5", "01:01.0"]


def test_runs_are_compared_on_the_same_axes(show):
    runs = {name: make_run(epochs) for name, epochs in (("a", 2), ("b", 3), ("c", 4))}
    opened = show(runs, title="three")

    traces = opened.chart("Loss")["traces"]
    longest = {}
    for each in traces:
        longest[each["key"]] = max(longest.get(each["key"], 0), each["x"][-1])
    assert longest == {"a": 40, "b": 60, "c": 80}
    assert len({each["colour"] for each in traces}) == 3
    last = opened.page.eval_on_selector_all(
        "#last tbody tr:nth-child(5) td", "all => all.map(each => each.textContent)"
    )
    means = [epoch_record(epoch)["metrics"]["avg_loss"] for epoch in (1, 2, 3)]
    assert last == [f"{mean:.4g}" for mean in means]


def test_a_saved_page_replaces_the_one_before_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")

    save_page(path, make_run(1), title="new & <b>")

    assert "<title>new &amp; &lt;b&gt;</title>" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    taken = tmp_path / "folder"
    (taken / "inside").mkdir(parents=True)

    with pytest.raises(ValueError, match="must be a file .* is a directory"):
        save_page(taken, make_run(1), title="new")

    assert list(tmp_path.iterdir()) == [taken]


def test_without_plotly_it_names_the_extra():
    program = (
        "import sys; sys.modules['plotly'] = None\n"
        "from fuelflow.watch.pages.page import make_page\n"
        "make_page([], title='a run')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.stderr.endswith("pip install 'fuelflow[report]'\n")


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
