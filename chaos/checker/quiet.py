"""S16, and S11 by the log alone: after the faults the cluster comes to rest. Needs the state at the end, and to be told when faults have ended.

At rest does not mean idle: jobs may run, and wait for room that is not there. Nothing may be on its way for ever, though, and nothing may wait
that the policy would start.
"""

from __future__ import annotations

from gangline.chaos.checker.lives import CONVERGE_MS
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.decide import attend_to_all, decide

_ON_THEIR_WAY = ("placed", "preparing", "restarting", "preempting", "resizing")


def lingering(report: Report, state: State) -> None:
    """S11: a node that is up has let go of what it should not have any more."""
    for node in state.nodes.values():
        report.checked["S11"] += 1
        if node.status != "up":
            continue
        for job_id, held in node.holdings.items():
            job = state.jobs[job_id]
            since = max(job.since_ms, job.ended_at_ms, node.joined_at_ms)
            late = state.at_ms - since
            if held.leaving_since and late > CONVERGE_MS + job.spec.preemption.grace_s * 1000:
                what = f"{job_id} is to leave {node.id}, which has not let go of it for {late / 1000:.0f} s"
                report.add("S11", what, Cite(held.leaving_since))


def at_rest(report: Report, state: State, by_ms: int | None) -> None:
    """S16: nothing is on its way since before `by_ms`, log time, and nothing waits that could run."""
    if by_ms is None:
        report.gap("S16", "when faults ended is not known")
        return
    for job in state.jobs.values():
        report.checked["S16"] += 1
        if job.state in _ON_THEIR_WAY and job.since_ms <= by_ms:
            since = (by_ms - job.since_ms) / 1000
            report.add("S16", f"{job.id} is {job.state} since {since:.0f} s before the time at which all should be at rest", Cite(job.index))
    for node in state.nodes.values():
        for job_id, held in node.holdings.items():
            report.checked["S16"] += 1
            if held.leaving_since and node.status == "up" and state.jobs[job_id].since_ms <= by_ms:
                report.add("S16", f"{job_id} still holds {list(held.gpus)} of {node.id}, and should be gone", Cite(held.leaving_since))
    if state.brake.on:
        report.add("S16", f"the brake is on: {state.brake.message}")
    if not state.leader:
        report.add("S16", "nobody leads")
    _startable(report, state, by_ms)


def _startable(report: Report, state: State, by_ms: int) -> None:
    """What the policy would start if it looked at everything now waits although it could run."""
    copy = load_state(dump_state(state))
    now_ms = max(by_ms, copy.at_ms)
    attend_to_all(copy)
    for event in decide(copy, now_ms):
        job = copy.jobs.get(getattr(event, "job", ""))
        if isinstance(event, ev.GangPlaced) and job is not None and job.since_ms <= by_ms and job.not_before_ms <= by_ms:
            where = ", ".join(p.node for p in event.parts)
            report.add("S16", f"{event.job} is {job.state} and could run on {where}", Cite(job.index))
