"""The environment of a rank: what torch and its kind expect, and GANGLINE_* for what they do not know. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gangline.core.model.arrays import size, split_element
from gangline.core.model.documents import DesiredGang, DesiredRank, DesiredRole, Gpu
from gangline.core.model.gpufacts import MIG_LAYOUTS
from gangline.core.model.roles import of_role
from gangline.core.model.spec import JobSpec
from gangline.nodeagent.isolation import User


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
    #: UUIDs of its MIG instances
    instances: tuple[str, ...] = ()
    #: pipe directory of the MPS control daemon, "" when there is none
    mps_pipe: str = ""


def rank_environment(gang: DesiredGang, rank: DesiredRank, spec: JobSpec, here: Here) -> dict[str, str]:
    """Return the whole environment; what the job asks for itself gives way to what the scheduler knows, except OMP_NUM_THREADS."""
    what = of_role(spec, rank.role)
    return {
        "OMP_NUM_THREADS": str(max(1, what.resources.cpus_milli // 1000)),
        **here.base,
        **what.env,
        **_torch(gang, rank, here),
        **_devices(rank, here),
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


def user_environment(base: dict[str, str], user: User | None) -> dict[str, str]:
    """Return what every rank of this user gets; None: of the agent's own."""
    if user is None:
        return base
    return {**base, "HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": user.shell}


def _torch(gang: DesiredGang, rank: DesiredRank, here: Here) -> dict[str, str]:
    role = _role(gang, rank)
    values: dict[str, object] = {
        # A gang of one node is left to meet on the spot.
        "MASTER_ADDR": gang.master_addr or "127.0.0.1",
        "MASTER_PORT": gang.master_port or here.port,
        "RANK": rank.rank,
        "WORLD_SIZE": gang.world_size,
        "LOCAL_RANK": rank.local_rank,
        # As torchelastic has it, a group is what of one role is on one node.
        "LOCAL_WORLD_SIZE": sum(r.role == rank.role for r in gang.ranks),
        "NODE_RANK": gang.node_rank,
        "GROUP_RANK": role.group,
        "GROUP_WORLD_SIZE": gang.groups or gang.nodes,
        "ROLE_RANK": rank.role_rank if gang.roles else rank.rank,
        "ROLE_WORLD_SIZE": role.ranks,
        "ROLE_NAME": role.name or "default",
        "TORCHELASTIC_RESTART_COUNT": gang.restart.restarts if gang.restart else 0,
        "TORCHELASTIC_RUN_ID": gang.job,
    }
    return {k: str(v) for k, v in values.items()}


def _role(gang: DesiredGang, rank: DesiredRank) -> DesiredRole:
    return gang.roles[rank.role] if gang.roles else DesiredRole("", gang.world_size, gang.node_rank)


def _devices(rank: DesiredRank, here: Here) -> dict[str, str]:
    """What CUDA, container runtimes and MPS look at, and what of each GPU the rank has for those who want to keep to it."""
    share = rank.share
    if share is not None and share.mig:
        visible = ",".join(here.instances)
    else:
        visible = ",".join(str(i) if here.simulated or i not in here.gpus else here.gpus[i].uuid for i in rank.gpus)
    # Empty, not absent: a rank without GPUs must not see those of others. Container runtimes take "void" for that.
    found = {"CUDA_VISIBLE_DEVICES": visible, "NVIDIA_VISIBLE_DEVICES": visible or "void"}
    if not rank.gpus:
        return found
    memory_mib = _memory_mib(rank, here)
    if memory_mib:
        found["GANGLINE_GPU_MEMORY_MIB"] = str(memory_mib)
    if share is None or not share.mig:
        found["GANGLINE_GPU_SHARE"] = f"{(1000 if share is None else share.milli) / 1000:g}"
    if share is not None and not share.mig and here.mps_pipe:
        found["CUDA_MPS_PIPE_DIRECTORY"] = here.mps_pipe
        found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{share.milli / 10:g}"
        if memory_mib:
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{at}={memory_mib}M" for at in range(len(rank.gpus)))
    return found


def _memory_mib(rank: DesiredRank, here: Here) -> int:
    """Return how much memory the rank may use of each of its GPUs or instances, of the smallest where they differ; 0: not known."""
    share = rank.share
    if share is not None and share.memory_mib:
        return share.memory_mib
    known = [here.gpus[g] for g in rank.gpus if g in here.gpus]
    if share is not None and share.mig:
        layouts = {gpu.index: MIG_LAYOUTS.get(gpu.mig) for gpu in known}
        profiles = [layout.profile(one.profile) for one in share.mig if (layout := layouts.get(one.gpu)) is not None]
        return min((p.memory_mib for p in profiles if p is not None), default=0)
    return min((gpu.memory_mib for gpu in known), default=0) * (1000 if share is None else share.milli) // 1000


def _gangline(gang: DesiredGang, rank: DesiredRank, spec: JobSpec, here: Here) -> dict[str, str]:
    values: dict[str, object] = {
        "JOB_ID": gang.job,
        "JOB_NAME": spec.name or gang.job,
        "QUEUE": spec.queue,
        "ROLE": _role(gang, rank).name,
        "REPLICA": rank.replica,
        # Where each role has its first rank, for those who meet by role rather than at MASTER_ADDR.
        "ROLE_LEADERS": ",".join(f"{role.name}={role.leader}" for role in gang.roles if role.leader),
        "NODE": here.node,
        "GENERATION": rank.generation,
        "RESTARTS": gang.restart.restarts if gang.restart else 0,
        "RESTART_CAUSE": gang.restart.cause if gang.restart else "",
        "EVENTS": here.events,
        "SOCKET": here.socket,
        "TOKEN": here.token,
        "CHECKPOINT_DIR": spec.checkpoint.path,
    }
    element = split_element(gang.job) if spec.array is not None else None
    if element is not None and spec.array is not None:
        values |= {"ARRAY_JOB": element[0], "ARRAY_INDEX": element[1], "ARRAY_SIZE": size(spec.array)}
    return {f"GANGLINE_{k}": str(v) for k, v in values.items()}
