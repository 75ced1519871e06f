"""Two processes of four devices: one run, the same for both, and as one of eight."""

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import COMMAND, DEADLINE_SECS, ENVIRONMENT, write
from process_problems import EPOCHS, ROADS, everything
from rank_problems import small_batch

import fuelflow as ff

PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import fuelflow as ff
ff.initialize()
import jax
from process_problems import everything
told = everything()
with open(sys.argv[1] + str(jax.process_index()), "w") as file:
    json.dump(told, file)
"""
# Their gradients are added up in another order, over 21 updates of a twentieth.
RTOL, ATOL = 1e-5, 1e-6


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes tells."""
    folder = tmp_path_factory.mktemp("processes")
    program, target = write(folder / "program.py", PROGRAM), folder / "told"
    options = ("-n", "2", "--devices-per-process", "4", program, str(target))
    done = subprocess.run(
        [*COMMAND, *options],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * DEADLINE_SECS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"told{index}").read_text()) for index in range(2)]


@functools.cache
def told_by_one() -> dict[str, Any]:
    """What one process with all eight devices tells."""
    return everything()


def histories(told: list[dict[str, Any]], road: str) -> list[ff.History]:
    return [ff.History.from_dict(each[road]["history"]) for each in told]


@pytest.mark.parametrize("road", ROADS)
def test_both_processes_have_the_very_same_history(told: Any, road: str):
    first, second = histories(told, road)

    assert len(first) == EPOCHS
    assert first == second  # times and all
    assert told[0][road]["w"] == told[1][road]["w"]
    for metrics in first:
        assert metrics.epoch_ms > 0
        assert list(metrics.process_indices) == [0] * 4 + [1] * 4
        assert len(set(metrics.device_indices)) == 8


@pytest.mark.parametrize("road", ROADS)
def test_two_processes_do_what_one_does_with_as_many_devices(told: Any, road: str):
    (history, _), (expected,) = histories(told, road), histories([told_by_one()], road)

    np.testing.assert_allclose(
        told[0][road]["w"], told_by_one()[road]["w"], rtol=RTOL, atol=ATOL
    )
    for metrics, one in zip(history, expected, strict=True):
        for name in ("epoch", "num_steps", "global_step", "per_rank_samples", "lr"):
            assert getattr(metrics, name) == getattr(one, name), name
        assert metrics.avg_loss == pytest.approx(one.avg_loss, rel=1e-5)
        assert metrics.scalars == pytest.approx(one.scalars, rel=1e-5)
        assert metrics.evaluation == pytest.approx(one.evaluation, rel=1e-5)
        assert metrics.per_rank_loss == pytest.approx(one.per_rank_loss, rel=1e-4)


def test_tails_are_counted_on_the_ranks_that_have_them(told: Any):
    for road in ROADS:
        for metrics in histories(told, road)[0]:
            # Six batches of 32, and five rows: four for rank 0 and one for rank 1.
            assert list(metrics.per_rank_samples) == [28, 25, *[24] * 6]
            assert metrics.num_samples == 197


def test_streaming_and_resident_rows_give_both_processes_the_same(told: Any):
    resident, streaming = (histories(told, road)[0] for road in ROADS)

    assert told[0]["resident"]["w"] == told[0]["streaming"]["w"]
    for one, other in zip(resident, streaming, strict=True):
        assert one.avg_loss == other.avg_loss
        assert one.evaluation == other.evaluation


def test_an_evaluation_over_processes_counts_each_row_once(told: Any):
    valid = small_batch(37, seed=1)
    error = valid["x"] @ np.float32(told[0]["streaming"]["w"]) - valid["y"]
    evaluation = histories(told, "streaming")[1][-1].evaluation

    assert evaluation["loss"] == pytest.approx((error**2).mean(), rel=1e-5)
    assert evaluation["absolute"] == pytest.approx(np.abs(error).mean(), rel=1e-5)


def test_every_face_of_the_loop_works_over_processes(told: Any):
    first, second, one = (each["faces"] for each in (*told, told_by_one()))

    assert first == second
    assert first["num_devices"] == 1
    for name, values in one.items():
        np.testing.assert_allclose(
            first[name], values, rtol=RTOL, atol=ATOL, err_msg=name
        )


def test_a_process_that_wishes_to_stop_ends_them_all_after_the_same_step(told: Any):
    # The last process' callback asks for it after the first of three epochs.
    assert [each["stopped"] for each in (*told, told_by_one())] == [[1, 7]] * 3
