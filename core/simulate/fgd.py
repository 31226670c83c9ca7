"""The protocol of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023): tasks arrive until 130 % of the GPUs are asked for, and none leaves.

Only nodes with GPUs take part. Tasks are sorted by name and shuffled by the seed. If they ask for less than 1.3 times the GPUs, tasks drawn with
replacement from the list are appended until the next would pass it; the stop test adds what the task asks of one GPU, as the authors' simulator
has it. If they ask for more, tasks drawn by chance are removed. A task that does not fit when it arrives is dropped, and counts as arrived.

The policy of production runs as it does in a scheduler: each arrival is a job in the what-if world (core/policy/world.py), a session decides,
and its decision is settled. It knows the mix of the list, as the published policy does. The other policies (published.py) are for comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random

from gangline.core.policy.fragmentation import Kind, Measure, typical
from gangline.core.policy.gangs import Job, Podset, PodsetGroup, Rank
from gangline.core.policy.nodes import NodeSpec
from gangline.core.policy.placing import Placer
from gangline.core.policy.queues import QueueSpec
from gangline.core.policy.requests import GPU, Request
from gangline.core.policy.session import run_session
from gangline.core.policy.world import Options, World
from gangline.core.simulate import published
from gangline.core.simulate.formats.openb import OpenbNode, OpenbTask, read_nodes, read_tasks
from gangline.core.simulate.protocols import Asked, Result, Tick, Unusable
from gangline.core.simulate.published import COVERED, Room

POLICIES = {
    "production": "what schedules the cluster, with the measure of fragmentation (core/policy/fragmentation.py)",
    "fullest": "what schedules the cluster, without a measure: the fullest node that has room",
    **published.POLICIES,
}

#: GPUs asked for in all, in per cent of those that there are
ASKED_PCT = 130
#: where the allocation is told, in per cent of the GPUs asked for so far
TOLD_PCT = (80, 90, 95, 100, 110, 120, 130)
_MIB = 1 << 20


@dataclass
class Cluster:
    """A policy at work: `place` tries a task and says whether it was placed; `rooms` returns what is idle, in the order of the nodes."""

    place: Callable[[OpenbTask], bool]
    rooms: Callable[[], list[Room]]


def run(asked: Asked, tick: Tick) -> Result:
    """Run the protocol on a list of nodes and one of tasks. Raises BadTrace, Unusable."""
    if asked.nodes is None or len(asked.tasks) != 1:
        raise Unusable("The protocol fgd needs one list of nodes and one of tasks: --nodes FILE --tasks FILE.")
    nodes = sorted((n for n in read_nodes(asked.nodes) if n.gpus), key=lambda n: n.name)
    tasks = read_tasks(asked.tasks[0])
    if not nodes or not any(task.total_milli for task in tasks):
        raise Unusable(f"There must be nodes with GPUs in {asked.nodes}, and tasks that ask for GPUs in {asked.tasks[0]}.")
    return replay(nodes, tasks, asked.policy or "production", asked.seed, tick)


def replay(nodes: list[OpenbNode], tasks: list[OpenbTask], policy: str, seed: int, tick: Tick) -> Result:
    """Run the protocol with the policy of this name."""
    began = time.perf_counter()
    mix = mix_of(tasks)
    capacity = sum(n.gpus for n in nodes) * GPU
    arrivals = arrivals_of(tasks, capacity, seed)
    if policy in published.POLICIES:
        cluster: Cluster = _published(nodes, mix, policy, seed)
    else:
        cluster = production(nodes, Measure(typical(mix)) if policy == "production" else None)
    arrived = allocated = placed = 0
    at: dict[int, float] = {}
    for number, task in enumerate(arrivals):
        if number % 128 == 0:
            tick(number, len(arrivals))
        arrived += task.total_milli
        if cluster.place(task):
            placed += 1
            allocated += task.total_milli
        at[round(100 * arrived / capacity)] = 100 * allocated / capacity
    rooms = cluster.rooms()
    idle = sum(sum(room.idle) for room in rooms)
    if idle != capacity - allocated:
        raise AssertionError(f"{idle} thousandths are idle, and {capacity - allocated} were not given out")
    measure = Measure(typical(mix, COVERED))
    fragments = sum(measure.fragments(room.model, room.cpu_milli, tuple(sorted(room.idle))) for room in rooms)
    figures = {
        "protocol": "fgd", "policy": policy, "seed": seed, "nodes": len(nodes), "gpus": capacity // GPU,
        "tasks": len(arrivals), "placed": placed, "dropped": len(arrivals) - placed,
        "arrived_pct": round(100 * arrived / capacity, 3),
        "allocated_pct": round(100 * allocated / capacity, 3),
        "fragmentation_pct": round(100 * fragments / capacity, 3),
        "fragmentation_of_idle_pct": round(100 * fragments / idle, 3) if idle else 0.0,
        "unallocated_gpus": round((capacity - allocated) / GPU, 3),
        "allocated_pct_at": {str(told): round(_up_to(at, told), 3) for told in TOLD_PCT},
        "seconds": round(time.perf_counter() - began, 3),
    }  # fmt: skip
    return Result(figures, _lines(figures))


def arrivals_of(tasks: list[OpenbTask], capacity_milli: int, seed: int) -> list[OpenbTask]:
    """Return the tasks in the order of their arrival."""
    random, known = Random(seed), sorted(tasks, key=lambda t: t.name)
    out, goal = list(known), capacity_milli * ASKED_PCT / 100
    random.shuffle(out)
    asked = sum(t.total_milli for t in out)
    if asked < goal:
        while asked + (task := known[random.randrange(len(known))]).gpu_milli <= goal:
            out.append(task)
            asked += task.total_milli
    while asked > goal and (gone := out.pop(random.randrange(len(out)))):
        asked -= gone.total_milli
    return out


def mix_of(tasks: list[OpenbTask]) -> dict[Kind, int]:
    """Return how many tasks there are of each kind."""
    counts: dict[Kind, int] = {}
    for task in tasks:
        kind = published.kind_of(task)
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def production(nodes: list[OpenbNode], measure: Measure | None) -> Cluster:
    """Return the engine of production on these nodes, with one queue; `measure` says what idle room is worth."""
    world = World(Options(quotas=False, evict_for_surplus=False))
    world.measure = measure
    world.add_nodes(NodeSpec(n.name, n.gpus, 0, n.cpu_milli, n.memory_mib * _MIB, 1 << 20, gpu_model=n.model) for n in nodes)
    world.add_queue(QueueSpec("all"))
    queue, placer, numbers = world.queues["all"], Placer(world), count()
    of_models: dict[tuple[str, ...], tuple[str, ...] | None] = {(): None}

    def place(task: OpenbTask) -> bool:
        if task.models not in of_models:
            of_models[task.models] = tuple(n.name for n in nodes if n.model in task.models)
        request = Request(task.gpus, task.gpu_milli, cpu_milli=task.cpu_milli, memory_bytes=task.memory_mib * _MIB, nodes=of_models[task.models])
        podset = Podset("ranks", 1)
        number = next(numbers)
        job = Job(f"{number}", queue, priority=0, preemptible=False, order=number, root=PodsetGroup("job", None, [podset]))
        rank = Rank(job, 0, job.name, world.intern(request), None)
        rank.podset = podset
        podset.ranks.append(rank)
        job.ranks.append(rank)
        world.add_job(job)
        placed = bool(run_session(world, ("allocate",), placer).placements)
        world.settle()
        if not placed:
            world.remove_job(job.name)
        return placed

    def rooms() -> list[Room]:
        found = (world.node_by_name[n.name] for n in nodes)
        return [Room(n.name, n.model, n.cpu_idle, n.memory_idle // _MIB, [each * GPU // n.full for each in n.dev_idle]) for n in found]

    return Cluster(place, rooms)


def _published(nodes: list[OpenbNode], mix: dict[Kind, int], policy: str, seed: int) -> Cluster:
    cluster = published.Published(nodes, policy, Measure(typical(mix, COVERED)), seed)
    return Cluster(cluster.place, lambda: cluster.rooms)


def _up_to(at: dict[int, float], pct: int) -> float:
    """Return the allocation when so many per cent, rounded, had arrived."""
    return max((share for arrived, share in at.items() if arrived <= pct), default=0.0)


def _lines(figures: dict[str, object]) -> list[str]:
    at = figures["allocated_pct_at"]
    assert isinstance(at, dict)
    return [
        f"{figures['policy']}, seed {figures['seed']}: {figures['tasks']} tasks on {figures['nodes']} nodes with {figures['gpus']} GPUs",
        f"allocated            {figures['allocated_pct']:.2f} % of the GPUs, when {figures['arrived_pct']:.1f} % of them had been asked for",
        f"not allocated        {figures['unallocated_gpus']:.1f} GPUs",
        f"fragmentation        {figures['fragmentation_pct']:.2f} % of all GPUs, {figures['fragmentation_of_idle_pct']:.2f} % of the idle ones",
        f"dropped              {figures['dropped']} tasks",
        "allocated by arrived " + ", ".join(f"{pct} %: {share:.2f}" for pct, share in at.items()),
        f"computed in          {figures['seconds']:.1f} s",
    ]
