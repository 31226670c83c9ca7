"""Several leaders-to-be on one modelled cluster that loses, delays and repeats: the log stays one, and says what was promised."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from gangline.core.store.api import Ambiguous, WentBack
from gangline.core.store.election import Election, Leadership
from gangline.core.store.fencing import Fenced
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.core.store.memory import Faults, MemoryCluster, MemoryStore
from gangline.core.store.watching import Timing

KEYS = Keys("test")


class Racer:
    """Campaigns, appends a few frames, and resigns, crashes or is deposed; again and again. It keeps what it was told."""

    def __init__(self, cluster: MemoryCluster, name: str, rng: random.Random) -> None:
        self.store = MemoryStore(cluster, name, timeout_s=0.1, timing=Timing(0.05, 0.1))
        self.log = Log(self.store, KEYS, settle_s=0.5)
        self.name = name
        self.rng = rng
        self.written: dict[int, bytes] = {}
        self.refused: list[tuple[int, bytes]] = []
        self.count = 0

    async def run(self) -> None:
        while True:
            try:
                term = await Election(self.store, KEYS, self.name, self.name.encode(), 1.0).campaign()
            except WentBack:  # nothing but stale answers for a whole timeout: the process would end here, and be started again
                continue
            try:
                await self._lead(term)
            except (Fenced, Ambiguous, WentBack):
                pass
            finally:
                if self.rng.random() < 0.8:
                    await term.resign()
                else:
                    term._task.cancel()  # a crash: the lease ends by itself

    async def _lead(self, term: Leadership) -> None:
        index = len([entry async for entry in self.log.read(1)])
        for _ in range(self.rng.randint(1, 30)):
            index, self.count = index + 1, self.count + 1
            nonce = f"{self.name}-{self.count:06d}-{term.token}".encode()
            data = b"%d " % term.token + nonce
            try:
                await self.log.append(data, index=index, nonce=nonce, token=term.token)
            except Fenced:
                self.refused.append((index, data))
                raise
            self.written[index] = data
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(3))
async def test_the_log_is_one_and_says_what_was_promised(seed: int) -> None:
    rng = random.Random(seed)
    faults = Faults(seed)
    faults.ambiguous_write, faults.late_write_s, faults.stale_read = 0.15, 0.05, 0.02
    cluster = MemoryCluster(faults=faults, min_lease_ttl_s=1.0, latency=lambda: rng.random() * 0.002)
    racers = [Racer(cluster, name, rng) for name in "abc"]
    tasks = [asyncio.create_task(racer.run()) for racer in racers]
    for _ in range(12):
        faults.partitioned = {r.name for r in racers if rng.random() < 0.25}
        if rng.random() < 0.3:
            with contextlib.suppress(Ambiguous):
                await MemoryStore(cluster, "operator").delete(KEYS.leader)
        await asyncio.sleep(0.25)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results), results
    await asyncio.sleep(2 * faults.late_write_s)
    faults.ambiguous_write = faults.stale_read = 0.0
    faults.partitioned.clear()

    entries = [entry async for entry in Log(MemoryStore(cluster, "checker"), KEYS).read(1)]
    log = {index: data for index, data, _ in entries}
    assert list(log) == list(range(1, len(log) + 1))
    assert len(log) > 20
    elections = {event.kv.mod_revision for event in cluster.mvcc.events(KEYS.leader, b"", 1)[0] if event.kv.version == 1}
    assert len(elections) > 3
    for _, data, revision in entries:
        token = int(data.split()[0])
        assert not [e for e in elections if token < e <= revision], f"{data!r} was written after a later election"
    tokens = [int(data.split()[0]) for data in log.values()]
    assert tokens == sorted(tokens), "a deposed leader wrote after its successor"
    assert len(set(log.values())) == len(log), "a frame was written twice"
    for racer in racers:
        assert racer.written.items() <= log.items()
        assert not [frame for _, frame in racer.refused if frame in log.values()]
