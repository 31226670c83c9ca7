"""What queues should have now, from the state alone: for whoever shows it. The passes work it out on the world that they keep (fairshare.py).

It costs as much as there are live jobs and nodes, so nothing that decides asks for it. A gang that takes several GPU models counts for each of
them here; the passes count it for the first one that has room for it, if there is one, and do not count gangs that may be on no node now.
"""

from __future__ import annotations

from gangline.core.model.accounting import offers
from gangline.core.model.gpushares import charged_milli
from gangline.core.model.roles import leaves
from gangline.core.model.state import Job, State
from gangline.core.model.usage import usage_of
from gangline.core.policy.declared import queue_specs
from gangline.core.policy.fairshare import ToDivide, divide_all
from gangline.core.policy.queues import Queue
from gangline.core.policy.requests import Vector, add
from gangline.core.policy.world import World

_MIB = 1 << 20


def queues_with_shares(state: State, now_ms: int) -> dict[str, Queue]:
    """Return the declared queues, or the implicit one, by path, with what they are allocated and their fair shares.

    Gangs that are leaving do not count, nor do those that wait in a queue on hold.
    """
    tree, world = state.queues, World()
    world.add_queues(queue_specs(tree))
    models = dict.fromkeys(model for queue in world.roots()[:1] for model in queue.models)
    found = ToDivide((0, 0, 0), {}, {})
    for node in state.nodes.values():
        gpus, cpus, memory_mib = offers(node)
        found.total = add(found.total, (gpus, cpus, memory_mib * _MIB))
        model = node.registration.gpus[0].model if node.registration.gpus else ""
        found.by_model[model] = found.by_model.get(model, 0) + gpus
    for job_id in state.running:
        job = state.jobs[job_id]
        if job.state != "preempting":
            _allocate(state, world.queues[tree.leaf_of(job.spec.queue)], job)
    for _, _, job_id in state.queue:
        job = state.jobs[job_id]
        if not tree.starts(job.spec.queue):
            continue
        queue = world.queues[tree.leaf_of(job.spec.queue)]
        for leaf in leaves(job.spec):
            vector = _vector(leaf.gang.ranks, leaf.resources.charged_milli(), leaf.resources.cpus_milli, leaf.resources.memory_mib)
            queue.waiting = add(queue.waiting, vector)
            for model in models if vector[0] else ():
                if not leaf.resources.gpu_models or model in leaf.resources.gpu_models:
                    for above in queue.path:
                        found.waiting[above, model] = found.waiting.get((above, model), 0) + vector[0]
    for path in tree.half_lives_ms:
        world.queues[path].usage = usage_of(state.usage, tree, path, now_ms)
    divide_all(world.roots(), found)
    return world.queues


def _allocate(state: State, queue: Queue, job: Job) -> None:
    specs = leaves(job.spec)
    for node_id, part in job.parts.items():
        gpus = state.nodes[node_id].registration.gpus if node_id in state.nodes else ()
        model = gpus[0].model if gpus else ""
        for rank in part.ranks.values():
            res = specs[rank.leaf].resources
            vector = _vector(1, charged_milli(rank.gpus, rank.share), res.cpus_milli, res.memory_mib)
            for above in queue.path:
                above.allocated = add(above.allocated, vector)
                if model in above.models:
                    above.models[model].allocated += vector[0]


def _vector(times: int, gpus_milli: int, cpus_milli: int, memory_mib: int) -> Vector:
    return (times * gpus_milli, times * cpus_milli, times * memory_mib * _MIB)
