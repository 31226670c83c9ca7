"""What to do about one gang that is placed: the rules of DESIGN section 5, as a function of the state and the time.

`next_step` looks at the job's situation and returns the one decision that it calls for, or nothing. The cases stand in order of precedence.
`due_ms` says when time alone may change the answer.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import msgspec

from gangline.core.model import events as ev
from gangline.core.model.foldhealth import hardware_failed
from gangline.core.model.foldlosses import row_of_failures
from gangline.core.model.health import NODE
from gangline.core.model.state import Job, Node, Part, Rank, State
from gangline.core.policy import admission, ageing, resize, service, spares
from gangline.core.policy.sizes import present

#: a node that has not prepared, or not started its ranks, in this time is charged with it; the old generation's grace comes on top
PREPARE_TIMEOUT_MS = 60_000
#: the same for one that may have to fetch a container image first
IMAGE_TIMEOUT_MS = 900_000
#: how long a gang keeps away from a node that could not prepare it
AVOID_MS = 60_000
#: placements in a row that fail to prepare before the job itself is blamed
PREPARE_ATTEMPTS = 3
#: two failures of the infrastructure within this time: the second restart waits for the job's first backoff
_AGAIN_SO_SOON_MS = 10_000
#: a node loss so soon after a rank failure is taken for its cause
SAME_OUTAGE_MS = 60_000

#: a rank that ended so shortly before or after its hardware failed did so for that
HARDWARE_MS = 60_000

#: causes of a rank's end that are not the application's doing (documents.ObservedRank)
INFRASTRUCTURE_CAUSES = frozenset({"fenced", "node_restart", "lost", "stopped"})


def next_step(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    """Return the decision that the job's situation calls for now, or None."""
    step = _next_step(state, job, now_ms)
    if job.spec.burn_in and isinstance(step, ev.GangRequeued | ev.GangRestarting | ev.GangResizing):
        # A test is of no use anywhere else, nor later; whoever wants it makes another one (health.py).
        return ev.GangFinished(job=job.id, outcome="cancelled", cause=step.cause, message=step.message)
    # What a node that is away may still run (on_disconnect: keep) must not run anywhere else, until it is back or proven to be dead.
    if isinstance(step, ev.GangRequeued | ev.GangPlaced | ev.GangResizing) and _is_away(state, job):
        return None
    # A gang that waits after a failure of its own waits as long wherever it goes on, unless that failure was none.
    if isinstance(step, ev.GangRequeued) and not step.forgive and job.not_before_ms > max(now_ms, step.not_before_ms):
        return msgspec.structs.replace(step, not_before_ms=job.not_before_ms)
    return step


def _next_step(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    if job.elements is not None:
        return admission.array_step(state, job, now_ms)
    # 0. What is not to go on, wherever it is.
    over = admission.ends(state, job, now_ms)
    if over is not None:
        return over
    if not job.active:
        return None
    # 1. Nodes that are gone take the whole gang with them.
    lost = _lost_nodes(state, job)
    if lost and not resize.goes_on_without(job, lost, now_ms):
        return _node_failure(state, job, lost, now_ms)
    # 2. A restart in place that has waited long enough.
    if job.state == "restarting":
        return admission.late(job, now_ms) or _place_again(state, job, now_ms)
    # 3. A gang that was asked to leave, or to go on with another number of ranks, and has saved its work or run out of time.
    if job.state == "preempting":
        return _leave(job, now_ms)
    if job.state == "resizing":
        return resize.next_step(state, job, now_ms)
    # 4. Ranks that ended badly, then a gang that is done.
    failed = _first_failure(job)
    if failed is not None:
        return _rank_failure(state, job, *failed, now_ms)
    if all(r.exited for r in _ranks(job)):
        return ev.GangFinished(job=job.id, outcome="succeeded", cause="completed", message=f"all {job.world_size} ranks ended with status 0")
    # 5. Limits.
    if job.spec.time_limit_s and job.running_since_ms and _ran_ms(job, now_ms) >= job.spec.time_limit_s * 1000:
        message = f"ran for its time limit of {job.spec.time_limit_s:g} s"
        return ev.GangFinished(job=job.id, outcome="failed", cause="time_limit", message=message)
    overdue = admission.late(job, now_ms)
    if overdue is not None:
        return overdue
    # 6. The barrier.
    step = _barrier(state, job, now_ms)
    if step is not None:
        return step
    # 7. Hardware that has gone bad under it, nodes that an operator wants empty, and gangs that somebody wants back in the queue.
    return _unhealthy(state, job, now_ms) or _straggler(state, job, now_ms) or _drain(state, job, now_ms) or _hold(job, now_ms)


def due_ms(state: State, job: Job, now_ms: int) -> int | None:
    """Return the log time after `now_ms` at which `next_step` may answer otherwise although nothing happens; None when time changes nothing.

    What was due by `now_ms` has been looked at: were it named again although nothing came of it, the shell would look for ever.
    """
    return min((due for due in _moments(state, job, now_ms) if due > now_ms), default=None)


def _moments(state: State, job: Job, now_ms: int) -> Iterator[int]:
    yield from admission.moments(job)
    if state.queues.ages and job.state == "queued":
        yield from ageing.next_point_ms(state, job)
    if service.worsens(state, job) and (changes_ms := service.next_change_ms(job, "least_attained", now_ms)) is not None:
        yield changes_ms
    if job.state in ("queued", "restarting", "resizing"):
        yield job.not_before_ms
    if job.state == "queued":
        yield from job.avoid.values()
    if job.state in ("preempting", "resizing") and job.notice is not None:
        yield job.notice.deadline_ms
    if (grows_ms := resize.grows_from_ms(job)) is not None:
        yield grows_ms
    if job.state in ("placed", "preparing", "running"):
        yield _prepare_deadline(job)
        if job.spec.restart.on_rank_failure == "rank":
            yield from (_rank_backoff_end(job, r) for r in _ranks(job) if r.exited and _failed(r))
    if job.running_since_ms and job.spec.time_limit_s:
        yield int(job.running_since_ms - job.ran_ms + job.spec.time_limit_s * 1000)
    if job.active:
        yield from (n.drain_deadline_ms for n in _nodes(state, job) if n.draining)


def failure_class(rank: Rank) -> ev.FailureClass:
    """Attribute a rank's end by itself: infrastructure only on evidence, since that is free of charge to the job."""
    return "infrastructure" if rank.cause in INFRASTRUCTURE_CAUSES else "application"


def attributed(state: State, job: Job, number: int, rank: Rank) -> tuple[ev.FailureClass, str]:
    """Attribute a rank's end, and say what its hardware did at the time; "" if nothing is known of that."""
    node = next((state.nodes.get(n) for n, part in job.parts.items() if number in part.ranks), None)
    if node is None or not node.health or job.spec.burn_in or failure_class(rank) == "infrastructure":
        return failure_class(rank), ""
    what = hardware_failed(node, rank, HARDWARE_MS)
    return ("infrastructure", f"{node.id}: {what}") if what else ("application", "")


def describe_exit(number: int, rank: Rank) -> str:
    """Say how a rank ended, for people."""
    if rank.cause == "start_failed":
        return f"rank {number} could not be started: {rank.message or 'no reason given'}"
    how = f"was ended by {_signal_name(-rank.exit_code)}" if rank.exit_code < 0 else f"exited with status {rank.exit_code}"
    why = f" ({rank.cause}{': ' + rank.message if rank.message else ''})" if rank.cause else ""
    return f"rank {number} {how}{why}"


# ---------------------------------------------------------------- 1. lost nodes


def _lost_nodes(state: State, job: Job) -> list[str]:
    return [n for n, part in job.parts.items() if part.dead or n not in state.nodes]


def _node_failure(state: State, job: Job, lost: list[str], now_ms: int) -> ev.LogEvent:
    names = ", ".join(lost)
    message = f"node {names} lost" if len(lost) == 1 else f"nodes {names} lost"
    if job.spec.restart.on_node_failure == "fail":
        return ev.GangFinished(job=job.id, outcome="failed", cause="node_lost", message=f"{message}, and the job says on_node_failure: fail")
    # Ranks of a dying node fail a little before it is known to be lost, and those of its neighbours with them.
    recent = job.restart is not None and now_ms - job.restart.failed_at_ms < SAME_OUTAGE_MS
    disguised = recent and job.restart is not None and job.restart.failure_class == "application" and not job.running_since_ms
    lost_ranks = tuple(r for n in lost for r in job.parts[n].ranks)
    # What is left of an elastic gang goes on at once, if it is enough.
    # So does one for which there are spare nodes, with all of its ranks.
    step = _replace(state, job, lost, "node_lost", message, now_ms, 0.0, lost_ranks=lost_ranks, forgive=disguised)
    step = step or resize.go_on_without(state, job, lost, "node_lost", message, now_ms, lost_ranks=lost_ranks, forgive=disguised)
    return step or ev.GangRequeued(
        job=job.id, generation=job.generation, cause="node_lost", failure_class="infrastructure", message=message,
        lost_ranks=lost_ranks, lost_nodes=tuple(lost), forgive=disguised,
    )  # fmt: skip


# ---------------------------------------------------------------- 2. restart in place


def _place_again(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    if now_ms < job.not_before_ms:
        return None
    if job.held_requeue:
        return ev.GangRequeued(
            job=job.id, generation=job.generation, cause="held", failure_class="infrastructure", message=f"it is held{_reason(job)}"
        )
    if any(n.draining for n in _nodes(state, job)):
        return ev.GangRequeued(
            job=job.id, generation=job.generation, cause="drain", failure_class="infrastructure",
            message="a node of the gang is being drained, so it restarts elsewhere",
        )  # fmt: skip
    unfit = _unfit(state, job)
    if unfit:
        return _elsewhere(state, job, unfit)
    parts, role_sizes = present(job)
    return ev.GangPlaced(job=job.id, generation=job.generation + 1, parts=parts, reason="restart in place", role_sizes=role_sizes)


# ---------------------------------------------------------------- 3. asked to leave


def _leave(job: Job, now_ms: int) -> ev.LogEvent | None:
    if job.notice is None:
        return None
    gone = all(p.acknowledged or p.failed or all(r.exited for r in p.ranks.values()) for p in job.parts.values())
    if not gone and now_ms < job.notice.deadline_ms:
        return None
    how = "saved its work" if gone else f"did not acknowledge within {job.notice.grace_s:g} s"
    return ev.GangRequeued(
        job=job.id, generation=job.generation, cause=job.notice.cause, failure_class="infrastructure",
        message=f"{job.notice.message}; it {how}", failed_at_ms=now_ms,
    )  # fmt: skip


# ---------------------------------------------------------------- 4. failed ranks


def _failed(rank: Rank) -> bool:
    return rank.exit_code != 0 or bool(rank.cause)


def _first_failure(job: Job) -> tuple[int, Rank] | None:
    failed = [(r.exited_at_ms, n, r) for p in job.parts.values() for n, r in p.ranks.items() if r.exited and _failed(r)]
    return min(failed)[1:] if failed else None


def _rank_failure(state: State, job: Job, number: int, rank: Rank, now_ms: int) -> ev.LogEvent | None:
    rules = job.spec.restart
    kind, why = attributed(state, job, number, rank)
    what = describe_exit(number, rank) + (f"; {why}" if why else "")
    alone = rules.on_rank_failure == "rank"
    # The first failure brings the others of its gang down; ranks that restart alone fail each for its own reason.
    failed = [(n, r) for p in job.parts.values() for n, r in p.ranks.items() if r.exited and _failed(r)] if alone else [(number, rank)]
    for n, r in failed:
        final = _final(job, r, attributed(state, job, n, r)[0], now_ms)
        if final:
            cause, why = final
            message = f"{describe_exit(n, r)}; {why}"
            return ev.GangFinished(job=job.id, outcome="failed", cause=cause, message=message, exit_code=_shell_status(r))
    cause = "hang" if rank.cause == "hang" else "rank_failed"
    if alone:
        if now_ms < _rank_backoff_end(job, rank):
            return None
        return ev.RankRestarting(
            job=job.id, generation=job.generation, ranks=tuple(sorted(n for n, _ in failed)), cause=cause, failure_class=kind, message=what
        )
    delay_ms = _backoff_ms(job, now_ms) if kind == "application" else _pause_ms(job, now_ms)
    return ev.GangRestarting(
        job=job.id, generation=job.generation, cause=cause, failure_class=kind, message=what, lost_ranks=(number,),
        not_before_ms=now_ms + delay_ms if delay_ms else 0,
    )  # fmt: skip


def _final(job: Job, rank: Rank, kind: ev.FailureClass, now_ms: int) -> tuple[str, str] | None:
    """Return (cause, words) when this failure ends the job."""
    rules = job.spec.restart
    if rank.cause == "start_failed":
        return "start_failed", "starting it again would not help"
    if kind == "infrastructure":
        return None
    if rules.on_rank_failure == "never":
        return "rank_failed", "the job says on_rank_failure: never"
    if rank.exit_code in rules.fail_exit_codes:
        return "rank_failed", f"the job says that exit code {rank.exit_code} is final"
    if rank.exit_code < 0 and _signal_name(-rank.exit_code) in rules.fail_signals:
        return "rank_failed", f"the job says that {_signal_name(-rank.exit_code)} is final"
    used = sum(t > now_ms - rules.window_s * 1000 for t in job.failures_ms)
    if used >= rules.max_restarts:
        return "restarts_exhausted", f"{used} of {rules.max_restarts} restarts within {rules.window_s:g} s are used up"
    return None


def _pause_ms(job: Job, now_ms: int) -> int:
    """Failures of the infrastructure are free, but one right after another does not restart the gang at once: it may be for ever."""
    soon = job.restart is not None and now_ms - job.restart.failed_at_ms < _AGAIN_SO_SOON_MS
    return int(job.spec.restart.backoff_initial_s * 1000) if soon else 0


def _backoff_ms(job: Job, now_ms: int) -> int:
    """The first failure in a row restarts at once, then the delay doubles from `initial` to `max`."""
    row = row_of_failures(job, now_ms)
    if row == 0:
        return 0
    rules = job.spec.restart
    return int(min(rules.backoff_initial_s * 2 ** min(row - 1, 40), rules.backoff_max_s) * 1000)


def _rank_backoff_end(job: Job, rank: Rank) -> int:
    delay = _backoff_ms(job, rank.ended_ms) if failure_class(rank) == "application" else 0
    return rank.ended_ms + delay


def _shell_status(rank: Rank) -> int:
    return 128 - rank.exit_code if rank.exit_code < 0 else rank.exit_code or 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---------------------------------------------------------------- 6. the barrier


def _barrier(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    if job.state not in ("placed", "preparing", "running"):
        return None
    broken = {n: p.failed for n, p in job.parts.items() if p.failed}
    if not broken and job.lingering:
        return None
    if not broken and not job.released and len(job.parts) > 1 and all(p.prepared for p in job.parts.values()):
        first = next(iter(job.parts.values()))
        return ev.GangReleased(job=job.id, generation=job.generation, master_addr=first.address, master_port=first.port)
    if not broken and now_ms >= _prepare_deadline(job):
        waited = f"nothing for {(now_ms - job.placed_at_ms) / 1000:.0f} s"
        broken = {n: waited for n, p in job.parts.items() if not _has_done_its_part(job, p)}
    if not broken:
        return None
    message = "; ".join(f"{n} could not prepare: {why}" for n, why in broken.items())
    if job.prepare_failures + 1 >= PREPARE_ATTEMPTS:
        message = f"{message}; {PREPARE_ATTEMPTS} placements in a row failed, so the job is to blame"
        return ev.GangFinished(job=job.id, outcome="failed", cause="prepare_failed", message=message)
    avoid = tuple((n, now_ms + AVOID_MS) for n in broken)
    smaller = resize.go_on_without(state, job, broken, "prepare_failed", message, now_ms, avoid=avoid)
    return smaller or ev.GangRequeued(
        job=job.id, generation=job.generation, cause="prepare_failed", failure_class="infrastructure", message=message, avoid=avoid
    )


def _has_done_its_part(job: Job, part: Part) -> bool:
    if job.released or len(job.parts) == 1:
        return all(r.started for r in part.ranks.values())
    return part.prepared


def _prepare_deadline(job: Job) -> int:
    timeout_ms = IMAGE_TIMEOUT_MS if job.spec.image else PREPARE_TIMEOUT_MS
    return job.placed_at_ms + timeout_ms + int(job.spec.preemption.grace_s * 1000)


# ---------------------------------------------------------------- 7. bad hardware, slow ranks, drain


def _unfit(state: State, job: Job) -> dict[str, str]:
    """Return the nodes of a gang on which something is withdrawn that it uses, with the reason; nodes that are withdrawn whole, too."""
    found: dict[str, str] = {}
    if job.spec.burn_in:
        return found
    for name, part in job.parts.items():
        node = state.nodes.get(name)
        if node is None or not node.health:
            continue
        uuids = {gpu.index: gpu.uuid for gpu in node.registration.gpus}
        for uuid in (NODE, *dict.fromkeys(uuids[g] for r in part.ranks.values() for g in r.gpus if g in uuids)):
            ailment = node.health.get(uuid)
            if ailment is not None and ailment.unfit and name not in found:
                found[name] = f"GPU {uuid} of {name}: {ailment.message}" if uuid else f"node {name}: {ailment.message}"
    return found


def _is_fatal(state: State, job: Job, node: str) -> bool:
    """Whether what a gang computes on a node is lost already."""
    there, part = state.nodes[node], job.parts[node]
    mine = {gpu.uuid for gpu in there.registration.gpus for r in part.ranks.values() if gpu.index in r.gpus} | {NODE}
    return any(ailment.fatal for uuid, ailment in there.health.items() if uuid in mine)


def _unhealthy(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    """Move a gang off what has gone bad under it: at once where its work is lost, else with time for a checkpoint; or leave it, as it wishes."""
    unfit = _unfit(state, job)
    if not unfit:
        return None
    fatal = any(_is_fatal(state, job, node) for node in unfit)
    if not fatal and job.spec.health.on_unhealthy == "warn":
        return None
    grace_s = 0.0 if fatal or job.spec.health.on_unhealthy == "restart" else job.spec.preemption.grace_s
    message = "; ".join(unfit.values())
    return _move_off(state, job, list(unfit), "health", message, now_ms, grace_s)


def _straggler(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    """Replace what is under a rank that is slower than its gang, if the job wants that and there is something to replace it with."""
    if not job.slow or job.state != "running" or job.spec.health.stragglers != "replace":
        return None
    nodes = [name for name, part in job.parts.items() if any(r in part.ranks for r in job.slow)]
    words = ", ".join(str(r) for r in job.slow)
    message = f"rank {words} on {', '.join(nodes)} is slower than the others"
    return _replace(state, job, nodes, "straggler", message, now_ms, job.spec.preemption.grace_s)


def _move_off(state: State, job: Job, nodes: list[str], why: str, message: str, now_ms: int, grace_s: float) -> ev.LogEvent:
    whole = [n for n in nodes if state.nodes[n].withdrawn]
    step = _replace(state, job, whole, why, message, now_ms, grace_s)
    if step is None and grace_s == 0.0:
        lost_ranks = tuple(r for n in nodes for r in job.parts[n].ranks)
        step = resize.go_on_without(state, job, whole, "node_lost", message, now_ms, lost_ranks=lost_ranks) or ev.GangRequeued(
            job=job.id, generation=job.generation, cause=why, failure_class="infrastructure", message=message, lost_ranks=lost_ranks,
        )  # fmt: skip
    return step or ev.GangPreempting(
        job=job.id, generation=job.generation, cause=why, message=message, deadline_ms=int(now_ms + grace_s * 1000), grace_s=grace_s
    )


def _replace(
    state: State, job: Job, nodes: list[str], why: str, message: str, now_ms: int, grace_s: float, *,
    lost_ranks: tuple[int, ...] = (), forgive: bool = False,
) -> ev.LogEvent | None:  # fmt: skip
    """Decide that the gang goes on where it is, with other GPUs or spare nodes for what is bad; None if there are none."""
    if job.state in ("preempting", "resizing") or job.spec.burn_in or job.lingering:
        return None
    found = spares.replaced(state, job, nodes)
    if found is None or not found[1]:
        return None
    placement, words = found
    return ev.GangResizing(
        job=job.id, generation=job.generation, parts=placement.parts, role_sizes=placement.role_sizes, cause="node_lost",
        message=f"{message}; it gets {words}", deadline_ms=int(now_ms + grace_s * 1000), grace_s=grace_s, lost_ranks=lost_ranks,
        lost_nodes=tuple(nodes) if why == "node_lost" else (), forgive=forgive, why="" if why == "node_lost" else why,
    )  # fmt: skip


def _elsewhere(state: State, job: Job, unfit: dict[str, str]) -> ev.LogEvent:
    """A gang that restarts does so without what has gone bad."""
    found = spares.replaced(state, job, [n for n in unfit if state.nodes[n].withdrawn])
    message = "; ".join(unfit.values())
    if found is not None and found[1]:
        placement, words = found
        reason = f"restart with {words}: {message}"
        return ev.GangPlaced(job=job.id, generation=job.generation + 1, parts=placement.parts, reason=reason, role_sizes=placement.role_sizes)
    return ev.GangRequeued(
        job=job.id, generation=job.generation, cause="health", failure_class="infrastructure", message=f"it restarts elsewhere: {message}"
    )


def _drain(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    for node in _nodes(state, job):
        overdue = node.drain_deadline_ms and now_ms >= node.drain_deadline_ms
        if node.draining and (job.spec.preemptible or overdue):
            grace_s = job.spec.preemption.grace_s
            reason = f": {node.reason}" if node.reason else ""
            return ev.GangPreempting(
                job=job.id, generation=job.generation, cause="drain", message=f"node {node.id} is being drained{reason}",
                deadline_ms=int(now_ms + grace_s * 1000), grace_s=grace_s,
            )  # fmt: skip
    return None


def _hold(job: Job, now_ms: int) -> ev.LogEvent | None:
    if not job.held_requeue:
        return None
    grace_s = job.spec.preemption.grace_s
    return ev.GangPreempting(
        job=job.id, generation=job.generation, cause="held", message=f"it is held{_reason(job)}", deadline_ms=int(now_ms + grace_s * 1000),
        grace_s=grace_s,
    )  # fmt: skip


def _reason(job: Job) -> str:
    return f": {job.held_reason}" if job.held_reason else ""


# ---------------------------------------------------------------- small readings of the state


def _is_away(state: State, job: Job) -> bool:
    """Whether a node of the gang is lost without proof that its ranks are dead."""
    return any(n.status == "lost" and not job.parts[n.id].dead for n in _nodes(state, job))


def _ranks(job: Job) -> list[Rank]:
    return [r for p in job.parts.values() for r in p.ranks.values()]


def _nodes(state: State, job: Job) -> list[Node]:
    return [state.nodes[n] for n in job.parts if n in state.nodes]


def _ran_ms(job: Job, now_ms: int) -> int:
    return job.ran_ms + now_ms - job.running_since_ms
