"""What the agent asks of a way to run ranks, and what it tells it of the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from gangline.core.model.documents import DesiredRank
from gangline.core.model.spec import JobSpec
from gangline.nodeagent import storage
from gangline.nodeagent.adoption import RankStatus
from gangline.nodeagent.cgroups import Layout
from gangline.nodeagent.isolation import User, user_of
from gangline.nodeagent.launcher import Launch
from gangline.nodeagent.nodefile import NodeRules
from gangline.nodeagent.storage import Mounted


def nothing_closed(rank: DesiredRank) -> tuple[tuple[int, int], ...]:
    """Of a node whose GPUs have no device files."""
    return ()


class Site(msgspec.Struct, frozen=True):
    """The node, as far as running ranks is concerned."""

    rules: NodeRules
    layout: Layout
    #: tells this agent's control groups and containers from those of others on the same host
    identity: str
    state: Path
    #: simulated GPUs have no devices that a container could be given
    simulated: bool
    #: what every process of the node gets
    base_environment: dict[str, str] = {}
    #: device files, as (major, minor), of what a rank does not have of the GPUs; none where they have no device files
    closed: Callable[[DesiredRank], tuple[tuple[int, int], ...]] = nothing_closed

    @property
    def base(self) -> str:
        """Name of the control group above those of the ranks."""
        return f"gangline-{self.identity[:12]}"


class Ready(msgspec.Struct, frozen=True):
    """What preparing a job has found out; kept with the gang, also for the next agent."""

    user: User | None = None
    mounts: tuple[Mounted, ...] = ()


class Driver(Protocol):
    """One way to run ranks. Nothing here waits except `prepare` and `bury`."""

    async def prepare(self, job: str, generation: int, spec: JobSpec, say: Callable[[str], None]) -> Ready:
        """See to it that the job can start here; `say` how far that is. Raises Refused, OSError."""

    def box(self, launch: Launch, spec: JobSpec, rank: DesiredRank, ready: Ready) -> Launch:
        """Return the launch of a rank as it is to be run; given is that of a process of the agent's user, without any limits."""

    def inside(self, status: RankStatus, spec: JobSpec, ready: Ready, command: Sequence[str]) -> list[str]:
        """Return what to run, as the agent's user, for running a command inside a running rank's isolation. Raises Refused."""

    async def bury(self, status: RankStatus) -> None:
        """Kill and remove what is left of a rank whose supervisor is gone."""


def rank_name(job: str, generation: int, rank: int) -> str:
    """Return the name of a rank, good for a file and a container."""
    return f"{job}@{generation}.{rank}"


async def look_at_storage(job: str, generation: int, spec: JobSpec, rules: NodeRules) -> Ready:
    """Return the job's user and mounts, after all that it wants of storage has been tried out. Raises Refused, OSError."""
    user = None
    if spec.user or rules.ranks.user or rules.ranks.refuse_root:
        user = await asyncio.to_thread(user_of, spec, rules)
    mounts: tuple[Mounted, ...] = ()
    if spec.mounts:
        mounted = storage.mount_points(await asyncio.to_thread(Path("/proc/self/mountinfo").read_text))
        mounts = storage.resolve(spec.mounts, rules, mounted)
    await storage.check(storage.wants_of(job, generation, spec, mounts, rules), user)
    return Ready(user, mounts)
