"""What the HTTP API sees of a scheduler. `scheduler.Scheduler` is the real one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from gangline.core.model.codec import Frame
from gangline.core.model.state import State
from gangline.leader.commands import Accepted, Command


class NotLeader(Exception):
    """This scheduler does not lead. `url` is where the leader is reached, empty when none is known."""

    def __init__(self, leader: str, url: str) -> None:
        super().__init__(f"this scheduler does not lead; {leader or 'nobody'} does")
        self.leader = leader
        self.url = url


class Unavailable(Exception):
    """The command could not be carried out now and may or may not take effect later; say it again with the same idempotency key."""


class Gone(Exception):
    """The log before `first` is archived and no longer in the store."""

    def __init__(self, first: int) -> None:
        super().__init__(f"the log in the store begins at {first}")
        self.first = first


class Service(Protocol):
    """One scheduler."""

    name: str
    role: Literal["starting", "standby", "leader"]
    #: name and address of the leader as far as this scheduler knows, empty when it knows none
    leader_name: str
    leader_url: str
    #: the last answer of the store says that it is reachable
    store_ok: bool

    @property
    def lag_s(self) -> float:
        """Seconds since this scheduler last knew that it had folded everything; 0 on the leader."""

    def now_ms(self) -> int:
        """Return log time: that of the log stands still while nothing happens."""

    async def view(self, min_index: int = 0, wait_s: float = 0.0) -> State:
        """Return the state once everything in it is committed and it has reached `min_index`. Read it before the next await.

        Raises TimeoutError after `wait_s` when `min_index` is not reached.
        """

    async def execute(self, commands: list[Command]) -> list[Accepted | Exception]:
        """Carry out commands and return after the commit, one result for each: Accepted or commands.Refused.

        Raises NotLeader when this scheduler does not lead (nothing was written), Unavailable when the outcome is unknown.
        """

    def entries(self, first: int, *, follow: bool = False) -> AsyncIterator[Frame]:
        """Yield the committed frames from index `first` on, from memory, store or archive; with `follow` without an end. Raises Gone."""
