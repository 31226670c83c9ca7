"""From the store to the state: newest snapshot + the log after it = the fold of everything.

Everything here folds strictly: a frame that is missing, damaged, of a newer version, or impossible stops it with the frame's index.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gangline.core.model.codec import BadFrame, Frame, decode_frame
from gangline.core.model.fold import IllegalTransition, apply_frame
from gangline.core.model.state import State
from gangline.core.model.statecodec import BadSnapshot, load_state
from gangline.core.store.api import Store, StoreError
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log, Truncated
from gangline.core.store.snapshots import Snapshots

#: a leader may save, prune and truncate while somebody recovers; then it begins again
_TRIES = 5


class Unrecoverable(StoreError):
    """The beginning of the log is gone and no snapshot that can be read replaces it. A person must restore the store from a backup."""


class Recovered(NamedTuple):
    """The state as the store had it at store revision `revision`: go on with `Log.follow(state.index + 1, revision + 1)`."""

    state: State
    revision: int
    #: index of the snapshot it was folded from, 0 for none
    snapshot: int
    #: snapshots that were passed over and why: sentences for the operator
    skipped: tuple[str, ...]


async def recover(store: Store, keys: Keys) -> Recovered:
    """Return the state after the whole log that the store has.

    Raises BadFrame (with the index) for a frame that cannot be folded, LogGap for one that is missing, Unrecoverable, and StoreErrors.
    """
    log = Log(store, keys)
    for left in reversed(range(_TRIES)):
        state, skipped = await _newest_snapshot(Snapshots(store, keys))
        snapshot = state.index
        try:
            revision = await catch_up(state, log)
        except Truncated as e:
            if left:
                continue
            raise Unrecoverable(f"{e}; none can be read: {'; '.join(skipped) or 'there is none'}; restore a backup of the store") from e
        if not state.index and skipped:
            raise Unrecoverable(f"the log is empty and no snapshot can be read: {'; '.join(skipped)}; restore a backup of the store")
        return Recovered(state, revision, snapshot, skipped)
    raise AssertionError("unreachable")


async def catch_up(state: State, log: Log) -> int:
    """Fold what the log has after `state`, in place, and return the store revision at which that was all. Raises as `recover`, and Truncated."""
    revision = 0
    async for page in log.pages(state.index + 1):
        replay((data for _, data, _ in page.entries), state)
        revision = page.revision
    return revision


def replay(frames: Iterable[bytes], state: State | None = None) -> State:
    """Return the state after folding raw frames that follow `state` (None: from the first); `state` itself is changed.

    Raises BadFrame with the index; the state is then not to be used.
    """
    state = State() if state is None else state
    for data in frames:
        fold_next(state, data)
    return state


def fold_next(state: State, data: bytes) -> Frame:
    """Fold the next raw frame into `state` and return it decoded. Raises BadFrame with the index; the state is then not to be used."""
    frame = decode_frame(data, state.index + 1, state.digest)
    try:
        apply_frame(state, frame)
    except IllegalTransition as e:
        raise BadFrame(frame.index, f"an event that cannot happen, {e}") from e
    return frame


async def _newest_snapshot(snapshots: Snapshots) -> tuple[State, tuple[str, ...]]:
    """Return the state of the newest snapshot that can be read, the empty state without one, and what was passed over."""
    skipped: list[str] = []
    before: int | None = None
    while True:
        found = await snapshots.latest(before=before)
        skipped += snapshots.skipped
        if found is None:
            return State(), tuple(dict.fromkeys(skipped))
        before, data = found
        try:
            state = load_state(data)
        except BadSnapshot as e:
            skipped.append(f"snapshot {before}: {e}; the one before is used")
            continue
        if state.index == before:
            return state, tuple(dict.fromkeys(skipped))
        skipped.append(f"snapshot {before}: contains the state after log entry {state.index}; the one before is used")
