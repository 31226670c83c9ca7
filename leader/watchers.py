"""What reaches the leader from the nodes, kept until the next cycle takes it: the newest document of each node, never a queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gangline.core.model.codec import unpack
from gangline.core.model.documents import Observed, Registration
from gangline.core.store.api import Compacted, Event, KeyValue, Store
from gangline.core.store.keys import Keys

#: how long a missing lease waits for others, at most and as a part of its time to live
_GATHER_S = 1.0
_GATHER_PART = 1 / 8
#: a node whose time to live is not known has so long
_UNKNOWN_TTL_S = 10.0


class NodeInbox:
    """Newest registrations, observed documents and missing leases, as they come from the watch on nodes/."""

    def __init__(self, store: Store, keys: Keys, wake: Callable[[], None], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._keys = keys
        self._wake = wake
        self._monotonic = monotonic
        self.registrations: dict[str, Registration] = {}
        self.observed: dict[str, Observed] = {}
        #: node → monotonic time from which its missing lease counts
        self.missing: dict[str, float] = {}
        #: documents that could not be read, by node, for the log
        self.unreadable: dict[str, str] = {}
        #: nodes whose lease lives, with its time to live in seconds
        self._alive: dict[str, float] = {}

    async def start(self) -> list[KeyValue]:
        """Read everything under nodes/ and return it; `run` goes on from there."""
        found = await self._store.range(self._keys.nodes)
        self._revision = found.revision
        self._alive = {}
        for kv in found.kvs:
            self._put(kv)
        return found.kvs

    def expect(self, nodes: dict[str, float]) -> None:
        """These nodes should be alive. One that is not has the given seconds before it counts as missing: grace after a change of leader."""
        for node, grace_s in nodes.items():
            if node not in self._alive:
                self.missing[node] = self._monotonic() + grace_s

    async def run(self) -> None:
        """Follow nodes/ for ever."""
        while True:
            try:
                async for batch in self._store.watch(self._keys.nodes, start_revision=self._revision + 1):
                    for event in batch.events:
                        self._event(event)
                    if batch.events:
                        self._revision = batch.next_revision - 1
                        self._wake()
            except Compacted:
                before = set(self._alive)
                await self.start()
                self.expect(dict.fromkeys(sorted(before), 0.0))
                self._wake()

    def due(self) -> tuple[list[str], float | None]:
        """Return the nodes whose missing lease counts now, and the seconds until the next one does."""
        now = self._monotonic()
        due = sorted(n for n, at in self.missing.items() if at <= now)
        later = [at - now for at in self.missing.values() if at > now]
        return due, min(later, default=None)

    def _event(self, event: Event) -> None:
        if event.kind == "put":
            self._put(event.kv)
            return
        named = self._keys.node_of(event.kv.key)
        if named is not None and named[1] == "alive":
            ttl_s = self._alive.pop(named[0], 0.0)
            self.registrations.pop(named[0], None)
            # Leases of nodes that vanish together do not end together: wait a little, to see whether there are many (the brake).
            self.missing.setdefault(named[0], self._monotonic() + min(_GATHER_S, ttl_s * _GATHER_PART))
            self._wake()

    def _put(self, kv: KeyValue) -> None:
        named = self._keys.node_of(kv.key)
        if named is None or named[1] == "desired":
            return
        node, what = named
        try:
            if what == "alive":
                reg = unpack(kv.value, Registration)
                self._check(node, reg.node)
                self.registrations[node] = reg
                self._alive[node] = reg.lease_ttl_s
                self.missing.pop(node, None)
            else:
                doc = unpack(kv.value, Observed)
                self._check(node, doc.node)
                self.observed[node] = doc
        except ValueError as e:
            self.unreadable[node] = f"{what} of {node} at revision {kv.mod_revision}: {e}"
            if what == "alive":
                # Perhaps under no lease, so it may never go. The agent has the time of a lease to put it right.
                self.registrations.pop(node, None)
                self.missing.setdefault(node, self._monotonic() + (self._alive.pop(node, 0.0) or _UNKNOWN_TTL_S))
                self._wake()

    def _check(self, key: str, said: str) -> None:
        if key != said:
            raise ValueError(f"it says that it is of {said!r}")

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        """Return when `event` is set or `timeout_s` has passed."""
        if timeout_s is None:
            await event.wait()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return
