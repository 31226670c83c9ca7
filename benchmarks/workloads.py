"""The throughput workloads of the Kueue suite, end to end over the log with simulated agents (benchmarks/rig.py).

The generators and the published figures are in queue_throughput_workloads.json: facts of the performance suite of kubernetes-sigs/kueue
(test/performance/scheduler/configs, August 2026, Apache-2.0). Its unit of the one resource is a CPU here. A cohort is a queue with as many
queues below it; nominal quota is quota; what a queue may borrow is its limit, bounded by what the cohort has.

    floor = sum over all jobs of run time x request / sum of the nominal quotas
"""

from __future__ import annotations

import json
import statistics
from importlib.resources import files
from typing import Any

from gangline.benchmarks.history import Life
from gangline.benchmarks.rig import Job, Rig, Shape, rig
from gangline.leader.process import calm_garbage_collector

NAMES = ("baseline", "topology", "large_scale")
#: CPUs of a node where the workload says nothing of nodes, and how much more room than quota there is, so that the quota is what binds
_NODE_CPUS = 96
_ROOM = 1.6
_TIMEOUT_S = 3_600.0


def published(name: str) -> dict[str, Any]:
    """Return what the file says of a workload."""
    text = files("gangline.benchmarks").joinpath("queue_throughput_workloads.json").read_text()
    found: dict[str, Any] = json.loads(text)[name]
    return found


def run(name: str, cohorts: int = 0) -> dict[str, Any]:
    """Run a workload, or only so many of its cohorts, and return the figures."""
    calm_garbage_collector()
    facts = published(name)
    whole = cohorts in (0, facts["cohorts"])
    facts["cohorts"] = cohorts or facts["cohorts"]
    jobs = schedule(facts)
    with rig(shape(facts)) as cluster:
        cluster.declare(queues(facts))
        cluster.begin()
        late = cluster.submit_at(jobs)
        submitted_s = cluster.wall_s()
        cluster.history.wait(lambda: cluster.history.finished >= len(jobs), "all jobs to end", _TIMEOUT_S)
        figures = _figures(facts, cluster) | {"submitted_s": round(submitted_s, 2), "last_submission_late_s": round(late, 2)}
    ours = figures["mean_time_to_admission_s"]
    if whole:
        theirs = facts["published"]
        times = {"wall": theirs["wall_s"] / figures["wall_s"]}
        times |= {name: s / ours[name] for name, s in theirs["mean_time_to_admission_s"].items() if ours.get(name)}
        figures |= {"published": theirs, "times_faster": {name: round(value, 2) for name, value in times.items()}}
    return {"workload": name} | figures


def _figures(facts: dict[str, Any], cluster: Rig) -> dict[str, Any]:
    lives = list(cluster.history.jobs.values())
    assert all(life.outcome == "succeeded" for life in lives), "every job succeeds"
    wall_s = (max(life.finished_ms for life in lives) - min(life.submitted_ms for life in lives)) / 1000
    cpu_s = cluster.cpu_s()
    floor_s = floor(facts)
    classes = {w["priority"]: w["class"] for w in facts["workloads"]}
    return {
        "jobs": len(lives),
        "queues": facts["cohorts"] * facts["queues_per_cohort"],
        "nodes": shape(facts).nodes,
        "floor_s": round(floor_s, 2),
        "wall_s": round(wall_s, 2),
        "ratio": round(wall_s / floor_s, 3),
        "nominal_use_pct": round(100 * floor_s / wall_s, 1),
        "jobs_per_s": round(len(lives) / wall_s, 1),
        "mean_time_to_admission_s": admission(lives, classes),
        "evictions": sum(life.evictions for life in lives),
        "events": cluster.history.events,
        "entries": cluster.history.frames,
        "cpu_s": cpu_s,
        "scheduler_cpu_ms_per_job": round(1000 * cpu_s["scheduler"] / len(lives), 3),
    }


def floor(facts: dict[str, Any]) -> float:
    """Return the seconds below which the work cannot be done within the nominal quotas."""
    work = sum(w["count"] * w["runtime_ms"] / 1000 * units(w) for w in facts["workloads"])
    return float(work / facts["nominal_quota"])


def units(workload: dict[str, Any]) -> float:
    """Return what one job of a class holds."""
    return float(workload["ranks"] * workload["request_per_rank"] if "ranks" in workload else workload["request"])


def admission(lives: list[Life], classes: dict[int, str]) -> dict[str, float]:
    """Return the mean seconds from submission to first placement by class."""
    out = {}
    for priority, name in classes.items():
        some = [life.placed_ms - life.submitted_ms for life in lives if life.priority == priority]
        out[name] = round(statistics.fmean(some) / 1000, 3)
    return out


def shape(facts: dict[str, Any]) -> Shape:
    """Return the nodes of a workload."""
    there = facts.get("topology")
    if there:
        racks = there["blocks"] * there["racks_per_block"]
        levels = {"block": there["racks_per_block"] * there["nodes_per_rack"], "rack": there["nodes_per_rack"]}
        return Shape(racks * there["nodes_per_rack"], cpus=there["node_capacity_units"], levels=levels)
    units_in_all = facts["cohorts"] * facts["queues_per_cohort"] * facts["nominal_quota"]
    return Shape(-(-int(units_in_all * _ROOM) // _NODE_CPUS), cpus=_NODE_CPUS)


def queues(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the queues as a cluster file has them."""
    quota, count = facts["nominal_quota"], facts["queues_per_cohort"]
    whole = quota * count
    below = {f"q{i}": {"quota": {"cpus": quota}, "limit": {"cpus": min(whole, quota + facts["borrowing_limit"])}} for i in range(count)}
    cohort = {"quota": {"cpus": whole}, "limit": {"cpus": whole}, "reclaim_min_runtime": "0s", "queues": below}
    return {f"c{i}": cohort for i in range(facts["cohorts"])}


def schedule(facts: dict[str, Any]) -> list[tuple[float, Job]]:
    """Return all jobs with the second of their submission, in order."""
    out: list[tuple[float, Job]] = []
    for cohort in range(facts["cohorts"]):
        for queue in range(facts["queues_per_cohort"]):
            for workload in facts["workloads"]:
                job = _job(workload) | {"queue": f"c{cohort}/q{queue}"}
                out += [(i * workload["creation_interval_ms"] / 1000, job) for i in range(workload["count"])]
    out.sort(key=lambda one: one[0])
    return out


def _job(workload: dict[str, Any]) -> Job:
    job: Job = {
        "command": ["sleep", str(workload["runtime_ms"] / 1000)], "priority": workload["priority"], "preemptible": True,
        "resources": {"cpus": workload.get("request_per_rank", workload.get("request"))},
    }  # fmt: skip
    if "ranks" not in workload:
        return job
    ranks, (kind, _, rest) = workload["ranks"], workload["constraint"].partition(" ")
    if kind != "balanced":
        return job | {"gang": {"ranks": ranks}, "topology": {kind: rest}}
    level, size = rest.split(", slice ")
    # A slice is what is spread in equal numbers: a replica of a role.
    role = {"name": "slice", "ranks": int(size), "replicas": ranks // int(size), "resources": job.pop("resources"), "topology": {kind: level}}
    return job | {"roles": [role]}
