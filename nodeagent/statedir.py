"""What an agent keeps on disk, so that the next agent on this node can go on where it stopped.

identity           who this node's agent is; made once
seen               highest epoch and index of a desired document
schedulers         how the schedulers were reached last, for when the store cannot be asked
fence, fence.boot  see fence.py
notify, job/sock   the doors for supervisors and for ranks
locks/gpu-<i>      locked by the supervisor whose rank holds the device, together with others when they have parts of it
locks/gpu-<i>-<s>  locked by the supervisor whose rank holds a MIG instance with this memory slice
ranks.journal      what ran here, see journal.py
mig.json           into what simulated GPUs are partitioned
forgotten          gangs that are over here, one line each: generation and job
gangs              GangRecords, one JSON a line; the last one of a job counts
runs/              status and command files, see rankfile.py, and the events of each generation
logs/<job>/        what the ranks printed
work/<job>@<rank>  private working directories

Nothing is synced to disk: what has to survive is the agent, not the host, whose ranks are gone with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from gangline.core.model.documents import StopNotice
from gangline.core.model.spec import JobSpec
from gangline.core.store.node import SchedulerAddress
from gangline.nodeagent import rankfile
from gangline.nodeagent.drivers.driver import Ready
from gangline.nodeagent.jobsocket import PATH_BYTES_MAX

#: the file of records is written anew when it has become so much larger than what is in it
_RECORDS_BYTES = 1 << 20

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class StateError(Exception):
    """The state directory cannot be used; the message says what to do."""


class GangRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What must survive the agent about a gang, besides the status files of its ranks."""

    job: str
    generation: int
    phase: str = "new"
    message: str = ""
    address: str = ""
    port: int = 0
    spec: JobSpec | None = None
    #: socket tokens by "rank/generation"
    tokens: dict[str, str] = {}
    notice: StopNotice | None = None
    #: monotonic second, true for the boot below
    notified_at: float = 0.0
    boot_id: str = ""
    step: int = -1
    checkpoint_step: int = -1
    checkpoint_path: str = ""
    #: what preparing has found out of the job's user and storage
    ready: Ready = Ready()


class Seen(msgspec.Struct, frozen=True):
    """The highest epoch and index of a desired document that was acted on."""

    epoch: int = 0
    index: int = 0


def is_safe(job: str) -> bool:
    """Whether a job id may be part of a path."""
    return bool(_NAME.match(job))


class StateDir:
    """The state directory. One agent at a time, see `lock`."""

    def __init__(self, root: Path) -> None:
        """Make what is missing. Raises StateError."""
        self.root = root.absolute()
        self._root = str(self.root)
        self._forgotten_fd = -1
        self._identity = ""
        #: newest record of each gang as it is in the file, and how large that is
        self._records: dict[str, bytes] | None = None
        self._records_fd = -1
        self._records_bytes = 0
        # In a folder of its own, which can be mounted into containers: the socket is made anew by each agent.
        self.job_socket = self.root / "job/sock"
        size = len(os.fsencode(self.job_socket))
        if size > PATH_BYTES_MAX:
            raise StateError(f"{self.job_socket} has {size} bytes, a socket's path may have {PATH_BYTES_MAX}: use a shorter --state-dir")
        try:
            for folder in (".", "job", "locks", "runs", "logs", "work"):
                (self.root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise StateError(f"cannot make the state directory {self.root}: {e.strerror}; choose another one with --state-dir") from e

    def open_to_users(self) -> None:
        """Let ranks of other users than the agent's reach what is theirs: by its path only, folders stay unreadable. Raises OSError."""
        for folder in (self._root, f"{self._root}/job", f"{self._root}/work", f"{self._root}/runs"):
            os.chmod(folder, 0o711)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(self.job_socket, 0o666)

    @property
    def is_open_to_users(self) -> bool:
        """Whether there have been such ranks."""
        return bool(os.stat(self._root).st_mode & stat.S_IXOTH)

    def lock(self) -> None:
        """Keep other agents out for as long as this process lives. Raises StateError when one is here already."""
        self._lock_fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StateError(f"another agent is using {self.root}: stop it, or give this one its own --state-dir") from None

    def unlock(self) -> None:
        """Let another agent in."""
        os.close(self._lock_fd)

    def identity(self) -> str:
        """Return the identity of this node's agent, made on first use."""
        if not self._identity:
            path = self.root / "identity"
            if not path.exists():
                self._write(path, secrets.token_hex(16).encode())
            self._identity = path.read_text().strip()
        return self._identity

    def open_notify(self) -> int:
        """Return the reading end of the FIFO of hints, never blocking and never at its end."""
        path = self.root / rankfile.NOTIFY
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise StateError(f"{path} is in the way and is not a FIFO: remove it")
        return fd

    def seen(self) -> Seen:
        """Return the highest epoch and index seen, zeros for a new state directory. Raises StateError for a damaged file."""
        try:
            return msgspec.json.decode((self.root / "seen").read_bytes(), type=Seen)
        except FileNotFoundError:
            return Seen()
        except (msgspec.DecodeError, OSError) as e:
            raise StateError(f"{self.root / 'seen'} cannot be read ({e}): stop every rank on this node, then remove it") from e

    def save_seen(self, seen: Seen) -> None:
        """Remember it. Written in place: a file of one short line is never torn, and there is one such write for each document."""
        data = b"%-63b\n" % msgspec.json.encode(seen)
        fd = os.open(self.root / "seen", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)

    def schedulers(self) -> list[SchedulerAddress]:
        """Return how the schedulers were reached last."""
        try:
            return msgspec.json.decode((self.root / "schedulers").read_bytes(), type=list[SchedulerAddress])
        except (FileNotFoundError, msgspec.DecodeError):
            return []

    def save_schedulers(self, schedulers: list[SchedulerAddress]) -> None:
        """Remember them."""
        self._write(self.root / "schedulers", msgspec.json.encode(schedulers))

    def records(self) -> list[GangRecord]:
        """Return the newest record of each gang that is not over; without damaged ones: their ranks are found by their status files."""
        over = self.forgotten()
        found: dict[str, bytes] = {}
        records = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.root / "gangs").read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    record = msgspec.json.decode(line, type=GangRecord)
                    if record.generation <= over.get(record.job, -1):
                        continue
                    records[record.job], found[record.job] = record, line
        self._records = found
        return list(records.values())

    def save_record(self, record: GangRecord) -> None:
        """Remember a gang. Raises OSError, and then the record before it may count."""
        line = msgspec.json.encode(record)
        if self._records is None:
            self.records()
        records = self._records = self._records or {}
        records[record.job] = line
        if self._records_fd < 0 or self._records_bytes > _RECORDS_BYTES + 2 * sum(map(len, records.values())):
            self._rewrite_records(records)
            return
        self._records_bytes += len(line) + 1
        if os.write(self._records_fd, line + b"\n") != len(line) + 1:
            self._close_records()  # a torn line: the next one is not to be written behind it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rewrite_records(self, records: dict[str, bytes]) -> None:
        """Write the newest records alone, and go on behind them."""
        self._close_records()
        data = b"".join(line + b"\n" for line in records.values())
        self._write(self.root / "gangs", data)
        self._records_fd = os.open(self.root / "gangs", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._records_bytes = len(data)

    def _close_records(self) -> None:
        if self._records_fd >= 0:
            os.close(self._records_fd)
            self._records_fd = -1

    def forget(self, job: str, generation: int) -> None:
        """Remember that a gang is over here: one short line, since short jobs make many. What it left is swept up later. Raises OSError."""
        if self._records is not None:
            self._records.pop(job, None)
        if self._forgotten_fd < 0:
            self._forgotten_fd = os.open(self.root / "forgotten", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._forgotten_fd, f"{generation} {job}\n".encode())

    def forgotten(self) -> dict[str, int]:
        """Return the gangs that are over here, with their last generation: neither that nor an older one may ever start here again."""
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.root / "forgotten").read_text().splitlines():
                generation, _, job = line.partition(" ")
                if generation.isdecimal() and is_safe(job):
                    found[job] = int(generation)
        return found

    def save_forgotten(self, forgotten: dict[str, int]) -> None:
        """Write the list anew, without those of which nothing is left, and before it the records without theirs. Raises OSError."""
        if self._records is None:
            self.records()
        self._rewrite_records(self._records or {})
        self._write(self.root / "forgotten", "".join(f"{g} {job}\n" for job, g in forgotten.items()).encode())
        if self._forgotten_fd >= 0:
            os.close(self._forgotten_fd)
            self._forgotten_fd = -1

    def sweep(self, forgotten: dict[str, int]) -> None:
        """Remove the status files of generations that are over. Their logs stay."""
        self._remove(lambda job, generation: generation <= forgotten.get(job, -1))

    def remove_runs(self, job: str, generations: set[int]) -> None:
        """Remove the status files of these generations of a job."""
        if generations:
            self._remove(lambda j, generation: j == job and generation in generations)

    def _remove(self, over: Callable[[str, int], bool]) -> None:
        for name in os.listdir(f"{self._root}/runs"):
            named = rankfile.named(name)
            if named is not None and over(*named):
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._root}/runs/{name}")

    def workdir(self, job: str, rank: int) -> str:
        """Private working directory of a rank."""
        return f"{self._root}/work/{job}@{rank}"

    def events(self, job: str, generation: int) -> str:
        """File of the events of a generation."""
        return f"{self._root}/{rankfile.events_path(job, generation)}"

    def make_folder(self, job: str) -> None:
        """Make the folder of a job's logs. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{self._root}/logs/{job}", 0o700)

    def _write(self, path: Path, data: bytes) -> None:
        temporary = f"{path}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        os.replace(temporary, path)
