"""A cluster for measuring the scheduler end to end: a real etcd, a real scheduler with its API, and simulated agents, each a process.

    client ── HTTP ──▶ scheduler ── log, desired ──▶ etcd ◀── observed ── simulated agents (benchmarks/simagents.py)
                                                      └── log ──▶ history (benchmarks/history.py)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import msgspec

from gangline.benchmarks.history import History
from gangline.benchmarks.servers import etcd, free_port
from gangline.core.client.api import ApiError, Client, Unreachable, new_key

CLUSTER = "bench"
#: jobs are sent in batches of at most so many, over so many connections
_BATCH = 1_000
_CONNECTIONS = 4
#: jobs that are due within this time are sent together
_TICK_S = 0.02
_START_S = 120.0
_SEND_S = 300.0
_STOP_S = 30.0

Job = dict[str, Any]


class Shape(msgspec.Struct, frozen=True):
    """The nodes of a rig: how many, what each has, and for each label how many nodes carry the same value of it."""

    nodes: int
    gpus: int = 0
    cpus: int = 96
    levels: dict[str, int] = {}


class Rig:
    """A running cluster. `cpu_s` of its processes counts from `begin`."""

    def __init__(self, url: str, history: History, pids: dict[str, int]) -> None:
        self.client = Client([url])
        self.history = history
        self._url = url
        self._pids = pids
        self._before: dict[str, float] = {}
        self._began = 0.0

    def begin(self) -> None:
        """What is measured begins now."""
        self._before = self._cpu()
        self._began = time.monotonic()

    def wall_s(self) -> float:
        """Return the seconds since it began."""
        return time.monotonic() - self._began

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process since it began."""
        return {name: round(after - self._before[name], 2) for name, after in self._cpu().items()}

    def declare(self, queues: dict[str, Any], **more: Any) -> None:
        """Declare the queues anew."""
        self.client.declare_queues({"queues": queues, **more}, int(self.client.queues()["index"]), dry_run=False)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Submit jobs as fast as that goes."""
        self.submit_at([(0.0, job) for job in jobs])

    def submit_at(self, jobs: Sequence[tuple[float, Job]]) -> float:
        """Submit each job at its second, or as soon after that as the scheduler takes it. Returns by how much the last was late."""
        began = time.monotonic()
        late = 0.0
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            clients = [Client([self._url]) for _ in range(_CONNECTIONS)]
            sent: list[Future[None]] = []
            at = 0
            while at < len(jobs):
                time.sleep(max(0.0, jobs[at][0] - (time.monotonic() - began)))
                now = time.monotonic() - began + _TICK_S
                end = at + 1
                while end < len(jobs) and end - at < _BATCH and jobs[end][0] <= now:
                    end += 1
                sent.append(pool.submit(_send, clients[len(sent) % _CONNECTIONS], [job for _, job in jobs[at:end]]))
                if len(sent) >= _CONNECTIONS:
                    sent[-_CONNECTIONS].result()
                late = time.monotonic() - began - jobs[end - 1][0]
                at = end
            for one in sent:
                one.result()
        return late

    def _cpu(self) -> dict[str, float]:
        return {name: _cpu_s(pid) for name, pid in self._pids.items()}


@contextlib.contextmanager
def rig(shape: Shape) -> Iterator[Rig]:
    """Run a cluster of that shape and end it. Raises ClickException when it does not come up."""
    folder = Path(tempfile.mkdtemp(prefix="gangline-bench-"))
    try:
        etcds: list[int] = []
        with etcd(etcds.append) as endpoint, contextlib.ExitStack() as stack:
            url = f"http://127.0.0.1:{free_port()}"
            leader = stack.enter_context(_process(
                [sys.executable, "-m", "gangline.leader", "--cluster", CLUSTER, "--etcd", endpoint, "--name", "s1",
                 "--listen", url.removeprefix("http://"), "--state-dir", str(folder / "s1"), "--leader-ttl", "15"], folder / "leader.log"
            ))  # fmt: skip
            levels = [f"--level={name}={size}" for name, size in shape.levels.items()]
            agents = stack.enter_context(_process(
                [sys.executable, "-m", "gangline.benchmarks.simagents", endpoint, CLUSTER, "--nodes", str(shape.nodes),
                 "--gpus", str(shape.gpus), "--cpus", str(shape.cpus), *levels], folder / "agents.log"
            ))  # fmt: skip
            history = History(endpoint, CLUSTER)
            stack.callback(history.close)
            pids = {"scheduler": leader.pid, "agents": agents.pid, "etcd": etcds[0], "client": os.getpid()}
            running = Rig(url, history, pids)
            _wait_for_nodes(running, shape.nodes, folder, (leader, agents))
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _send(client: Client, jobs: list[Mapping[str, Any]]) -> None:
    """Submit jobs; a scheduler that is too busy to answer in time is asked again, and the key has each job taken once."""
    key, deadline = new_key(), time.monotonic() + _SEND_S
    while True:
        try:
            refused = [r["problem"] for r in client.submit_batch(jobs, key).body["results"] if "problem" in r]
        except Unreachable:
            if time.monotonic() > deadline:
                raise
            continue
        if not refused:
            return
        if any(p["status"] != 503 for p in refused) or time.monotonic() > deadline:
            raise click.ClickException(f"{len(refused)} jobs were refused, the first because of {refused[0]}")


def _wait_for_nodes(running: Rig, nodes: int, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(ApiError, Unreachable):
            if sum(node["state"] == "up" for node in running.client.nodes()) == nodes:
                return
        if time.monotonic() > deadline or any(p.poll() is not None for p in processes):
            ends = "\n".join((folder / name).read_text()[-2_000:] for name in ("leader.log", "agents.log"))
            raise click.ClickException(f"the cluster did not come up:\n{ends}")
        time.sleep(0.2)


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
