"""What an agent keeps on disk, so that the next agent on this node can go on where it stopped.

identity           who this node's agent is; made once
seen               highest epoch and index of a desired document
schedulers         how the schedulers were reached last, for when the store cannot be asked
fence, fence.boot  see fence.py
notify, job.sock   the doors for supervisors and for ranks
locks/gpu-<i>      locked by the supervisor whose rank holds the device, together with others when they have parts of it
locks/gpu-<i>-<s>  locked by the supervisor whose rank holds a MIG instance with this memory slice
mig.json           into what simulated GPUs are partitioned
forgotten          gangs that are over here, one line each: generation and job
runs/<job>/gang    a GangRecord
runs/<job>/<generation>/   status and command files, see rankfile.py, and the events of that generation
logs/<job>/<generation>/   what the ranks printed
work/<job>/rank-<r>        private working directories
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

import msgspec

from gangline.core.model.documents import StopNotice
from gangline.core.model.spec import JobSpec
from gangline.core.store.node import SchedulerAddress
from gangline.nodeagent import rankfile
from gangline.nodeagent.jobsocket import PATH_BYTES_MAX

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
        self.job_socket = self.root / "job.sock"
        size = len(os.fsencode(self.job_socket))
        if size > PATH_BYTES_MAX:
            raise StateError(f"{self.job_socket} has {size} bytes, a socket's path may have {PATH_BYTES_MAX}: use a shorter --state-dir")
        try:
            for folder in (".", "locks", "runs", "logs", "work"):
                (self.root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise StateError(f"cannot make the state directory {self.root}: {e.strerror}; choose another one with --state-dir") from e

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
        path = self.root / "identity"
        if not path.exists():
            self._write(path, secrets.token_hex(16).encode())
        return path.read_text().strip()

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
        """Return the records of all gangs, damaged ones left out: their ranks are found by their status files and stopped."""
        found = []
        for path in sorted((self.root / "runs").glob("*/gang")):
            with contextlib.suppress(msgspec.DecodeError, OSError):
                found.append(msgspec.json.decode(path.read_bytes(), type=GangRecord))
        return found

    def forget(self, job: str, generation: int) -> None:
        """Remember that a gang is over here: one short line, since short jobs make many. What it left is swept up later. Raises OSError."""
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
        """Write the list anew, without those of which nothing is left. Raises OSError."""
        self._write(self.root / "forgotten", "".join(f"{g} {job}\n" for job, g in forgotten.items()).encode())
        if self._forgotten_fd >= 0:
            os.close(self._forgotten_fd)
            self._forgotten_fd = -1

    def sweep(self, forgotten: dict[str, int]) -> None:
        """Remove the status files of generations that are over. Their logs stay."""
        for job, last in forgotten.items():
            with contextlib.suppress(OSError):
                names = os.listdir(self.root / "runs" / job)
                self.remove_runs(job, [int(n) for n in names if n.isdecimal() and int(n) <= last])

    def save_record(self, record: GangRecord) -> None:
        """Remember a gang. Raises OSError."""
        _make(f"{self._root}/runs/{record.job}")
        self._write(Path(f"{self._root}/runs/{record.job}/gang"), msgspec.json.encode(record))

    def run_folder(self, job: str, generation: int) -> Path:
        """Folder of the status files of a generation."""
        return self.root / "runs" / job / str(generation)

    def log_folder(self, job: str, generation: int) -> Path:
        """Folder of the logs of a generation."""
        return self.root / "logs" / job / str(generation)

    def events(self, job: str, generation: int) -> Path:
        """File of the events of a generation."""
        return self.run_folder(job, generation) / "events.jsonl"

    def make_folders(self, job: str, generation: int) -> None:
        """Make the folders of a generation. Raises OSError."""
        for kind in ("runs", "logs"):
            parent = f"{self._root}/{kind}/{job}"
            # The parent is there already from the second generation on, the folder itself when a start follows a preparation.
            try:
                os.mkdir(f"{parent}/{generation}", 0o700)
            except FileExistsError:
                continue
            except FileNotFoundError:
                _make(parent)
                _make(f"{parent}/{generation}")

    def remove_runs(self, job: str, generations: list[int] | None = None) -> None:
        """Remove the status files of these generations, of all when None."""
        folder = self.root / "runs" / job
        names = [str(g) for g in generations] if generations is not None else [p.name for p in folder.glob("[0-9]*")]
        for name in names:
            shutil.rmtree(folder / name, ignore_errors=True)

    def _write(self, path: Path, data: bytes) -> None:
        temporary = f"{path}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        os.replace(temporary, path)


def _make(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
