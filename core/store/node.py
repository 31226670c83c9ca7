"""What an agent needs of the store, and no more, so that a gateway can serve the same calls where nodes must not reach etcd (DESIGN section 4).

An agent never reads the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from gangline.core.model.documents import Desired, Observed, Registration
from gangline.core.model.spec import JobSpec
from gangline.core.store.api import Lease, StoreError


class NameTaken(StoreError):
    """Another agent with another identity is registered under this node's name and alive."""


class SchedulerAddress(msgspec.Struct, frozen=True):
    """The value of `leader/schedulers/<name>`."""

    name: str
    url: str


class NodeStore(Protocol):
    """The store as one node's agent sees it. All methods raise `StoreError`s only."""

    async def register(self, registration: Registration, *, ttl_s: float, lease: int = 0) -> Lease:
        """Announce the node, bound to a lease: to `lease` if it is still alive (a restarted agent), else to a new one.

        May be called again to change the registration. Raises NameTaken.
        """

    async def keepalive(self) -> float:
        """Renew the lease and return its time to live in seconds.

        Raises LeaseNotFound when it is gone, or when the registration is gone or no longer ours although the lease answers
        (etcd 3.4.23 may acknowledge a revoked lease).
        """

    def watch_desired(self) -> AsyncIterator[Desired]:
        """Yield the desired document now, if there is one, and then each newer one; in between only the newest matters."""

    async def write_observed(self, observed: Observed) -> None:
        """Write the observed document, guarded by our registration being the one in the store. Raises NameTaken when it is not."""

    async def job_spec(self, job: str) -> JobSpec | None:
        """Return the spec of a job that the desired document names; None when the leader has withdrawn it."""

    async def schedulers(self) -> list[SchedulerAddress]:
        """Return how the schedulers are reached, for the question whether they reach the store (self-fencing)."""
