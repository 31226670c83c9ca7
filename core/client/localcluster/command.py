"""`gangline up` and `gangline down`: the same with words on standard error and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path

from gangline.core.client import exits
from gangline.core.client.localcluster.cluster import LocalCluster
from gangline.core.client.localcluster.layout import ClusterError, Layout, SizeConflict
from gangline.core.client.localcluster.process import Process
from gangline.core.client.settings import DEFAULT_STATE_DIR


def up(*, nodes: int, gpus: int, schedulers: int, state_dir: Path, gpu_model: str = "h100", quiet: bool = False) -> int:
    """Start a cluster, or what is missing of it, and return once it works: 0, 1 when it does not come up, 8 when it runs in another size."""
    cluster = LocalCluster(state_dir, nodes, gpus, schedulers, gpu_model=gpu_model, say=_nothing if quiet else _say)
    try:
        cluster.start()
    except SizeConflict as e:
        _say(f"gangline: {e}")
        return exits.CONFLICT
    except ClusterError as e:
        _say(f"gangline: {e}")
        if any(p.alive for p in cluster.processes.values()):
            _say("What did start runs on: `gangline up` tries the rest again, `gangline down` ends it.")
        return exits.INTERNAL
    if not quiet:
        _say(_summary(cluster, nodes, gpus, gpu_model))
    return exits.DONE


def down(*, state_dir: Path, quiet: bool = False) -> int:
    """End the cluster with all its jobs; what it knows stays on disk for the next `up`. Returns 0, also when nothing ran."""
    say = _nothing if quiet else _say
    try:
        ran = LocalCluster(state_dir, say=say).stop()
    except ClusterError as e:
        _say(f"gangline: {e}")
        return exits.INTERNAL
    say(f"the cluster in {state_dir} is down; `gangline up` starts it again with all it knows" if ran else f"no cluster runs in {state_dir}")
    return exits.DONE


def status(*, state_dir: Path) -> dict[str, Process]:
    """Return the processes of a cluster by name; each says whether it is alive."""
    return Layout(state_dir).processes()


def _summary(cluster: LocalCluster, nodes: int, gpus: int, gpu_model: str) -> str:
    lines = [
        f"the cluster is up: {nodes} nodes with {gpus} simulated {gpu_model} each; {cluster.leader() or 'a scheduler'} leads",
        *(f"  scheduler  {url}" for url in cluster.urls),
        f"  logs       {cluster.state_dir / 'logs'}",
    ]
    if cluster.state_dir != Path(DEFAULT_STATE_DIR).absolute():
        lines.append(f"  to use it  export GANGLINE_STATE={cluster.state_dir}")
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _nothing(_line: str) -> None:
    pass
