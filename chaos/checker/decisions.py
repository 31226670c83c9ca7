"""S14, S15: the decisions in a log are those that the policy takes, again, on the same entries before them; and no clock but log time counts.

Each entry has what happened (commands, what nodes say), and then what was decided about it. So it is taken apart: what happened is folded, the
policy decides, and its answer is compared with the log. That is done twice, the second time with all of log time moved by `SHIFT_MS` and the
nodes' own clocks moved by something else for each node: the same decisions must come out, moved.

A scheduler remembers when it last looked at the queues, and a look that came to nothing is in no log. So where the answer differs, the policy is
asked once more as by a scheduler that has just taken over, and once more as by one that does not look at the queues now. Only an entry that
comes out of none of them is a violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev
from gangline.core.model.codec import Frame
from gangline.core.model.fold import IllegalTransition, apply, seal
from gangline.core.model.state import Scratch, State
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.decide import attend_to_all, decide, settle, wake
from gangline.leader.batch import FRAME_BYTES, FRAME_EVENTS

#: log time is moved by so much: some years, and not a whole number of anything
SHIFT_MS = 123_456_789_123
#: rounds of deciding in one entry, at most, as in leader/term.py
_ROUNDS = 64

_DECIDED = (
    ev.ElementsQueued, ev.GangPlaced, ev.GangsDeferred, ev.GangReserved, ev.GangReleased, ev.GangRestarting, ev.RankRestarting,
    ev.GangPreempting, ev.GangResizing, ev.GangRequeued, ev.GangFinished, ev.ReservationBegun,
)  # fmt: skip


class Decisions:
    """Decides again along the log, with a state of its own."""

    def __init__(self, report: Report, assertion: str, base: State | None, move: Callable[[ev.LogEvent], ev.LogEvent] | None = None) -> None:
        """`move` changes the events of the log before they are used; `shift_ms` of it is how far log time is moved."""
        self._report = report
        self._assertion = assertion
        self._move = move
        self._shift_ms = SHIFT_MS if move is not None else 0
        self.state: State | None = State() if base is None else load_state(dump_state(base))
        if base is not None:
            attend_to_all(self.state or base)
        self._frames: list[Frame] = []

    def entry(self, frame: Frame) -> None:
        """Take in one entry. What one cycle has written in several is taken together."""
        if self._frames and (frame.epoch, frame.at_ms) != (self._frames[-1].epoch, self._frames[-1].at_ms):
            self._flush()
        self._frames.append(frame)
        if frame.size_bytes < FRAME_BYTES and len(frame.events) < FRAME_EVENTS:
            self._flush()

    def end(self) -> None:
        """All entries are there."""
        self._flush()

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if self.state is None or not frames:
            return
        cycle = _Cycle(self.state, frames, self._shift_ms, self._move)
        try:
            differs = cycle.run()
        except IllegalTransition as e:
            self.state = None
            self._report.gap(self._assertion, f"decisions after entry {frames[0].index}: {e}")
            return
        self._report.checked[self._assertion] += 1
        if differs is not None:
            recorded, decided = differs
            at = Cite(frames[-1].index, frames[-1].at_ms, recorded if self._move is None else None)
            self._report.add(self._assertion, _words(recorded, decided, self._move is not None), at)


def _words(recorded: ev.LogEvent | None, decided: ev.LogEvent | None, moved: bool) -> str:
    when = "with the clocks moved, " if moved else ""
    if recorded is None:
        return f"{when}the policy decides {_named(decided)}, and the log has no such decision"
    if decided is None:
        return f"{when}the policy does not decide {_named(recorded)}, which the log has"
    return f"{when}the policy decides {_named(decided)}, and the log has {_named(recorded)}"


def _named(event: ev.LogEvent | None) -> str:
    return f"{event.NAME} {msgspec.json.encode(event).decode()[:300]}" if event is not None else "nothing"


class _Cycle:
    """One cycle of a leader: what came in, and what was decided."""

    def __init__(
        self, state: State, frames: list[Frame], shift_ms: int, move: Callable[[ev.LogEvent], ev.LogEvent] | None
    ) -> None:
        self._state = state
        self._epoch = frames[0].epoch
        self._now_ms = frames[0].at_ms + shift_ms
        self._frames = frames
        self._events = [(f.index, move(e) if move is not None else e) for f in frames for e in f.events]
        self._at = 0

    def run(self) -> tuple[ev.LogEvent | None, ev.LogEvent | None] | None:
        """Return the first (recorded, decided) that differ, None when nothing does. Raises IllegalTransition."""
        state = self._state
        if isinstance(self._events[0][1], ev.LeaderElected):
            self._apply()
            state.scratch = Scratch()
            attend_to_all(state)
        else:
            wake_first = True
            while self._at < len(self._events) and not isinstance(self._events[self._at][1], _DECIDED):
                self._apply()
            if wake_first:
                wake(state, self._now_ms)
            differs = self._decide()
            self._rest()
            settle(state, self._now_ms)
            self._seal()
            return differs
        self._rest()
        self._seal()
        return None

    def _decide(self) -> tuple[ev.LogEvent | None, ev.LogEvent | None] | None:
        state, first = self._state, None
        for _ in range(_ROUNDS):
            recorded = [e for _, e in self._events[self._at :]]
            for ask in (_as_it_stands, _as_after_election, _without_moves, _without_queues):
                decided = ask(state, self._now_ms)
                differs = _differs(recorded, decided)
                if differs is None:
                    break
                first = first or differs
            else:
                return first
            if not decided:
                return None
            for _ in decided:
                self._apply()
        return None

    def _apply(self) -> None:
        index, event = self._events[self._at]
        self._at += 1
        self._seal_before(index)
        apply(self._state, event, index, self._epoch, self._now_ms)

    def _seal_before(self, index: int) -> None:
        for frame in self._frames:
            if self._state.index < frame.index < index:
                seal(self._state, frame.index, frame.digest)

    def _rest(self) -> None:
        while self._at < len(self._events):
            self._apply()

    def _seal(self) -> None:
        last = self._frames[-1]
        seal(self._state, last.index, last.digest)


def _as_it_stands(state: State, now_ms: int) -> list[ev.LogEvent]:
    return decide(state, now_ms)


def _as_after_election(state: State, now_ms: int) -> list[ev.LogEvent]:
    attend_to_all(state)
    state.scratch.moves_ms, state.scratch.planned = -1 << 60, {}
    return decide(state, now_ms)


def _without_moves(state: State, now_ms: int) -> list[ev.LogEvent]:
    attend_to_all(state)
    state.scratch.moves_ms, state.scratch.planned = now_ms, dict.fromkeys(state.reserved, now_ms)
    return decide(state, now_ms)


def _without_queues(state: State, now_ms: int) -> list[ev.LogEvent]:
    attend_to_all(state)
    state.scratch.queue_dirty = False
    return decide(state, now_ms)


def _differs(recorded: list[ev.LogEvent], decided: list[ev.LogEvent]) -> tuple[ev.LogEvent | None, ev.LogEvent | None] | None:
    if not decided:
        return (recorded[0], None) if recorded else None
    for at, each in enumerate(decided):
        if at >= len(recorded):
            return None, each
        if recorded[at] != each:
            return recorded[at], each
    return None
