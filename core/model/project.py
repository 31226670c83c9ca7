"""`project`: what one node should be running, as the state says it. Pure; the projector writes the result to `nodes/<id>/desired`."""

from __future__ import annotations

from gangline.core.model.documents import Desired, DesiredGang, DesiredRank
from gangline.core.model.state import Job, State

#: states in which a gang's ranks belong on its nodes; a restarting gang that waits out its backoff is stopped there
_WANTED = ("placed", "preparing", "running", "preempting", "resizing")


def project(state: State, node: str) -> Desired:
    """Return the desired document of `node` at the state's index; gangs in order of submission."""
    holder = state.nodes.get(node)
    gangs: list[DesiredGang] = []
    if holder is not None:
        # A lost node keeps what may still run there (on_disconnect: keep): it reads this before anybody knows that it is back.
        jobs = sorted((state.jobs[j] for j in holder.holdings), key=lambda j: j.number)
        gangs = [project_gang(job, node) for job in jobs if job.state in _WANTED and node in job.parts and not job.parts[node].dead]
    return Desired(
        node=node, index=state.index, epoch=state.epoch, gangs=tuple(gangs), draining=holder is not None and holder.draining,
        session=holder.registration.session if holder is not None else "",
    )  # fmt: skip


def project_gang(job: Job, node: str) -> DesiredGang:
    """Return the part of a placed gang that is on `node`."""
    part = job.parts[node]
    barrier = len(job.parts) > 1 or bool(job.lingering)
    return DesiredGang(
        job=job.id,
        generation=job.generation,
        phase="run" if job.released or not barrier else "prepare",
        ranks=tuple(DesiredRank(r, i, rank.gpus, rank.generation, rank.share) for i, (r, rank) in enumerate(part.ranks.items())),
        world_size=job.world_size,
        node_rank=list(job.parts).index(node),
        nodes=len(job.parts),
        master_addr=job.master_addr,
        master_port=job.master_port,
        restart=job.restart,
        notice=job.notice,
    )
