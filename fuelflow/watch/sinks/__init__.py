"""Where records go besides the screen: a `Monitor` is given some of these.

A sink is anything that can be called with a `Record`. If it has a ``close``, that is
called at the end. Each has a thread of its own: it may be slow, block or raise, and the
run neither waits for it nor fails. So other trackers take three lines:

    run = wandb.init(project="digits")

    def sink(record: ff.sinks.Record) -> None:
        if record.scalars:
            run.log(record.scalars, record.step)

    monitor = ff.Monitor(sinks=[sink])
"""

from fuelflow.watch.record.records import Record
from fuelflow.watch.sinks.csv import Csv
from fuelflow.watch.sinks.jsonl import JsonLines
from fuelflow.watch.sinks.tensorboard import TensorBoard

__all__ = ["Csv", "JsonLines", "Record", "TensorBoard"]
