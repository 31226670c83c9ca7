"""The Store on a real etcd cluster: `EtcdStore.connect`.

Reads are linearizable and repeated inside their time; writes are sent exactly once; watches follow the rules of `watching.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from gangline.core.store.answers import HighWater, repeat_read
from gangline.core.store.api import (
    Ambiguous,
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
    RangeResult,
    Status,
    TooLarge,
    TxnResult,
    Unauthenticated,
    WatchBatch,
    prefix_end,
)
from gangline.core.store.endpoints import Endpoints, TlsFiles
from gangline.core.store.etcd_channel import BidirectionalStream, Channel
from gangline.core.store.etcd_keepalive import Keepalive
from gangline.core.store.etcd_stubs import MESSAGES
from gangline.core.store.watching import Glance, Message, Timing, follow

_RangeRequest = MESSAGES["RangeRequest"]
_PutRequest = MESSAGES["PutRequest"]
_DeleteRangeRequest = MESSAGES["DeleteRangeRequest"]
_TxnRequest = MESSAGES["TxnRequest"]
_RequestOp = MESSAGES["RequestOp"]
_Compare = MESSAGES["Compare"]
_CompactionRequest = MESSAGES["CompactionRequest"]
_LeaseGrantRequest = MESSAGES["LeaseGrantRequest"]
_LeaseRevokeRequest = MESSAGES["LeaseRevokeRequest"]
_StatusRequest = MESSAGES["StatusRequest"]
_WatchRequest = MESSAGES["WatchRequest"]
_WatchCreateRequest = MESSAGES["WatchCreateRequest"]

#: `Compare.op` and `Compare.target` as etcd numbers them
_OPERATORS = {"==": 0, ">": 1, "<": 2, "!=": 3}
_TARGETS = {"version": 0, "create_revision": 1, "mod_revision": 2, "value": 3}

#: Pages of a range: the first shows how large the values are, the others aim at `_PAGE_BYTES`.
_FIRST_PAGE = 200
_PAGE_KEYS_MAX = 5_000
_PAGE_BYTES = 4 << 20
#: a list that compaction overtakes is begun again so often
_RANGE_TRIES = 5


class EtcdStore:
    """An etcd cluster, for the event loop in which `connect` ran."""

    def __init__(self, endpoints: Endpoints, timeout_s: float, timing: Timing) -> None:
        """Use `connect`."""
        self._timeout_s = timeout_s
        self._timing = timing
        self._seen = HighWater()
        self._channel = Channel(endpoints)
        self._lease_channel = Channel(endpoints)
        self._keepalive = Keepalive(self._lease_channel, self._seen)
        self._closed = False

    @classmethod
    async def connect(
        cls,
        endpoints: Sequence[str],
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = 5.0,
        timing: Timing = Timing(),  # noqa: B008 - immutable
    ) -> EtcdStore:
        """Connect to the members at `endpoints` (each `host:port`), and read once to learn which cluster and revision it is.

        `timeout_s` is the deadline of every call. Raises ValueError for endpoints that cannot be understood, StoreErrors as a read.
        """
        store = cls(Endpoints(endpoints, tls), timeout_s, timing)
        try:
            await store._channel.open()
            await store._first_look()
        except BaseException:
            await store.close()
            raise
        return store

    async def get(self, key: bytes, *, revision: int = 0) -> KeyValue | None:
        """See Store."""
        answer = await self._range(_RangeRequest(key=key, revision=revision), f"get {key!r}")
        return _key_value(answer.kvs[0]) if answer.kvs else None

    async def range(
        self, prefix: bytes, *, start: bytes = b"", limit: int = 0, revision: int = 0, keys_only: bool = False
    ) -> RangeResult:
        """See Store."""
        for left in reversed(range(_RANGE_TRIES)):
            try:
                return await self._pages(max(start, prefix) or b"\0", prefix_end(prefix), limit, revision, keys_only)
            except Compacted:
                if revision or not left:
                    raise
        raise AssertionError("unreachable")

    async def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        """See Store."""
        request = _TxnRequest(
            compare=[_comparison(compare) for compare in compares],
            success=[_operation(op) for op in success],
            failure=[_operation(op) for op in failure],
        )
        answer = await self._write("Txn", request, "txn")
        gets = [
            _key_value(response.response_range.kvs[0]) if response.response_range.kvs else None
            for response in answer.responses
            if response.HasField("response_range")
        ]
        return TxnResult(answer.succeeded, answer.header.revision, gets)

    async def put(self, key: bytes, value: bytes, *, lease: int = 0) -> int:
        """See Store."""
        answer = await self._write("Put", _PutRequest(key=key, value=value, lease=lease), "put")
        return int(answer.header.revision)

    async def delete(self, key: bytes, *, range_end: bytes = b"") -> int:
        """See Store."""
        answer = await self._write("DeleteRange", _DeleteRangeRequest(key=key, range_end=range_end), "delete")
        return int(answer.header.revision)

    async def watch(
        self, prefix: bytes, *, start_revision: int, exact: bool = False
    ) -> AsyncGenerator[WatchBatch, None]:
        """See Store."""
        key, end = (prefix, b"") if exact else (prefix or b"\0", prefix_end(prefix))
        try:
            async with contextlib.aclosing(follow(self, key, end, start_revision, self._timing)) as batches:
                async for batch in batches:
                    yield batch
        except Definite:
            if not self._closed:
                raise

    async def lease_grant(self, ttl_s: float) -> Lease:
        """See Store."""
        answer = await self._channel.unary(
            "Lease", "LeaseGrant", _LeaseGrantRequest(TTL=math.ceil(ttl_s)), self._timeout_s, f"lease grant of {ttl_s} s"
        )
        self._seen.check_cluster(answer.header.cluster_id)
        return Lease(answer.ID, float(answer.TTL))

    async def lease_keepalive(self, lease: int) -> float:
        """See Store. Repeated inside the deadline: renewing twice does no harm."""
        return await repeat_read(lambda timeout_s: self._keepalive.renew(lease, timeout_s), self._timeout_s)

    async def lease_revoke(self, lease: int) -> None:
        """See Store."""
        try:
            answer = await self._channel.unary(
                "Lease", "LeaseRevoke", _LeaseRevokeRequest(ID=lease), self._timeout_s, f"lease revoke of {lease:x}"
            )
        except LeaseNotFound:
            return
        self._seen.check_cluster(answer.header.cluster_id)

    async def compact(self, revision: int) -> None:
        """See Store."""
        try:
            await self._write("Compact", _CompactionRequest(revision=revision), "compact")
        except Compacted:
            return

    async def status(self) -> Status:
        """See Store."""

        async def once(timeout_s: float) -> Any:
            return await self._channel.unary("Maintenance", "Status", _StatusRequest(), timeout_s, "status")

        answer = await repeat_read(once, self._timeout_s)
        self._seen.check_cluster(answer.header.cluster_id)
        alarms = [error.partition("alarm:")[2].strip() or error for error in answer.errors]
        return Status(
            version=answer.version,
            db_size_bytes=answer.dbSize,
            db_size_in_use_bytes=answer.dbSizeInUse,
            cluster_id=answer.header.cluster_id,
            revision=answer.header.revision,
            raft_term=answer.raftTerm,
            alarms=alarms,
        )

    async def close(self) -> None:
        """See Store. Watches end; other calls that run raise Ambiguous, later ones Definite."""
        self._closed = True
        self._keepalive.close()
        await self._channel.close()
        await self._lease_channel.close()

    async def open_watch(self, key: bytes, range_end: bytes, start_revision: int) -> _WatchStream:
        """For `watching.follow`."""
        stream = _WatchStream(self._channel.stream("Watch", "Watch", f"watch {key!r} from revision {start_revision}"), self._seen)
        await stream.create(key, range_end, start_revision, self._timeout_s)
        return stream

    async def glance(self, key: bytes, range_end: bytes, since: int) -> Glance:
        """For `watching.follow`."""
        what = f"check watch of {key!r}"
        if range_end:
            # The members answer a count from the index, but read every value of the range for the other question.
            answer = await self._range(_RangeRequest(key=key, range_end=range_end, count_only=True), what)
            if answer.header.revision < since:
                return Glance(answer.header.revision, False, answer.count)
        answer = await self._range(
            _RangeRequest(key=key, range_end=range_end, min_mod_revision=since, limit=1, keys_only=True), what
        )
        return Glance(answer.header.revision, bool(answer.kvs), answer.count)

    async def count_at(self, key: bytes, range_end: bytes, revision: int) -> int | None:
        """For `watching.follow`."""
        if revision < 1:
            return 0
        try:
            answer = await self._range(
                _RangeRequest(key=key, range_end=range_end, revision=revision, count_only=True), f"check watch of {key!r}"
            )
        except Compacted:
            return None
        return int(answer.count)

    async def _first_look(self) -> None:
        """Learn which cluster and revision it is."""
        try:
            await self._range(_RangeRequest(key=b"\0", count_only=True), "connect to etcd")
        except Unauthenticated:
            raise
        except Definite:
            # Who may read a few keys only, such as an agent, is told nothing here; the cluster is then known from the first answer.
            return

    async def _pages(self, first: bytes, end: bytes, limit: int, revision: int, keys_only: bool) -> RangeResult:
        kvs: list[KeyValue] = []
        page = _FIRST_PAGE
        while True:
            want = min(page, limit - len(kvs)) if limit else page
            request = _RangeRequest(key=first, range_end=end, limit=want, revision=revision, keys_only=keys_only)
            try:
                answer = await self._range(request, f"range {first!r} to {end!r}")
            except TooLarge:
                if want == 1:
                    raise
                page = want // 4 or 1
                continue
            kvs.extend(map(_key_value, answer.kvs))
            # All pages are read at the revision of the first.
            revision = revision or answer.header.revision
            if not answer.more or len(kvs) == limit:
                return RangeResult(kvs, revision)
            first = kvs[-1].key + b"\0"
            page = max(1, min(_PAGE_KEYS_MAX, _PAGE_BYTES * len(answer.kvs) // answer.ByteSize()))

    async def _range(self, request: Any, what: str) -> Any:
        async def once(timeout_s: float) -> Any:
            mark = self._seen.mark()
            answer = await self._channel.unary("KV", "Range", request, timeout_s, what)
            header = answer.header
            self._seen.check(mark, header.cluster_id, header.revision, header.raft_term)
            return answer

        return await repeat_read(once, self._timeout_s)

    async def _write(self, method: str, request: Any, what: str) -> Any:
        mark = self._seen.mark()
        answer = await self._channel.unary("KV", method, request, self._timeout_s, what)
        header = answer.header
        self._seen.check(mark, header.cluster_id, header.revision, header.raft_term)
        return answer


class _WatchStream:
    """One watch on a stream of its own: when the stream is closed, the server forgets the watch."""

    def __init__(self, stream: BidirectionalStream, seen: HighWater) -> None:
        self._stream = stream
        self._seen = seen

    async def create(self, key: bytes, range_end: bytes, start_revision: int, timeout_s: float) -> None:
        """Ask for the watch and wait until the server has it."""
        request = _WatchCreateRequest(key=key, range_end=range_end, start_revision=start_revision, fragment=True)
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.send(_WatchRequest(create_request=request))
                answer = await self._receive()
        except TimeoutError:
            self.close()
            raise Ambiguous(f"watch {key!r}: not accepted within {timeout_s:.1f} s") from None
        except BaseException:
            self.close()
            raise
        if not answer.created:
            self.close()
            raise Ambiguous(f"watch {key!r}: the server began with another message than the watch's creation")

    async def read(self) -> Message:
        answer = await self._receive()
        return Message([_event(event) for event in answer.events], not answer.fragment)

    def close(self) -> None:
        self._stream.close()

    async def _receive(self) -> Any:
        answer = await self._stream.receive()
        self._seen.check_cluster(answer.header.cluster_id)
        # The stream stays open and silent after a cancel: this flag is all that tells. A refused watch has it, too.
        if answer.canceled:
            raise _cancelled(answer)
        if answer.events:
            self._seen.saw(answer.events[-1].kv.mod_revision)
        return answer


def _cancelled(answer: Any) -> Exception:
    reason = answer.cancel_reason
    if answer.compact_revision or "compacted" in reason:
        return Compacted(
            f"watch cancelled: compacted up to revision {answer.compact_revision}; list again and watch from the list's revision + 1",
            answer.compact_revision,
        )
    if "permission denied" in reason.lower().replace("permissiondenied", "permission denied"):
        return Definite(f"watch refused: {reason}; grant the user of this certificate a role for these keys")
    if "auth" in reason:
        return Unauthenticated(f"watch refused: {reason}; check the client certificate and the cluster's users")
    return Ambiguous(f"watch cancelled by the server: {reason or 'no reason given'}")


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def _event(event: Any) -> Event:
    return Event("delete" if event.type else "put", _key_value(event.kv))


def _comparison(compare: Compare) -> Any:
    return _Compare(
        key=compare.key,
        target=_TARGETS[compare.target],
        result=_OPERATORS[compare.op],
        **{compare.target: compare.value},
    )


def _operation(op: Op) -> Any:
    match op:
        case Put():
            return _RequestOp(request_put=_PutRequest(key=op.key, value=op.value, lease=op.lease))
        case Delete():
            return _RequestOp(request_delete_range=_DeleteRangeRequest(key=op.key, range_end=op.range_end))
        case Get():
            return _RequestOp(request_range=_RangeRequest(key=op.key))
