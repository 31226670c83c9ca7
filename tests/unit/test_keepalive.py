"""Renewals over streams that fail: which stream the next one goes to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gangline.core.store.answers import HighWater
from gangline.core.store.api import Ambiguous
from gangline.core.store.etcd_channel import Channel
from gangline.core.store.etcd_keepalive import Keepalive


class Stream:
    """One on a member that is frozen, or that answers at once."""

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen
        self.closed = False
        self.answers: asyncio.Queue[Any] = asyncio.Queue()

    async def send(self, request: Any) -> None:
        if not self.frozen:
            self.answers.put_nowait(SimpleNamespace(header=SimpleNamespace(cluster_id=1), ID=request.ID, TTL=6))

    async def receive(self) -> Any:
        return await self.answers.get()

    def close(self) -> None:
        self.closed = True


class Members:
    """Implements what a Keepalive uses of a Channel: the first stream is on a frozen member, the others are not."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    async def open(self) -> None:
        pass

    def stream(self, service: str, method: str, what: str) -> Stream:
        self.streams.append(Stream(frozen=not self.streams))
        return self.streams[-1]


@pytest.mark.parametrize("patience_s", [0.01, 5.0], ids=["cancelled", "timed out"])
async def test_the_next_renewal_goes_elsewhere_however_the_last_one_was_given_up(patience_s: float) -> None:
    members = Members()
    keepalive = Keepalive(cast(Channel, members), HighWater())
    with pytest.raises((TimeoutError, Ambiguous)):
        await asyncio.wait_for(keepalive.renew(7, 0.02), patience_s)
    assert members.streams[0].closed
    assert await asyncio.wait_for(keepalive.renew(7, 1.0), 1.0) == 6.0
    assert await keepalive.renew(7, 1.0) == 6.0
    assert len(members.streams) == 2
    keepalive.close()
