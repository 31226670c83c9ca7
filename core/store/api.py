"""The Store: what Gangline asks of etcd, and all that it asks.

`etcd.py` speaks to a real cluster, `memory.py` is a model of one with switches for its bad moments; `tests/contract` runs one suite
against both. Nothing else in the project knows gRPC.

The one thing to remember about errors: **definite** errors changed nothing; after an **ambiguous** one a write may have happened or not,
and may still happen a little later. The store never repeats a write by itself. Who writes, settles (see `log.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec


class StoreError(Exception):
    """Anything that the store could not do. The message says what was tried, what was seen and what to do next."""


class Definite(StoreError):
    """The request was refused and changed nothing; sending it again unchanged will not help."""


class Ambiguous(StoreError):
    """No answer, or one that proves nothing. A read may be repeated; a write may or may not have been applied."""


class Unauthenticated(Definite):
    """The credentials were refused, or the cluster's auth configuration changed under the request."""


class TooLarge(Definite):
    """The request exceeds the request size or the operations limit of the cluster."""


class OutOfSpace(Ambiguous):
    """The cluster raised NOSPACE. It refuses writes until space is freed and the alarm is disarmed; the write may still have been applied."""


class Corrupt(StoreError):
    """The cluster reports corruption. Stop writing and call a person."""


class Compacted(Definite):
    """The revision asked for is gone.

    `revision` is the oldest one that can still be read (0 when the cluster did not say).
    """

    def __init__(self, message: str, revision: int) -> None:
        super().__init__(message)
        self.revision = revision


class WentBack(StoreError):
    """The store answered from another cluster or from an older state than this process has already seen. Nothing may be decided on it."""


class LeaseNotFound(Definite):
    """The lease has expired or was revoked."""


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """One key at one revision."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    #: id of the lease that the key is bound to, 0 for none
    lease: int = 0


class RangeResult(msgspec.Struct, frozen=True):
    """All keys of a range at one revision."""

    kvs: list[KeyValue]
    #: the store revision at which the answer is true
    revision: int


class Compare(msgspec.Struct, frozen=True):
    """A guard of a transaction: `target` of `key` `op` `value`. A key that does not exist has version and revisions 0."""

    key: bytes
    target: Literal["version", "create_revision", "mod_revision", "value"]
    op: Literal["==", "!=", ">", "<"]
    value: int | bytes


class Put(msgspec.Struct, frozen=True):
    """Write a key, bound to a lease when one is given."""

    key: bytes
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True):
    """Delete a key, or every key from `key` up to but without `range_end`."""

    key: bytes
    range_end: bytes = b""


class Get(msgspec.Struct, frozen=True):
    """Read a key inside a transaction."""

    key: bytes


Op = Put | Delete | Get


class TxnResult(msgspec.Struct, frozen=True):
    """`succeeded` tells which list ran. `gets` has the answers of its Get operations, in order (None: no such key)."""

    succeeded: bool
    revision: int
    gets: list[KeyValue | None]


class Event(msgspec.Struct, frozen=True, gc=False):
    """One change. `kv.value` is empty for a delete; `kv.mod_revision` is the revision of the change."""

    kind: Literal["put", "delete"]
    kv: KeyValue


class WatchBatch(msgspec.Struct, frozen=True):
    """Events in revision order, each revision whole.

    Resume from `next_revision` (the last event's own revision + 1, never the revision of the response header).
    An empty batch is a sign of life, sent when a quiet watch was confirmed to have caught up to `next_revision - 1`.
    """

    events: list[Event]
    next_revision: int


class Lease(msgspec.Struct, frozen=True):
    """`ttl_s` is what the cluster granted, which may be more than was asked for."""

    id: int
    ttl_s: float


class Status(msgspec.Struct, frozen=True):
    """Health of the store as one member reports it. An answer alone does not prove a quorum."""

    version: str
    db_size_bytes: int
    db_size_in_use_bytes: int
    cluster_id: int
    revision: int
    raft_term: int
    alarms: list[str]


class Store(Protocol):
    """An etcd cluster seen by one process.

    Keys are absolute. All methods raise `StoreError`s only. Reads are linearizable and are repeated inside `timeout`; writes are sent once.
    """

    async def get(self, key: bytes, *, revision: int = 0) -> KeyValue | None:
        """Return the key now, or as it was at `revision`. Raises Compacted, Ambiguous, Definite."""

    async def range(self, prefix: bytes, *, start: bytes = b"", limit: int = 0, revision: int = 0, keys_only: bool = False) -> RangeResult:
        """Return the keys under `prefix` in key order, from `start` (an absolute key) on, at most `limit` (0: all).

        Read in pages, all at one revision: the whole answer is one moment of the store.
        """

    async def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        """Run `success` when all of `compares` hold, else `failure`, in one revision. Sent exactly once."""

    async def put(self, key: bytes, value: bytes, *, lease: int = 0) -> int:
        """Write unguarded and return the revision. Sent exactly once."""

    async def delete(self, key: bytes, *, range_end: bytes = b"") -> int:
        """Delete a key or a range and return the revision. Sent exactly once."""

    def watch(self, prefix: bytes, *, start_revision: int, exact: bool = False) -> AsyncIterator[WatchBatch]:
        """Yield every change under `prefix` (of the very key when `exact`) from `start_revision` on, without a gap or a repetition.

        Survives lost connections, server-side cancels and silent streams by resuming from the last event's revision + 1.
        Raises Compacted when that revision is gone: list again, and watch from the list's revision + 1. Ends when its iterator is closed.
        """

    async def lease_grant(self, ttl_s: float) -> Lease:
        """Create a lease. The caller keeps it alive."""

    async def lease_keepalive(self, lease: int) -> float:
        """Renew once and return the new time to live in seconds. Raises LeaseNotFound when the lease is gone, Ambiguous when unanswered.

        Goes over a connection of its own, so that bulk traffic cannot delay it.
        """

    async def lease_revoke(self, lease: int) -> None:
        """End a lease and delete its keys. A lease that is already gone is no error."""

    async def compact(self, revision: int) -> None:
        """Forget history before `revision`. A revision that is already compacted is no error."""

    async def status(self) -> Status:
        """Ask one member for its status."""

    async def close(self) -> None:
        """End all streams and connections."""


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after every key that starts with `prefix` (etcd's range end; b"\\0" means no end)."""
    for i in range(len(prefix) - 1, -1, -1):
        if prefix[i] < 0xFF:
            return prefix[:i] + bytes([prefix[i] + 1])
    return b"\0"
