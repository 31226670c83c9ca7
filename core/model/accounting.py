"""Where the fold of the log meets the accounts of usage (usage.py): what gangs hold, and what nodes have, counts from the event that changes it.

What one event changes on many nodes is added up first, and goes into the accounts once.
"""

from __future__ import annotations

from gangline.core.model import usage
from gangline.core.model.gpushares import GPU
from gangline.core.model.queues import QueueTree
from gangline.core.model.state import Holding, Node, State


def note_held(state: State, job_id: str, holding: Holding, sign: int) -> None:
    """A gang holds something more on a node (`sign` 1), or less (-1)."""
    if state.queues.half_lives_ms:
        job, noted = state.jobs[job_id], state.scratch.held
        key, by = (job.spec.queue, job.user), _amounts(holding)
        g, c, m = noted.get(key, usage.NOTHING)
        noted[key] = (g + sign * by[0], c + sign * by[1], m + sign * by[2])


def settle(state: State, at_ms: int) -> None:
    """The event is folded: what was noted counts from its time on."""
    for (queue, user), by in state.scratch.held.items():
        usage.take_in(state.usage, state.queues, queue, user, by, at_ms)
    state.scratch.held.clear()


def offers(node: Node | None) -> usage.Held:
    """Return what a node has that can be used: nothing while it is lost."""
    if node is None or node.status != "up":
        return usage.NOTHING
    reg = node.registration
    return (sum(GPU for gpu in reg.gpus if gpu.healthy), reg.cpus_milli, reg.memory_mib)


def change_capacity(state: State, before: usage.Held, after: usage.Held, at_ms: int) -> None:
    """A node has other than it had before."""
    usage.change_capacity(state.usage, (after[0] - before[0], after[1] - before[1], after[2] - before[2]), at_ms)


def account_anew(state: State, before: QueueTree, at_ms: int) -> None:
    """Other queues are declared than `before`: add up anew what is held in them."""
    if not before.half_lives_ms and not state.queues.half_lives_ms:
        return
    holdings = ((state.jobs[job], held) for node in state.nodes.values() for job, held in node.holdings.items())
    holders = [(job.spec.queue, job.user, _amounts(held)) for job, held in holdings]
    has = [offers(node) for node in state.nodes.values()]
    capacity = (sum(h[0] for h in has), sum(h[1] for h in has), sum(h[2] for h in has))
    state.usage = usage.declared(state.usage, before, state.queues, holders, capacity, at_ms)


def _amounts(holding: Holding) -> usage.Held:
    return (len(holding.gpus) * GPU + sum(use.charged for use in holding.shares), holding.cpus_milli, holding.memory_mib)
