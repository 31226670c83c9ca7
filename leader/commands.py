"""What clients ask of the leader, and `admit`: the pure function that turns a command into events or refuses it.

A command is answered after the frame with its events is committed, never before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gangline.core.model import events as ev
from gangline.core.model.codec import encode_event
from gangline.core.model.foldcluster import stranded
from gangline.core.model.health import Ailment, HealthState
from gangline.core.model.naming import as_job, find_id
from gangline.core.model.nearest import nearest
from gangline.core.model.queues import Declaration, QueueSpec, QueueTree
from gangline.core.model.reservations import Reservation
from gangline.core.model.roles import topologies_asked
from gangline.core.model.spec import Dependency, JobSpec, TopologyRequest
from gangline.core.model.state import Job, State
from gangline.core.model.topologies import Topology, changes, levels_by_name
from gangline.core.model.topologies import check as check_topologies
from gangline.core.policy.health import held
from gangline.core.policy.windows import choose

#: a declaration fits into one entry of the log, with room for what is already in that entry
MAX_DECLARATION_BYTES = 768 * 1024


class Submit(msgspec.Struct, frozen=True):
    """Accept a job. `job` is the id that it gets, made by the caller because ids are random."""

    job: str
    spec: JobSpec
    user: str = ""
    idempotency_key: str = ""
    #: digest of the request, compared when the key is seen again
    body_digest: str = ""
    trace_id: str = ""


class Stop(msgspec.Struct, frozen=True):
    """End a job."""

    job: str
    by: str = ""
    reason: str = ""


class Hold(msgspec.Struct, frozen=True):
    """Do not start a job before it is released; `requeue`: one that runs is asked to leave, too."""

    job: str
    by: str = ""
    reason: str = ""
    requeue: bool = False


class Release(msgspec.Struct, frozen=True):
    """Let a job start that was held."""

    job: str
    by: str = ""
    reason: str = ""


class Administer(msgspec.Struct, frozen=True):
    """Change how a node is used."""

    node: str
    action: Literal["cordon", "uncordon", "drain", "undrain", "confirm_dead"]
    by: str = ""
    reason: str = ""
    deadline_s: float = 0.0


class SetHealth(msgspec.Struct, frozen=True):
    """Say how well a GPU, or a node as a whole (`device` ""), is: it is taken out, somebody works on it, it is mended, or nothing is wrong."""

    node: str
    #: UUID of the GPU, or its index
    device: str
    state: Literal["quarantined", "repair", "burn_in", "healthy"]
    by: str = ""
    reason: str = ""


class SetBrake(msgspec.Struct, frozen=True):
    """Set or clear the mass-loss brake."""

    on: bool
    by: str = ""
    reason: str = ""


class DeclareQueues(msgspec.Struct, frozen=True):
    """Make these the queues and topologies of the cluster, all of them."""

    queues: tuple[QueueSpec, ...]
    #: index of the declaration that they were made from, 0 when there was none: another one since then is not overwritten
    base: int
    by: str = ""
    reason: str = ""
    topologies: tuple[Topology, ...] = ()


class Reserve(msgspec.Struct, frozen=True):
    """Keep nodes, or so many GPUs, for some jobs or for maintenance."""

    reservation: Reservation
    #: GPUs for which the leader chooses nodes; 0: the reservation names its nodes
    gpus: int = 0


class Unreserve(msgspec.Struct, frozen=True):
    """Remove a reservation."""

    name: str
    by: str = ""
    reason: str = ""


Command = SetHealth | Reserve | Unreserve | Submit | Stop | Hold | Release | Administer | SetBrake | DeclareQueues


class Accepted(msgspec.Struct, frozen=True):
    """The command is true from log entry `index` on (also when it was true before: `replayed`)."""

    index: int
    #: the job or node concerned
    subject: str
    replayed: bool = False


class Refused(Exception):
    """The command cannot be carried out in this state; nothing was written."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """`status` is the HTTP status that says it best: 404, 409, 422."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def admit(state: State, command: Command) -> ev.LogEvent | Accepted:
    """Return the event that carries the command out, or Accepted when it is true already. Raises Refused."""
    match command:
        case Submit():
            return _submit(state, command)
        case Stop():
            return _stop(state, command)
        case Hold():
            return _hold(state, command)
        case Release():
            return _release(state, command)
        case Administer():
            return _administer(state, command)
        case SetBrake():
            if state.brake.on == command.on:
                return Accepted(state.index, "brake", replayed=True)
            return ev.BrakeSet(on=command.on, message=command.reason or "set by an operator", by=command.by)
        case SetHealth():
            return _set_health(state, command)
        case Reserve():
            return _reserve(state, command)
        case Unreserve():
            return _unreserve(state, command)
        case DeclareQueues():
            return _declare_queues(state, command)


def _submit(state: State, c: Submit) -> ev.LogEvent | Accepted:
    if c.idempotency_key and (known := state.keys.get(c.idempotency_key)) is not None:
        job = state.jobs[known]
        if job.body_digest != c.body_digest:
            raise Refused(422, "idempotency_key_reused", f"this idempotency key belongs to {known}, which was submitted with another body")
        return Accepted(job.submitted_index, known, replayed=True)
    if c.spec.name and (holder := state.names.get(c.spec.name)) is not None:
        message = f"the name {c.spec.name} belongs to {holder}, which is {state.jobs[holder].state}; stop it or take another"
        raise Refused(409, "name_in_use", message)
    _check_queue(state.queues, c.spec.queue)
    for asked in topologies_asked(c.spec):
        _check_topology(state.queues.declaration.topologies, asked)
    spec = _with_known_jobs(state, c.spec)
    return ev.JobSubmitted(
        job=c.job, spec=spec, user=c.user, idempotency_key=c.idempotency_key, body_digest=c.body_digest, trace_id=c.trace_id
    )


def _with_known_jobs(state: State, spec: JobSpec) -> JobSpec:
    """Return the spec with the ids of the jobs that it depends on. A job that is not known cannot be waited for, so it is refused."""
    if not spec.depends_on:
        return spec
    found: dict[str, Dependency] = {}
    for each in spec.depends_on:
        job = find_id(state, each.job)
        if job is None:
            message = f"depends on {each.job}, and no job has this id or name; those that ended long ago are forgotten"
            raise Refused(404, "no_such_dependency", message)
        if job in found:
            message = f"depends twice on {job}, the second time as {each.job}; one condition says what is asked of it"
            raise Refused(422, "dependency_twice", message)
        found[job] = Dependency(job, each.when)
    return msgspec.structs.replace(spec, depends_on=tuple(found.values()))


def _check_queue(tree: QueueTree, queue: str) -> None:
    """Refuse a job whose queue takes none."""
    match tree.refusal(queue):
        case "unknown":
            leaves = list(tree.leaves())
            near = nearest(queue, leaves) or next((leaf for leaf in leaves if leaf.endswith(f"/{queue}")), "")
            hint = f"did you mean {near}?" if near else "`gangline queues` lists those that there are"
            raise Refused(404, "no_such_queue", f"there is no queue {queue}; {hint}")
        case "parent":
            below = ", ".join(tree.children(queue)[:5])
            raise Refused(404, "no_such_queue", f"{queue} is a queue of queues and takes no jobs itself; below it are {below}")
        case "drains":
            drained = next(spec.path for spec in tree.lineage(queue) if spec.state == "drain")
            above = "" if drained == queue else f" with {drained} above it"
            raise Refused(409, "queue_drains", f"queue {queue} drains{above}: it takes no more jobs")


def _check_topology(topologies: tuple[Topology, ...], asked: TopologyRequest) -> None:
    """Refuse a job that asks for a topology or level that is not declared; before any is declared that shows when it is placed."""
    if not topologies or not asked:
        return
    levels = levels_by_name(topologies, ()).get(asked.name)
    if levels is None:
        raise Refused(404, "no_such_topology", f"there is no topology {asked.name}; {_which(asked.name, [t.name for t in topologies])}")
    for level in asked.levels():
        if level not in levels:
            raise Refused(404, "no_such_topology", f"topology {asked.name} has no level {level}; {_which(level, list(levels))}")


def _which(word: str, words: list[str]) -> str:
    near = nearest(word, words)
    return f"did you mean {near}?" if near else f"there are {', '.join(words[:8])}"


def _declare_queues(state: State, c: DeclareQueues) -> ev.LogEvent | Accepted:
    present = state.queues
    if c.queues == present.declaration.queues and not changes(present.declaration.topologies, c.topologies):
        return Accepted(present.index, "queues", replayed=True)
    if c.base != present.index:
        by = f" by {present.declaration.by}" if present.declaration.by else ""
        message = f"the queues were declared anew{by} in entry {present.index}, and what was sent was made from entry {c.base}; look again"
        raise Refused(412, "queues_changed", message)
    try:
        tree = QueueTree(Declaration(c.queues))
        check_topologies(c.topologies)
    except ValueError as e:
        raise Refused(422, "bad_queues", str(e)) from None
    if not tree.declared:
        raise Refused(422, "bad_queues", "a declaration has at least one queue")
    if lost := stranded(state, tree):
        queue, jobs = next(iter(lost.items()))
        more = f"; {len(lost) - 1} more queues are in the way" if len(lost) > 1 else ""
        which = "would have queues below it" if queue in tree.specs else "is missing"
        live = f"{jobs} live job{'' if jobs == 1 else 's'}"
        remedy = "keep it as it is with `state: drain` until they have ended, or stop them"
        raise Refused(409, "queue_in_use", f"queue {queue} {which} and has {live}: {remedy}{more}")
    event = ev.QueuesDeclared(queues=c.queues, topologies=c.topologies, by=c.by, reason=c.reason)
    if len(encode_event(event)) > MAX_DECLARATION_BYTES:
        raise Refused(413, "too_large", f"the declaration has more than {MAX_DECLARATION_BYTES:,} bytes as an entry of the log")
    return event


def _reserve(state: State, c: Reserve) -> ev.LogEvent | Accepted:
    new = c.reservation
    present = state.reservations.get(new.name)
    if present is not None:
        raise Refused(409, "name_in_use", f"there is a reservation {new.name}; `gangline reservation delete` removes it")
    for queue in new.queues:
        if state.queues.declared and queue not in state.queues.specs:
            near = nearest(queue, list(state.queues.specs))
            raise Refused(404, "no_such_queue", f"there is no queue {queue}" + (f"; did you mean {near}?" if near else ""))
    if c.gpus:
        chosen = choose(state, c.gpus, new.start_ms, state.at_ms)
        if chosen is None:
            raise Refused(409, "no_room", f"there are no {c.gpus} GPUs on nodes that take jobs, beside other reservations and gangs that stay")
        new = msgspec.structs.replace(new, nodes=chosen)
    if unknown := [kept.node for kept in new.nodes if kept.node not in state.nodes]:
        raise Refused(404, "no_such_node", f"there is no node {', '.join(unknown[:5])}")
    if problem := new.problem():
        raise Refused(422, "bad_reservation", problem)
    return ev.ReservationDeclared(reservation=new)


def _unreserve(state: State, c: Unreserve) -> ev.LogEvent | Accepted:
    if c.name not in state.reservations:
        near = nearest(c.name, list(state.reservations))
        raise Refused(404, "no_such_reservation", f"there is no reservation {c.name}" + (f"; did you mean {near}?" if near else ""))
    return ev.ReservationRemoved(name=c.name, by=c.by, reason=c.reason)


def _stop(state: State, c: Stop) -> ev.LogEvent | Accepted:
    job = as_job(state, c.job)
    if job is None:
        raise Refused(404, "no_such_job", f"there is no job {c.job}")
    if job.state == "finished" or job.stop:
        return Accepted(job.index, job.id, replayed=True)
    return ev.JobStopRequested(job=c.job, by=c.by, reason=c.reason)


def _hold(state: State, c: Hold) -> ev.LogEvent | Accepted:
    job = _held_or_to_be(state, c.job)
    if job.state == "finished":
        raise Refused(409, "job_ended", f"{job.id} has {job.outcome}: there is nothing to hold")
    again = job.held and job.held_reason == c.reason and not (c.requeue and (job.active or job.elements is not None))
    return Accepted(job.index, job.id, replayed=True) if again else ev.JobHeld(job=c.job, by=c.by, reason=c.reason, requeue=c.requeue)


def _release(state: State, c: Release) -> ev.LogEvent | Accepted:
    job = _held_or_to_be(state, c.job)
    array = state.jobs.get(job.array)
    if array is not None and array.held and not job.held:
        raise Refused(409, "array_held", f"{job.id} waits because its array is held: release {array.id}")
    if not job.held or job.state == "finished":
        return Accepted(job.index, job.id, replayed=True)
    return ev.JobReleased(job=c.job, by=c.by, reason=c.reason)


def _held_or_to_be(state: State, job_id: str) -> Job:
    job = state.jobs.get(job_id)
    if job is not None:
        return job
    if (element := as_job(state, job_id)) is not None:
        message = f"{job_id} is not a job yet, or no longer; hold and release {element.array}, or stop {job_id}"
        raise Refused(409, "element_not_live", message)
    raise Refused(404, "no_such_job", f"there is no job {job_id}")


def _administer(state: State, c: Administer) -> ev.LogEvent | Accepted:
    node = state.nodes.get(c.node)
    if node is None:
        raise Refused(404, "no_such_node", f"there is no node {c.node}")
    same = {
        "cordon": node.cordoned and node.reason == c.reason, "uncordon": not node.cordoned, "undrain": not node.draining,
        "drain": node.draining and node.reason == c.reason and not c.deadline_s, "confirm_dead": False,
    }  # fmt: skip
    if same[c.action]:
        return Accepted(node.index, c.node, replayed=True)
    if c.action == "confirm_dead" and node.status != "lost":
        raise Refused(409, "node_is_up", f"{c.node} is up; stop its agent or cut its power before it is called dead")
    return ev.NodeAdministered(node=c.node, action=c.action, by=c.by, reason=c.reason, deadline_s=c.deadline_s)


def _set_health(state: State, c: SetHealth) -> ev.LogEvent | Accepted:
    node = state.nodes.get(c.node)
    if node is None:
        raise Refused(404, "no_such_node", f"there is no node {c.node}")
    device = c.device
    if device:
        known_uuids = (gpu.uuid for gpu in node.registration.gpus if device in (gpu.uuid, str(gpu.index)))
        found = next(known_uuids, device if device in node.health else "")
        if not found:
            raise Refused(404, "no_such_gpu", f"{c.node} has no GPU {device}; it has {len(node.registration.gpus)}, from 0 on")
        device = found
    known = node.health.get(device, Ailment())
    if known.state == c.state and known.by == c.by and known.message == c.reason:
        return Accepted(node.index, c.node, replayed=True)
    if c.state == "repair" and not known.withdrawn:
        raise Refused(409, "not_withdrawn", f"it is {known.state}; quarantine it first, so that what runs there leaves it")
    if c.state in ("repair", "burn_in") and held(node, device):
        raise Refused(409, "device_in_use", f"{', '.join(list(node.holdings)[:5])} still has it; quarantine it and wait")
    # What still runs there is moved first: "unhealthy" becomes "quarantined" when it is empty.
    to: HealthState = "unhealthy" if c.state == "quarantined" and held(node, device) else c.state
    clear = c.state in ("healthy", "burn_in")
    words = {"quarantined": "taken out", "repair": "somebody works on it", "burn_in": "it is mended, and tested", "healthy": "nothing is wrong"}
    by = c.by or "operator"
    return ev.HealthChanged(node=c.node, device=device, state=to, cause="operator", message=c.reason or words[c.state], by=by, clear=clear)
