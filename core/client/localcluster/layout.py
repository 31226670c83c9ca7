"""What a local cluster keeps on disk, and the ports it listens on.

cluster.json      a Description: where it is reached and how large it is; outlives `down`
run/<name>.json   a Process, written as soon as it was started
logs/<name>.log   what the process prints
<name>/           its data: e1 etcd, s1 s2 schedulers, n1 n2 … agents
exec.key          what schedulers sign commands in ranks with
lock              held while somebody starts or ends processes
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gangline.core.client.localcluster.process import Process, is_alive

#: below what the kernel gives to outgoing connections, so that a port which is free now stays free for a restart
_PORTS = range(20_000, 32_000)
_LOCK_PATIENCE_S = 120.0
_TAIL_BYTES = 16_384


class ClusterError(Exception):
    """The cluster could not be brought into the state that was asked for; the message says why and what to do."""


class SizeConflict(ClusterError):
    """It runs already, in another size or shape, which only `down` can change."""


class Description(msgspec.Struct, kw_only=True):
    """cluster.json. `schedulers` and `etcd` are what a client needs."""

    cluster: str
    #: URLs, in the order of the names s1, s2, …
    schedulers: list[str] = []
    #: host:port of the members e1, e2, … for clients
    etcd: list[str] = []
    #: host:port where the members talk with one another
    etcd_peers: list[str] = []
    nodes: int = 0
    gpus: int = 0
    gpu_model: str = ""


class RankOnDisk(msgspec.Struct):
    """The part of a rank's status file by which the processes of a rank are recognised. The agent's rankfile.py has the whole."""

    boot_id: str = ""
    state: str = ""
    supervisor: int = 0
    supervisor_start: int = 0
    pid: int = 0
    pid_start: int = 0


def _rank_in(data: bytes) -> RankOnDisk | None:
    """Return what a status file says. It has the same line twice, so that one is whole while the other is being written."""
    for line in data.splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=RankOnDisk)
    return None


def _lives(rank: RankOnDisk) -> bool:
    # The supervisor of one that has ended may live on, for another rank.
    return rank.state != "exited" and _is_there(rank)


def _is_there(rank: RankOnDisk) -> bool:
    return is_alive(rank.supervisor, rank.supervisor_start) or is_alive(rank.pid, rank.pid_start)


class Layout:
    """The state directory."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.logs = self.root / "logs"
        self.run = self.root / "run"
        self._description = self.root / "cluster.json"

    def make(self) -> None:
        """Make the folders that everything else needs."""
        for folder in (self.root, self.logs, self.run):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def exec_key(self) -> Path:
        """Return the file of the key for commands in ranks, made on first use."""
        path = self.root / "exec.key"
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, f"{os.urandom(32).hex()}\n".encode())
            finally:
                os.close(fd)
        return path

    def log(self, name: str) -> Path:
        """Return the file of what a process prints."""
        return self.logs / f"{name}.log"

    def tail(self, name: str, lines: int = 12) -> str:
        """Return the last lines that a process has printed."""
        try:
            with self.log(name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def description(self) -> Description | None:
        """Return what cluster.json says, None when there is none. Raises ClusterError."""
        try:
            return msgspec.json.decode(self._description.read_bytes(), type=Description)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as e:
            raise ClusterError(f"{self._description} cannot be read: {e}") from e

    def save_description(self, description: Description) -> None:
        """Write cluster.json."""
        _replace(self._description, (json.dumps(msgspec.to_builtins(description), indent=1) + "\n").encode())

    def record(self, process: Process) -> None:
        """Remember a process that was just started."""
        _replace(self.run / f"{process.name}.json", msgspec.json.encode(process))
        _replace(self.run / f"{process.name}.pid", f"{process.pid}\n".encode())

    def forget(self, name: str) -> None:
        """Forget a process that has ended."""
        for suffix in (".pid", ".json"):
            (self.run / f"{name}{suffix}").unlink(missing_ok=True)

    def processes(self) -> dict[str, Process]:
        """Return all processes that were started and not ended by us, whether or not they live, etcd first, then schedulers, then agents."""
        found = []
        for path in self.run.glob("*.json"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found.append(msgspec.json.decode(path.read_bytes(), type=Process))
        order = {"etcd": 0, "scheduler": 1, "agent": 2}
        return {p.name: p for p in sorted(found, key=lambda p: (order[p.kind], len(p.name), p.name))}

    def ranks(self, boot: str) -> list[RankOnDisk]:
        """Return the ranks of all nodes that were started since boot."""
        found = []
        for path in self.root.glob("n*/runs/*.status"):
            with contextlib.suppress(OSError):
                rank = _rank_in(path.read_bytes())
                if rank is not None and rank.boot_id == boot and _lives(rank):
                    found.append(rank)
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from starting and ending processes meanwhile. Raises ClusterError when they take too long."""
        self.make()
        path = self.root / "lock"
        with path.open("a+") as file:
            deadline = time.monotonic() + _LOCK_PATIENCE_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        file.seek(0)
                        raise ClusterError(f"process {file.read().strip()} is at work on the cluster in {self.root}; it holds {path}") from None
                    time.sleep(0.1)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens on."""
    candidates = iter(random.sample(_PORTS, len(_PORTS)))
    return [next(port for port in candidates if port_is_free(port)) for _ in range(count)]


def port_is_free(port: int) -> bool:
    """Whether one may listen on the port, as a server does that does not mind connections of its predecessor."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)
