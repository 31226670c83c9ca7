"""What an agent knows of its own node: the state that `reconcile` compares with the desired document. Immutable, no I/O."""

from __future__ import annotations

from typing import Literal

import msgspec

from gangline.core.model.documents import Gpu, StopNotice
from gangline.core.model.gpushares import GpuShare

RankState = Literal["starting", "running", "stopping", "exited"]


class LocalRank(msgspec.Struct, frozen=True):
    """One rank that was started here, from the request to start it until its gang is forgotten."""

    rank: int
    generation: int
    #: device indices that it holds while it is live
    gpus: tuple[int, ...]
    state: RankState
    pid: int = 0
    exit_code: int = 0
    cause: str = ""
    message: str = ""
    started_at_ms: int = 0
    exited_at_ms: int = 0
    #: monotonic second of its start or its last progress, whichever is later
    progress_at: float = 0.0
    #: what it has of its devices, None: the whole of each
    share: GpuShare | None = None
    #: last step that it reported, and how long one takes it: smoothed, 0 before two were reported
    step: int = -1
    pace_ms: float = 0.0

    @property
    def live(self) -> bool:
        """Whether anything of it may still run and hold its devices."""
        return self.state != "exited"

    @property
    def key(self) -> tuple[int, int]:
        """Rank and generation: what is started at most once."""
        return (self.rank, self.generation)


class LocalGang(msgspec.Struct, frozen=True):
    """This node's part of a gang as it is. `generation` is the highest one that was acted on; nothing lower is obeyed any more."""

    job: str
    generation: int
    #: how far this generation is; "new" means that nothing was done for it yet
    phase: Literal["new", "preparing", "prepared", "prepare_failed"] = "new"
    ranks: tuple[LocalRank, ...] = ()
    #: why preparing failed
    message: str = ""
    address: str = ""
    port: int = 0
    hang_timeout_s: float = 0.0
    #: the stop notice that was delivered, and the monotonic second of it
    notice: StopNotice | None = None
    notified_at: float = 0.0
    #: ranks that have acknowledged it
    acknowledged: tuple[int, ...] = ()
    step: int = -1
    checkpoint_step: int = -1
    checkpoint_path: str = ""

    @property
    def live(self) -> tuple[LocalRank, ...]:
        """Ranks of any generation of which something may still run."""
        return tuple(r for r in self.ranks if r.live)


class Local(msgspec.Struct, frozen=True):
    """The node: its devices and its gangs, by job id."""

    #: index to health
    gpus: dict[int, bool]
    gangs: dict[str, LocalGang]
    #: gangs that were forgotten: the generation up to which nothing of them is ever started here again
    retired: dict[str, int] = {}
    #: what is known of each device, by index
    facts: dict[int, Gpu] = {}
