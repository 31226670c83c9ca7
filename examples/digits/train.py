"""Train a small network on the digits, data-parallel: every rank has a part of each batch, gradients are summed over all ranks.

    gangline submit examples/digits/job.yaml --workdir .   16 ranks on the cluster
    python examples/digits/train.py --checkpoint-dir /tmp/digits --steps 200      one process, without Gangline

What to look at in the code below are the five places marked (1) to (5): all that a training job does to survive restarts and preemption.
With the same seed and number of ranks, the loss at a step is the same whether the run was interrupted or not. With another number of ranks it
is the same but for rounding: a batch is divided among the ranks that there are (elastic.yaml).
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys

# Before numpy is imported: many ranks share a machine here, and the matrices are small.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import argparse
import json
import time
from pathlib import Path

import numpy as np
from exchange import Exchange, PeerLost, connect
from model import HELD_OUT, Perceptron, batch_rows, load_digits

from gangline import rank

#: says "I was asked to leave and am not done", as a shell does for a process that SIGTERM ended; 0 means done
EXIT_ASKED_TO_LEAVE = 143
EXIT_PEER_LOST = 3


def main() -> int:
    options = parse_options()
    rank.should_stop()  # from here on SIGTERM asks, and does not kill
    who = rank.context()
    directory = Path(options.checkpoint_dir or who.checkpoint_dir or "checkpoints")
    exchange: Exchange | None = None
    try:
        # (1) Take the checkpoint directory before anything else: no rank of an older generation can write there any more.
        saved = rank.latest_checkpoint(directory)
        exchange = connect(options.backend, who, options.timeout_s)
        return train(options, directory, saved.path if saved else None, exchange)
    except PeerLost as lost:
        # The rank that died is the news; this one ends quickly, so that the gang can be restarted.
        print(f"peer lost: {lost}", file=sys.stderr, flush=True)
        return EXIT_PEER_LOST
    finally:
        if exchange is not None:
            exchange.close()


def train(options: argparse.Namespace, directory: Path, saved: Path | None, exchange: Exchange) -> int:
    who = rank.context()
    chief = who.rank == 0
    images, labels = load_digits()
    model = Perceptron(options.seed)
    size = len(model.parameters)
    step, loss = 0, float("nan")
    if saved is not None:
        # (2) Go on from the newest checkpoint, and say why.
        state = np.load(saved)
        step, loss = int(state[0]), float(state[1])
        model.parameters, model.momentum = state[2 : 2 + size], state[2 + size :]
    agree_on(step, exchange)
    if chief and (saved is not None or who.generation > 1):
        notice = rank.restart()
        ranks = f" ranks={notice.old_world_size}->{who.world_size}" if notice and notice.old_world_size != who.world_size else ""
        print(f"resumed from checkpoint step={step} loss={loss:.6f} cause={notice.cause if notice else 'none'}{ranks}", flush=True)

    metrics = open(directory / "metrics.jsonl", "a") if chief else None  # noqa: SIM115
    saved_step = step
    leave = False
    while step < options.steps and not leave:
        started = time.monotonic()
        rows = batch_rows(step, options.batch, len(images) - HELD_OUT, options.seed)[who.rank :: who.world_size]
        gradient, loss_sum = model.gradient(images[rows], labels[rows])
        # (3) Every rank hears of a preemption at its own moment; all must leave at the same step, so it is summed with the gradients.
        total = exchange.sum(np.concatenate([gradient, [loss_sum, float(rank.should_stop())]]))
        model.update(total[:size] / options.batch, rate=options.rate)
        loss, leave = float(total[size]) / options.batch, total[size + 1] > 0
        step += 1
        # (4) Report the step: a rank that hangs is noticed.
        rank.progress(step)
        if chief:
            assert metrics is not None
            line = {"step": step, "loss": loss, "generation": who.generation, "ranks": who.world_size, "time": time.time_ns() / 1e9}
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            if step % options.print_every == 0 or step == options.steps:
                print(f"step={step} loss={loss:.6f} generation={who.generation}", flush=True)
            # (5) Save, behind the fence.
            if step % options.checkpoint_every == 0 or step == options.steps or leave:
                with rank.checkpoint(step, directory=directory, suffix=".npy", keep=3) as path:
                    np.save(path, np.concatenate([[step, loss], model.parameters, model.momentum]))
                saved_step = step
            time.sleep(max(0.0, options.step_time_ms / 1000 - (time.monotonic() - started)))

    exchange.sum(np.zeros(1))  # the last checkpoint is on disk before anybody says so
    if step < options.steps:
        rank.acknowledge()
        if chief:
            asked = rank.stop_notice()
            cause = asked.cause if asked else "SIGTERM" if rank.should_stop() else "another rank was asked"
            print(f"leaving step={step} checkpoint={saved_step} cause={cause}", flush=True)
        return EXIT_ASKED_TO_LEAVE
    if chief:
        accuracy = model.accuracy(images[-HELD_OUT:], labels[-HELD_OUT:])
        print(f"done step={step} loss={loss:.6f} accuracy={accuracy:.3f} generation={who.generation}", flush=True)
    return 0


def agree_on(step: int, exchange: Exchange) -> None:
    """Stop a run whose ranks start from different checkpoints, as when the directory is not shared between the nodes."""
    ranks, total, squares = exchange.sum(np.array([1.0, step, step * step]))
    if total * total != squares * ranks:
        raise SystemExit(f"this rank starts at step {step}, others elsewhere: is the checkpoint directory the same for all nodes?")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Data-parallel training on the digits.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=320, help="images in a batch, over all ranks")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--checkpoint-dir", default="", help="default: what the job file says, else ./checkpoints")
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--step-time-ms", type=float, default=0.0, help="slow down to so much time a step")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="silence of another rank that counts as its death")
    parser.add_argument("--backend", choices=["auto", "gloo", "ring"], default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
