"""What a run on a terminal says as it goes: one line for each thing that happens, and a line that is redrawn with how training goes."""

from __future__ import annotations

import sys
import time
from typing import TextIO

#: redraws of the live line a second, and seconds between progress lines where nothing can be redrawn
_REDRAW_S = 0.25
_LINE_S = 2.0


class Screen:
    """Prints to a stream, with the time since its making before each line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._live = ""
        self._progress_due = 0.0
        self._last = ""
        self._redraws = self._stream.isatty()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began

    def say(self, text: str, mark: str = "   ") -> None:
        """Print one line."""
        self._clear()
        print(f"{self.elapsed_s:6.1f} s {mark} {text}", file=self._stream, flush=True)

    def plain(self, *lines: str) -> None:
        """Print lines as they are."""
        self._clear()
        for line in lines:
            print(line, file=self._stream)
        self._stream.flush()

    def progress(self, text: str) -> None:
        """Show how things go; on a terminal in place, elsewhere as a line every other second, when it has changed."""
        now = time.monotonic()
        if text == self._last or now < self._progress_due:
            return
        self._last = text
        self._progress_due = now + (_REDRAW_S if self._redraws else _LINE_S)
        if not self._redraws:
            self.say(text)
            return
        self._clear()
        self._live = f"{self.elapsed_s:6.1f} s     {text}"
        print(self._live, end="", file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r" + " " * len(self._live) + "\r", end="", file=self._stream)
            self._live = ""
