"""The check that the log is the truth: folding it anew, from its first entry, gives what every live scheduler has, byte for byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangline.core.client.api import ApiError, Client, Unreachable
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state, state_digest
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.core.store.recover import replay

_POLL_S = 0.2


@dataclass(frozen=True)
class Replay:
    """The folded log, and what the live schedulers said at the end."""

    state: State
    #: digest of the folded state, and its size
    digest: str
    size_bytes: int
    #: (index, digest) by address of each scheduler
    live: Mapping[str, tuple[int, str]]

    @property
    def agreed(self) -> bool:
        """All schedulers are at the same index as the replay, with the same bytes."""
        return bool(self.live) and all(seen == (self.state.index, self.digest) for seen in self.live.values())


def compare(etcd: Sequence[str], cluster: str, urls: Sequence[str], patience_s: float) -> Replay:
    """Replay the raw log of a cluster and ask each scheduler for its digest, until all are at one index or the patience is over.

    Raises BadFrame for a log that cannot be folded, Truncated for one whose beginning is gone, StoreErrors.
    """
    return asyncio.run(_compare(etcd, Keys(cluster), urls, time.monotonic() + patience_s))


async def _compare(etcd: Sequence[str], keys: Keys, urls: Sequence[str], deadline: float) -> Replay:
    store = await EtcdStore.connect(etcd)
    try:
        log = Log(store, keys)
        while True:
            live = await asyncio.to_thread(ask_all, urls)
            state = replay([data async for _, data, _ in log.read(1)])
            found = Replay(state, state_digest(state), len(dump_state(state)), live)
            if all(index == state.index for index, _ in live.values()) or time.monotonic() > deadline:
                return found
            await asyncio.sleep(_POLL_S)
    finally:
        await store.close()


def ask_all(urls: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Return (index, state digest) of each scheduler by its URL, (0, why) of one that does not say."""
    return {url: _ask(url) for url in urls}


def _ask(url: str) -> tuple[int, str]:
    """Return index and digest of one scheduler, (0, why) when it does not say."""
    client = Client([url])
    try:
        body = client.get("/v1/state").body
    except (ApiError, Unreachable) as e:
        return 0, str(e)
    finally:
        client.close()
    return int(body["index"]), str(body["digest"])
