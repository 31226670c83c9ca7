"""S14, S15: the decisions in a log are those that the policy takes, again, on the same entries before them; and no clock but log time counts.

Each entry has what happened (commands, what nodes say), and then what was decided about it. So it is taken apart: what happened is folded, the
policy decides, and its answer is compared with the log. That is done twice, the second time on the log as it would have been with other clocks
(moved.py): the same decisions must come out, moved.

A scheduler remembers when it last looked at the queues, and a look that came to nothing is in no log. So where the answer differs, the policy is
asked once more as by a scheduler that has just taken over, and, where nothing has happened that would make it look, as by one that does not look
at the queues now. Only an entry that comes out of none of them is a violation.
"""

from __future__ import annotations

import msgspec

from gangline.chaos.checker.moved import SHIFT_MS, moved, without_words
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev
from gangline.core.model.codec import Frame
from gangline.core.model.fold import IllegalTransition, apply, seal
from gangline.core.model.state import Scratch, State
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.decide import attend_to_all, decide, settle, wake
from gangline.leader.batch import FRAME_BYTES, FRAME_EVENTS

#: rounds of deciding in one entry, at most, as in leader/term.py
_ROUNDS = 64

_DECIDED = (
    ev.ElementsQueued, ev.GangPlaced, ev.GangsDeferred, ev.GangReserved, ev.GangReleased, ev.GangRestarting, ev.RankRestarting,
    ev.GangPreempting, ev.GangResizing, ev.GangRequeued, ev.GangFinished, ev.ReservationBegun,
)  # fmt: skip


def _is_decided(event: ev.LogEvent) -> bool:
    """Whether the policy has decided it: of changes of health those that are nobody's word, of submissions the tests of devices."""
    match event:
        case ev.HealthChanged():
            return not event.by
        case ev.JobSubmitted():
            return bool(event.spec.burn_in)
        case _:
            return isinstance(event, _DECIDED)


class Decisions:
    """Decides again along the log, with a state of its own."""

    def __init__(self, report: Report, base: State | None, *, but_for: Decisions | None = None) -> None:
        """Without `but_for`, S15. With it, S14: with other clocks, but for what differs there. A log that begins with a state is not moved."""
        move = but_for is not None
        self._but_for = but_for
        #: cycles in which something differs, by their last index
        self.different: set[int] = set()
        self._report = report
        self._assertion = "S14" if move else "S15"
        self._move = move
        self._state: State | None = State()
        self._frames: list[Frame] = []
        if base is not None:
            self._state = None if move else load_state(dump_state(base))
            if self._state is not None:
                attend_to_all(self._state)
            else:
                report.gap("S14", "decisions with other clocks, the log does not begin at its first entry")

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
        if self._state is None or not frames:
            return
        cycle = _Cycle(self._state, frames, self._move)
        try:
            differs = cycle.run()
        except IllegalTransition as e:
            self._state = None
            self._report.gap(self._assertion, f"decisions from entry {frames[0].index} on ({e})")
            return
        self._report.checked[self._assertion] += 1
        if differs is not None:
            self.different.add(frames[-1].index)
        if differs is not None and (self._but_for is None or frames[-1].index not in self._but_for.different):
            recorded, decided = differs
            at = Cite(frames[-1].index, frames[-1].at_ms, None if self._move else recorded)
            self._report.add(self._assertion, _words(recorded, decided, self._move), at)


def _words(recorded: ev.LogEvent | None, decided: ev.LogEvent | None, with_other_clocks: bool) -> str:
    when = "with other clocks, " if with_other_clocks else ""
    if recorded is None:
        return f"{when}the policy decides {_named(decided)}, and the log has no such decision"
    if decided is None:
        return f"{when}the policy does not decide {_named(recorded)}, which the log has"
    return f"{when}the policy decides {_named(decided)}, and the log has {_named(recorded)}"


def _named(event: ev.LogEvent | None) -> str:
    return f"{event.NAME} {msgspec.json.encode(event).decode()[:300]}" if event is not None else "nothing"


class _Cycle:
    """One cycle of a leader: what came in, and what was decided."""

    def __init__(self, state: State, frames: list[Frame], move: bool) -> None:
        self._state = state
        self._move = move
        self._epoch = frames[0].epoch
        self._now_ms = frames[0].at_ms + (SHIFT_MS if move else 0)
        self._frames = frames
        self._events = [(f.index, moved(e) if move else e) for f in frames for e in f.events]
        self._at = 0
        #: something has happened for which the queues must be looked at; without that, a look is due from time to time
        self._must_look = False

    def run(self) -> tuple[ev.LogEvent | None, ev.LogEvent | None] | None:
        """Return the first (recorded, decided) that differ, None when nothing does. Raises IllegalTransition."""
        state, differs = self._state, None
        if self._events and isinstance(self._events[0][1], ev.LeaderElected):
            # An election is an entry of its own; then the new leader looks at everything.
            self._rest()
            state.scratch = Scratch()
            attend_to_all(state)
        else:
            # A look that was due before, after an election, may have come to nothing before this entry.
            due, state.scratch.queue_dirty = state.scratch.queue_dirty, False
            while self._at < len(self._events) and not _is_decided(self._events[self._at][1]):
                self._apply()
            self._must_look = state.scratch.queue_dirty
            state.scratch.queue_dirty |= due
            wake(state, self._now_ms)
            differs = self._decide()
            self._rest()
            settle(state, self._now_ms)
        last = self._frames[-1]
        seal(state, last.index, last.digest)
        return differs

    def _decide(self) -> tuple[ev.LogEvent | None, ev.LogEvent | None] | None:
        state, first = self._state, None
        for _ in range(_ROUNDS):
            recorded = [e for _, e in self._events[self._at :]]
            asked = (_as_it_stands, _as_after_election, _without_moves)
            for ask in asked if self._must_look else (*asked, _without_queues):
                decided = ask(state, self._now_ms)
                if self._move:
                    decided = [without_words(e) for e in decided]
                differs = _differs(recorded, decided)
                if differs is None:
                    break
                first = first or differs
            else:
                return first
            if not decided:
                return None
            looks_again, state.scratch.queue_dirty = state.scratch.queue_dirty, False
            for _ in decided:
                self._apply()
            self._must_look |= state.scratch.queue_dirty
            state.scratch.queue_dirty |= looks_again
        return None

    def _apply(self) -> None:
        index, event = self._events[self._at]
        self._at += 1
        apply(self._state, event, index, self._epoch, self._now_ms)

    def _rest(self) -> None:
        while self._at < len(self._events):
            self._apply()


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
