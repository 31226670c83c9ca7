"""What a rank prints, kept within bounds: rotation by size, a rate limit, and a line that counts what was dropped.

`rank-0.1.log`, for rank 0 of generation 1, is the newest part. A full one is renamed to `rank-0.1.log.<offset>`, 16 digits: the position of
its first byte in the whole stream, so that a reader can ask for positions that stay true over rotations. Small imports: a bare interpreter
runs it.
"""

from __future__ import annotations

import os
import time

#: sustained rate above which output is dropped, and the burst that is always kept
RATE_BYTES_PER_S = 16 << 20
BURST_BYTES = 64 << 20


class RankLog:
    """Writer of one rank's log. Never raises and never blocks on anything but the disk: what does not fit is dropped and counted."""

    def __init__(self, path: str, part_bytes: int, parts: int) -> None:
        """Keep at most `parts` files, two or more, of about `part_bytes` each."""
        self._path = path
        self._part_bytes = part_bytes
        self._parts = max(2, parts)  # the name of the last full one tells where the newest begins
        self._rate = RATE_BYTES_PER_S
        self._burst = max(BURST_BYTES, part_bytes)
        self._budget = float(self._burst)
        self._refilled_at = time.monotonic()
        self._fd = -1
        self._base = 0
        self._size = 0
        self._dropped = 0
        self.dropped_total = 0
        self._open()

    def write(self, data: bytes) -> None:
        """Append, unless the rank prints faster than anybody could read."""
        now = time.monotonic()
        self._budget = min(self._burst, self._budget + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        # Half a burst of hysteresis: one counter line for a long flood, not one for each pipe full.
        if len(data) > self._budget or (self._dropped and self._budget < self._burst / 2):
            self._drop(len(data))
            return
        self._budget -= len(data)
        self._tell_dropped()
        self._append(data)

    def close(self) -> None:
        """Write the last counter line."""
        self._tell_dropped()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drop(self, size: int) -> None:
        self._dropped += size
        self.dropped_total += size

    def _tell_dropped(self) -> None:
        if self._dropped:
            count, self._dropped = self._dropped, 0
            self._append(b"\n[gangline: %d bytes of output dropped: faster than %d bytes/s, or no space]\n" % (count, self._rate))

    def _append(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._part_bytes:
            self._rotate()
        try:
            done = os.write(self._fd, data)
        except OSError:  # no space, or no file
            done = 0
        self._size += done
        if done < len(data):
            self._drop(len(data) - done)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(self._path, flags, 0o640)
        except OSError:
            self._fd = -1

    def _rotate(self) -> None:
        try:
            os.rename(self._path, f"{self._path}.{self._base:016d}")
            self._delete_oldest()
        except OSError:
            return
        if self._fd >= 0:
            os.close(self._fd)
        self._base += self._size
        self._size = 0
        self._open()

    def _delete_oldest(self) -> None:
        folder, name = os.path.split(self._path)
        old = sorted(n for n in os.listdir(folder) if n.startswith(name + "."))
        for n in old[: max(0, len(old) - (self._parts - 1))]:
            os.unlink(os.path.join(folder, n))
