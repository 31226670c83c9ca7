"""The deadline after which no rank of this node may run: 8 bytes that the agent writes and every supervisor reads."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from gangline.nodeagent import rankfile


class Fence:
    """Writer of the deadline, in seconds of the boottime clock. It is 0, in the past, until a lease has been granted."""

    def __init__(self, state_dir: Path, *, boot_id: str) -> None:
        """Keep the deadline of an earlier agent, unless the host has booted since: then its clock has started anew."""
        fd = os.open(state_dir / rankfile.FENCE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 8)
            self._map = mmap.mmap(fd, 8)
        finally:
            os.close(fd)
        # A cast view stores the eight bytes at once: no reader sees half of an old and half of a new deadline.
        self._cell = memoryview(self._map).cast("d")
        boot = state_dir / "fence.boot"
        if not boot.exists() or boot.read_text() != boot_id:
            self._cell[0] = 0.0
            boot.write_text(boot_id)

    @property
    def deadline(self) -> float:
        """Boottime second at which supervisors kill."""
        return self._cell[0]

    def extend(self, deadline: float) -> None:
        """Move the deadline later; an earlier one than we have is ignored, because supervisors sleep until the one they have read."""
        if deadline > self._cell[0]:
            self._cell[0] = deadline
