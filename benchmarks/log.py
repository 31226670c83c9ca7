"""The log alone: what the path from an event to the state of a standby costs."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from gangline.benchmarks.servers import etcd
from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.spec import JobSpec, Resources
from gangline.core.model.state import State
from gangline.core.model.statecodec import state_digest
from gangline.core.store.api import Compare, Put
from gangline.core.store.election import Election
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.core.store.recover import fold_next
from gangline.leader.batch import Batch
from gangline.leader.process import calm_garbage_collector

_NODES = 32
_GPUS = 8
_SPEC = JobSpec(("python", "train.py"), resources=Resources(gpus=1, cpus_milli=1000, memory_mib=8192))


def run(events: int, frame_events: int) -> dict[str, Any]:
    """Return events_per_s over the whole path, and what the store alone does with frames of that size."""
    calm_garbage_collector()
    with etcd() as endpoint:
        return asyncio.run(_measure(endpoint, events, frame_events))


async def _measure(endpoint: str, events: int, frame_events: int) -> dict[str, Any]:
    store = await EtcdStore.connect([endpoint])
    keys = Keys("bench")
    standby = await asyncio.create_subprocess_exec(sys.executable, "-m", "gangline.benchmarks.log", endpoint, stdout=asyncio.subprocess.PIPE)
    assert standby.stdout is not None
    await standby.stdout.readline()  # it follows
    leadership = await Election(store, keys, "bench", b"", 15.0).campaign()
    log, state = Log(store, keys), State()
    took: list[float] = []
    sizes: list[int] = []
    written = 0
    stream = life_of_jobs()
    began = time.perf_counter()
    while written < events:
        batch = Batch(state, leadership.token, 1_000 + len(took))
        for _ in range(frame_events):
            batch.add(next(stream))
        for sealed in batch.finish():
            before = time.perf_counter()
            await log.append(sealed.data, index=sealed.frame.index, nonce=sealed.frame.nonce, token=leadership.token)
            took.append(time.perf_counter() - before)
            sizes.append(len(sealed.data))
            written += len(sealed.frame.events)
    leader_s = time.perf_counter() - began
    batch = Batch(state, leadership.token, 1_000 + len(took))
    batch.add(ev.LeaderResigned(scheduler="bench"))
    (last,) = batch.finish()
    await log.append(last.data, index=last.frame.index, nonce=last.frame.nonce, token=leadership.token)
    answer = (await standby.stdout.readline()).decode().split()
    whole_s = time.perf_counter() - began
    assert answer[1] == state_digest(state), "the standby's state differs from the leader's"
    await standby.wait()
    raw = frame_events * await _raw(store, keys, leadership.token, round(statistics.mean(sizes)), len(sizes))
    await leadership.resign()
    await store.close()
    rate = written / whole_s
    return {
        "events_per_s": rate,
        "appends_per_s": len(took) / whole_s,
        "append_p50_ms": statistics.median(took) * 1000,
        "append_p99_ms": statistics.quantiles(took, n=100)[98] * 1000,
        "ratio_to_raw": rate / raw,
        "raw_events_per_s": raw,
        "leader_events_per_s": written / leader_s,
        "frame_bytes": round(statistics.mean(sizes)),
        "events": written,
    }


async def _raw(store: EtcdStore, keys: Keys, token: int, size: int, count: int) -> float:
    """Return bare compare-and-put transactions of the same size per second: nothing encoded, nothing folded, nobody follows."""
    data = secrets.token_bytes(size)
    began = time.perf_counter()
    for i in range(count):
        key = keys.root + f"raw/{i:016d}".encode()
        await store.txn([Compare(keys.leader, "create_revision", "==", token), Compare(key, "version", "==", 0)], [Put(key, data)])
    return count / (time.perf_counter() - began)


def life_of_jobs() -> Iterator[ev.LogEvent]:
    """The life of one-GPU jobs after one another on 32 nodes: submitted, placed, ended, finished."""
    yield ev.LeaderElected(scheduler="bench")
    for n in range(_NODES):
        gpus = tuple(Gpu(i, f"n{n}-{i}", "H100", 81_559) for i in range(_GPUS))
        yield ev.NodeJoined(
            registration=Registration(
                node=f"n{n}", identity=f"id{n}", boot_id="b", address="10.0.0.1", agent_url="", gpus=gpus, cpus_milli=64_000, memory_mib=512_000
            )
        )
    number = 0
    while True:
        some = range(number, number + _NODES * _GPUS)
        number += _NODES * _GPUS
        for j in some:
            yield ev.JobSubmitted(job=f"j{j}", spec=_SPEC, user="bench", idempotency_key=f"key-{j}", body_digest="0123456789abcdef")
        for j in some:
            node, gpu = divmod(j % (_NODES * _GPUS), _GPUS)
            parts = (ev.PlacedPart(f"n{node}", (ev.PlacedRank(0, (gpu,)),)),)
            yield ev.GangPlaced(job=f"j{j}", generation=1, parts=parts, reason="first that fits")
        for j in some:
            node = j % (_NODES * _GPUS) // _GPUS
            yield ev.RanksExited(job=f"j{j}", node=f"n{node}", exits=(ev.RankExit(0, 1, 0, "", "", 1_000),))
        for j in some:
            yield ev.GangFinished(job=f"j{j}", outcome="succeeded", cause="completed", message="all 1 ranks ended with status 0")


async def _follow(endpoint: str) -> None:
    """Be a standby: fold what is appended; say the state's digest when the leader resigns."""
    store = await EtcdStore.connect([endpoint])
    log, state = Log(store, Keys("bench")), State()
    print("following", flush=True)
    async for entries in log.follow(1, 1):
        for _, data, _ in entries:
            frame = fold_next(state, data)
            if isinstance(frame.events[-1], ev.LeaderResigned):
                print(frame.index, state_digest(state), flush=True)
                await store.close()
                return


if __name__ == "__main__":
    calm_garbage_collector()
    asyncio.run(_follow(sys.argv[1]))
