"""Every event as one sentence for people, and whom it concerns: used by stories, event lists and timelines. Pure.

`sentence(event)` names the job or node it is about; `sentence(event, about=job)` leaves that job out, for a reader who is looking at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from gangline.core.model import events as ev
from gangline.core.model.arrays import array_text, split_element
from gangline.core.model.roles import asked, least, leaves

#: names of a list that are written out; the rest is counted
SHOWN = 6

#: Linux x86-64 and arm64; the `signal` module would name those of the machine that runs this
_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1",
    11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 16: "SIGSTKFLT", 17: "SIGCHLD", 24: "SIGXCPU", 25: "SIGXFSZ",
    31: "SIGSYS",
}  # fmt: skip

_CAUSES = {
    "start_failed": "could not be started",
    "hang": "hung",
    "oom": "ran out of memory",
    "stopped": "was stopped",
    "fenced": "was stopped because its node lost contact",
    "node_restart": "is gone with a restart of its node",
    "lost": "ended while nobody held its exit status",
}


def sentence(event: ev.LogEvent, about: str = "") -> str:
    """Return what happened, without a full stop. `about` is the job that the reader is looking at."""
    text = _SENTENCES[type(event)](event)
    jobs, _ = concerns(event)
    if not jobs or about in jobs:
        return text
    return f"{jobs[0]}: {text}" if len(jobs) == 1 else f"{_names(jobs)}: {text}"


def concerns(event: ev.LogEvent) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the jobs and the nodes that an event is about."""
    match event:
        case ev.GangsDeferred():
            return event.jobs, ()
        case ev.GangPlaced() | ev.GangResizing():
            return (event.job,), tuple(p.node for p in event.parts)
        case ev.GangRequeued():
            return (event.job,), event.lost_nodes
        case ev.ReservationDeclared():
            return (), tuple(kept.node for kept in event.reservation.nodes)
        case ev.NodeJoined():
            return (), (event.registration.node,)
        case _:
            job, node = getattr(event, "job", ""), getattr(event, "node", "")
            return (job,) if job else (), (node,) if node else ()


class JobStory:
    """Tells which events belong to the story of one job: its own, and what befell the nodes while it was on them.

    Events must be shown to it in log order, from the job's submission on.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._element = split_element(job)
        self._nodes: frozenset[str] = frozenset()

    def tells(self, event: ev.LogEvent) -> bool:
        """The event belongs to the story."""
        jobs, nodes = concerns(event)
        if isinstance(event, ev.ElementsQueued) and self._element is not None:
            return self._element[0] == event.job and self._element[1] in event.indices
        if isinstance(event, ev.GangFinished) and event.outcome != "succeeded" and event.job.rpartition(".")[0] == self._job:
            return True  # of its elements, an array tells those that came to no good end
        if self._job in jobs:
            if isinstance(event, ev.GangPlaced):
                self._nodes = frozenset(nodes)
            elif isinstance(event, ev.GangRequeued | ev.GangFinished):
                self._nodes = frozenset()
            return True
        return isinstance(event, ev.NodeLost | ev.NodeAdministered | ev.HealthChanged) and event.node in self._nodes


def numbers(values: Iterable[int]) -> str:
    """Return ascending numbers as ranges: 0-7, 9."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:SHOWN]]
    return ", ".join(shown) + (f" and {len(runs) - SHOWN} more ranges" if len(runs) > SHOWN else "")


def duration(seconds: float) -> str:
    """Return a duration as people say it: 45 s, 2 min, 1 h 30 min."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


# ---------------------------------------------------------------- leadership


def _leader_elected(e: ev.LeaderElected) -> str:
    return f"{e.scheduler} leads now"


def _leader_resigned(e: ev.LeaderResigned) -> str:
    return f"{e.scheduler} hands the lead over"


def _brake_set(e: ev.BrakeSet) -> str:
    what = "brake on: no node is declared lost and no gang is moved" if e.on else "brake off"
    return _because(what, e.message) + _by(e.by)


# ---------------------------------------------------------------- jobs


def _job_submitted(e: ev.JobSubmitted) -> str:
    spec = e.spec
    name = f" as {spec.name}" if spec.name else ""
    gpus = f" of {spec.resources.gpu_words}" if spec.resources.wants_gpus else ""
    all_there, fewest = asked(spec), sum(least(spec))
    ranks = _count(all_there.ranks, "rank") + (f" (at least {fewest})" if fewest < all_there.ranks else "")
    if spec.roles:
        of_role = Counter(leaf.name for leaf in leaves(spec) for _ in range(leaf.gang.ranks))
        ranks += f" in the roles {_names([f'{role} ({count})' for role, count in of_role.items()])}"
        gpus = f", {all_there.gpus:g} GPU{'' if all_there.gpus <= 1 else 's'}" if all_there.gpus else ""
    array = f" as array {array_text(spec.array)}, each" if spec.array is not None else ""
    after = f", {_names(f'{each.when} of {each.job}' for each in spec.depends_on)}" if spec.depends_on else ""
    held = ", on hold" if spec.hold else ""
    return f"submitted{name} to queue {spec.queue}{array}: {ranks}{gpus}, priority {spec.priority}{after}{held}" + _by(e.user)


def _job_stop_requested(e: ev.JobStopRequested) -> str:
    return _because("stop requested", e.reason) + _by(e.by)


def _job_held(e: ev.JobHeld) -> str:
    what = "held, and asked to leave where it runs" if e.requeue else "held: it is not started before it is released"
    return _because(what, e.reason) + _by(e.by)


def _job_released(e: ev.JobReleased) -> str:
    return _because("released: it may be started", e.reason) + _by(e.by)


def _elements_queued(e: ev.ElementsQueued) -> str:
    return f"element{'' if len(e.indices) == 1 else 's'} {numbers(e.indices)} of the array queued"


def _gang_placed(e: ev.GangPlaced) -> str:
    parts = [f"{p.node} ({_ranks(r.rank for r in p.ranks)}{_instances(p)})" for p in e.parts]
    return _because(f"placed on {_names(parts)} as generation {e.generation}", e.reason)


def _instances(part: ev.PlacedPart) -> str:
    """Return into what the GPUs are partitioned for a part, "" when they are not."""
    found = [one for r in part.ranks if r.share is not None for one in r.share.mig]
    words = [f"{one.profile} at slice {one.start} of GPU {one.gpu}" for one in found[:4]]
    return f" with {_names(words)}{f' and {len(found) - 4} more' if len(found) > 4 else ''}" if found else ""


def _gangs_deferred(e: ev.GangsDeferred) -> str:
    return _because("waits", e.message or e.code)


def _gang_reserved(e: ev.GangReserved) -> str:
    if not e.parts:
        return _because("no room is kept for it any more", e.message)
    parts = [f"{p.node} ({_count(p.gpus, 'GPU')})" if p.gpus else p.node for p in e.parts]
    return _because(f"room is kept for it on {_names(parts)}", e.message)


def _gang_released(e: ev.GangReleased) -> str:
    return f"every node is ready: the ranks of generation {e.generation} start and meet at {_address(e.master_addr, e.master_port)}"


def _gang_restarting(e: ev.GangRestarting) -> str:
    return _because("restarting in place", e.message or e.cause)


def _rank_restarting(e: ev.RankRestarting) -> str:
    return _because(f"restarting {_ranks(e.ranks)} alone", e.message or e.cause)


def _gang_preempting(e: ev.GangPreempting) -> str:
    return _because(f"asked to checkpoint and leave within {duration(e.grace_s)}", e.message or e.cause)


def _gang_resizing(e: ev.GangResizing) -> str:
    size, nodes = sum(len(p.ranks) for p in e.parts), _names(p.node for p in e.parts)
    grace = f"asked to checkpoint within {duration(e.grace_s)}, to go" if e.grace_s else "goes"
    text = _because(f"{grace} on with {_count(size, 'rank')} on {nodes}", e.message or e.cause)
    return text + (f" (not on {_names([n for n, _ in e.avoid])} for now)" if e.avoid else "")


def _gang_requeued(e: ev.GangRequeued) -> str:
    text = _because("back in the queue", e.message or e.cause)
    return text + (f" (not on {_names([n for n, _ in e.avoid])} for now)" if e.avoid else "")


def _gang_finished(e: ev.GangFinished) -> str:
    code = f" with exit code {e.exit_code}" if e.outcome == "failed" and e.exit_code > 0 else ""
    return _because(f"{e.outcome}{code}", e.message or ("" if e.outcome == "succeeded" else e.cause))


# ---------------------------------------------------------------- what agents report


def _node_joined(e: ev.NodeJoined) -> str:
    r = e.registration
    models = list(dict.fromkeys(g.model for g in r.gpus))
    sick = sum(not g.healthy for g in r.gpus)
    gpus = f"{_count(len(r.gpus), 'GPU')}{f' ({_names(models)})' if models else ''}{f', {sick} of them unhealthy' if sick else ''}"
    return f"node {r.node} joined with {gpus}, {_count(r.cpus_milli // 1000, 'CPU')}, {r.memory_mib // 1024} GiB"


def _node_lost(e: ev.NodeLost) -> str:
    return _because(f"node {e.node} lost", e.message or e.cause)


def _node_prepared(e: ev.NodePrepared) -> str:
    return f"{e.node} is ready for generation {e.generation}"


def _prepare_failed(e: ev.PrepareFailed) -> str:
    return _because(f"{e.node} cannot start its ranks", e.message)


def _ranks_started(e: ev.RanksStarted) -> str:
    return f"{_ranks(e.ranks)} started on {e.node}"


def _ranks_exited(e: ev.RanksExited) -> str:
    ways: dict[str, list[int]] = {}
    for x in e.exits:
        ways.setdefault(exit_words(x.code, x.cause), []).append(x.rank)
    shown = [f"{_ranks(ranks)} {how}" for how, ranks in ways.items()]
    messages = list(dict.fromkeys(x.message for x in e.exits if x.message))
    return _because(f"{_names(shown)} on {e.node}", "; ".join(messages[:SHOWN]))


def exit_words(code: int, cause: str = "") -> str:
    """Return how a rank ended: "ended by SIGKILL", "exited with 3", "ran out of memory"."""
    if cause:
        return _CAUSES.get(cause, f"ended ({cause})")
    if code < 0:
        return f"ended by {_SIGNALS.get(-code, f'signal {-code}')}"
    return f"exited with {code}"


def _part_released(e: ev.PartReleased) -> str:
    return f"nothing is left on {e.node}"


def _progress_reported(e: ev.ProgressReported) -> str:
    return f"reached step {e.step}"


def _checkpoint_reported(e: ev.CheckpointReported) -> str:
    return f"wrote a checkpoint at step {e.step}" + (f" to {e.path}" if e.path else "")


def _stop_acknowledged(e: ev.StopAcknowledged) -> str:
    return f"its ranks on {e.node} have saved and may be stopped"


def _device(node: str, device: str) -> str:
    return f"{device} of {node}" if device else f"node {node}"


def _health_reported(e: ev.HealthReported) -> str:
    if not e.symptoms:
        well = e.report is None and (e.device or (e.driver is None and not e.checks))
        return f"{_device(e.node, e.device)} has {'nothing more' if well else 'something else'} to report"
    return f"{_device(e.node, e.device)}: {'; '.join(s.message for s in e.symptoms[:SHOWN])}"


def _health_changed(e: ev.HealthChanged) -> str:
    what = {
        "healthy": "is healthy again", "suspect": "is suspect", "unhealthy": "is unhealthy, and given to nobody new",
        "quarantined": "is quarantined", "repair": "is in repair", "burn_in": "is being tested",
    }[e.state]  # fmt: skip
    actions = {"reset_gpu": "a reset", "reboot_node": "a reboot of its node", "rma": "repair or exchange"}
    needs = f"; it needs {actions[e.action]}" if e.action in actions and e.state in ("unhealthy", "quarantined", "repair") else ""
    return _because(f"{_device(e.node, e.device)} {what}", e.message + needs) + _by(e.by)


def _rank_slow(e: ev.RankSlow) -> str:
    slower = f", {e.score_tenths / 10:g} times the spread" if e.score_tenths else ""
    return f"rank {e.rank} on {e.node} is slow: {e.pace_ms} ms for a step, {e.median_ms} ms are usual in its gang{slower}"


# ---------------------------------------------------------------- administration


def _node_administered(e: ev.NodeAdministered) -> str:
    what = {
        "cordon": f"node {e.node} cordoned: no new ranks",
        "uncordon": f"node {e.node} takes new ranks again",
        "drain": f"node {e.node} draining: its gangs are moved",
        "undrain": f"node {e.node} is no longer drained",
        "confirm_dead": f"node {e.node} is confirmed to be off",
    }[e.action]
    deadline = f", all of them after {duration(e.deadline_s)}" if e.action == "drain" and e.deadline_s else ""
    return _because(what + deadline, e.reason) + _by(e.by)


def _reservation_declared(e: ev.ReservationDeclared) -> str:
    r = e.reservation
    what = [k.node if k.gpus < 0 else f"{_count(k.gpus, 'GPU')} of {k.node}" for k in r.nodes]
    owners = [f"queue {q}" for q in r.queues] + [f"user {u}" for u in r.users]
    whom = "maintenance" if r.maintenance else _names(owners)
    text = f"reservation {r.name}: {_names(what)} for {whom}, for {duration((r.end_ms - r.start_ms) / 1000)}"
    return _because(text, r.reason) + _by(r.by)


def _reservation_begun(e: ev.ReservationBegun) -> str:
    return f"reservation {e.name} begins"


def _reservation_removed(e: ev.ReservationRemoved) -> str:
    return _because(f"reservation {e.name} ends", e.reason) + _by(e.by)


def _queues_declared(e: ev.QueuesDeclared) -> str:
    queues = f"{_count(len(e.queues), 'queue')} declared ({_names(q.path for q in e.queues)})"
    topologies = "".join(f", topology {t.name} ({' > '.join(t.levels) or 'nodes only'})" for t in e.topologies[:SHOWN])
    return _because(queues + topologies, e.reason) + _by(e.by)


# ---------------------------------------------------------------- words


def _because(what: str, why: str) -> str:
    return f"{what}: {why.rstrip('.')}" if why else what


def _by(who: str) -> str:
    return f" (by {who})" if who else ""


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'' if len(listed) == 1 else 's'} {numbers(listed)}"


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    if len(listed) > SHOWN + 1:
        listed = [*listed[:SHOWN], f"{len(listed) - SHOWN} more"]
    return f"{', '.join(listed[:-1])} and {listed[-1]}" if len(listed) > 1 else "".join(listed)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_SENTENCES: dict[type[ev.LogEvent], Callable[[Any], str]] = {
    ev.LeaderElected: _leader_elected,
    ev.LeaderResigned: _leader_resigned,
    ev.BrakeSet: _brake_set,
    ev.JobSubmitted: _job_submitted,
    ev.JobStopRequested: _job_stop_requested,
    ev.JobHeld: _job_held,
    ev.JobReleased: _job_released,
    ev.ElementsQueued: _elements_queued,
    ev.GangPlaced: _gang_placed,
    ev.GangsDeferred: _gangs_deferred,
    ev.GangReserved: _gang_reserved,
    ev.GangReleased: _gang_released,
    ev.GangRestarting: _gang_restarting,
    ev.RankRestarting: _rank_restarting,
    ev.GangPreempting: _gang_preempting,
    ev.GangResizing: _gang_resizing,
    ev.GangRequeued: _gang_requeued,
    ev.GangFinished: _gang_finished,
    ev.NodeJoined: _node_joined,
    ev.NodeLost: _node_lost,
    ev.NodePrepared: _node_prepared,
    ev.PrepareFailed: _prepare_failed,
    ev.RanksStarted: _ranks_started,
    ev.RanksExited: _ranks_exited,
    ev.PartReleased: _part_released,
    ev.ProgressReported: _progress_reported,
    ev.CheckpointReported: _checkpoint_reported,
    ev.StopAcknowledged: _stop_acknowledged,
    ev.HealthReported: _health_reported,
    ev.HealthChanged: _health_changed,
    ev.RankSlow: _rank_slow,
    ev.NodeAdministered: _node_administered,
    ev.ReservationDeclared: _reservation_declared,
    ev.ReservationBegun: _reservation_begun,
    ev.ReservationRemoved: _reservation_removed,
    ev.QueuesDeclared: _queues_declared,
}
