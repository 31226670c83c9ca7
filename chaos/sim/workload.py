"""What clients of the simulated cluster ask for: jobs of every kind, queues, reservations. Drawn from a generator that the caller brings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.core.model.arrays import parse_array
from gangline.core.model.gpufacts import MIG_LAYOUTS
from gangline.core.model.queues import Amounts, QueueSpec, Weights
from gangline.core.model.reservations import WHOLE, KeptNode, Reservation
from gangline.core.model.spec import Condition, Dependency, Elastic, Gang, JobSpec, Preemption, Resources, Restart, Role, TopologyRequest

#: devices of each node
GPUS = 4
#: queues that jobs go to where some are declared
LEAVES = ("default", "team/a", "team/b")
#: GPUs of the largest job, MIG instances counted by their slices
LARGEST = 8 * 2 * 7


def job(rng: random.Random, nodes: int) -> JobSpec:
    """Return a job that fits into an empty cluster of so many nodes."""
    resources = devices(rng)
    most = max(resources.gpus, resources.mig_count, int(resources.shares_gpu))
    ranks = rng.choice((1, 1, 2, 3, 4, 6, 8, 8))
    while ranks * most > GPUS * nodes:
        ranks //= 2
    per_node = rng.choice((0, 0, 2)) if ranks % 2 == 0 and ranks // 2 <= nodes else 0
    unit = per_node or 1
    gang = Gang(ranks, ranks if rng.random() < 0.5 else max(unit, ranks // 2 // unit * unit), per_node)
    restart = Restart(
        on_rank_failure=rng.choice(("gang", "gang", "rank", "never")), on_node_failure=rng.choice(("reschedule",) * 4 + ("fail",)),
        max_restarts=rng.choice((1, 3, 100)), backoff_initial_s=rng.choice((0.0, 0.5, 3.0)), backoff_max_s=10.0,
    )  # fmt: skip
    fits = gang.min_ranks <= 2 * per_node if per_node else gang.min_ranks * most <= 2 * GPUS
    parts = roles(rng) if rng.random() < 0.25 else ()
    near = rng.choice(("", "", "preferred", "required" if fits and not parts else "preferred"))
    return JobSpec(
        ("train",), gang=gang, elastic=Elastic(rng.choice((1.0, 5.0, 20.0))),
        topology=_near(near, "rack"), priority=rng.choice((10, 50, 150)),
        preemptible=rng.random() < 0.7, restart=restart, resources=resources, roles=parts,
        time_limit_s=rng.choice((0.0, 0.0, 15.0, 60.0)), preemption=Preemption(grace_s=rng.choice((0.5, 3.0, 10.0))),
        on_disconnect=rng.choice(("stop", "stop", "stop", "keep")),
    )  # fmt: skip


def _near(how: str, level: str) -> TopologyRequest:
    nowhere = TopologyRequest()
    match how:
        case "required":
            return msgspec.structs.replace(nowhere, required=level)
        case "preferred":
            return msgspec.structs.replace(nowhere, preferred=level)
        case "balanced":
            return msgspec.structs.replace(nowhere, balanced=level)
        case "spread":
            return msgspec.structs.replace(nowhere, spread=level)
        case _:
            return nowhere


def devices(rng: random.Random) -> Resources:
    """Return whole GPUs, parts of one, or MIG instances."""
    cpus = rng.choice((100, 4_000))
    match rng.randrange(8):
        case 0:
            return Resources(cpus_milli=cpus, gpu_share_milli=rng.choice((100, 330, 500, 700)))
        case 1:
            return Resources(cpus_milli=cpus, gpu_memory_mib=rng.choice((8_000, 26_667, 40_000, 60_001)))
        case 2:
            return Resources(cpus_milli=cpus, mig=rng.choice(MIG_LAYOUTS["H100"].profiles).name, mig_count=rng.choice((1, 1, 2)))
        case _:
            return Resources(gpus=rng.choice((0, 1, 1, 2)), cpus_milli=cpus)


def roles(rng: random.Random) -> tuple[Role, ...]:
    """Return two or three kinds of rank, of which some are in replicas: so few that they fit together."""
    nowhere = TopologyRequest()

    def role(name: str, most: int, topology: TopologyRequest = nowhere) -> Role:
        ranks = rng.randrange(1, most + 1)
        resources = Resources(gpus=rng.choice((0, 1)), cpus_milli=rng.choice((100, 500)))
        return Role(name, Gang(ranks, rng.choice((ranks, 1))), resources, topology=topology)

    near = _near(rng.choice(("preferred", "balanced", "spread")), rng.choice(("rack", "hostname")))
    group = Role("g", replicas=2, min_replicas=rng.choice((0, 1, 2)), roles=(role("x", 1), role("y", 2)), topology=near)
    return (role("a", 2, near), group) if rng.random() < 0.5 else (role("a", 2), role("b", 3, near))


def conditional(rng: random.Random, spec: JobSpec, known: Sequence[str]) -> JobSpec:
    """Return the job as an array, or as one that waits for some that are known, or for its time."""
    others = rng.sample(list(known), min(len(known), rng.choice((0, 0, 1, 2))))
    conditions: tuple[Condition, ...] = ("after_ok", "after_any", "after_not_ok", "after_start")
    return msgspec.structs.replace(
        spec, array=parse_array(rng.choice(("0-5%2", "0-9:3", "1,3,5-7%1"))) if rng.random() < 0.4 else None,
        depends_on=tuple(Dependency(job, rng.choice(conditions)) for job in others), hold=rng.random() < 0.2,
        begin_after_s=rng.choice((0.0, 0.0, 15.0)), deadline_after_s=rng.choice((0.0, 0.0, 0.0, 60.0)),
    )  # fmt: skip


def in_queue(rng: random.Random, spec: JobSpec) -> tuple[JobSpec, str]:
    """Return the job in one of the declared queues, and whose it is."""
    queue = rng.choice(LEAVES)
    # Only the first has no bounds on what cannot be preempted.
    return msgspec.structs.replace(spec, queue=queue, preemptible=spec.preemptible or queue != LEAVES[0]), rng.choice(("ann", "bob"))


def queues(rng: random.Random, nodes: int) -> tuple[QueueSpec, ...]:
    """Return a declaration of the same queues with other amounts, for a cluster of so many nodes."""

    def amounts(least: int) -> Amounts:
        """Of nothing, or of at least so many GPUs: no job is larger."""
        most = GPUS * nodes + least
        models = {"H100": rng.randint(least, most) * 1000} if rng.random() < 0.5 else {}
        return Amounts(rng.choice((None, rng.randint(least, most) * 1000)), models=models)

    def queue(path: str, **more: Any) -> QueueSpec:
        return QueueSpec(
            path, over_quota_weight=Weights(rng.choice((1.0, 2.0)), models={"H100": 3.0} if rng.random() < 0.3 else {}),
            priority=rng.choice((100, 100, 200)), reclaim_min_runtime_s=rng.choice((None, 0.0, 5.0)),
            preempt_min_runtime_s=rng.choice((None, 10.0)), usage_half_life_s=rng.choice((None, 0.0, 60.0, 300.0)),
            user_fairness=rng.random() < 0.5, **more,
        )  # fmt: skip

    top, default, a, b = ("team", *LEAVES)
    return (
        queue(default), queue(top, quota=amounts(0), limit=amounts(LARGEST)), queue(a, quota=amounts(0), limit=amounts(LARGEST)),
        queue(b, quota=amounts(0)),
    )  # fmt: skip


def reservation(rng: random.Random, name: str, nodes: Sequence[str], now_ms: int) -> Reservation:
    """Keep one or two of the nodes, or some of their GPUs, for maintenance or for somebody, soon and not for long."""
    maintenance = rng.random() < 0.5
    some = rng.sample(list(nodes), min(len(nodes), rng.choice((1, 1, 2))))
    start_ms = now_ms + rng.choice((0, 5_000, 20_000))
    return Reservation(
        name, tuple(KeptNode(node, rng.choice((WHOLE, WHOLE, 2))) for node in some), start_ms, start_ms + rng.choice((5_000, 30_000)),
        users=() if maintenance else ("ann",), maintenance=maintenance, deadline_s=5.0 if maintenance else 0.0,
    )  # fmt: skip
