"""The command `fuelflow report`: what it reads, writes and refuses."""

import json
import re

import pytest
import run_problems
import watch_browser
from watch_records import make_run, run_record, step_record, write_records

import fuelflow as ff
from fuelflow.cli import main
from fuelflow.watch.pages.report import write_report


def page_of(path):
    """What a page was given to draw."""
    start = '<script type="application/json" id="page">'
    found = re.search(f"{start}(.*?)</script>", path.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_it_writes_a_page_into_the_directory_of_the_run(tmp_path, capsys):
    directory = write_records(tmp_path / "run", make_run(3))

    code = main(["report", str(directory)])

    page = directory / "report.html"
    (run,) = page_of(page)["runs"]
    assert code == 0
    assert capsys.readouterr().out == f"{page} ({page.stat().st_size / 1e6:.1f} MB)\n"
    assert run["label"] == "run"
    assert run["steps"]["step"][-1] == 60
    assert run["epochs"]["epoch"] == [0, 1, 2]


def test_a_line_that_was_torn_off_loses_only_itself(tmp_path):
    directory = write_records(tmp_path / "run", make_run(3)[:-1])
    with (directory / "records.jsonl").open("a") as file:
        file.write(json.dumps(step_record(61))[:50])

    path = write_report([str(directory)])

    assert page_of(path)["runs"][0]["steps"]["step"][-1] == 60


def test_several_runs_share_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, epochs in (("a", 2), ("b", 3), ("c/a", 4)):
        write_records(tmp_path / name, make_run(epochs))

    code = main(["report", "a", "b", "c/a"])

    page = page_of(tmp_path / "report.html")
    assert code == 0
    # By their last part, or whole if that is not enough.
    labels = [run["label"] for run in page["runs"]]
    assert labels == [str(tmp_path / "a"), "b", str(tmp_path / "c/a")]
    assert [len(run["epochs"]["epoch"]) for run in page["runs"]] == [2, 3, 4]
    assert capsys.readouterr().out.startswith("report.html (")


def test_the_page_goes_where_it_is_asked_to(tmp_path, capsys):
    directory = write_records(tmp_path / "run", make_run(1))
    output = tmp_path / "else where.html"

    assert main(["report", str(directory), "-o", str(output)]) == 0
    assert output.exists()
    assert not (directory / "report.html").exists()


def test_a_file_of_records_is_as_good_as_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = write_records(tmp_path / "run", make_run(1))

    path = write_report([str(directory / "records.jsonl")])

    assert str(path) == "report.html"
    assert page_of(path)["runs"][0]["epochs"]["epoch"] == [0]


@pytest.mark.parametrize("name", ["empty", "absent", "torn", "file", "newer", "odd"])
def test_what_has_no_records_is_refused_in_one_line(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    write_records(tmp_path / "torn", []).joinpath("records.jsonl").write_text('{"kin')
    (tmp_path / "file").write_text("no records")
    write_records(tmp_path / "newer", [run_record(version=2)])
    write_records(tmp_path / "odd", [run_record(), {"kind": "step", "time": 0.0}])
    reasons = {
        "absent": "there is no directory",
        "newer": "another version",
        "odd": "is not as fuelflow writes it",
    }

    code = main(["report", str(tmp_path / name)])

    out, error = capsys.readouterr()
    assert code == 1
    assert out == ""
    assert reasons.get(name, "there are no records in") in error
    assert str(tmp_path / name) in error
    assert error.count("\n") == 1


def test_a_page_that_cannot_be_written_is_refused_in_one_line(tmp_path, capsys):
    directory = write_records(tmp_path / "run", make_run(1))

    for output in (tmp_path / "no" / "page.html", tmp_path):
        assert main(["report", str(directory), "-o", str(output)]) == 1
        out, error = capsys.readouterr()
        assert out == ""
        assert str(output) in error
        assert error.count("\n") == 1


def test_a_run_that_is_given_twice_is_refused(tmp_path, capsys):
    directory = write_records(tmp_path / "run", make_run(1))

    code = main(["report", str(directory), f"{directory}/../run"])

    assert code == 1
    assert "each run must be given once" in capsys.readouterr().err


def test_without_a_run_it_is_used_wrongly(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main(["report"])

    assert "RUN_DIR" in capsys.readouterr().err


def test_it_opens_the_page_when_asked(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    directory = write_records(tmp_path / "run", make_run(1))

    assert main(["report", str(directory), "--open"]) == 0
    assert opened == [(directory / "report.html").as_uri()]


def test_checkpoints_alone_make_a_page_of_their_epochs(tmp_path):
    run = run_problems.Run("dict-0", "resident", 1)
    checkpointer = ff.Checkpointer(tmp_path / "saved")
    trained = run.make_trainer(run.make_loop(), checkpointer=checkpointer).fit()

    path = write_report([str(tmp_path / "saved")])

    (drawn,) = page_of(path)["runs"]
    losses = [metrics.avg_loss for metrics in trained.history]
    assert drawn["epochs"]["loss"] == pytest.approx(losses, rel=1e-6)
    assert drawn["run"]["params"]["name"] == sorted(trained.state.params)
    assert drawn["epochs"]["held"][-1] == str(trained.history[-1].bottleneck)
    with watch_browser.chromium() as browser:
        opened = watch_browser.Opened(browser, path.as_uri())
        mean = opened.trace("Loss", "epoch mean")
        assert mean["y"] == drawn["epochs"]["loss"]
        assert opened.complaints == []
