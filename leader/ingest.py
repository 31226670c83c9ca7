"""From what agents say to events: pure functions that compare a document with the state and return what is new in it.

Documents are states, so each may be read any number of times and only the newest counts; a document that says nothing new gives no events.
"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.core.model import events as ev
from gangline.core.model.documents import GpuReport, Observed, ObservedGang, ObservedRank, Registration
from gangline.core.model.foldhealth import as_reported
from gangline.core.model.health import NODE, check_symptom, driver_symptom, symptoms, worth_noting
from gangline.core.model.state import Job, Node, Part, Rank, State

#: at most one progress event of a gang in this time
PROGRESS_EVERY_MS = 60_000

#: nodes that were lost in this time count as gone at once
LOSS_WINDOW_MS = 60_000
#: so many nodes, and this share of those that were up a minute ago: more than that gone at once is rather our own fault
BRAKE_NODES = 3
BRAKE_SHARE = 0.5
#: the brake clears itself after this time
BRAKE_MS = 300_000


def registered(state: State, reg: Registration) -> list[ev.LogEvent]:
    """What a registration says that the state does not know."""
    node = state.nodes.get(reg.node)
    joined = ev.NodeJoined(registration=reg)
    if node is None:
        return [joined]
    known = node.registration
    if node.status == "up" and as_reported(node) == reg:
        return []
    if known.identity == reg.identity and known.boot_id == reg.boot_id:
        return [joined]
    # Whatever ran there is gone with the boot, or with the machine that had this name before.
    cause = "replaced" if known.identity != reg.identity else "rebooted"
    lost = ev.NodeLost(node=reg.node, cause=cause, message=f"{reg.node} came back {cause}; nothing of what ran there is left", proven=True)
    if node.status == "lost":
        return [joined] if not node.holdings else [ev.NodeAdministered(node=reg.node, action="confirm_dead", reason=cause), joined]
    return [lost, joined]


def vanished(state: State, due: list[str], missing: list[str], now_ms: int) -> list[ev.LogEvent]:
    """What it means that the leases of `missing` nodes are gone, those of `due` for long enough: nodes lost, or the brake."""
    up = [n for n in due if n in state.nodes and state.nodes[n].status == "up"]
    brake = state.brake
    if brake.on:
        if now_ms - brake.since_ms < BRAKE_MS:
            return []
        lost = [ev.NodeLost(node=n, cause="lease_expired", message=f"the lease of {n} has expired") for n in up]
        return [ev.BrakeSet(on=False, message=f"cleared after {BRAKE_MS // 1000} s"), *lost]
    if not up:
        return []
    # Nodes, not losses: one that comes and goes is no reason to doubt oneself.
    recent = sum(n.status == "lost" and n.lost_at_ms > now_ms - LOSS_WINDOW_MS for n in state.nodes.values())
    gone = recent + sum(n in state.nodes and state.nodes[n].status == "up" for n in missing)
    total = recent + sum(n.status == "up" for n in state.nodes.values())
    if gone >= BRAKE_NODES and gone > BRAKE_SHARE * total and now_ms >= brake.armed_from_ms:
        message = f"{gone} of {total} nodes vanished within a minute: suspecting the network or the store, nothing is moved"
        return [ev.BrakeSet(on=True, message=message)]
    return [ev.NodeLost(node=n, cause="lease_expired", message=f"the lease of {n} has expired") for n in sorted(up)]


def observed(state: State, doc: Observed, now_ms: int) -> list[ev.LogEvent]:
    """What an observed document says that the state does not know. One that is not from the registered agent says nothing."""
    node = state.nodes.get(doc.node)
    if node is None or node.status != "up" or node.registration.identity != doc.identity or node.registration.boot_id != doc.boot_id:
        return []
    gangs = {g.job: g for g in doc.gangs}
    # What the hardware did comes first: it explains how ranks ended.
    out: list[ev.LogEvent] = list(_hardware(node, doc, now_ms))
    for job_id, holding in node.holdings.items():
        gang = gangs.get(job_id)
        if holding.leaving_since:
            if gang is None and doc.desired_index >= holding.leaving_since:
                out.append(ev.PartReleased(job=job_id, node=doc.node))
            continue
        job = state.jobs[job_id]
        part = job.parts.get(doc.node)
        if part is None or not job.active or job.state == "restarting":
            continue
        if gang is not None:
            out.extend(_gang(job, part, doc, gang, now_ms))
        elif lost := tuple(_forgotten(n, r, now_ms) for n, r in part.ranks.items() if r.started and not r.exited):
            out.append(ev.RanksExited(job=job_id, node=doc.node, exits=lost))
    return out


def _hardware(node: Node, doc: Observed, now_ms: int) -> Iterator[ev.LogEvent]:
    reports = {report.uuid: report for report in doc.gpus}
    for uuid, report in reports.items():
        old = node.reports.get(uuid)
        # "stale" says nothing new of the GPU itself: the driver does not answer, which is told apart.
        if report.state != "stale" and worth_noting(old, report):
            found = symptoms(old, report, _holders(node, uuid), now_ms)
            yield ev.HealthReported(node=node.id, device=uuid, symptoms=tuple(found), report=report)
    for uuid in node.reports:
        if uuid not in reports and doc.driver is None and node.reports[uuid] != GpuReport(uuid=uuid):
            yield ev.HealthReported(node=node.id, device=uuid)
    ill = doc.driver if doc.driver is not None and doc.driver.state != "answers" else None
    known = node.driver
    new = [driver_symptom(ill, now_ms)] if ill is not None and (known is None or ill.state != known.state) else []
    before = {check.name: check.status for check in node.checks}
    new += [check_symptom(check, now_ms) for check in doc.checks if before.get(check.name) != check.status]
    if new or (ill is None) != (known is None) or before != {check.name: check.status for check in doc.checks}:
        yield ev.HealthReported(node=node.id, device=NODE, symptoms=tuple(new), driver=ill, checks=doc.checks)


def _holders(node: Node, uuid: str) -> tuple[str, ...]:
    index = next((gpu.index for gpu in node.registration.gpus if gpu.uuid == uuid), -1)
    return tuple(job for job, held in node.holdings.items() if index in held.gpus or any(use.gpu == index for use in held.shares))


def _gang(job: Job, part: Part, doc: Observed, gang: ObservedGang, now_ms: int) -> Iterator[ev.LogEvent]:
    node, current = doc.node, gang.generation == job.generation
    if current and job.state in ("placed", "preparing", "running") and not part.failed:
        if gang.phase == "prepared" and len(job.parts) > 1 and not part.prepared:
            yield ev.NodePrepared(job=job.id, generation=job.generation, node=node, address=gang.address, port=gang.port)
        elif gang.phase == "prepare_failed" and not all(r.started for r in part.ranks.values()):
            yield ev.PrepareFailed(job=job.id, generation=job.generation, node=node, message=gang.message)
    ranks = [r for r in gang.ranks if r.rank in part.ranks and part.ranks[r.rank].generation == r.generation]
    started = tuple(r.rank for r in ranks if r.state in ("running", "stopping") and not part.ranks[r.rank].started)
    if started:
        yield ev.RanksStarted(job=job.id, generation=job.generation, node=node, ranks=started)
    exits = tuple(_exit(r, doc, now_ms) for r in ranks if r.state == "exited" and not part.ranks[r.rank].exited)
    if exits:
        yield ev.RanksExited(job=job.id, node=node, exits=exits)
    if current:
        yield from _reports(job, part, node, gang, now_ms)


def _reports(job: Job, part: Part, node: str, gang: ObservedGang, now_ms: int) -> Iterator[ev.LogEvent]:
    if gang.checkpoint_step > job.checkpoint_step:
        yield ev.CheckpointReported(job=job.id, generation=job.generation, step=gang.checkpoint_step, path=gang.checkpoint_path)
    due = job.step_generation != job.generation or now_ms - job.step_at_ms >= PROGRESS_EVERY_MS
    if gang.step >= 0 and gang.step != job.step and due:
        yield ev.ProgressReported(job=job.id, generation=job.generation, step=gang.step)
    if job.state in ("preempting", "resizing") and gang.acknowledged and not part.acknowledged:
        yield ev.StopAcknowledged(job=job.id, generation=job.generation, node=node)


def _forgotten(number: int, rank: Rank, now_ms: int) -> ev.RankExit:
    """An agent reports a gang for as long as anything of it may run; one that it no longer names has ended, whatever became of its end."""
    message = "the node knows nothing of it any more"
    return ev.RankExit(rank=number, generation=rank.generation, code=-9, cause="lost", message=message, at_ms=now_ms)


def _exit(r: ObservedRank, doc: Observed, now_ms: int) -> ev.RankExit:
    """Clocks of nodes differ, and jump. How long ago a rank ended is the same by all of them, so its end is told in log time."""
    at_ms = now_ms - max(0, doc.at_ms - r.exited_at_ms) if doc.at_ms and r.exited_at_ms else r.exited_at_ms
    return ev.RankExit(rank=r.rank, generation=r.generation, code=r.exit_code, cause=r.cause, message=r.message, at_ms=at_ms)
