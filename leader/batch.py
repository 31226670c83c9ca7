"""Group commit: events are checked by folding them, in the order in which they will stand in the log, and gathered into frames.

What is folded here is not committed yet. If the append fails the state is worth nothing, and the scheduler folds the log again.
"""

from __future__ import annotations

import secrets

import msgspec

from gangline.core.model.codec import Frame, digest, encode_event, encode_frame
from gangline.core.model.events import LogEvent
from gangline.core.model.fold import apply, seal
from gangline.core.model.state import State

#: a frame is closed when its events have reached this size: well under the store's request limit, large enough to spread its cost
FRAME_BYTES = 512 * 1024
FRAME_EVENTS = 5_000

_NONCE_BYTES = 12


class Sealed(msgspec.Struct, frozen=True):
    """A frame ready to be appended."""

    frame: Frame
    data: bytes


class Batch:
    """Frames that follow the state they are folded into."""

    def __init__(self, state: State, epoch: int, at_ms: int) -> None:
        self.state = state
        self.epoch = epoch
        self.at_ms = at_ms
        self.frames: list[Sealed] = []
        self._events: list[LogEvent] = []
        self._wires: list[bytes] = []
        self._bytes = 0

    @property
    def index(self) -> int:
        """Index of the entry that the next event goes into."""
        return self.state.index + 1

    def __bool__(self) -> bool:
        return bool(self.frames or self._events)

    def add(self, event: LogEvent) -> int:
        """Fold an event and return the index of its entry. Raises IllegalTransition, and then the event is not part of the batch."""
        index = self.index
        apply(self.state, event, index, self.epoch, self.at_ms)
        wire = encode_event(event)
        self._events.append(event)
        self._wires.append(wire)
        self._bytes += len(wire)
        if self._bytes >= FRAME_BYTES or len(self._wires) >= FRAME_EVENTS:
            self._close()
        return index

    def finish(self) -> list[Sealed]:
        """Close the last frame and return all of them, in order."""
        if self._events:
            self._close()
        return self.frames

    def _close(self) -> None:
        index, previous, nonce = self.index, self.state.digest, secrets.token_bytes(_NONCE_BYTES)
        data = encode_frame(index, self.epoch, self.at_ms, previous, nonce, self._wires)
        frame = Frame(index, self.epoch, self.at_ms, previous, nonce, tuple(self._events), digest(data), len(data))
        seal(self.state, index, frame.digest)
        self.frames.append(Sealed(frame, data))
        self._events, self._wires, self._bytes = [], [], 0
