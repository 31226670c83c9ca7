"""One walk over the entries, with all assertions at once. Time and memory are linear in what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gangline.chaos.checker import quiet
from gangline.chaos.checker.decisions import Decisions
from gangline.chaos.checker.evidence import Entry, NodeView, Operation, RankLife
from gangline.chaos.checker.facts import Facts, Handler
from gangline.chaos.checker.folding import Folding
from gangline.chaos.checker.gangs import Gangs
from gangline.chaos.checker.jobs import Jobs
from gangline.chaos.checker.lives import Lives
from gangline.chaos.checker.order import Order
from gangline.chaos.checker.quotas import Quotas
from gangline.chaos.checker.report import Cite, Report, Violation
from gangline.chaos.checker.submissions import Submissions
from gangline.core.model import events as ev
from gangline.core.model.state import State


def check(
    entries: Iterable[Entry], agent_records: Iterable[RankLife] | None = None, client_history: Iterable[Operation] | None = None,
    nodes: Iterable[NodeView] | None = None, quiescent_after: int | None = None, **more: Any,
) -> list[Violation]:  # fmt: skip
    """Return what is violated; see `examine`."""
    return examine(entries, agent_records, client_history, nodes, quiescent_after, **more).violations


def examine(
    entries: Iterable[Entry],
    agent_records: Iterable[RankLife] | None = None,
    client_history: Iterable[Operation] | None = None,
    nodes: Iterable[NodeView] | None = None,
    quiescent_after: int | None = None,
    *,
    snapshots: Mapping[int, bytes] | None = None,
    replicas: Mapping[str, tuple[int, str]] | None = None,
    base: State | None = None,
    decisions: bool = True,
) -> Report:
    """Check S1 to S16 as far as the evidence goes.

    `entries` are those of a log in its order, from the first one, or from the one after `base`, a state that is changed. `quiescent_after` is
    the log time (ms) by which all must be at rest: faults had ended long enough before. `snapshots` are states as bytes by index, `replicas`
    what live schedulers say of themselves, (index, state digest) by name. What is None is evidence that there is not: the report says what could
    not be checked without it. `decisions`: take all decisions again, which costs twice the time that the leaders took for them.
    """
    report = Report()
    facts = Facts(keep_ends=agent_records is not None or nodes is not None)
    again: list[Decisions] = []
    if decisions:
        again = [first := Decisions(report, base), Decisions(report, base, but_for=first)]
    else:
        for assertion in ("S14", "S15"):
            report.gap(assertion, "decisions are not taken again")
    order = Order(report, base.index if base else 0, base.digest if base else bytes(32), base.epoch if base else 0)
    folding = Folding(report, base, snapshots, replicas)
    gangs, jobs, quotas = Gangs(report, facts), Jobs(report, facts), Quotas(report, facts)
    submissions, lives = Submissions(report, facts, client_history), Lives(report, facts, agent_records, nodes)
    if base is not None:
        for account in (facts, gangs, jobs, quotas, submissions):
            account.begin(base)
        report.gap("S3", f"entries 1 to {base.index}, the log begins after them")
    # The facts come last: the others look at what was true before the event.
    handlers = _dispatch(
        gangs.handlers().items(), jobs.handlers(), quotas.handlers().items(), submissions.handlers().items(), lives.handlers().items(),
        facts.handlers().items(),
    )  # fmt: skip
    at_ms = 0
    for entry in entries:
        report.entries += 1
        report.first = report.first or entry.index
        if not order.entry(entry):
            continue
        folding.fold(entry)
        frame = entry.frame
        report.last = entry.index
        if frame is None:
            continue
        for event in frame.events:
            report.events += 1
            at = Cite(frame.index, frame.at_ms, event)
            for handler in handlers.get(type(event), ()):
                handler(at, event)
        if folding.state is not None:
            for each in again:
                each.entry(frame)
        lives.sealed(frame.index, frame.epoch)
        at_ms = frame.at_ms
    folding.end()
    for each in again:
        each.end()
    submissions.end(report.last)
    lives.end(at_ms)
    quotas.end()
    if folding.state is not None:
        quiet.lingering(report, folding.state)
        quiet.at_rest(report, folding.state, quiescent_after)
    return report


def _dispatch(*tables: Iterable[tuple[type[ev.LogEvent], Handler]]) -> dict[type[ev.LogEvent], list[Callable[[Cite, Any], None]]]:
    found: dict[type[ev.LogEvent], list[Callable[[Cite, Any], None]]] = {}
    for table in tables:
        for kind, handler in table:
            found.setdefault(kind, []).append(handler)
    return found
