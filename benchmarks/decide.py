"""The decisions alone, in process: a state folded from events, and cycles as the leader runs them.

    wake ─▶ decide, fold, decide, fold, … until nothing is left to decide ─▶ settle

A full cluster of one-GPU jobs with a long queue of gangs behind it is what everything is measured on. No log is written and nothing runs: the
jobs in the state end by the events that agents would report.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Iterable
from typing import Any

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.fold import apply, seal
from gangline.core.model.spec import Gang, JobSpec, Resources
from gangline.core.model.state import State
from gangline.core.policy.decide import attend_to_all, decide, settle, wake
from gangline.leader.process import calm_garbage_collector

#: one log entry takes so many submissions
_BATCH = 1_000
_RANKS = 512
#: whole nodes' worth of GPUs that are free while gangs come and go; those that wait in the queue ask for more
_FREE = 80
_EACH = 8
_SHAPES = 20
_OLD_MS = 3_600_000
_IDLE_ROUNDS = 50
_GANG_ROUNDS = 40
_PROOF_ROUNDS = 5
#: gangs that wait, in a curve; rounds of each step there; and one-GPU places that are free meanwhile
PENDING = (1_000, 10_000, 100_000)
_CURVE_ROUNDS = 20
_PLACED = 8
_FIRST = 90


class Cluster:
    """A state that is changed by events only, with a clock of its own."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.state, self.now = State(), 1_000
        self.fold([ev.LeaderElected(scheduler="bench")])
        for i in range(nodes):
            name = f"n{i:05d}"
            devices = tuple(Gpu(g, f"{name}-{g}", "H100", 81_559) for g in range(gpus))
            labels = {"rack": f"r{i // 32:04d}", "block": f"b{i // 512:02d}"}
            reg = Registration(name, name, "b", name, "", devices, 128_000, 1_000_000, labels)
            self.fold([ev.NodeJoined(registration=reg)])
        attend_to_all(self.state)

    def fold(self, events: Iterable[ev.LogEvent]) -> None:
        """Fold one entry."""
        index = self.state.index + 1
        for event in events:
            apply(self.state, event, index, 1, self.now)
        seal(self.state, index, bytes(32))

    def submit(self, specs: Iterable[JobSpec]) -> list[str]:
        """Submit jobs and return their ids."""
        specs = list(specs)
        ids = [f"j{self.state.submitted + i:07d}" for i in range(len(specs))]
        for at in range(0, len(specs), _BATCH):
            some = zip(ids[at : at + _BATCH], specs[at : at + _BATCH], strict=True)
            self.fold([ev.JobSubmitted(job=job, spec=spec) for job, spec in some])
        return ids

    def cycle(self) -> float:
        """Run one cycle and return its seconds."""
        self.now += 10
        began = time.perf_counter()
        wake(self.state, self.now)
        while decisions := decide(self.state, self.now):
            self.fold(decisions)
        settle(self.state, self.now)
        return time.perf_counter() - began

    def start(self, jobs: Iterable[str]) -> None:
        """Have placed jobs of one node run, for long enough not to be protected any more."""
        for job in jobs:
            placed = self.state.jobs[job]
            [(node, part)] = placed.parts.items()
            self.fold([ev.RanksStarted(job=job, generation=placed.generation, node=node, ranks=tuple(part.ranks))])
        self.cycle()
        self.now += _OLD_MS
        self.cycle()

    def end(self, jobs: Iterable[str]) -> None:
        """End placed jobs; their nodes are free at once. Nothing is learned of how long they run, so no room is kept for those that wait."""
        for job in jobs:
            nodes = self.state.jobs[job].nodes()
            self.fold([ev.GangFinished(job=job, outcome="cancelled", cause="stopped", message="")])
            self.fold([ev.PartReleased(job=job, node=node) for node in nodes])


def run(nodes: int, gpus: int, jobs: int, profile: str = "") -> dict[str, Any]:
    """Return the figures; `profile` names the one whose profile is added."""
    calm_garbage_collector()
    cluster = Cluster(nodes, gpus)
    cluster.cycle()  # takes all nodes into the policy's world, which is done once when a scheduler takes over
    figures: dict[str, Any] = {}
    measures = {"placements_per_s": _fill, "idle_cycle_ms": _idle, "unschedulable_proof_ms": _proof, "gang512_p99_ms": _gangs}
    for name, measure in measures.items():
        if name == "idle_cycle_ms":
            _queue(cluster, jobs)
        if name != profile:
            figures[name] = measure(cluster)
            continue
        with cProfile.Profile() as profiler:
            figures[name] = measure(cluster)
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
        figures["profile"] = text.getvalue()
    waiting = len(cluster.state.queue)
    return figures | {"nodes": nodes, "gpus": nodes * gpus, "running": len(cluster.state.running), "pending": waiting}


def curve(nodes: int, gpus: int, pending: Iterable[int] = PENDING) -> list[dict[str, Any]]:
    """Return what single steps cost, in ms, on one full cluster while ever more gangs wait: medians, the number of nodes staying the same.

    idle         a look at the queues although nothing has happened
    submission   the cycle after one more gang was submitted, which waits
    placement    the cycle after a gang of one GPU was submitted that is placed
    """
    calm_garbage_collector()
    cluster = Cluster(nodes, gpus)
    cluster.cycle()
    _fill(cluster)
    cluster.end(list(cluster.state.running)[-_PLACED:])
    cluster.cycle()
    rows = []
    for count in pending:
        _queue(cluster, count - len(cluster.state.queue))
        cluster.cycle()
        cluster.cycle()
        steps = {"idle_ms": _looks_again, "submission_ms": lambda c: _joins(c, _large(c.state.submitted)), "placement_ms": _fits}
        row: dict[str, Any] = {"pending": len(cluster.state.queue)}
        rows.append(row | {name: statistics.median(step(cluster) for _ in range(_CURVE_ROUNDS)) * 1000 for name, step in steps.items()})
    return rows


def _looks_again(cluster: Cluster) -> float:
    cluster.state.scratch.queue_dirty = True
    return cluster.cycle()


def _fits(cluster: Cluster) -> float:
    """Seconds of the cycle that places one GPU's worth before all that wait, for whom room may be kept; the gang is gone afterwards."""
    [job] = cluster.submit([_one(priority=_FIRST)])
    took = cluster.cycle()
    assert cluster.state.jobs[job].state == "placed", "the gang has its place"
    cluster.end([job])
    cluster.cycle()
    return took


def _one(gpus: int = 1, ranks: int = 1, priority: int = 50) -> JobSpec:
    return JobSpec(("true",), priority=priority, gang=Gang(ranks, ranks), resources=Resources(gpus=gpus, cpus_milli=1_000))


def _large(number: int) -> JobSpec:
    """A gang that asks for more than is ever free here, in one of many shapes."""
    return _one(_EACH, _FREE + 1 + number % _SHAPES)


def _fill(cluster: Cluster) -> float:
    """One-GPU jobs placed per second, until the cluster is full."""
    total = sum(len(node.registration.gpus) for node in cluster.state.nodes.values())
    cluster.submit([_one()] * total)
    took = cluster.cycle()
    assert len(cluster.state.running) == total, "every job has a place"
    cluster.start(list(cluster.state.running))
    return total / took


def _queue(cluster: Cluster, jobs: int) -> None:
    """Have gangs of many shapes wait, none of which can get a place in this measurement."""
    before = len(cluster.state.queue)
    cluster.submit(_large(i) for i in range(jobs))
    cluster.cycle()
    assert len(cluster.state.queue) == before + jobs, "every gang waits"


def _idle(cluster: Cluster) -> float:
    """The median cycle in which a gang joins the queue and nothing can be placed."""
    return statistics.median(_joins(cluster, _large(i)) for i in range(_IDLE_ROUNDS)) * 1000


def _proof(cluster: Cluster) -> float:
    """The median cycle that proves that ten ranks of eight GPUs have no place on the full cluster, whoever is moved or evicted."""
    return statistics.median(_joins(cluster, _one(_EACH, 10)) for _ in range(_PROOF_ROUNDS)) * 1000


def _joins(cluster: Cluster, spec: JobSpec) -> float:
    """Seconds of the cycle after a submission; the gang that waits then is taken away again."""
    [job] = cluster.submit([spec])
    took = cluster.cycle()
    assert cluster.state.jobs[job].deferral is not None, "it waits, and why is recorded"
    cluster.fold([ev.GangFinished(job=job, outcome="cancelled", cause="stopped", message="")])
    cluster.cycle()
    return took


def _gangs(cluster: Cluster) -> float:
    """The 99th percentile of the cycles that place a gang of 512 ranks, with a long queue of gangs before it that do not fit."""
    jobs = list(cluster.state.running)
    free = min(_FREE * _EACH, len(jobs))
    cluster.end(jobs[-free:])
    cluster.cycle()
    took = []
    for _ in range(_GANG_ROUNDS):
        [job] = cluster.submit([_one(ranks=min(_RANKS, free))])
        took.append(cluster.cycle())
        assert cluster.state.jobs[job].state == "placed", "the gang has its place"
        cluster.end([job])
        cluster.cycle()
    return sorted(took)[-1 - len(took) // 100] * 1000
