"""`project`: what one node should be running, as the state says it. Pure; the projector writes the result to `nodes/<id>/desired`."""

from __future__ import annotations

from gangline.core.model.documents import Desired, DesiredGang, DesiredRank, DesiredRole, HealthNotice
from gangline.core.model.roles import Leaf, leaves
from gangline.core.model.state import Job, Node, Part, State

#: states in which a gang's ranks belong on its nodes; a restarting gang that waits out its backoff is stopped there
_WANTED = ("placed", "preparing", "running", "preempting", "resizing")


def project(state: State, node: str) -> Desired:
    """Return the desired document of `node` at the state's index; gangs in order of submission."""
    holder = state.nodes.get(node)
    gangs: list[DesiredGang] = []
    if holder is not None:
        # A lost node keeps what may still run there (on_disconnect: keep): it reads this before anybody knows that it is back.
        jobs = sorted((state.jobs[j] for j in holder.holdings), key=lambda j: j.order)
        gangs = [_gang(state, job, node) for job in jobs if job.state in _WANTED and node in job.parts and not job.parts[node].dead]
    return Desired(
        node=node, index=state.index, epoch=state.epoch, gangs=tuple(gangs), draining=holder is not None and holder.draining,
        session=holder.registration.session if holder is not None else "",
    )  # fmt: skip


def _gang(state: State, job: Job, node: str) -> DesiredGang:
    """Return the part of a placed gang that is on `node`."""
    part = job.parts[node]
    barrier = len(job.parts) > 1 or bool(job.lingering)
    node_rank = list(job.parts).index(node)
    every = leaves(job.spec)
    roles: tuple[DesiredRole, ...]
    if len(every) == 1:
        ranks = tuple(DesiredRank(r, i, rank.gpus, rank.generation, rank.share, role_rank=r) for i, (r, rank) in enumerate(part.ranks.items()))
        roles, groups = (DesiredRole(every[0].name, job.world_size, node_rank),), len(job.parts)
    else:
        ranks, roles, groups = _with_roles(state, job, part, every)
    return DesiredGang(
        job=job.id,
        generation=job.generation,
        phase="run" if job.released or not barrier else "prepare",
        ranks=ranks,
        world_size=job.world_size,
        node_rank=node_rank,
        nodes=len(job.parts),
        roles=roles,
        groups=groups,
        master_addr=job.master_addr,
        master_port=job.master_port,
        restart=job.restart,
        notice=job.notice,
        health=_health(state.nodes[node], part) if node in state.nodes and state.nodes[node].health else (),
    )


def _health(node: Node, part: Part) -> tuple[HealthNotice, ...]:
    """Return what the part is to be told of its devices and its node."""
    index = {gpu.uuid: gpu.index for gpu in node.registration.gpus}
    mine = {g for rank in part.ranks.values() for g in rank.gpus}
    ill = ((index.get(uuid, -1), a) for uuid, a in sorted(node.health.items()) if a.state != "healthy" and (not uuid or index.get(uuid) in mine))
    return tuple(HealthNotice(device, a.state, a.message) for device, a in ill)


def _with_roles(
    state: State, job: Job, part: Part, every: tuple[Leaf, ...]
) -> tuple[tuple[DesiredRank, ...], tuple[DesiredRole, ...], int]:  # fmt: skip
    """Return the ranks of a part, the roles of its gang, and how many groups this has. A group is what of one role is on one node."""
    number = 0
    first_rank: list[int] = []
    ranks_before: list[int] = []
    in_role: dict[int, int] = {}
    leaders: dict[int, int] = {}
    for leaf, size in zip(every, job.sizes(), strict=True):
        first_rank.append(number)
        ranks_before.append(in_role.get(leaf.role, 0))
        in_role[leaf.role] = ranks_before[-1] + size
        if size:
            leaders.setdefault(leaf.role, number)
        number += size
    here = {role: part.groups_before + at for at, role in enumerate(sorted({every[r.leaf].role for r in part.ranks.values()}))}
    local = dict.fromkeys(here, 0)
    ranks: list[DesiredRank] = []
    for r, rank in part.ranks.items():
        leaf = every[rank.leaf]
        role_rank = ranks_before[leaf.index] + r - first_rank[leaf.index]
        ranks.append(DesiredRank(r, local[leaf.role], rank.gpus, rank.generation, rank.share, leaf.role, role_rank, leaf.replica))
        local[leaf.role] += 1
    names = {leaf.role: leaf.name for leaf in every}
    hosts = _hosts(state, job, leaders)
    roles = tuple(DesiredRole(names[at], in_role[at], here.get(at, -1), hosts.get(at, "")) for at in sorted(names))
    last = job.parts[next(reversed(job.parts))]
    return tuple(ranks), roles, last.groups_before + len({every[r.leaf].role for r in last.ranks.values()})


def _hosts(state: State, job: Job, leaders: dict[int, int]) -> dict[int, str]:
    """Return the host of the first rank of each role."""
    wanted = {rank: role for role, rank in leaders.items()}
    found: dict[int, str] = {}
    for node, part in job.parts.items():
        for rank in part.ranks.keys() & wanted.keys():
            found[wanted[rank]] = state.nodes[node].registration.address if node in state.nodes else ""
    return found
