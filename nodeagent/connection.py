"""A NodeStore that connects when it is first asked: an agent must adopt and guard its ranks while the store cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from gangline.core.model.documents import Desired, Observed, Registration
from gangline.core.model.spec import JobSpec
from gangline.core.store.api import Lease, Store, StoreError
from gangline.core.store.node import SchedulerAddress, StoreNode


class ConnectingNode:
    """StoreNode over a store that is connected to on first use, and again after that has failed."""

    def __init__(self, connect: Callable[[], Awaitable[Store]], cluster: str, node: str) -> None:
        """`connect` raises StoreError when it fails. Raises ValueError for a bad cluster name."""
        self._connect = connect
        self._cluster = cluster
        self._name = node
        self._store: Store | None = None
        self._node: StoreNode | None = None
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """End the connection, if there is one."""
        if self._store is not None:
            await self._store.close()

    async def register(self, registration: Registration, *, ttl_s: float, lease: int = 0) -> Lease:
        """See NodeStore."""
        return await (await self._connected()).register(registration, ttl_s=ttl_s, lease=lease)

    async def keepalive(self) -> float:
        """See NodeStore."""
        return await (await self._connected()).keepalive()

    async def watch_desired(self) -> AsyncIterator[Desired]:
        """See NodeStore."""
        node = await self._connected()
        async for desired in node.watch_desired():
            yield desired

    async def write_observed(self, observed: Observed) -> None:
        """See NodeStore."""
        await (await self._connected()).write_observed(observed)

    async def job_spec(self, job: str) -> JobSpec | None:
        """See NodeStore."""
        return await (await self._connected()).job_spec(job)

    async def job_specs(self, jobs: Sequence[str]) -> dict[str, JobSpec | StoreError]:
        """See NodeStore."""
        return await (await self._connected()).job_specs(jobs)

    async def schedulers(self) -> list[SchedulerAddress]:
        """See NodeStore."""
        return await (await self._connected()).schedulers()

    async def _connected(self) -> StoreNode:
        if self._node is not None:
            return self._node
        async with self._lock:
            if self._node is None:
                self._store = await self._connect()
                self._node = StoreNode(self._store, self._cluster, self._name)
            return self._node
