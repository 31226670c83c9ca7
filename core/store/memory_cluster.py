"""A model of an etcd cluster in memory: revisions, history, transactions, leases, compaction and their limits. No I/O, no waiting.

Clients are in `memory.py`. Time comes from a clock that the owner gives, so that leases can run on simulated time.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gangline.core.store.api import (
    Compacted,
    Compare,
    Definite,
    Delete,
    Event,
    Get,
    KeyValue,
    Lease,
    LeaseNotFound,
    Op,
    Put,
    TooLarge,
    TxnResult,
)

OPS_MAX = 128
REQUEST_BYTES_MAX = 3 << 19
#: of a catch-up message of a watch
WATCH_REVISIONS_MAX = 1_000

#: what the encoding of one operation adds to its keys and values, roughly
_OP_BYTES = 16


class _Lease:
    def __init__(self, ttl_s: float, expires_at: float) -> None:
        self.ttl_s = ttl_s
        self.expires_at = expires_at
        # A dict for its order: what a lease deletes must not depend on hashes.
        self.keys: dict[bytes, None] = {}


class Mvcc:
    """All keys at all revisions since the last compaction. Every change calls the functions in `listeners`."""

    def __init__(self, clock: Callable[[], float], min_lease_ttl_s: float, cluster_id: int) -> None:
        self.cluster_id = cluster_id
        self.raft_term = 2
        self.revision = 1
        self.compacted = 0
        self.listeners: list[Callable[[], None]] = []
        self._clock = clock
        self._min_lease_ttl_s = min_lease_ttl_s
        self._keys: list[bytes] = []
        #: of each key all versions in order; a deletion has version 0
        self._versions: dict[bytes, list[KeyValue]] = {}
        self._log: list[tuple[int, list[Event]]] = []
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0
        #: no lease expires before; a renewal leaves it as it is
        self._soonest_expiry = math.inf

    # Reading

    def read(self, key: bytes, range_end: bytes, revision: int = 0) -> Iterator[KeyValue]:
        """Yield the keys that exist at `revision` (0: now) in key order. Raises Compacted, Definite for a future revision."""
        self._check_revision(revision)
        for name in self._names(key, range_end):
            versions = self._versions[name]
            i = len(versions) if not revision else bisect.bisect_right(versions, revision, key=_mod_revision)
            if i and versions[i - 1].version:
                yield versions[i - 1]

    def events(self, key: bytes, range_end: bytes, start_revision: int) -> tuple[list[Event], int]:
        """Return up to 1,000 revisions of changes from `start_revision` on, and where to go on. Raises Compacted."""
        if start_revision < self.compacted:
            raise Compacted(
                f"watch of {key!r} from revision {start_revision}: compacted up to {self.compacted}; "
                "list again and watch from the list's revision + 1",
                self.compacted,
            )
        found: list[Event] = []
        revisions = 0
        first = bisect.bisect_left(self._log, start_revision, key=_log_revision)
        for revision, events in self._log[first:]:
            mine = [event for event in events if _inside(event.kv.key, key, range_end)]
            if mine and revisions == WATCH_REVISIONS_MAX:
                return found, revision
            found += mine
            revisions += bool(mine)
        return found, max(start_revision, self.revision + 1)

    # Writing

    def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> TxnResult:
        """Run a transaction. Raises TooLarge, Definite, LeaseNotFound, having changed nothing."""
        _check_limits(compares, success, failure)
        for ops in (success, failure):
            _check_duplicates(ops)
        succeeded = all(self._holds(compare) for compare in compares)
        ops = success if succeeded else failure
        for op in ops:
            if isinstance(op, Put) and op.lease:
                self._lease(op.lease)
        revision, events, gets = self.revision + 1, list[Event](), list[KeyValue | None]()
        for op in ops:
            match op:
                case Put():
                    events.append(self._put(op, revision))
                case Delete():
                    names = [kv.key for kv in self.read(op.key, op.range_end)]
                    events.extend(self._delete(name, revision) for name in names)
                case Get():
                    gets.append(next(self.read(op.key, b""), None))
        self._commit(revision, events)
        return TxnResult(succeeded, self.revision, gets)

    def compact(self, revision: int) -> None:
        """Forget what is older than `revision`. Raises Compacted when that is done already, Definite for a future revision."""
        self._check_revision(revision)
        if revision <= self.compacted:
            raise Compacted(f"compact to {revision}: already compacted up to {self.compacted}", self.compacted)
        self.compacted = revision
        del self._log[: bisect.bisect_left(self._log, revision, key=_log_revision)]
        for versions in self._versions.values():
            # The newest version at `revision` can still be read.
            del versions[: max(0, bisect.bisect_right(versions, revision, key=_mod_revision) - 1)]
        gone = {name for name, versions in self._versions.items() if len(versions) == 1 and self._is_old_tombstone(versions[0])}
        for name in gone:
            del self._versions[name]
        self._keys = [name for name in self._keys if name not in gone]

    def go_back(self, revision: int) -> None:
        """Become what the store was at `revision`, as a cluster restored from a backup does. Raises Compacted, Definite."""
        self._check_revision(revision)
        self.revision = revision
        self.raft_term = 2
        self._log = [entry for entry in self._log if entry[0] <= revision]
        for name in list(self._versions):
            versions = self._versions[name]
            del versions[bisect.bisect_right(versions, revision, key=_mod_revision) :]
            if not versions:
                del self._versions[name]
        self._keys = sorted(self._versions)
        self._announce()

    # Leases

    def grant(self, ttl_s: float) -> Lease:
        """Create a lease of whole seconds, no shorter than the minimum."""
        self._last_lease += 1
        ttl_s = max(float(math.ceil(ttl_s)), self._min_lease_ttl_s)
        self._leases[self._last_lease] = _Lease(ttl_s, self._clock() + ttl_s)
        self._soonest_expiry = min(self._soonest_expiry, self._clock() + ttl_s)
        return Lease(self._last_lease, ttl_s)

    def keepalive(self, lease: int) -> float:
        """Renew a lease and return its time to live in seconds. Raises LeaseNotFound."""
        found = self._lease(lease)
        found.expires_at = self._clock() + found.ttl_s
        return found.ttl_s

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys in one revision. Raises LeaseNotFound."""
        names = [name for name in self._lease(lease).keys if self._versions[name][-1].version]
        del self._leases[lease]
        revision = self.revision + 1
        self._commit(revision, [self._delete(name, revision) for name in sorted(names)])

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self._clock()
        if now < self._soonest_expiry:
            return
        for lease in [lease for lease, held in self._leases.items() if held.expires_at <= now]:
            self.revoke(lease)
        self._soonest_expiry = min((held.expires_at for held in self._leases.values()), default=math.inf)

    def seconds_to_expiry(self) -> float | None:
        """Return when to call `expire` again, None when there are no leases."""
        return None if math.isinf(self._soonest_expiry) else max(0.0, self._soonest_expiry - self._clock())

    def renew_all_leases(self) -> None:
        """Give every lease its full time, as a new leader of the cluster does."""
        for held in self._leases.values():
            held.expires_at = self._clock() + held.ttl_s

    # Inside

    def _names(self, key: bytes, range_end: bytes) -> Iterator[bytes]:
        if not range_end:
            if key in self._versions:
                yield key
            return
        i = bisect.bisect_left(self._keys, key)
        while i < len(self._keys) and (range_end == b"\0" or self._keys[i] < range_end):
            yield self._keys[i]
            i += 1

    def _check_revision(self, revision: int) -> None:
        if revision > self.revision:
            raise Definite(f"revision {revision} is a future one, the store is at {self.revision}")
        if revision and revision < self.compacted:
            raise Compacted(f"revision {revision} is compacted; the oldest that can be read is {self.compacted}", self.compacted)

    def _is_old_tombstone(self, kv: KeyValue) -> bool:
        return not kv.version and kv.mod_revision <= self.compacted

    def _lease(self, lease: int) -> _Lease:
        try:
            return self._leases[lease]
        except KeyError:
            raise LeaseNotFound(f"lease {lease:x} has expired or was revoked, ask for a new one") from None

    def _holds(self, compare: Compare) -> bool:
        kv = next(self.read(compare.key, b""), None)
        if kv is None and compare.target == "value":
            return False
        # Of the type of `compare.value`, by the definition of Compare.
        seen: Any = getattr(kv, compare.target) if kv else 0
        match compare.op:
            case "==":
                return bool(seen == compare.value)
            case "!=":
                return bool(seen != compare.value)
            case ">":
                return bool(seen > compare.value)
            case "<":
                return bool(seen < compare.value)

    def _put(self, op: Put, revision: int) -> Event:
        before = next(self.read(op.key, b""), None)
        kv = KeyValue(
            op.key,
            op.value,
            before.create_revision if before else revision,
            revision,
            before.version + 1 if before else 1,
            op.lease,
        )
        self._unbind(before)
        if op.lease:
            self._leases[op.lease].keys[op.key] = None
        self._write(kv)
        return Event("put", kv)

    def _delete(self, name: bytes, revision: int) -> Event:
        self._unbind(self._versions[name][-1])
        kv = KeyValue(name, b"", 0, revision, 0)
        self._write(kv)
        return Event("delete", kv)

    def _unbind(self, before: KeyValue | None) -> None:
        if before and before.lease in self._leases:
            self._leases[before.lease].keys.pop(before.key, None)

    def _write(self, kv: KeyValue) -> None:
        if kv.key not in self._versions:
            self._versions[kv.key] = []
            bisect.insort(self._keys, kv.key)
        self._versions[kv.key].append(kv)

    def _commit(self, revision: int, events: list[Event]) -> None:
        if events:
            self.revision = revision
            self._log.append((revision, events))
            self._announce()

    def _announce(self) -> None:
        for listener in list(self.listeners):
            listener()


def _mod_revision(kv: KeyValue) -> int:
    return kv.mod_revision


def _log_revision(entry: tuple[int, list[Event]]) -> int:
    return entry[0]


def _inside(name: bytes, key: bytes, range_end: bytes) -> bool:
    if not range_end:
        return name == key
    return key <= name and (range_end == b"\0" or name < range_end)


def _check_limits(compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> None:
    longest = max(len(compares), len(success), len(failure))
    if longest > OPS_MAX:
        raise TooLarge(f"txn of {longest} operations in one list, the cluster's limit is {OPS_MAX}")
    size = 0
    for op in (*compares, *success, *failure):
        if not op.key:
            raise Definite(f"txn: an operation has no key: {op}")
        value = getattr(op, "value", b"")
        size += len(op.key) + (len(value) if isinstance(value, bytes) else 8) + _OP_BYTES
    if size > REQUEST_BYTES_MAX:
        raise TooLarge(f"request of {size} bytes, the cluster's limit is {REQUEST_BYTES_MAX}")


def _check_duplicates(ops: Sequence[Op]) -> None:
    """A transaction may write a key once only; a deletion of a range counts for every key in it that is also put."""
    puts = [op.key for op in ops if isinstance(op, Put)]
    deletes = [op for op in ops if isinstance(op, Delete)]
    if len(set(puts)) < len(puts) or any(_inside(put, delete.key, delete.range_end) for put in puts for delete in deletes):
        raise Definite("txn: duplicate key: one of its lists writes a key twice")
