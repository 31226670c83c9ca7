"""The agent's own record of what ran on its node: every start and every end of a rank, one line each, for whoever checks the log against it.

    ranks.journal      JSON lines, the newest last; ranks.journal.1 has what was before, and what was before that is gone

Nothing that schedules reads it. It is appended to and never changed, not synced to disk, and a line that cannot be written is left out: a node
without space runs its ranks all the same. Lines are of `Opened`, `Started` and `Ended` below; a torn one is passed over by the reader.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from gangline.core.model.gpushares import GpuShare
from gangline.nodeagent.adoption import RankStatus
from gangline.nodeagent.kernel import boottime
from gangline.nodeagent.launcher import Launch

NAME = "ranks.journal"
#: so large may one of the two files become; about sixty thousand lives
_FILE_BYTES = 16 << 20


class Opened(msgspec.Struct, frozen=True, tag="opened", tag_field="t"):
    """An agent began to write, or a new file was begun: what follows is of this node in this boot of its host."""

    node: str
    boot: str
    #: boottime second and wall-clock ms
    at_s: float
    at_ms: int


class Started(msgspec.Struct, frozen=True, omit_defaults=True, tag="start", tag_field="t"):
    """A rank is about to be started: it has not begun before that."""

    job: str
    rank: int
    generation: int
    gpus: tuple[int, ...]
    at_s: float
    at_ms: int
    #: log index and epoch of the desired document that asks for it
    index: int = 0
    epoch: int = 0
    share: GpuShare | None = None
    #: it is killed by the dead man's switch (on_disconnect: stop)
    fenced: bool = True


class Ended(msgspec.Struct, frozen=True, omit_defaults=True, tag="end", tag_field="t"):
    """Nothing was left of a rank at this time. `seen`: its supervisor saw that; else it was found to be gone, and may have been for long."""

    job: str
    rank: int
    generation: int
    #: of the boot in which it had been started
    boot: str
    at_s: float
    at_ms: int
    seen: bool = True
    code: int = 0
    cause: str = ""


Line = Opened | Started | Ended

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


class RankJournal:
    """Appends to the journal in a state directory."""

    def __init__(self, folder: Path, node: str, boot: str) -> None:
        """Nothing is opened before the first line."""
        self._path = f"{folder}/{NAME}"
        self._node = node
        self._boot = boot
        self._fd = -1
        self._bytes = 0
        #: lines that could not be written
        self.lost = 0

    def started(self, launches: Iterable[Launch], index: int, epoch: int) -> None:
        """Note ranks that are about to be started on a desired document."""
        at_s, at_ms = boottime(), _now_ms()
        lines = (Started(x.job, x.rank, x.generation, x.gpus, at_s, at_ms, index, epoch, x.share, x.fenced) for x in launches)
        self._write(b"".join(map(_line, lines)))

    def ended(self, status: RankStatus) -> None:
        """Note that a rank has ended."""
        at_s = status.ended_boot_ms / 1000 if status.ended_boot_ms else boottime()
        self._write(
            _line(
                Ended(
                    status.job, status.rank, status.generation, status.boot_id, at_s, status.exited_at_ms, bool(status.ended_boot_ms),
                    status.exit_code, status.cause,
                )
            )
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        try:
            if self._fd < 0 or self._bytes > _FILE_BYTES:
                self._open()
            self._bytes += len(data)
            if os.write(self._fd, data) != len(data):
                self.close()  # a torn line ends here: the next one is to begin on a line of its own
                self.lost += 1
        except OSError:
            self.close()
            self.lost += 1

    def _open(self) -> None:
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        if os.fstat(fd).st_size > _FILE_BYTES:
            os.close(fd)
            os.replace(self._path, f"{self._path}.1")
            fd = os.open(self._path, flags, 0o600)
        self._fd, self._bytes = fd, os.fstat(fd).st_size
        os.write(fd, b"\n" + _line(Opened(self._node, self._boot, boottime(), _now_ms())))


def read_journal(folder: Path) -> Iterator[Line]:
    """Yield what an agent has written down in its state directory, oldest first. Torn lines are passed over; no journal gives nothing."""
    for name in (f"{NAME}.1", NAME):
        with contextlib.suppress(FileNotFoundError), (folder / name).open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError):
                    yield _decode(line)


def _line(line: Line) -> bytes:
    return _encode(line) + b"\n"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
