"""S3 once more: the state that the fold makes adds up. Of each entry, only what it has touched is looked at.

What a node has free is what it has without what is held there; who holds is placed, or dying; a job that runs was allowed to; an array counts
each of its elements once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import pairwise

from gangline.core.model.arrays import size
from gangline.core.model.gpushares import GPU, GpuUse
from gangline.core.model.state import Job, Node, State


def wrong_in(state: State) -> Iterator[str]:
    """Yield what does not add up, of what has changed since this was asked last."""
    scratch = state.scratch
    nodes, jobs = list(scratch.moved_nodes), dict.fromkeys([*scratch.moved, *scratch.jobs])
    scratch.nobody_decides()
    for name in nodes:
        if name in state.nodes:
            yield from _node(state, state.nodes[name])
    for job_id in jobs:
        if job_id in state.jobs:
            yield from _job(state, state.jobs[job_id])


def wrong_accounts(state: State) -> Iterator[str]:
    """Yield what the accounts of usage say that the nodes do not; looks at everything."""
    held: dict[str, int] = {}
    for node in state.nodes.values():
        for job, holding in node.holdings.items():
            queue = state.jobs[job].spec.queue
            gpus = len(holding.gpus) * GPU + sum(use.charged for use in holding.shares)
            for spec in state.queues.lineage(queue) if queue in state.queues.specs else ():
                held[spec.path] = held.get(spec.path, 0) + gpus
    for path, account in state.usage.queues.items():
        if account.held[0] != held.get(path, 0) or min(account.used) < 0:
            yield f"queue {path} holds {held.get(path, 0)} thousandths of GPUs, and its account says {account}"
        users = state.usage.users.get(path)
        if users is not None and sum(user.held[0] for user in users.values()) != account.held[0]:
            yield f"the users of queue {path} hold other than it: {users}, {account}"


def _node(state: State, node: Node) -> Iterator[str]:
    held = [g for h in node.holdings.values() for g in h.gpus]
    if len(set(held)) != len(held):
        yield f"a GPU of {node.id} is held twice: {node.holdings}"
    yield from _parts(node)
    used = {*held, *node.parted}
    usable = {g.index for g in node.registration.gpus if g.healthy}
    if set(node.free_gpus) != usable - used:
        yield f"free GPUs of {node.id} are {list(node.free_gpus)}, and should be {sorted(usable - used)}"
    cpus = node.registration.cpus_milli - sum(h.cpus_milli for h in node.holdings.values())
    memory = node.registration.memory_mib - sum(h.memory_mib for h in node.holdings.values())
    if (cpus, memory) != (node.free_cpus_milli, node.free_memory_mib):
        yield f"{node.id} has {node.free_cpus_milli} CPUs and {node.free_memory_mib} MiB free, and should have {cpus} and {memory}"
    for job in node.holdings:
        if job not in state.jobs or node.id not in state.jobs[job].held_nodes:
            yield f"{job} holds something on {node.id}, and does not know of it"


def _parts(node: Node) -> Iterator[str]:
    """No GPU is shared beyond the whole, or partitioned into what overlaps, or used in two ways."""
    uses: dict[int, list[GpuUse]] = {}
    for holding in node.holdings.values():
        for use in holding.shares:
            uses.setdefault(use.gpu, []).append(use)
    if set(uses) != set(node.parted):
        yield f"parts of GPUs {sorted(uses)} of {node.id} are held, and not of {sorted(node.parted)}"
        return
    memory = {gpu.index: gpu.memory_mib for gpu in node.registration.gpus}
    for gpu, some in uses.items():
        together = reduce(GpuUse.plus, some)
        # What one gang holds for two of its generations may overlap: the younger starts when the older is gone.
        alone = len(some) == 1 and len(together.mig) > 1
        problem = "" if alone or gpu not in memory else together.problem(memory[gpu])
        if problem or together != node.parted[gpu]:
            yield f"GPU {gpu} of {node.id} {problem or 'is added up wrongly'}: {some}, {node.parted[gpu]}"
        if any(gpu in holding.gpus for holding in node.holdings.values()):
            yield f"GPU {gpu} of {node.id} is held whole and in part"


def _job(state: State, job: Job) -> Iterator[str]:
    nowhere = [n for n in job.held_nodes if n not in state.nodes or job.id not in state.nodes[n].holdings]
    if nowhere:
        yield f"{job.id} thinks that it holds something on {nowhere}"
    if job.active and not set(job.parts) <= set(job.held_nodes):
        yield f"{job.id} is {job.state} on {list(job.parts)}, and holds something on {list(job.held_nodes)} only"
    if (job.id in state.running) != job.active:
        yield f"{job.id} is {job.state}, and is {'' if job.id in state.running else 'not '}among those that run"
    if job.state == "placed" and (job.waits_for or state.at_ms < job.begin_at_ms):
        yield f"{job.id} is placed before {job.waits_for or job.begin_at_ms}"
    if job.elements is not None:
        yield from _array(job)


def _array(array: Job) -> Iterator[str]:
    """No more elements are live than the array allows; when it has ended, each of its elements has ended once."""
    elements, spec = array.elements, array.spec.array
    assert elements is not None
    assert spec is not None
    if spec.at_most and len(elements.live) > spec.at_most:
        yield f"{array.id} has {len(elements.live)} live elements, and allows {spec.at_most}"
    runs = sorted([*elements.succeeded, *elements.failed, *elements.cancelled])
    if any(a[1] >= b[0] for a, b in pairwise(runs)):
        yield f"an element of {array.id} has ended twice: {runs}"
    ended = sum(last - first + 1 for first, last in runs)
    if array.outcome == "succeeded" and ended != size(spec):
        yield f"{array.id} has succeeded, and {ended} of its {size(spec)} elements have ended"
