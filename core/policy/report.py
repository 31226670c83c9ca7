"""What a session has decided, in the order in which it was decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gangline.core.policy.gangs import Job, Rank
from gangline.core.policy.nodes import Place
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.waiting import Group, JobKey, Tail

#: the passes, by name
Action = Literal["allocate", "consolidate", "reclaim", "preempt", "evict-stale-gangs", "grow"]
ACTIONS: tuple[Action, ...] = ("allocate", "consolidate", "reclaim", "preempt", "evict-stale-gangs")


@dataclass(frozen=True)
class Placement:
    """A rank starts at `place`."""

    rank: Rank
    place: Place


@dataclass(frozen=True)
class Reservation:
    """A rank is to have `place` once what leaves it has left. `moved`: it works elsewhere now, and is being evicted from there."""

    rank: Rank
    place: Place
    moved: bool


@dataclass(frozen=True)
class Eviction:
    """A rank has to go from `place`. `beneficiary` is the job that it makes room for, "" if there is none."""

    rank: Rank
    place: Place
    action: Action
    beneficiary: str
    #: it has a place to go to
    moved: bool


@dataclass
class Decisions:
    """The outcome of one session. Jobs that wait are in `refusals`, grouped by reason: (jobs, reason)."""

    placements: list[Placement] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    refusals: list[tuple[tuple[Job, ...] | Tail, Refusal]] = field(default_factory=list)
    #: jobs for which nobody is evicted because that would break what potential.py states, and how
    withheld: dict[Job, str] = field(default_factory=dict)

    def refusal(self, job: Job) -> Refusal | None:
        """Return why a job waits."""
        return next((why for jobs, why in self.refusals if job in jobs), None)


class Notes:
    """What the passes note down for the report."""

    def __init__(self, barred: dict[Job, None] | None = None) -> None:
        #: jobs for which nobody is evicted in this session
        self.barred = barred or {}
        self.refusals: dict[Job, Refusal] = {}
        self.withheld: dict[Job, str] = {}
        #: where in the world's journal the allocation ended
        self.allocated = 0
        #: the allocation has placed as much as one session may, and is to go on in another before anything else is done
        self.cut = False
        self.skipped: list[tuple[Tail, Refusal]] = []
        self.causes: dict[Rank, tuple[Action, str]] = {}
        #: jobs for which others were evicted, or lost their reservations
        self.served: dict[Job, None] = {}
        self._skipped_by_group: dict[Group, list[tuple[Tail, Refusal]]] = {}
        self._indexed = 0

    def serve(self, job: Job, among: tuple[Group, JobKey] | None) -> None:
        """Note that others were evicted for a job; `among` is its place among those that wait.

        Should it lose what it has got to somebody else, it waits for the reason for which it was passed over.
        """
        self.served[job] = None
        for tail, why in self.skipped[self._indexed :]:
            self._skipped_by_group.setdefault(tail.group, []).append((tail, why))
        self._indexed = len(self.skipped)
        for tail, why in self._skipped_by_group.get(among[0], ()) if among is not None else ():
            if among is not None and tail.start <= among[1]:
                self.refusals.setdefault(job, why)
