"""A scheduler that starts on a long log."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from gangline.benchmarks.cluster import wait
from gangline.benchmarks.log import life_of_jobs
from gangline.benchmarks.servers import etcd
from gangline.core.model import events as ev
from gangline.core.model.spec import JobSpec, Resources
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state
from gangline.core.store.election import Election
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.core.store.snapshots import Snapshots
from gangline.leader.batch import Batch
from gangline.leader.process import calm_garbage_collector
from gangline.leader.snapshotter import EVERY_EVENTS

_FRAME_EVENTS = 1_000
_NEVER = JobSpec(("true",), resources=Resources(gpus=64))


def run(events: int, jobs: int) -> dict[str, Any]:
    """Return takeover_s (process start to leading), and the memory of a scheduler that holds so many waiting jobs besides."""
    calm_garbage_collector()
    with etcd() as endpoint:
        written, index = asyncio.run(_write(endpoint, events, jobs))
        return {"events": written, "jobs": jobs} | _start(endpoint, index, jobs)


async def _write(endpoint: str, events: int, jobs: int) -> tuple[int, int]:
    store = await EtcdStore.connect([endpoint])
    keys = Keys("bench")
    leadership = await Election(store, keys, "bench", b"", 15.0).campaign()
    log, state, written = Log(store, keys), State(), 0
    waiting = (ev.JobSubmitted(job=f"w{j}", spec=_NEVER, user="bench") for j in range(jobs))
    stream = life_of_jobs()
    begin = itertools.islice(stream, 40)  # the election and the nodes
    source = itertools.chain(begin, waiting, stream)
    snapshot_after = events - EVERY_EVENTS  # the longest tail that a leader leaves
    while written < events:
        batch = Batch(state, leadership.token, 1_000 + written)
        for event in itertools.islice(source, _FRAME_EVENTS):
            batch.add(event)
        for sealed in batch.finish():
            await log.append(sealed.data, index=sealed.frame.index, nonce=sealed.frame.nonce, token=leadership.token)
            written += len(sealed.frame.events)
        if snapshot_after <= written < snapshot_after + _FRAME_EVENTS:
            await Snapshots(store, keys).save(dump_state(state), state.index, leadership.token)
    await leadership.resign()
    await store.close()
    return written, state.index


def _start(endpoint: str, index: int, jobs: int) -> dict[str, Any]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gangline.leader", "--cluster", "bench", "--etcd", endpoint, "--listen", f"127.0.0.1:{port}"]
        began = time.monotonic()
        process = subprocess.Popen([*command, "--state-dir", folder, "--name", "s1"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait(lambda: _leads(port, index), "the scheduler to lead", 120)
            took = time.monotonic() - began
            rss = int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[0])
            return {"takeover_s": took, "rss_mb": rss / 1024}
        finally:
            process.terminate()
            process.wait(20)


def _leads(port: int, index: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/health", timeout=5) as answer:
            health = json.load(answer)
            return health["role"] == "leader" and int(health["index"]) > index
    except OSError:
        return False
