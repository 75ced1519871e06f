"""What held an epoch back is named, with its share of the time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_records import make_metrics, make_record


def found_in(ranks, **common):
    """The bottleneck of ranks, each in a process of its own unless it says."""
    records = [
        make_record(i, **{"process": i, **common, **rank})
        for i, rank in enumerate(ranks)
    ]
    return make_metrics(records).bottleneck


def named(found):
    return found.kind, found.rank, pytest.approx(found.share, abs=1e-9)


HEALTHY = {}
STARVED = {"compute_only_ms": 380, "data_starve_ms": 620}
LATE = {"compute_only_ms": 546}  # 444 ms on neither steps nor data


def test_a_healthy_run_computes():
    found = found_in([HEALTHY] * 4)

    assert named(found) == ("compute", None, 0.97)
    assert not found.is_notable
    assert str(found) == "compute: the devices were at work for 97 % of the epoch"


def test_a_slow_loader_of_one_process_with_many_devices_is_input():
    found = found_in([STARVED] * 8, process=0)

    assert named(found) == ("input", None, 0.62)
    assert str(found) == "input: 62 % of the epoch was spent waiting for data"


def test_slow_loaders_of_all_processes_are_nobodys():
    starved = [
        {"compute_only_ms": 380 + extra, "data_starve_ms": 620 - extra}
        for extra in (0, 40, 80)
    ]

    assert named(found_in(starved)) == ("input", None, 0.62)


def test_one_process_with_a_slow_loader_is_named_while_the_others_wait_in_steps():
    found = found_in([HEALTHY, HEALTHY, STARVED, HEALTHY])

    assert named(found) == ("input", 2, 0.62)
    assert str(found) == (
        "input: rank 2 (process 2) spent 62 % of the epoch waiting for data"
    )


def test_of_two_processes_the_one_short_of_data_is_named():
    assert named(found_in([STARVED, HEALTHY])) == ("input", 0, 0.62)
    assert named(found_in([HEALTHY, STARVED])) == ("input", 1, 0.62)


def test_waiting_for_data_that_steps_under_way_hide_costs_nothing():
    hidden = {"compute_only_ms": 980, "data_starve_ms": 700}

    assert found_in([hidden] * 2).kind == "compute"


def test_a_process_that_is_late_with_its_steps_is_the_slow_rank():
    found = found_in([HEALTHY, HEALTHY, HEALTHY, LATE])

    # The others stood idle for 20 ms in this way.
    assert named(found) == ("rank", 3, 0.444 - 0.02)
    assert found.ratio == pytest.approx(1 / (1 - found.share))
    assert str(found) == (
        "rank 3 (process 3) took 1.7 × as long as the median of the others; the rest "
        "waited 42 % of the epoch"
    )


def test_of_two_processes_the_late_one_is_named_and_not_the_waiting_one():
    assert named(found_in([LATE, HEALTHY])) == ("rank", 0, 0.424)


def test_all_devices_of_a_late_process_are_compared_with_the_other_processes():
    processes = [{"process": 0}] * 2 + [{"process": 1, **LATE}] * 4
    found = found_in(processes)

    assert found.kind == "rank"
    assert found.process == 1
    assert found.share == pytest.approx(0.424)


def test_a_rank_that_is_done_later_than_the_others_is_the_slow_one():
    early = {"share_complete_ms": 1000 / 1.8, "compute_only_ms": 1000 / 1.8}
    slow = {"share_complete_ms": 1000, "compute_only_ms": 1000}
    found = found_in([early, early, early, slow], process=0, data_starve_ms=0)

    assert named(found) == ("rank", 3, 0.8 / 1.8)
    assert str(found) == (
        "rank 3 took 1.8 × as long as the median of the others; the rest waited 44 % "
        "of the epoch"
    )


def test_what_is_measured_after_the_last_step_does_not_change_how_slow_a_rank_is():
    early = {"share_complete_ms": 500, "compute_only_ms": 500}
    slow = {"share_complete_ms": 1000, "compute_only_ms": 1000}
    found = found_in([early, slow, early], epoch_ms=1250)

    assert named(found) == ("rank", 1, 0.4)
    assert found.ratio == pytest.approx(2)


def test_devices_of_one_process_begin_together_whatever_came_before():
    early = {"share_complete_ms": 500, "compute_only_ms": 500}
    ranks = [early, early, {"compute_only_ms": 1000}]

    found = found_in(ranks, process=0, compile_ms=9000, callback_ms=400)
    assert named(found) == ("rank", 2, 0.5)
    found = found_in(ranks, process=0, callback_ms=600)
    assert named(found) == ("callback", None, 600 / 1600)


def test_a_device_is_at_work_for_its_share_at_most():
    early = {"share_complete_ms": 500, "compute_only_ms": 900}
    slow = {"share_complete_ms": 1000, "compute_only_ms": 1000}

    assert named(found_in([early, slow])) == ("rank", 1, 0.5)


def test_a_rank_that_is_done_later_for_want_of_data_is_short_of_input():
    early = {"share_complete_ms": 450, "compute_only_ms": 450, "data_starve_ms": 0}
    slow = {"compute_only_ms": 500, "data_starve_ms": 500}

    assert named(found_in([early, early, slow])) == ("input", 2, 0.5)


def test_slow_callbacks_are_named_with_their_share_of_the_whole_time():
    found = found_in([{"epoch_ms": 600, "compute_only_ms": 600, "eval_ms": 50}])
    slow = {"epoch_ms": 600, "compute_only_ms": 600, "eval_ms": 50, "callback_ms": 350}

    assert found.kind == "compute"
    found = found_in([slow])
    assert named(found) == ("callback", None, 0.35)
    assert str(found) == "callbacks took 35 % of the time between epochs' starts"


@pytest.mark.parametrize("num_processes", [2, 5])
def test_callbacks_of_one_process_that_the_others_wait_for_are_callbacks(num_processes):
    calling = {"epoch_ms": 600, "compute_only_ms": 600, "callback_ms": 400}
    waiting = {"epoch_ms": 1000, "compute_only_ms": 1000}
    found = found_in([calling] + [waiting] * (num_processes - 1))

    assert named(found) == ("callback", None, 0.4)


def test_time_spent_compiling_holds_nothing_back():
    assert found_in([HEALTHY] * 2, compile_ms=50_000).kind == "compute"


def test_a_process_that_waits_while_another_compiles_is_not_slow():
    compiling = {"compile_ms": 5000}
    waiting = {"compile_ms": 1000, "epoch_ms": 5000, "compute_only_ms": 5000}

    assert found_in([compiling, waiting, waiting]).kind == "compute"


def test_idle_devices_without_a_cause_are_not_explained():
    found = found_in([{"compute_only_ms": 450}] * 4)

    assert named(found) == ("nothing", None, 0.55)
    assert not found.is_notable
    assert "the devices were idle for 55 % of the epoch" in str(found)


def test_of_two_causes_the_one_that_lost_more_time_is_named():
    both = {"compute_only_ms": 600, "data_starve_ms": 300, "callback_ms": 250}

    assert found_in([both]).kind == "input"
    assert found_in([{**both, "callback_ms": 350}]).kind == "callback"


def test_less_than_a_tenth_of_the_time_is_not_worth_naming():
    starved = {"compute_only_ms": 901, "data_starve_ms": 99}
    late = {"compute_only_ms": 971 - 99}

    assert found_in([starved]).kind == "compute"
    assert found_in([HEALTHY, late]).kind == "compute"
    assert found_in([{"compute_only_ms": 900, "data_starve_ms": 100}]).kind == "input"


def test_where_no_time_passed_nothing_held_back():
    record = make_record(samples=0, sums={}, epoch_ms=0, compute_only_ms=0)
    found = make_metrics([record], num_steps=0).bottleneck

    assert named(found) == ("nothing", None, 0)


@given(st.permutations(range(5)), st.sampled_from([STARVED, LATE]))
def test_the_slow_one_is_found_at_any_place(order, slow):
    ranks = [slow if place == 3 else HEALTHY for place in order]

    assert found_in(ranks).rank == order.index(3)


@given(st.floats(0.1, 1e6), st.sampled_from([STARVED, LATE, HEALTHY]))
def test_shares_do_not_depend_on_the_unit_of_time(unit, slow):
    def scaled(rank):
        usual = {"epoch_ms": 1000, "compute_only_ms": 970, "data_starve_ms": 10}
        return {name: unit * ms for name, ms in {**usual, **rank}.items()}

    expected = found_in([HEALTHY, slow, HEALTHY])
    found = found_in([scaled(HEALTHY), scaled(slow), scaled(HEALTHY)])
    assert (found.kind, found.rank) == (expected.kind, expected.rank)
    assert found.share == pytest.approx(expected.share)


def test_a_few_milliseconds_are_not_worth_a_name():
    short = {"epoch_ms": 9, "compute_only_ms": 3, "data_starve_ms": 6}
    long = {name: 100 * ms for name, ms in short.items()}

    assert found_in([short]).kind == "nothing"
    assert found_in([long]).kind == "input"


def test_a_rank_that_takes_long_alone_is_named_in_lockstep():
    """All seem equally busy: 10 steps of 97 ms, in which 7 wait for the eighth."""
    ranks = [{"pass_ms": 20.0}] * 7 + [{"pass_ms": 80.0}]
    found = found_in(ranks)

    assert (found.kind, found.rank) == ("rank", 7)
    assert found.share == pytest.approx(0.6)  # 10 * (80 - 20) of 1000 ms
    assert found.ratio == pytest.approx(4)


def test_ranks_that_were_not_timed_alone_blame_nobody():
    assert found_in([{"pass_ms": 0.0}] * 4).kind == "compute"
