"""What is being waited for, on standard error: one line that is redrawn on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from gangline.core.client.output import clean
from gangline.core.model.units import format_duration

#: nothing is said about waits shorter than this
SILENT_S = 2.0
REDRAW_S = 0.25
HEARTBEAT_S = 60.0


class Progress:
    """Says what is being waited for."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._began = time.monotonic()
        self._said_at = 0.0
        self._said = ""
        self._drawn = False

    def update(self, text: str) -> None:
        """Say what the state of the wait is now."""
        now = time.monotonic()
        if self._quiet or now - self._began < SILENT_S:
            return
        if self._terminal:
            if now - self._said_at >= REDRAW_S:
                self._stream.write(f"\r\x1b[2K{clean(self._line(text, now))}")
                self._stream.flush()
                self._said_at, self._drawn = now, True
        elif text != self._said or now - self._said_at >= HEARTBEAT_S:
            self._stream.write(f"{self._line(text, now)}\n")
            self._stream.flush()
            self._said, self._said_at = text, now

    def clear(self) -> None:
        """Take the line away, so that something else can be printed."""
        if self._drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._drawn = False

    def _line(self, text: str, now: float) -> str:
        line = f"{text} ({format_duration(round(now - self._began))})"
        if not self._terminal:
            return line
        width = _columns(self._stream)
        return line if len(line) < width else f"{line[: width - 4]}..."


def _columns(stream: TextIO) -> int:
    import os

    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
