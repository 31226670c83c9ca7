"""What must be true of every folded state, and of what ran: beside the checker's S1 to S16, which know nothing of how the state is kept."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

from gangline.chaos.sim.node import Run
from gangline.core.model.arrays import size
from gangline.core.model.gpushares import GpuUse, uses_of
from gangline.core.model.state import Job, Node, State


class Violation(AssertionError):
    """Something that must always be true was not."""


def check_state(state: State) -> None:
    """What must be true of every state."""
    for node in state.nodes.values():
        held = [g for h in node.holdings.values() for g in h.gpus]
        if len(set(held)) != len(held):
            raise Violation(f"index {state.index}: a device of {node.id} is held twice: {node.holdings}")
        held += check_parts(state, node)
        if set(held) & set(node.free_gpus):
            raise Violation(f"index {state.index}: a device of {node.id} is held and free")
        usable = {g.index for g in node.registration.gpus if g.healthy}
        if set(node.free_gpus) != usable - set(held):
            raise Violation(f"index {state.index}: free devices of {node.id} are {node.free_gpus}, not {usable - set(held)}")
        cpus = node.registration.cpus_milli - sum(h.cpus_milli for h in node.holdings.values())
        if cpus != node.free_cpus_milli:
            raise Violation(f"index {state.index}: free CPUs of {node.id} are {node.free_cpus_milli}, not {cpus}")
    check_accounts(state)
    for job in state.jobs.values():
        held_on = [n.id for n in state.nodes.values() if job.id in n.holdings]
        if sorted(held_on) != sorted(job.held_nodes):
            raise Violation(f"index {state.index}: {job.id} holds on {held_on}, and thinks {list(job.held_nodes)}")
        if job.active and not set(job.parts) <= set(held_on):
            raise Violation(f"index {state.index}: {job.id} is {job.state} on {list(job.parts)} and holds on {held_on}")
        if job.active and job.spec.topology.required:
            racks = {state.nodes[n].registration.labels["rack"] for n in job.parts}
            if len(racks) > 1:
                raise Violation(f"index {state.index}: {job.id} is to be in one rack and is in {racks}")
        if (job.id in state.running) != job.active:
            raise Violation(f"index {state.index}: {job.id} is {job.state}, running: {job.id in state.running}")
        if job.active and (job.waits_for or state.at_ms < job.begin_at_ms):
            raise Violation(f"index {state.index}: {job.id} runs before {job.waits_for} or {job.begin_at_ms}")
        check_array(state, job)


def check_array(state: State, array: Job) -> None:
    """No more elements are live than the array allows; when it has ended, each of its elements has ended once."""
    elements, spec = array.elements, array.spec.array
    if elements is None or spec is None:
        return
    live = [j.id for j in state.jobs.values() if j.array == array.id and j.state != "finished"]
    if sorted(live) != sorted(elements.live) or (spec.at_most and len(live) > spec.at_most):
        raise Violation(f"index {state.index}: {array.id} has {live} live, knows of {list(elements.live)}, allows {spec.at_most}")
    ended = [p for runs in (elements.succeeded, elements.failed, elements.cancelled) for a, b in runs for p in range(a, b + 1)]
    if len(set(ended)) != len(ended):
        raise Violation(f"index {state.index}: an element of {array.id} has ended twice: {ended}")
    if array.outcome == "succeeded" and sorted(ended) != list(range(size(spec))):
        raise Violation(f"index {state.index}: {array.id} has succeeded, and only {ended} have ended")


def check_parts(state: State, node: Node) -> list[int]:
    """No device is shared beyond the whole, or partitioned into what overlaps, or used in two ways. Return those with parts."""
    uses: dict[int, list[GpuUse]] = {}
    for holding in node.holdings.values():
        for use in holding.shares:
            uses.setdefault(use.gpu, []).append(use)
    if set(uses) != set(node.parted):
        raise Violation(f"index {state.index}: parts of devices {sorted(uses)} of {node.id} are held, not of {sorted(node.parted)}")
    for gpu, some in uses.items():
        together = reduce(GpuUse.plus, some)
        # What a gang holds for two of its generations may overlap: the younger starts when the older is gone.
        lone = len(some) == 1 and len(together.mig) > 1
        problem = "" if lone else together.problem(80_000)
        if problem or together != node.parted[gpu]:
            raise Violation(f"index {state.index}: device {gpu} of {node.id} {problem or 'is added up wrongly'}: {some}, {node.parted[gpu]}")
        if any(gpu in holding.gpus for holding in node.holdings.values()):
            raise Violation(f"index {state.index}: device {gpu} of {node.id} is held whole and in part")
        if sum(use.milli for use in some) > 1000:
            raise Violation(f"index {state.index}: device {gpu} of {node.id} is shared beyond the whole")
    return list(uses)


def check_accounts(state: State) -> None:
    """What the accounts of usage say is held is what is held on the nodes."""
    held: dict[str, int] = {}
    for node in state.nodes.values():
        for job, holding in node.holdings.items():
            queue = state.jobs[job].spec.queue
            gpus = len(holding.gpus) * 1000 + sum(use.charged for use in holding.shares)
            for path in [spec.path for spec in state.queues.lineage(queue)] if queue in state.queues.specs else []:
                held[path] = held.get(path, 0) + gpus
    for path, account in state.usage.queues.items():
        if account.held[0] != held.get(path, 0) or min(account.used) < 0:
            raise Violation(f"index {state.index}: queue {path} holds {held.get(path, 0)}, and its account says {account}")
        users = state.usage.users.get(path)
        if users is not None and sum(user.held[0] for user in users.values()) != account.held[0]:
            raise Violation(f"index {state.index}: users of {path} hold other than it: {users}, {account}")


def check_runs(runs: list[Run]) -> None:
    """No rank runs twice at once, and no device has two ranks, unless they share it or have different parts of it."""
    by_rank: dict[object, list[Run]] = {}
    by_gpu: dict[tuple[str, int], list[Run]] = {}
    for r in runs:
        by_rank.setdefault((r.job, r.rank), []).append(r)
        for g in r.gpus:
            by_gpu.setdefault((r.node, g), []).append(r)
    for (node, gpu), some in by_gpu.items():
        for r in some:
            beside = [o for o in some if o.began <= r.began < (o.ended or 1e18)]
            uses = [use for o in beside for use in uses_of(o.gpus, o.share) if use.gpu == gpu]
            if len(beside) > 1 and (any(o.share is None for o in beside) or reduce(GpuUse.plus, uses).problem(80_000)):
                raise Violation(f"device {gpu} of {node} is used beyond what it has: {beside}")
    for what, some in by_rank.items():
        some.sort(key=lambda r: r.began)
        for a, b in pairwise(some):
            if not a.ended or a.ended > b.began:
                raise Violation(f"{what} at once: {a} and {b}")
    by_job: dict[str, list[Run]] = {}
    for r in runs:
        by_job.setdefault(r.job, []).append(r)
    for some in by_job.values():
        # Ranks that restart alone run beside older ones, but a whole generation elsewhere must not.
        for a in some:
            for b in some:
                if a.generation < b.generation and a.rank == b.rank and b.began < (a.ended or 1e18):
                    raise Violation(f"two generations at once: {a} and {b}")
