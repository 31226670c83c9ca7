"""Short jobs end to end, with everything real but the GPUs."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gangline.benchmarks.cluster import cluster, wait
from gangline.core.client.api import Client, new_key

_CONNECTIONS = 8
_BATCH = 1_000
_FIRST_ROUNDS = 7
_TRUE = {"command": ["true"], "resources": {"gpus": 1, "cpus": 0.1}}
#: fits no node, so that taking jobs in is measured alone
_NEVER = {"command": ["true"], "resources": {"gpus": 64, "cpus": 0.1}}


def run(jobs: int, nodes: int, gpus: int) -> dict[str, Any]:
    """Return the figures; see the keys."""
    with cluster(nodes, gpus) as c, tempfile.TemporaryDirectory() as folder:
        client = c.client()
        first = [_first_instruction(client, Path(folder) / str(i)) for i in range(_FIRST_ROUNDS)]
        took = _run_all(client, jobs)
        single = _submit_singly(c.urls, jobs)
        batch = _submit_in_batches(client)
        return {
            "jobs_per_s": jobs / took,
            "submit_per_s": single,
            "batch_submit_per_s": batch,
            "first_start_s": statistics.median(first),
            "jobs": jobs,
            "nodes": nodes,
        }


def _first_instruction(client: Client, stamp: Path) -> float:
    """Return the seconds from submitting on an idle cluster to the first instruction of the job."""
    command = ["sh", "-c", f"date +%s.%N > {stamp}.part && mv {stamp}.part {stamp}"]
    began = time.time_ns() / 1e9  # compared with the job's own wall clock
    client.submit({**_TRUE, "command": command}, new_key())
    wait(stamp.exists, "the first job")
    return float(stamp.read_text()) - began


def _run_all(client: Client, jobs: int) -> float:
    """Return the seconds from the first submission of that many jobs to the end of the last."""
    began = time.monotonic()
    for at in range(0, jobs, _BATCH):
        client.submit_batch([_TRUE] * min(_BATCH, jobs - at), new_key())
    for state in ("queued", "placed", "preparing", "running"):
        wait(lambda s=state: not client.jobs(1, state=s)[0], "the jobs to end", 600)  # type: ignore[misc]
    return time.monotonic() - began


def _submit_singly(urls: list[str], jobs: int) -> float:
    """Return durable submissions per second over eight connections, one job each."""
    each = jobs // _CONNECTIONS

    def work() -> None:
        client = Client(urls)
        for _ in range(each):
            client.submit(_NEVER, new_key())

    threads = [threading.Thread(target=work) for _ in range(_CONNECTIONS)]
    began = time.monotonic()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return each * _CONNECTIONS / (time.monotonic() - began)


def _submit_in_batches(client: Client, batches: int = 5) -> float:
    """Return durable submissions per second in batches of a thousand, over one connection."""
    began = time.monotonic()
    for _ in range(batches):
        answer = client.submit_batch([_NEVER] * _BATCH, new_key())
        assert all("job" in r for r in answer.body["results"])
    return batches * _BATCH / (time.monotonic() - began)
