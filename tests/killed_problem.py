"""A run of many short steps that is saved all the time, for tests that kill it.

    python killed_problem.py DIRECTORY EPOCHS

It goes on with the run in the directory, says so, and says that it is done.
"""

import pickle
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from run_problems import result_of
from saved_problems import CLASSES, dict_loss, make_dict

import fuelflow as ff

NUM_ROWS, SIZE = 85, 8  # eleven steps an epoch
BALLAST = 2000


def loss_fn(params, batch, key):
    # A parameter that makes each save take a while.
    losses, metrics = dict_loss(params, batch, key)
    return losses + 1e-3 * jax.numpy.mean(params["ballast"] ** 2), metrics


def make_trainer(directory: Path | None, epochs: int) -> ff.Trainer:
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_ROWS, 12)).astype(np.float32)
    y = random.integers(CLASSES, size=NUM_ROWS).astype(np.int32)
    model = {**make_dict(), "ballast": np.ones((BALLAST, 64), np.float32)}
    return ff.Trainer(
        ff.TrainingLoop(loss_fn, optax.adam, schedule=0.01, max_grad_norm=1.0),
        model,
        ff.DataLoader({"x": x, "y": y}, SIZE, seed=3, resident=False),
        epochs=epochs,
        seed=7,
        steps_per_call=1,
        checkpointer=ff.Checkpointer(directory, every_steps=1) if directory else None,
        resume=directory is not None,
    )


def main(directory: Path, epochs: int) -> None:
    trainer = make_trainer(directory / "run", epochs)
    print("begins", flush=True)
    trained = trainer.fit()
    (directory / "result").write_bytes(pickle.dumps(result_of(trained)))
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
