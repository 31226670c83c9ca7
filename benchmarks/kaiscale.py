"""The scale cases of KAI-Scheduler, end to end over the log with simulated agents (benchmarks/rig.py).

What they do follows test/e2e/scale of NVIDIA/KAI-Scheduler (Apache-2.0), where nodes are simulated by KWOK; the published seconds are in
queue_throughput_workloads.json. Each case has a cluster of its own. Its clock runs from the submission (where the queue is built first, from the
moment at which the queue is opened) until all ranks of what was asked for execute, which is later than what KAI-Scheduler measures, the binding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from gangline.benchmarks.rig import Job, Rig, Shape, rig
from gangline.benchmarks.workloads import published
from gangline.leader.process import calm_garbage_collector

_NODES = 500
_GPUS = 8
_RANKS = 10
_SAMPLES = 10
_TIMEOUT_S = 1_200.0
#: seconds that a rank of the burst runs; in the published run it is 20 to 40
BURST_RUN_S = 1.0
_BURST_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BURST_OF_EACH = 90


class Case(msgspec.Struct, frozen=True):
    """One case: `measure` returns the seconds that compare with the published ones."""

    #: as it is named on the command line, and in the file
    name: str
    published: str
    measure: Callable[[Rig, int], float]
    nodes: int = _NODES
    levels: dict[str, int] = {}
    #: in the figures, besides
    note: str = ""


def run(only: Sequence[str], nodes: int = 0) -> dict[str, Any]:
    """Run the cases and return for each what it took, beside what was published; on so many nodes, or as many as published."""
    calm_garbage_collector()
    unknown = [name for name in only if name not in {case.name for case in CASES}]
    if unknown:
        raise click.BadParameter(f"there is no case {unknown[0]!r}; there are {', '.join(case.name for case in CASES)}")
    theirs = {case["case"]: case["published_s"] for case in published("kai_scale")["cases"]}
    out: dict[str, Any] = {"workload": "kai_scale"}
    for case in CASES:
        if only and case.name not in only:
            continue
        click.echo(f"{case.name}: {case.published} ...", err=True)
        count = nodes or case.nodes
        with rig(Shape(count, gpus=_GPUS, cpus=128, levels=case.levels)) as cluster:
            took = case.measure(cluster, count)
            figures: dict[str, Any] = {"seconds": round(took, 3), "cpu_s": cluster.cpu_s(), "case": case.published, "nodes": count}
            figures["evictions"] = sum(life.evictions for life in cluster.history.jobs.values())
            if count == case.nodes:
                figures |= {"published_s": theirs[case.published], "times_faster": round(theirs[case.published] / took, 1)}
            out[case.name] = figures | ({"note": case.note} if case.note else {})
    return out


# ---------------------------------------------------------------- jobs and queues


def _job(queue: str, gpus: int = 1, ranks: int = 1, seconds: float | None = None, **more: Any) -> Job:
    command = ["sleep", f"{seconds:g}" if seconds is not None else "infinity"]
    return {"command": command, "queue": queue, "preemptible": True, "gang": {"ranks": ranks}, "resources": {"gpus": gpus, "cpus": 1}, **more}


def _declare(cluster: Rig, quotas: dict[str, int], held: Sequence[str] = ()) -> None:
    """Declare a queue with others below it; those in `held` take jobs and start none."""
    below = {name: {"quota": {"gpus": quota}, "state": "hold" if name in held else "open"} for name, quota in quotas.items()}
    cluster.declare({"all": {"reclaim_min_runtime": "0s", "queues": below}})


def _fill(cluster: Rig, queue: str, count: int, gpus: int = 1) -> None:
    """Have jobs run on the whole cluster that have no end."""
    cluster.submit([_job(queue, gpus)] * count)
    _running(cluster, count)


def _running(cluster: Rig, count: int) -> None:
    """Wait until so many jobs have been running."""
    cluster.history.wait(lambda: cluster.history.running >= count, f"{count} jobs to run", _TIMEOUT_S)


def _started_in_s(cluster: Rig, jobs: Sequence[Job]) -> float:
    """Submit jobs and return the seconds until all of their ranks execute."""
    before = cluster.history.running
    began = time.monotonic()
    cluster.submit(jobs)
    _running(cluster, before + len(jobs))
    return time.monotonic() - began


def _opened_in_s(cluster: Rig, quotas: dict[str, int], queue: str, jobs: Sequence[Job]) -> float:
    """Submit jobs to a queue that is held, open it, and return the seconds until all of their ranks execute."""
    _declare(cluster, quotas, held=[queue])
    before = cluster.history.running
    cluster.submit(jobs)
    cluster.begin()
    began = time.monotonic()
    _declare(cluster, quotas)
    _running(cluster, before + len(jobs))
    return time.monotonic() - began


# ---------------------------------------------------------------- the cases


def _fill_built_first(cluster: Rig, nodes: int) -> float:
    return _opened_in_s(cluster, {"work": nodes * _GPUS}, "all/work", [_job("all/work")] * (nodes * _GPUS))


def _fill_while_submitting(cluster: Rig, nodes: int) -> float:
    _declare(cluster, {"work": nodes * _GPUS})
    cluster.begin()
    return _started_in_s(cluster, [_job("all/work")] * (nodes * _GPUS))


def _one_gang(cluster: Rig, nodes: int) -> float:
    _declare(cluster, {"work": nodes * _GPUS})
    cluster.begin()
    return _started_in_s(cluster, [_job("all/work", _GPUS, nodes, topology={"preferred": "rack"})])


def _proof(cluster: Rig, nodes: int) -> float:
    """A gang for which so much had to be reclaimed that one GPU of it is within the quota of those who have it."""
    total = nodes * _GPUS
    _declare(cluster, {"work": total - _RANKS * _GPUS + 1, "other": _RANKS * _GPUS - 1})
    _fill(cluster, "all/work", total)
    cluster.begin()
    took = []
    for _ in range(_SAMPLES):
        known = set(cluster.history.jobs)
        began = time.monotonic()
        cluster.submit([_job("all/other", _GPUS, _RANKS)])
        cluster.history.wait(lambda: set(cluster.history.jobs) - known, "the submission", _TIMEOUT_S)  # noqa: B023 - waited for here
        [job] = set(cluster.history.jobs) - known
        life = cluster.history.jobs[job]
        cluster.history.wait(lambda: life.deferred_ms, "the reason", _TIMEOUT_S)  # noqa: B023
        took.append(time.monotonic() - began)
        assert not life.placed_ms, "it has no place"
        cluster.client.stop(job, "measured")
        cluster.history.wait(lambda: life.finished_ms, "its end", _TIMEOUT_S)  # noqa: B023
    return statistics.fmean(took)


def _reclaim(cluster: Rig, nodes: int, each: int, jobs: Sequence[Job], held: bool) -> float:
    """Fill the cluster with jobs of `each` GPUs of a queue without quota, and have one with quota take what it needs."""
    quotas = {"work": 0, "other": nodes * _GPUS}
    _declare(cluster, quotas)
    _fill(cluster, "all/work", nodes * _GPUS // each, each)
    if held:
        return _opened_in_s(cluster, quotas, "all/other", jobs)
    cluster.begin()
    return _started_in_s(cluster, jobs)


def _reclaim_half(cluster: Rig, nodes: int) -> float:
    return _reclaim(cluster, nodes, 1, [_job("all/other", _GPUS, nodes // 2)], held=False)


def _reclaim_all(cluster: Rig, nodes: int) -> float:
    return _reclaim(cluster, nodes, _GPUS, [_job("all/other", _GPUS, nodes)], held=False)


def _reclaim_one(cluster: Rig, nodes: int) -> float:
    first = _reclaim(cluster, nodes, 1, [_job("all/other")], held=False)
    return statistics.fmean([first, *(_started_in_s(cluster, [_job("all/other")]) for _ in range(_SAMPLES - 1))])


def _reclaim_singles(cluster: Rig, nodes: int) -> float:
    return _reclaim(cluster, nodes, 1, [_job("all/other")] * (nodes * _GPUS), held=True)


def _reclaim_gangs(cluster: Rig, nodes: int) -> float:
    return _reclaim(cluster, nodes, 1, [_job("all/other", _GPUS // 2 + 1, _RANKS)] * (nodes // _RANKS), held=True)


def _consolidate(cluster: Rig, nodes: int) -> float:
    """On each node 5 of 8 GPUs are free; gangs whose ranks need 6 have room once one job has left each of their nodes."""
    free = _GPUS // 2 + 1
    quotas = {"work": 0, "other": nodes * _GPUS}
    _declare(cluster, quotas)
    # As many jobs as remain on each node: the larger ones that fill it up first are stopped.
    cluster.submit([_job("all/other", free)] * nodes)
    _running(cluster, nodes)
    fillers = list(cluster.history.jobs)
    _fill_up = nodes * (_GPUS - free)
    cluster.submit([_job("all/work")] * _fill_up)
    _running(cluster, nodes + _fill_up)
    for job in fillers:
        cluster.client.stop(job, "makes room")
    cluster.history.wait(lambda: cluster.history.finished >= nodes, "the fillers to end", _TIMEOUT_S)
    gangs = free * nodes // ((free + 1) * _RANKS)
    return _opened_in_s(cluster, quotas, "all/other", [_job("all/other", free + 1, _RANKS)] * gangs)


def _burst(cluster: Rig, nodes: int) -> float:
    """Gangs of whole nodes in all sizes at once, until the last has ended."""
    _declare(cluster, {"work": nodes * _GPUS})
    jobs = [_job("all/work", _GPUS, size, BURST_RUN_S) for size in _BURST_SIZES if size <= nodes for _ in range(_BURST_OF_EACH)]
    cluster.begin()
    began = time.monotonic()
    cluster.submit(jobs)
    cluster.history.wait(lambda: cluster.history.finished >= len(jobs), "all gangs to end", _TIMEOUT_S)
    return time.monotonic() - began


_RACKS = {"zone": 128, "block": 16, "rack": 2}

CASES = (
    Case("fill", "fill 4000 GPUs with 4000 one-GPU jobs, queue built first", _fill_built_first),
    Case("fill-while-submitting", "same, scheduler running while submitting", _fill_while_submitting),
    Case("gang512", "one gang of 512 ranks over 512 nodes with preferred topology", _one_gang, 512, _RACKS),
    Case("proof", "decide that a 10-rank 80-GPU gang cannot be placed on a full cluster (mean)", _proof),
    Case("reclaim-half", "reclaim 2000 GPUs for one 250-rank job", _reclaim_half),
    Case("reclaim-all", "reclaim 4000 GPUs for one 500-rank job", _reclaim_all),
    Case("reclaim-one", "reclaim one GPU while 4000 jobs run (mean)", _reclaim_one),
    Case("reclaim-singles", "reclaim 4000 single-GPU jobs", _reclaim_singles),
    Case("reclaim-gangs", "reclaim by 50 gangs of 10 ranks", _reclaim_gangs),
    Case("consolidate", "consolidate for 41 gangs / 410 ranks", _consolidate),
    Case(
        "burst", "burst of distributed jobs, 45990 ranks in total", _burst,
        note=f"ranks run {BURST_RUN_S:g} s here and 20 to 40 s there: without these, floors of 92 s and 2,759 s, the rest compares",
    ),
)  # fmt: skip
