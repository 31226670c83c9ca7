"""What happened in a run, told from the log: the timeline, and how long each recovery took. Pure.

Entries are those of `GET /v1/events`, as JSON objects: index, epoch, at_ms, event, message, body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gangline.chaos import faults as f
from gangline.chaos.injector import Injection
from gangline.chaos.training import Step
from gangline.core.model.narrate import exit_words, numbers

Entry = Mapping[str, Any]

#: what a timeline of a run leaves out, because it is said by what comes before or after
_QUIET = frozenset({"node_prepared", "part_released", "progress_reported"})


@dataclass(frozen=True, slots=True)
class Recovery:
    """How one fault was survived. Times in seconds after the fault; None for what did not happen."""

    fault: str
    generation_before: int
    generation_after: int
    nodes_before: tuple[str, ...]
    nodes_after: tuple[str, ...]
    #: when the log first speaks of it
    detected_s: float | None
    #: when the decision was taken: restart in place, back in the queue, a new leader
    decided_s: float | None
    #: when all ranks of the new generation ran; None when none had to
    running_s: float | None
    #: when the next step was finished
    training_s: float | None
    steps_repeated: int

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


def recovery(
    injection: Injection, job: str, before: tuple[int, tuple[str, ...]], after: tuple[int, tuple[str, ...]],
    entries: Sequence[Entry], steps: Sequence[Step],
) -> Recovery:  # fmt: skip
    """Return how a fault was survived; `before` and `after` are the job's generation and nodes."""
    fault, at_ms = injection.fault, injection.at_ms
    generation = after[0]
    restarted = generation != before[0]
    later = [e for e in entries if e["at_ms"] >= at_ms]
    running = [e for e in later if _of(e, "ranks_started", job) and e["body"]["generation"] == generation]
    redone = [s for s in steps if s.generation == generation and s.at_s * 1000 >= at_ms]
    reached = max((s.step for s in steps if s.generation < generation), default=0)
    return Recovery(
        fault=str(fault), generation_before=before[0], generation_after=generation, nodes_before=before[1], nodes_after=after[1],
        detected_s=_since(at_ms, first(later, lambda e: _detects(e, fault, job))),
        decided_s=_since(at_ms, first(later, lambda e: _decides(e, fault, job))),
        running_s=_since(at_ms, running[-1]) if running and restarted else None,
        training_s=round(redone[0].at_s - at_ms / 1000, 2) if redone else None,
        steps_repeated=sum(1 for s in redone if s.step <= reached) if restarted else 0,
    )  # fmt: skip


def first(entries: Iterable[Entry], wanted: Any) -> Entry | None:
    """Return the first entry that is wanted."""
    return next((e for e in entries if wanted(e)), None)


def _of(entry: Entry, event: str, job: str) -> bool:
    return bool(entry["event"] == event and entry["body"].get("job") == job)


def _detects(entry: Entry, fault: f.Fault, job: str) -> bool:
    match fault:
        case f.KillRank():
            return _of(entry, "ranks_exited", job) and any(x[0] == fault.rank for x in entry["body"]["exits"])
        case f.KillNode() | f.FreezeNode():
            return bool(entry["event"] == "node_lost" and entry["body"]["node"] == fault.node)
        case _:
            return bool(entry["event"] == "leader_elected")


def _decides(entry: Entry, fault: f.Fault, job: str) -> bool:
    match fault:
        case f.KillRank():
            return _of(entry, "gang_restarting", job)
        case f.KillNode() | f.FreezeNode():
            return _of(entry, "gang_requeued", job)
        case _:
            return bool(entry["event"] == "leader_elected")


def _since(at_ms: int, entry: Entry | None) -> float | None:
    return None if entry is None else round((entry["at_ms"] - at_ms) / 1000, 2)


# ---------------------------------------------------------------- for people


def timeline(entries: Sequence[Entry], injections: Sequence[Injection], origin_ms: int, about: str = "") -> list[str]:
    """Return what happened, a line each: seconds since `origin_ms`, index in the log, and what the log says.

    Faults stand between the entries, marked, since the log cannot know of them. Runs of entries that say the same of several nodes, or of
    several steps, become one line. `about` is the job that the reader knows this is about.
    """
    lines: list[tuple[int, str, str]] = [(i.at_ms, ">>>", str(i.fault)) for i in injections]
    group: list[Entry] = []
    for entry in [*(e for e in entries if e["event"] not in _QUIET), None]:
        if group and (entry is None or not _together(group[-1], entry)):
            lines.append((group[0]["at_ms"], str(group[0]["index"]), _told(group)))
            group = []
        if entry is not None:
            group.append(entry)
    lines.sort(key=lambda line: line[0])
    return [f"{(at_ms - origin_ms) / 1000:8.2f} s  {index:>5}  {text.removeprefix(f'{about}: ')}" for at_ms, index, text in lines]


def _together(a: Entry, b: Entry) -> bool:
    if a["event"] != b["event"]:
        return False
    if a["event"] == "checkpoint_reported":
        return bool(a["body"]["generation"] == b["body"]["generation"])
    return a["event"] == "node_joined" or (a["event"] in ("ranks_started", "ranks_exited") and b["at_ms"] - a["at_ms"] < 2000)


def _told(group: Sequence[Entry]) -> str:
    """Return one sentence for entries of one kind."""
    bodies = [e["body"] for e in group]
    match group[0]["event"]:
        case "checkpoint_reported":
            steps = [str(b["step"]) for b in bodies]
            return f"checkpoint{'s' if steps[1:] else ''} at step{'s' if steps[1:] else ''} {', '.join(steps)}"
        case "ranks_started":
            ranks = [(b["node"], rank) for b in bodies for rank in b["ranks"]]
            return f"generation {bodies[-1]['generation']} started: {_by_node(ranks)}"
        case "ranks_exited":
            return _exits(bodies)
        case "node_joined" if group[1:]:
            return f"nodes {', '.join(b['registration']['node'] for b in bodies)} joined"
        case _:
            return str(group[0]["message"])


def _exits(bodies: Sequence[Mapping[str, Any]]) -> str:
    """Return how ranks ended, those of several nodes together. An exit is (rank, generation, code, cause, …)."""
    ways: dict[str, list[tuple[str, int]]] = {}
    for body in bodies:
        for exit_ in body["exits"]:
            ways.setdefault(exit_words(exit_[2], exit_[3] if len(exit_) > 3 else ""), []).append((body["node"], exit_[0]))
    return "; ".join(f"{_by_node(ranks)} {how}" for how, ranks in ways.items())


def _by_node(ranks: Iterable[tuple[str, int]]) -> str:
    nodes: dict[str, list[int]] = {}
    for node, rank in sorted(ranks):
        nodes.setdefault(node, []).append(rank)
    return ", ".join(f"rank{'s' if found[1:] else ''} {numbers(found)} on {node}" for node, found in nodes.items())


def recovery_table(recoveries: Sequence[Recovery]) -> list[str]:
    """Return the recoveries as lines of a table."""
    head = ("fault", "detected", "decided", "ranks run", "next step", "repeated", "generation", "nodes")
    rows = [
        (
            r.fault, _seconds(r.detected_s), _seconds(r.decided_s), _seconds(r.running_s, "never stopped"), _seconds(r.training_s),
            f"{r.steps_repeated} steps", _change(str(r.generation_before), str(r.generation_after)),
            _change(" ".join(r.nodes_before), " ".join(r.nodes_after)),
        )
        for r in recoveries
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]


def _seconds(value: float | None, otherwise: str = "-") -> str:
    return otherwise if value is None else f"{value:.1f} s"


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"
