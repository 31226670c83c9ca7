"""DistributedDataParallel on gloo, restarted and preempted by Gangline. Needs torch: pip install torch

    gangline submit examples/torch_ddp/job.yaml --workdir "$PWD"
    torchrun --nproc-per-node 2 examples/torch_ddp/train.py --steps 200           works without Gangline too

A small network learns to imitate a random one. The batch of a step depends on seed, step and rank alone, so a run that was interrupted
goes on as if it had not been. On GPUs: backend "nccl", and move model and batches to `cuda:{LOCAL_RANK}`.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gangline import rank

EXIT_ASKED_TO_LEAVE = 143


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--checkpoint-every", type=int, default=25)
    parser.add_argument("--checkpoint-dir", default="")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    rank.should_stop()  # from here on SIGTERM asks, and does not kill
    who = rank.context()
    directory = Path(options.checkpoint_dir or who.checkpoint_dir or "checkpoints")
    saved = rank.latest_checkpoint(directory)  # takes the directory: older generations are refused from now on

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    teacher, student = network(), network()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
    model = DistributedDataParallel(student)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, loss = 0, float("nan")
    if saved is not None:
        state = torch.load(saved.path, weights_only=True)
        student.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, loss = state["step"], state["loss"]
        notice = rank.restart()
        if who.rank == 0:
            print(f"resumed from checkpoint step={step} loss={loss:.6f} cause={notice.cause if notice else 'none'}", flush=True)

    leave = False
    while step < options.steps and not leave:
        generator = torch.Generator().manual_seed((options.seed * 1_000_003 + step) * 10_007 + who.rank)
        inputs = torch.randn(32, 16, generator=generator)
        with torch.no_grad():
            targets = teacher(inputs)
        error = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        step += 1
        rank.progress(step)

        # Everybody's loss, and whether anybody has been asked to leave: all must leave at the same step.
        shared = torch.tensor([error.item(), float(rank.should_stop())])
        dist.all_reduce(shared)
        loss, leave = shared[0].item() / who.world_size, shared[1].item() > 0
        last = leave or step == options.steps
        if who.rank == 0 and (last or step % options.checkpoint_every == 0):
            print(f"step={step} loss={loss:.6f} generation={who.generation}", flush=True)
            with rank.checkpoint(step, directory=directory, suffix=".pt", keep=3) as path:
                torch.save({"step": step, "loss": loss, "model": student.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()  # the checkpoint is on disk
    dist.destroy_process_group()
    if step < options.steps:
        rank.acknowledge()
        return EXIT_ASKED_TO_LEAVE
    return 0


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


if __name__ == "__main__":
    sys.exit(main())
