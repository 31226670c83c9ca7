"""The faults that can be injected, by name. What a fault hits is found by `targets.resolve`; how it is done to a cluster is in `injector.py`.

A fault says what happens to what, in the words of people: a rank, a node, a scheduler. It knows no pid, so a schedule of faults can be written
down, printed and repeated on another cluster.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Fault:
    """Base of all faults. `str(fault)` is one phrase for people."""

    #: stable name, as `gangline chaos inject NAME` takes it and schedules store it
    NAME: ClassVar[str] = ""
    #: what every process that it hits gets
    SIGNAL: ClassVar[signal.Signals] = signal.SIGKILL

    def __str__(self) -> str:
        verb = "freeze" if self.SIGNAL == signal.SIGSTOP else "kill -9"
        return f"{verb} {self.whom()}"

    def whom(self) -> str:
        """Return whom it hits, for people."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the fault as plain data."""
        return {"fault": self.NAME, **asdict(self)}


@dataclass(frozen=True, slots=True)
class KillRank(Fault):
    """The process of one rank of a job dies. Its supervisor stays and sees it."""

    NAME: ClassVar[str] = "kill-rank"
    job: str
    rank: int

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"rank {self.rank} of {self.job}"


@dataclass(frozen=True, slots=True)
class FreezeRank(Fault):
    """The process of one rank of a job stops running and stays there: a hung collective, seen from the others."""

    NAME: ClassVar[str] = "freeze-rank"
    SIGNAL: ClassVar[signal.Signals] = signal.SIGSTOP
    job: str
    rank: int

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"rank {self.rank} of {self.job}"


@dataclass(frozen=True, slots=True)
class KillNode(Fault):
    """Everything that Gangline runs on a node dies at once, as when its power fails: agent, supervisors, ranks and what they have started."""

    NAME: ClassVar[str] = "kill-node"
    node: str

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"node {self.node}, agent and ranks"


@dataclass(frozen=True, slots=True)
class FreezeNode(Fault):
    """Everything on a node stands still, as when its host is suspended."""

    NAME: ClassVar[str] = "freeze-node"
    SIGNAL: ClassVar[signal.Signals] = signal.SIGSTOP
    node: str

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"node {self.node}, agent and ranks"


@dataclass(frozen=True, slots=True)
class KillAgent(Fault):
    """The agent of a node dies; supervisors and ranks go on."""

    NAME: ClassVar[str] = "kill-agent"
    node: str

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"the agent of {self.node}, and not its ranks"


@dataclass(frozen=True, slots=True)
class KillScheduler(Fault):
    """A scheduler dies, whether it leads or not."""

    NAME: ClassVar[str] = "kill-scheduler"
    scheduler: str

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"scheduler {self.scheduler}"


@dataclass(frozen=True, slots=True)
class KillLeader(Fault):
    """The scheduler that leads at that moment dies."""

    NAME: ClassVar[str] = "kill-leader"

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return "the leading scheduler"


@dataclass(frozen=True, slots=True)
class FreezeLeader(Fault):
    """The scheduler that leads stands still, and wakes up later in the belief that it leads."""

    NAME: ClassVar[str] = "freeze-leader"
    SIGNAL: ClassVar[signal.Signals] = signal.SIGSTOP

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return "the leading scheduler"


@dataclass(frozen=True, slots=True)
class KillEtcd(Fault):
    """A member of etcd dies."""

    NAME: ClassVar[str] = "kill-etcd"
    member: str

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"etcd member {self.member}"


@dataclass(frozen=True, slots=True)
class FreezeEtcd(Fault):
    """A member of etcd stands still: its connections stay open and nobody answers."""

    NAME: ClassVar[str] = "freeze-etcd"
    SIGNAL: ClassVar[signal.Signals] = signal.SIGSTOP
    member: str

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"etcd member {self.member}"


@dataclass(frozen=True, slots=True)
class FreezeProcess(Fault):
    """One process of the cluster stands still: a scheduler, an agent without its ranks, or a member of etcd, by its name."""

    NAME: ClassVar[str] = "freeze-process"
    SIGNAL: ClassVar[signal.Signals] = signal.SIGSTOP
    process: str

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"the process {self.process}"


FAULTS: dict[str, type[Fault]] = {
    fault.NAME: fault
    for fault in (
        KillRank, KillNode, KillAgent, KillScheduler, KillLeader, KillEtcd,
        FreezeRank, FreezeNode, FreezeLeader, FreezeEtcd, FreezeProcess,
    )
}  # fmt: skip
