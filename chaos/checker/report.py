"""What the checker says: violations, with the entries that make them, and what was checked on which evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from gangline.core.model.events import LogEvent
from gangline.core.model.narrate import sentence

#: violations of one assertion that are kept with all they say; the others are counted
KEPT = 100

#: what each assertion demands
TITLES: dict[str, str] = {
    "S1": "indexes are dense, and every entry continues the one before it",
    "S2": "epochs never go back, and only the owner of the election key writes",
    "S3": "every event is legal, and replay gives every snapshot and every replica byte for byte",
    "S4": "no GPU is given twice",
    "S5": "a gang is placed whole and starts together",
    "S6": "no rank lives twice at once",
    "S7": "what was accepted is in the log once, what was rejected is not",
    "S8": "what has ended stays ended",
    "S9": "no queue is filled above its limit, nor above its quota by what cannot be preempted",
    "S10": "restarts stay within the budget, and wait as long as they must",
    "S11": "nothing runs that the log does not want, and everything that it wants runs",
    "S12": "a client reads what it has written",
    "S13": "agents act on entries of the log, and on no older ones than before",
    "S14": "a jump of the wall clock changes no decision",
    "S15": "the same log gives the same decisions",
    "S16": "after the faults the cluster comes to rest",
}


class Cite(msgspec.Struct, frozen=True, gc=False):
    """An entry that makes a violation: all of it, or one event of it."""

    index: int
    at_ms: int = 0
    event: LogEvent | None = None

    def words(self) -> str:
        """Return the entry as a line for people."""
        return f"{self.index}: {self.event.NAME}: {sentence(self.event)}" if self.event is not None else f"{self.index}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        if self.event is None:
            return {"index": self.index}
        body = msgspec.to_builtins(self.event)
        return {"index": self.index, "at_ms": self.at_ms, "event": self.event.NAME, "message": sentence(self.event), "body": body}


class Violation(NamedTuple):
    """Something that must always be true and was not."""

    assertion: str
    message: str
    entries: tuple[Cite, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.assertion} {self.message}", *(f"    {cite.words()}" for cite in self.entries)])

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"assertion": self.assertion, "message": self.message, "entries": [cite.to_json() for cite in self.entries]}


class Report:
    """Filled during one walk. `checked` counts what was looked at for each assertion; `gaps` are sentences on what could not be looked at."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        #: violations beyond those, by assertion
        self.more: dict[str, int] = {}
        self.checked: dict[str, int] = dict.fromkeys(TITLES, 0)
        self.gaps: dict[str, list[str]] = {}
        #: not violations, but worth knowing
        self.notes: list[str] = []
        self.entries = 0
        self.events = 0
        self.first = 0
        self.last = 0
        self._kept: dict[str, int] = {}

    @property
    def ok(self) -> bool:
        """Nothing is violated."""
        return not self.violations

    def add(self, assertion: str, message: str, *entries: Cite) -> None:
        """Something is violated."""
        kept = self._kept.get(assertion, 0)
        if kept < KEPT:
            self._kept[assertion] = kept + 1
            self.violations.append(Violation(assertion, message, entries))
        else:
            self.more[assertion] = self.more.get(assertion, 0) + 1

    def gap(self, assertion: str, why: str) -> None:
        """Something of this assertion was not checked."""
        said = self.gaps.setdefault(assertion, [])
        if why not in said:
            said.append(why)

    def status(self, assertion: str) -> str:
        """Return "violated", "checked", "partly checked" or "not checked"."""
        if self._kept.get(assertion):
            return "violated"
        if not self.checked[assertion]:
            return "not checked"
        return "partly checked" if self.gaps.get(assertion) else "checked"

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        for violation in self.violations:
            yield f"VIOLATION {violation}"
        for assertion, count in self.more.items():
            yield f"VIOLATION {assertion} and {count} more"
        if self.violations:
            yield ""
        for assertion, title in TITLES.items():
            nothing = () if self.checked[assertion] or self.gaps.get(assertion) else ("there is nothing of it in this log",)
            why = "; ".join([*self.gaps.get(assertion, ()), *nothing])
            yield f"{assertion:4} {self.status(assertion):15} {title}" + (f" (not checked: {why})" if why else "")
        for note in self.notes:
            yield f"note: {note}"
        count = sum(self._kept.values()) + sum(self.more.values())
        yield f"entries {self.first} to {self.last}, {self.events} events: {count or 'no'} violation{'' if count == 1 else 's'}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "ok": self.ok,
            "entries": self.entries, "events": self.events, "first": self.first, "last": self.last,
            "violations": [v.to_json() for v in self.violations],
            "more_violations": self.more,
            "assertions": {
                a: {"title": title, "status": self.status(a), "checked": self.checked[a], "not_checked": self.gaps.get(a, [])}
                for a, title in TITLES.items()
            },
            "notes": self.notes,
        }  # fmt: skip
