"""Records of ranks for tests of what is made of them."""

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.ranks import RankRecord, reduce_ranks


def make_record(device=0, process=0, **fields):
    """A rank that was at work for 970 of its epoch's 1000 ms."""
    usual = {
        "device_index": device,
        "process_index": process,
        "samples": 100,
        "sums": {"loss": (50.0, 100.0)},
        "epoch_ms": 1000.0,
        "share_complete_ms": fields.get("epoch_ms", 1000.0),
        "compute_only_ms": 970.0,
        "data_starve_ms": 10.0,
    }
    return RankRecord(**{**usual, **fields})


def make_metrics(records=None, **options) -> EpochMetrics:
    """The metrics of some records, by default of one."""
    usual = {"epoch": 0, "num_steps": 10, "global_step": 10}
    return reduce_ranks(records or [make_record()], **{**usual, **options})
