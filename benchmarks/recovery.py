"""How long everything takes that should be quick when something dies. Times are seen by the ranks themselves: each writes a stamp first."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from gangline.benchmarks.cluster import cluster, job, wait
from gangline.chaos.checker import examine
from gangline.chaos.checker.history import History
from gangline.chaos.checker.sources import gather
from gangline.chaos.faults import FreezeNode, KillAgent, KillLeader, KillNode, KillRank
from gangline.chaos.injector import Injector
from gangline.chaos.local import OnLocalCluster
from gangline.core.client.api import Client, Unreachable, new_key
from gangline.core.client.localcluster.cluster import LocalCluster

_SHORT_LEASE_S = 2.0
#: a rank of the interruption measurement says that it lives so often
_BEAT_S = 0.02


def run(rounds: int, only: tuple[str, ...]) -> dict[str, Any]:
    """Return the medians; `acknowledged_lost` is a sum."""
    out: dict[str, Any] = {}
    for figures, measure in _MEASURES.items():
        if only and not set(figures) & set(only):
            continue
        click.echo(f"measuring {', '.join(figures)}", err=True)
        out |= measure(rounds)
    return out


class Bench:
    """A cluster, what hurts it, and gangs whose ranks leave stamps."""

    def __init__(self, c: LocalCluster, folder: Path) -> None:
        self.cluster = c
        self.client = c.client()
        self.injector = Injector(OnLocalCluster(c))
        self._folder = folder
        self._numbers = itertools.count()

    def submit(self, ranks: int, then: str = "exec sleep 1000", **more: Any) -> Gang:
        """Submit a gang of one GPU a rank; each stamps the time of its first instruction."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        stamp = f"{folder}/$GANGLINE_GENERATION-$RANK"
        script = f"date +%s.%N > {stamp}.part; mv {stamp}.part {stamp}; {then}"
        spec = {
            "command": ["sh", "-c", script],
            "gang": {"ranks": ranks},
            "resources": {"gpus": 1, "cpus": 0.1},
            "preemption": {"grace": "2s"},
            **more,
        }
        sent = time.time_ns() / 1e9
        answer = self.client.submit(spec, new_key())
        return Gang(answer.body["job"], ranks, folder, sent)

    def clear(self, gang: Gang) -> None:
        """Stop a gang and wait until nothing of it is left."""
        self.client.stop(gang.id, "measured")
        wait(lambda: all(gang.id not in n["jobs"] for n in self.client.nodes() if n["state"] == "up"), "the gang to be gone")

    def nodes_up(self, count: int) -> None:
        """Wait until so many nodes are up."""
        wait(lambda: sum(n["state"] == "up" for n in self.client.nodes()) >= count, "the nodes to be up")


class Gang:
    """One gang that was submitted at `sent` (seconds of the wall clock)."""

    def __init__(self, job_id: str, ranks: int, folder: Path, sent: float) -> None:
        self.id = job_id
        self.ranks = ranks
        self.sent = sent
        self._folder = folder

    def executing(self, generation: int, timeout_s: float = 60.0) -> float:
        """Wait until every rank of a generation executes; return when the last one began, in seconds of the wall clock."""
        stamps = [self._folder / f"{generation}-{r}" for r in range(self.ranks)]
        wait(lambda: all(s.exists() for s in stamps), f"generation {generation} of {self.id} to execute", timeout_s)
        return max(float(s.read_text()) for s in stamps)


@contextlib.contextmanager
def _bench(nodes: int, schedulers: int = 1, **options: Any) -> Iterator[Bench]:
    with cluster(nodes, 8, schedulers, **options) as c, tempfile.TemporaryDirectory() as folder:
        yield Bench(c, Path(folder))


# ---------------------------------------------------------------- start and restart of ranks


def _start_and_restart(rounds: int) -> dict[str, Any]:
    with _bench(8) as b:
        starts, restarts = [], []
        for _ in range(rounds):
            gang = b.submit(64)
            starts.append(gang.executing(1) - gang.sent)
            b.clear(gang)
        for _ in range(rounds):
            gang = b.submit(16, gang={"ranks": 16, "ranks_per_node": 8})
            gang.executing(1)
            wait(lambda g=gang: job(b.client, g.id)["state"] == "running", "running")  # type: ignore[misc]
            hit = b.injector.inject(KillRank(gang.id, 3))
            restarts.append(gang.executing(2) - hit.at_ms / 1000)
            b.clear(gang)
        return {"gang64_start_s": statistics.median(starts), "rank_restart_s": statistics.median(restarts)}


# ---------------------------------------------------------------- nodes


def _nodes(rounds: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for suffix, lease_s in (("", 0.0), ("_short_lease", _SHORT_LEASE_S)):
        options: dict[str, Any] = {"lease_ttl_s": lease_s} if lease_s else {}
        with _bench(4, 1, **options) as b:
            out[f"node_loss{suffix}_s"] = statistics.median(_node_fault(b, KillNode) for _ in range(rounds))
            out[f"node_freeze{suffix}_s"] = statistics.median(_node_fault(b, FreezeNode) for _ in range(rounds))
    return out


def _node_fault(b: Bench, fault: Callable[[str], Any]) -> float:
    """Return the seconds from the fault of a node to its whole gang executing on others."""
    gang = b.submit(16, gang={"ranks": 16, "ranks_per_node": 8})
    gang.executing(1)
    wait(lambda: job(b.client, gang.id)["state"] == "running", "running")
    node = job(b.client, gang.id)["placement"][1]["node"]
    hit = b.injector.inject(fault(node))
    took = gang.executing(2) - hit.at_ms / 1000
    b.injector.heal(hit)
    b.clear(gang)
    b.nodes_up(4)
    wait(lambda: all(not n["jobs"] for n in b.client.nodes()), "the node to be clean")
    return took


# ---------------------------------------------------------------- schedulers and agents


def _failover(rounds: int) -> dict[str, Any]:
    with _bench(2, 2) as b, tempfile.TemporaryDirectory() as folder, _Submitter(b.cluster, Path(folder)) as submitter:
        took = []
        for _ in range(rounds):
            wait(lambda: sum(_alive(b, s) for s in ("s1", "s2")) == 2 and bool(b.cluster.leader()), "two schedulers")
            time.sleep(1.0)  # the standby has followed for a while, as it has in life
            hit = b.injector.inject(KillLeader())
            gang = b.submit(1)
            took.append(gang.executing(1) - hit.at_ms / 1000)
            b.injector.heal(hit)
            b.clear(gang)
        lost = submitter.lost()
    with _bench(2) as b, tempfile.TemporaryDirectory() as folder, _Submitter(b.cluster, Path(folder)) as submitter:
        restarts = []
        for _ in range(rounds):
            hit = b.injector.inject(KillLeader())
            b.injector.heal(hit)
            gang = b.submit(1)
            restarts.append(gang.executing(1) - hit.at_ms / 1000)
            b.clear(gang)
        lost += submitter.lost()
    return {"failover_s": statistics.median(took), "scheduler_restart_s": statistics.median(restarts), "acknowledged_lost": lost}


def _alive(b: Bench, name: str) -> bool:
    process = b.cluster.processes.get(name)
    return process is not None and process.alive


class _Submitter:
    """Submits without a pause while schedulers die, and writes down what it was told."""

    def __init__(self, c: LocalCluster, folder: Path) -> None:
        self._cluster = c
        self._client = Client(c.urls)
        self._path = folder / "history"
        self._history = History(self._path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> _Submitter:
        self._thread.start()
        return self

    def __exit__(self, *why: object) -> None:
        self._stop.set()
        self._thread.join()

    def lost(self) -> int:
        """Return how many submissions are not in the log as their client was told: acknowledged and lost, or there twice."""
        self.__exit__()
        found = gather(str(self._cluster.state_dir), history=self._path)
        report = examine(found.entries, client_history=found.client_history, decisions=False)
        told = sum(o.outcome == "ok" for o in found.client_history or ())
        click.echo(f"{told} jobs were acknowledged while schedulers died", err=True)
        return sum(v.assertion == "S7" for v in report.violations) + report.more.get("S7", 0)

    def _work(self) -> None:
        spec = {"command": ["true"], "resources": {"gpus": 64, "cpus": 0.1}}
        while not self._stop.wait(0.005):
            with contextlib.suppress(Unreachable):
                self._history.submit(self._client, spec, new_key())


def _agent_restart(rounds: int) -> dict[str, Any]:
    with _bench(2) as b, tempfile.TemporaryDirectory() as folder:
        gaps = []
        for i in range(rounds):
            beats = Path(folder) / f"beats{i}"
            gang = b.submit(1, then=f"while :; do date +%s.%N; sleep {_BEAT_S}; done > {beats}")
            gang.executing(1)
            wait(lambda g=gang: job(b.client, g.id)["state"] == "running", "running")  # type: ignore[misc]
            node = job(b.client, gang.id)["placement"][0]["node"]
            b.injector.heal(b.injector.inject(KillAgent(node)))
            wait(lambda n=node: any(r["id"] == n and r["state"] == "up" for r in b.client.nodes()), "the agent")  # type: ignore[misc]
            before = len(beats.read_text().splitlines())
            wait(lambda p=beats, n=before: len(p.read_text().splitlines()) > n + 20, "more beats")  # type: ignore[misc]
            same = job(b.client, gang.id)["generation"] == 1
            gaps.append(0.0 if same else max(_gaps(beats)))
            b.clear(gang)
        return {"agent_restart_interruption_s": statistics.median(gaps)}


def _gaps(beats: Path) -> Iterator[float]:
    times = [float(t) for t in beats.read_text().split()]
    return (b - a for a, b in itertools.pairwise(times))


_MEASURES: dict[tuple[str, ...], Callable[[int], dict[str, Any]]] = {
    ("gang64_start_s", "rank_restart_s"): _start_and_restart,
    ("node_loss_s", "node_freeze_s"): _nodes,
    ("failover_s", "scheduler_restart_s", "acknowledged_lost"): _failover,
    ("agent_restart_interruption_s",): _agent_restart,
}
