"""up and down: a cluster on this machine."""

from __future__ import annotations

import click

from gangline.core.client.settings import Settings


@click.command()
@click.option("--nodes", type=click.IntRange(0, 1000), default=2, show_default=True, help="Nodes (agents).")
@click.option("--gpus", type=click.IntRange(0, 64), default=8, show_default=True, help="Simulated GPUs of each node.")
@click.option("--schedulers", type=click.IntRange(1, 9), default=1, show_default=True, help="Schedulers; one of them leads.")
@click.option("--state-dir", default="", metavar="DIR", help="Where the cluster keeps everything [GANGLINE_STATE, or .gangline].")
@click.pass_context
def up(ctx: click.Context, nodes: int, gpus: int, schedulers: int, state_dir: str) -> None:
    """Start a cluster on this machine: etcd, schedulers and nodes with simulated GPUs."""
    from gangline.core.client import localcluster

    localcluster.up(nodes, gpus, schedulers, state_dir or _state_dir(ctx))


@click.command()
@click.option("--state-dir", default="", metavar="DIR", help="Where the cluster keeps everything [GANGLINE_STATE, or .gangline].")
@click.pass_context
def down(ctx: click.Context, state_dir: str) -> None:
    """End the cluster on this machine, its jobs too."""
    from gangline.core.client import localcluster

    localcluster.down(state_dir or _state_dir(ctx))


def _state_dir(ctx: click.Context) -> str:
    return (ctx.find_object(Settings) or Settings()).state_dir()
