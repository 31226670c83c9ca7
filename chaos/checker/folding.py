"""S3: every event is legal where it stands; a snapshot is the fold of the entries before it, byte for byte, and so is every live replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from gangline.chaos.checker.accounts import wrong_accounts, wrong_in
from gangline.chaos.checker.evidence import Entry
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model.codec import digest
from gangline.core.model.fold import IllegalTransition, apply, seal
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state


class Folding:
    """Folds the entries. `state` is None from the first one on that cannot be folded."""

    def __init__(
        self, report: Report, base: State | None, snapshots: Mapping[int, bytes] | None, replicas: Mapping[str, tuple[int, str]] | None
    ) -> None:
        self.state: State | None = State() if base is None else base
        self._report = report
        self._snapshots = dict(snapshots or {})
        #: by index: (name, digest) of replicas that are there
        self._replicas: dict[int, list[tuple[str, str]]] = {}
        for name, (index, seen) in (replicas or {}).items():
            self._replicas.setdefault(index, []).append((name, seen))
        if snapshots is None:
            report.gap("S3", "replay from snapshots, no snapshots")
        if replicas is None:
            report.gap("S3", "replicas, no live schedulers")

    def fold(self, entry: Entry) -> None:
        """Fold one entry that stands where it should."""
        state = self.state
        if state is None:
            return
        if entry.frame is None:
            self._stop(f"entry {entry.index} cannot be read: {entry.problem}", Cite(entry.index))
            return
        if entry.index != state.index + 1:
            self._stop(f"entries {state.index + 1} to {entry.index - 1} are missing", Cite(entry.index))
            return
        frame = entry.frame
        for event in frame.events:
            try:
                apply(state, event, frame.index, frame.epoch, frame.at_ms)
            except IllegalTransition as e:
                self._stop(f"an event that cannot happen, {e}", Cite(frame.index, frame.at_ms, event))
                return
        seal(state, frame.index, frame.digest)
        self._report.checked["S3"] += 1
        for wrong in wrong_in(state):
            what = f"the state after entry {frame.index} does not add up: {wrong}"
            self._report.add("S3", what, Cite(frame.index, frame.at_ms, frame.events[0] if frame.events else None))
        if frame.index in self._snapshots:
            self._compare(state, self._snapshots[frame.index])
        if frame.index in self._replicas:
            self._compare_replicas(state, self._replicas.pop(frame.index))

    def end(self) -> None:
        """All entries are folded."""
        state, report = self.state, self._report
        if state is None:
            return
        for wrong in wrong_accounts(state):
            report.add("S3", f"the state at the end does not add up: {wrong}", Cite(state.index))
        for index, replicas in self._replicas.items():
            for name, _ in replicas:
                report.gap("S3", f"replica {name}, which is at entry {index}, and these entries end at {state.index}")
        if late := sorted(index for index in self._snapshots if index > state.index):
            report.add("S3", f"there are snapshots of entries {late}, and the log ends at {state.index}", Cite(state.index))

    def _compare(self, state: State, snapshot: bytes) -> None:
        data = dump_state(state)
        if data != snapshot:
            where = differences(msgpack.unpackb(data, strict_map_key=False), _unpacked(snapshot))
            self._report.add("S3", f"the snapshot of entry {state.index} differs from the fold: {'; '.join(where[:5])}", Cite(state.index))

    def _compare_replicas(self, state: State, replicas: list[tuple[str, str]]) -> None:
        found = digest(dump_state(state)).hex()
        for name, seen in replicas:
            if seen != found:
                what = f"replica {name} differs at entry {state.index}: its digest is {seen[:16]}, that of the log {found[:16]}"
                self._report.add("S3", what, Cite(state.index))

    def _stop(self, what: str, at: Cite) -> None:
        self.state = None
        self._report.add("S3", what, at)
        for assertion in ("S3", "S14", "S15", "S16"):
            self._report.gap(assertion, f"what needs the state after entry {at.index}, which cannot be folded")


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (msgpack.UnpackException, ValueError):
        return f"{len(data)} bytes that are no state"


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Return where two unpacked states differ, the order of their maps included, as paths with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        both = [k for k in a if k in b]
        found = [f"{at}/{k}: {a.get(k, 'nothing')!r} and {b.get(k, 'nothing')!r}"[:300] for k in {**a, **b} if k not in a or k not in b]
        found += [d for k in both for d in differences(a[k], b[k], f"{at}/{k}")]
        return found or ([f"{at}: in another order, {list(a)} and {list(b)}"[:300]] if list(a) != list(b) else [])
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}/{i}")]
    return [] if a == b and type(a) is type(b) else [f"{at or '/'}: {a!r} and {b!r}"[:300]]
