"""Log time: what a leader stamps on its entries. It never goes back, and a jump of the wall clock does not move it.

It is the wall clock's time as long as nobody touches that clock, which is what people expect to read; decisions only ever compare log times.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class LogClock:
    """Follows the log's time by the monotonic clock.

    A standby that saw an entry arrive knows what log time is now, whatever its own wall clock says. Only a scheduler that has seen none
    arrive, because nobody led when it started, takes the wall clock's word for how long that was.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, wall_ms: Callable[[], int] | None = None) -> None:
        self._monotonic = monotonic
        self._wall_ms = wall_ms or (lambda: time.time_ns() // 1_000_000)
        self._offset_ms: int | None = None
        self._last_ms = 0

    def saw(self, at_ms: int) -> None:
        """An entry stamped `at_ms` has just arrived from the leader."""
        offset = at_ms - int(self._monotonic() * 1000)
        # The freshest arrival is the one that was under way for the shortest time.
        self._offset_ms = offset if self._offset_ms is None else max(self._offset_ms, offset)
        self._last_ms = max(self._last_ms, at_ms)

    def start_from(self, at_ms: int) -> None:
        """The log ends at `at_ms`: no time before that will be given."""
        self._last_ms = max(self._last_ms, at_ms)
        now_ms = int(self._monotonic() * 1000)
        if self._offset_ms is None:
            self._offset_ms = max(self._wall_ms(), at_ms) - now_ms
        # Entries that came late, or that somebody else read, tell that log time is further than we have seen.
        self._offset_ms = max(self._offset_ms, at_ms - now_ms)

    def now_ms(self) -> int:
        """Return log time. Never less than before."""
        if self._offset_ms is None:
            self.start_from(0)
        assert self._offset_ms is not None
        self._last_ms = max(self._last_ms, self._offset_ms + int(self._monotonic() * 1000))
        return self._last_ms

    def seconds_until(self, at_ms: int) -> float:
        """Return how long it is until `at_ms`, 0 when it has passed."""
        return max(0.0, (at_ms - self.now_ms()) / 1000)
