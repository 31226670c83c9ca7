"""The environment of a rank: what torch and its kind expect, and GANGLINE_* for what they do not know. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gangline.core.model.documents import DesiredGang, DesiredRank, Gpu
from gangline.core.model.spec import JobSpec


class Here(msgspec.Struct, frozen=True):
    """What the environment takes from the node."""

    node: str
    #: what every process of the node gets: PATH, HOME, LANG; never the agent's own environment
    base: dict[str, str]
    #: by index
    gpus: dict[int, Gpu]
    #: simulated GPUs have no driver that knows their uuids
    simulated: bool
    #: the agent's socket for ranks
    socket: str
    #: the port reserved on this node, for gangs of one node
    port: int
    #: the file of the gang's events
    events: str
    #: the rank's secret for the socket
    token: str


def rank_environment(gang: DesiredGang, rank: DesiredRank, spec: JobSpec, here: Here) -> dict[str, str]:
    """Return the whole environment; what the job asks for itself gives way to what the scheduler knows, except OMP_NUM_THREADS."""
    return {
        "OMP_NUM_THREADS": str(max(1, spec.resources.cpus_milli // 1000)),
        **here.base,
        **spec.env,
        **_torch(gang, rank, here),
        "CUDA_VISIBLE_DEVICES": _visible(rank.gpus, here),
        **_gangline(gang, rank, spec, here),
    }


def base_environment(agent: Mapping[str, str], user: str, home: str, shell: str) -> dict[str, str]:
    """Return what every rank gets. Of the agent's environment only the search path is kept: it is how a site provides its tools."""
    return {
        "PATH": agent.get("PATH") or "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": shell,
        "LANG": "C.UTF-8",
    }


def _torch(gang: DesiredGang, rank: DesiredRank, here: Here) -> dict[str, str]:
    values: dict[str, object] = {
        # A gang of one node is left to meet on the spot.
        "MASTER_ADDR": gang.master_addr or "127.0.0.1",
        "MASTER_PORT": gang.master_port or here.port,
        "RANK": rank.rank,
        "WORLD_SIZE": gang.world_size,
        "LOCAL_RANK": rank.local_rank,
        "LOCAL_WORLD_SIZE": len(gang.ranks),
        "NODE_RANK": gang.node_rank,
        "GROUP_RANK": gang.node_rank,
        "GROUP_WORLD_SIZE": gang.nodes,
        "ROLE_RANK": rank.rank,
        "ROLE_WORLD_SIZE": gang.world_size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": gang.restart.restarts if gang.restart else 0,
        "TORCHELASTIC_RUN_ID": gang.job,
    }
    return {k: str(v) for k, v in values.items()}


def _visible(gpus: tuple[int, ...], here: Here) -> str:
    # Empty, not absent: a rank without GPUs must not see those of others.
    return ",".join(str(i) if here.simulated or i not in here.gpus else here.gpus[i].uuid for i in gpus)


def _gangline(gang: DesiredGang, rank: DesiredRank, spec: JobSpec, here: Here) -> dict[str, str]:
    values: dict[str, object] = {
        "JOB_ID": gang.job,
        "JOB_NAME": spec.name or gang.job,
        "QUEUE": spec.queue,
        "NODE": here.node,
        "GENERATION": rank.generation,
        "RESTARTS": gang.restart.restarts if gang.restart else 0,
        "RESTART_CAUSE": gang.restart.cause if gang.restart else "",
        "EVENTS": here.events,
        "SOCKET": here.socket,
        "TOKEN": here.token,
        "CHECKPOINT_DIR": spec.checkpoint.path,
    }
    return {f"GANGLINE_{k}": str(v) for k, v in values.items()}
