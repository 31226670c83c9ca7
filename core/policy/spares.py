"""Another place for a part of a gang whose node or device is of no use any more, so that the rest of the gang stays where it is. Pure.

First another GPU of the same node, then a *spare* node: one with the label `gangline.io/spare`, which takes no jobs of its own. Operators
label so many of each topology domain as they want to have in reserve there. The spare must have the same GPU models and room for the whole
part; it must be in the domain that the job asks for (`topology.required`), and the nearest by the well-known levels is taken. Without a
spare the gang is queued again.
"""

from __future__ import annotations

from collections.abc import Collection

from gangline.core.model import events as ev
from gangline.core.model import roles
from gangline.core.model.documents import Gpu
from gangline.core.model.state import Job, Node, State
from gangline.core.model.topologies import WELL_KNOWN, levels_by_name
from gangline.core.policy.sizes import Placement, present


def replaced(state: State, job: Job, bad: Collection[str]) -> tuple[Placement, str] | None:
    """Return where the gang can go on: its present placement with other devices, or other nodes, for what cannot be used; and what was replaced.

    `bad` are nodes that are to be left whole. GPUs that count as not healthy are left as well. None if there is no other place.
    """
    placement = present(job)
    parts: list[ev.PlacedPart] = []
    words: list[str] = []
    taken = {p.node for p in placement.parts} | set(job.held_nodes)
    for part in placement.parts:
        node = state.nodes.get(part.node)
        if node is not None and part.node not in bad and node.status == "up":
            same = _on_other_devices(node, part)
            if same is not None:
                if same != part:
                    words.append(f"other GPUs of {part.node}")
                parts.append(same)
                continue
        spare = _spare_for(state, job, part, taken)
        if spare is None:
            return None
        taken.add(spare.node)
        parts.append(spare)
        words.append(f"{spare.node} for {part.node}")
    return Placement(tuple(parts), placement.role_sizes), ", ".join(words)


def _on_other_devices(node: Node, part: ev.PlacedPart) -> ev.PlacedPart | None:
    """Return the part with free devices of the same model in place of those that cannot be used; None if there are not enough."""
    facts = {gpu.index: gpu for gpu in node.registration.gpus}
    free = [facts[g] for g in node.free_gpus]
    ranks: list[ev.PlacedRank] = []
    for rank in part.ranks:
        bad = [g for g in rank.gpus if g not in facts or not facts[g].healthy]
        if not bad:
            ranks.append(rank)
            continue
        if rank.share is not None or node.withdrawn:
            return None
        new: list[int] = []
        for g in bad:
            model = facts[g].model if g in facts else ""
            other = next((gpu for gpu in free if not model or gpu.model == model), None)
            if other is None:
                return None
            free.remove(other)
            new.append(other.index)
        ranks.append(ev.PlacedRank(rank.rank, tuple(sorted([*(g for g in rank.gpus if g not in bad), *new]))))
    return ev.PlacedPart(part.node, tuple(ranks))


def _spare_for(state: State, job: Job, part: ev.PlacedPart, taken: Collection[str]) -> ev.PlacedPart | None:
    old = state.nodes.get(part.node)
    if old is None or any(rank.share is not None for rank in part.ranks):
        return None
    facts = {gpu.index: gpu for gpu in old.registration.gpus}
    wanted = [[facts[g].model for g in rank.gpus if g in facts] for rank in part.ranks]
    leaf_of = roles.leaf_of_ranks(job.sizes())
    cpus, memory = roles.of_ranks(job.spec, [leaf_of[rank.rank] for rank in part.ranks])
    near = [level for level in (job.spec.topology.required, job.spec.topology.preferred, *reversed(WELL_KNOWN)) if level]
    within = _levels(state, job)
    best: tuple[tuple[bool, ...], str, ev.PlacedPart] | None = None
    for node in state.nodes.values():
        if not node.spare or not node.schedulable or node.id in taken:
            continue
        if node.free_cpus_milli < cpus or node.free_memory_mib < memory or not all(_same(old, node, level) for level in within):
            continue
        given = _given(node, wanted)
        if given is None:
            continue
        ranks = tuple(ev.PlacedRank(rank.rank, gpus) for rank, gpus in zip(part.ranks, given, strict=True))
        key = (tuple(not _same(old, node, level) for level in near), node.id, ev.PlacedPart(node.id, ranks))
        if best is None or key[:2] < best[:2]:
            best = key
    return best[2] if best is not None else None


def _levels(state: State, job: Job) -> tuple[str, ...]:
    """Return the levels of the domain that the gang must not leave: the one that it requires, and all coarser ones."""
    required = job.spec.topology.required
    known = levels_by_name(state.queues.declaration.topologies, WELL_KNOWN).get(job.spec.topology.name, ())
    return tuple(known[: known.index(required) + 1]) if required in known else (required,) if required else ()


def _same(one: Node, other: Node, level: str) -> bool:
    return one.registration.labels.get(level) == other.registration.labels.get(level)


def _given(node: Node, wanted: list[list[str]]) -> list[tuple[int, ...]] | None:
    facts = {gpu.index: gpu for gpu in node.registration.gpus}
    free: list[Gpu] = [facts[g] for g in node.free_gpus]
    out: list[tuple[int, ...]] = []
    for models in wanted:
        some: list[int] = []
        for model in models:
            gpu = next((g for g in free if g.model == model), None)
            if gpu is None:
                return None
            free.remove(gpu)
            some.append(gpu.index)
        out.append(tuple(sorted(some)))
    return out
