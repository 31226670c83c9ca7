"""Renewing leases over one persistent stream on a connection of its own, so that bulk traffic cannot delay it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from gangline.core.store.answers import HighWater
from gangline.core.store.api import Ambiguous, LeaseNotFound, StoreError
from gangline.core.store.etcd_channel import BidirectionalStream, Channel
from gangline.core.store.etcd_stubs import MESSAGES

_Request = MESSAGES["LeaseKeepAliveRequest"]

_WHAT = "lease keepalive"


class Keepalive:
    """All renewals of one process. The stream is opened when needed, and again after it failed."""

    def __init__(self, channel: Channel, seen: HighWater) -> None:
        self._channel = channel
        self._seen = seen
        self._stream: _Stream | None = None

    async def renew(self, lease: int, timeout_s: float) -> float:
        """Renew once, return the time to live in seconds. Raises LeaseNotFound, Ambiguous, WentBack."""
        stream = self._stream
        if stream is None or stream.error is not None:
            await self._channel.open()
            stream = self._stream = _Stream(self._channel.stream("Lease", "LeaseKeepAlive", _WHAT), self._seen)
        answer = stream.ask(lease)
        try:
            async with asyncio.timeout(timeout_s):
                ttl_s = await answer
        except TimeoutError:
            # An answer that comes later must never be taken for that to a later request: the lease would seem to live longer
            # than it does. The next stream goes to another member.
            error = Ambiguous(f"{_WHAT} of {lease:x}: no answer within {timeout_s:.1f} s; opening another stream")
            stream.fail(error)
            raise error from None
        except asyncio.CancelledError:
            # Whoever has less patience than that must not meet the same frozen member with each of his tries.
            if not answer.done() or answer.cancelled():
                stream.fail(Ambiguous(f"{_WHAT} of {lease:x}: given up before an answer came; opening another stream"))
            raise
        if ttl_s <= 0:
            raise LeaseNotFound(f"{_WHAT} of {lease:x}: the lease has expired or was revoked, ask for a new one")
        return ttl_s

    def close(self) -> None:
        """End the stream; pending renewals raise Ambiguous."""
        if self._stream:
            self._stream.fail(Ambiguous(f"{_WHAT}: this store was closed"))


class _Stream:
    """One stream: requests go out in order, answers are matched by lease id, for one lease in order."""

    def __init__(self, stream: BidirectionalStream, seen: HighWater) -> None:
        self.error: StoreError | None = None
        self._stream = stream
        self._seen = seen
        self._outbox: asyncio.Queue[int] = asyncio.Queue()
        self._waiting: dict[int, deque[asyncio.Future[float]]] = {}
        self._tasks = [asyncio.create_task(self._run(self._send)), asyncio.create_task(self._run(self._receive))]

    def ask(self, lease: int) -> asyncio.Future[float]:
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lease, deque()).append(answer)
        self._outbox.put_nowait(lease)
        return answer

    def fail(self, error: StoreError) -> None:
        """End the stream; everyone who waits gets `error`."""
        if self.error is not None:
            return
        self.error = error
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._stream.close()
        for answers in self._waiting.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
                    # The error is for whoever waits; that somebody has stopped waiting is nothing to report.
                    answer.exception()
        self._waiting.clear()

    async def _send(self) -> None:
        await self._stream.send(_Request(ID=await self._outbox.get()))

    async def _receive(self) -> None:
        answer = await self._stream.receive()
        # The header's revision is that of one member, which may lag; only the cluster can be checked.
        self._seen.check_cluster(answer.header.cluster_id)
        answers = self._waiting.get(answer.ID)
        if not answers:
            return
        # One who was cancelled still has his turn, or the next would get his answer.
        future = answers.popleft()
        if not answers:
            del self._waiting[answer.ID]
        if not future.done():
            future.set_result(float(answer.TTL))

    async def _run(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            while self.error is None:
                await step()
        except StoreError as error:
            self.fail(error)
