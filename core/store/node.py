"""What an agent needs of the store, and no more, so that a gateway can serve the same calls where nodes must not reach etcd (DESIGN section 4).

An agent never reads the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from gangline.core.model.codec import pack, unpack
from gangline.core.model.documents import Desired, Observed, Registration
from gangline.core.model.spec import JobSpec
from gangline.core.store.api import Ambiguous, Compacted, Compare, Definite, Get, KeyValue, Lease, LeaseNotFound, Put, Store, StoreError
from gangline.core.store.keys import Keys

T = TypeVar("T")

_REGISTER_ATTEMPTS = 5
#: operations of one transaction, under the store's limit of 128
_TXN_OPS = 100
_NOBODY = ("", "")


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

    async def job_specs(self, jobs: Sequence[str]) -> dict[str, JobSpec | StoreError]:
        """Return the specs of these jobs in one answer, without those that there are not; an error stands for one that cannot be read."""

    async def schedulers(self) -> list[SchedulerAddress]:
        """Return how the schedulers are reached, for the question whether they reach the store (self-fencing)."""


class StoreNode:
    """NodeStore over a Store."""

    def __init__(self, store: Store, cluster: str, node: str) -> None:
        """Raise ValueError for a cluster name that is not a DNS label."""
        self._store = store
        self._keys = Keys(cluster)
        self._node = node
        self._alive = self._keys.alive(node)
        #: identity and boot: a copied state directory on another host has the same identity, and is another agent all the same
        self._owner = ("", "")
        self._lease = 0
        #: revision of the registration that is ours; every write is guarded by it
        self._registered_at = 0

    async def register(self, registration: Registration, *, ttl_s: float, lease: int = 0) -> Lease:
        """See NodeStore. An ambiguous result is settled by calling again: what we have written is recognised by its identity."""
        self._owner = (registration.identity, registration.boot_id)
        value = pack(registration)
        for _ in range(_REGISTER_ATTEMPTS):
            there = await self._store.get(self._alive)
            if there is not None and _owner(there) not in (_NOBODY, (registration.identity, registration.boot_id)):
                raise NameTaken(self._taken_message(there))
            granted = await self._living_lease(lease or (there.lease if there and _owner(there) != _NOBODY else 0), ttl_s)
            guard = Compare(self._alive, "mod_revision", "==", there.mod_revision if there else 0)
            result = await self._store.txn([guard], [Put(self._alive, value, granted.id)])
            if result.succeeded:
                self._lease, self._registered_at = granted.id, result.revision
                return granted
            lease = granted.id
        raise Ambiguous(f"registering node {self._node!r}: the key changed under each of {_REGISTER_ATTEMPTS} attempts; try again")

    async def keepalive(self) -> float:
        """See NodeStore."""
        ttl_s = await self._store.lease_keepalive(self._lease)
        there = await self._store.get(self._alive)
        if there is None or there.lease != self._lease or _owner(there) != self._owner:
            raise LeaseNotFound(f"lease {self._lease:x} answers, but the registration of {self._node!r} is gone or not ours: register again")
        return ttl_s

    async def watch_desired(self) -> AsyncIterator[Desired]:
        """See NodeStore. Raises Definite for a document that cannot be read; the agent keeps to the last good one."""
        key = self._keys.desired(self._node)
        while True:
            listed = await self._store.range(key)
            for kv in listed.kvs:
                if kv.key == key:
                    yield _document(kv, Desired)
            try:
                async for batch in self._store.watch(key, start_revision=listed.revision + 1, exact=True):
                    puts = [event.kv for event in batch.events if event.kind == "put"]
                    if puts:
                        yield _document(puts[-1], Desired)
            except Compacted:
                continue

    async def write_observed(self, observed: Observed) -> None:
        """See NodeStore. May be repeated after an ambiguous result: the newest document wins, and it is the whole state."""
        guard = Compare(self._alive, "mod_revision", "==", self._registered_at)
        result = await self._store.txn([guard], [Put(self._keys.observed(self._node), pack(observed))])
        if not result.succeeded:
            raise NameTaken(f"the registration of node {self._node!r} is gone or not ours, nothing was written: register again")

    async def job_spec(self, job: str) -> JobSpec | None:
        """See NodeStore."""
        kv = await self._store.get(self._keys.job(job))
        return None if kv is None else _document(kv, JobSpec)

    async def job_specs(self, jobs: Sequence[str]) -> dict[str, JobSpec | StoreError]:
        """See NodeStore."""
        found: dict[str, JobSpec | StoreError] = {}
        for at in range(0, len(jobs), _TXN_OPS):
            part = jobs[at : at + _TXN_OPS]
            answer = await self._store.txn([], [Get(self._keys.job(job)) for job in part])
            for job, kv in zip(part, answer.gets, strict=True):
                if kv is not None:
                    try:
                        found[job] = _document(kv, JobSpec)
                    except Definite as e:
                        found[job] = e
        return found

    async def schedulers(self) -> list[SchedulerAddress]:
        """See NodeStore."""
        listed = await self._store.range(self._keys.schedulers)
        return [_document(kv, SchedulerAddress) for kv in listed.kvs]

    async def _living_lease(self, lease: int, ttl_s: float) -> Lease:
        if lease:
            try:
                return Lease(lease, await self._store.lease_keepalive(lease))
            except LeaseNotFound:
                pass
        return await self._store.lease_grant(ttl_s)

    def _taken_message(self, there: KeyValue) -> str:
        return (
            f"node name {self._node!r} belongs to a living agent (identity and boot {_owner(there)}, ours {self._owner}): "
            "stop that agent, wait for its lease to end, or take another name with --node"
        )


def _owner(kv: KeyValue) -> tuple[str, str]:
    """Return who registered, in which boot; empty for bytes that are no registration, which is nobody's."""
    try:
        registration = unpack(kv.value, Registration)
    except ValueError:
        return _NOBODY
    return (registration.identity, registration.boot_id)


def _document(kv: KeyValue, as_type: type[T]) -> T:
    try:
        return unpack(kv.value, as_type)
    except ValueError as e:
        raise Definite(f"key {kv.key.decode('utf-8', 'replace')} at revision {kv.mod_revision}: {e}") from e
