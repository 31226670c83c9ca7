"""The agent's end of the fork server: start ranks under supervisors that outlive us. See `forkserver.py` and `supervisor.py`."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gangline.core.model.gpushares import GpuShare
from gangline.nodeagent.isolation import Box

#: The bare interpreter knows no installed packages. This gives it ours by its right name, and nothing else of the folder a chance to
#: stand in for a module of the standard library.
_BOOT = """
import sys
for name, path in (("gangline", []), ("gangline.nodeagent", [sys.argv[1]])):
    sys.modules[name] = module = type(sys)(name)
    module.__path__ = path
from gangline.nodeagent.forkserver import main
main(sys.argv[2], int(sys.argv[3]))
"""


class Launch(msgspec.Struct, frozen=True):
    """Everything that a supervisor has to know. Paths are relative to the state directory, except `workdir`."""

    job: str
    generation: int
    rank: int
    gpus: tuple[int, ...]
    boot_id: str
    command: tuple[str, ...]
    env: dict[str, str]
    workdir: str
    #: the working directory is private to the rank and made when it is missing
    make_workdir: bool
    log: str
    log_part_bytes: int
    log_parts: int
    #: killed when the node's lease has run out
    fenced: bool
    #: seconds between SIGTERM and SIGKILL when the supervisor itself is asked to end
    grace_s: float
    #: files that are locked while the rank lives, one for each exclusive device, or part of one
    locks: tuple[str, ...]
    #: files that are locked together with others: devices of which the rank has a part
    shared_locks: tuple[str, ...] = ()
    #: what it has of its devices, None: the whole of each
    share: GpuShare | None = None
    #: what stands around it, None: nothing
    box: Box | None = None


class Launcher:
    """A fork server that is started on first use, and again when it has died.

    A request that was lost with it may be sent again: the status file is claimed by whoever comes first, so no rank starts twice.
    """

    def __init__(self, state_dir: Path, *, nice: int = 0) -> None:
        """Start ranks with the priority `nice`."""
        self._state_dir = state_dir
        self._nice = nice
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = asyncio.Lock()

    @property
    def running(self) -> bool:
        """Whether the fork server that was started last is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the fork server unless it runs. The state directory must have its fence file."""
        if self.running:
            return
        self.close()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [sys.executable, "-I", "-S", "-c", _BOOT, str(Path(__file__).parent), str(self._state_dir), str(self._nice)]
        with theirs:
            # Symbols are bound at once, and not again in each fork. Ranks get an environment of their own.
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True, env={"LD_BIND_NOW": "1"})
        self._socket = ours

    async def launch(self, requests: Sequence[tuple[Launch, int]]) -> None:
        """Start ranks, each with the descriptor of its reserved port or -1. Returns when all requests are handed over.

        Raises OSError when the fork server cannot be reached; then try again, nothing starts twice.
        """
        async with self._lock:
            self.start()
            assert self._socket is not None
            try:
                for request, fd in requests:
                    await self._send(self._socket, request, fd)
            except OSError:
                self.close()
                raise

    async def _send(self, sock: socket.socket, request: Launch, fd: int) -> None:
        body = marshal.dumps(msgspec.to_builtins(request))
        head = len(body).to_bytes(4, "big")
        while True:
            try:
                socket.send_fds(sock, [head], [fd] if fd >= 0 else [])
                break
            except BlockingIOError:
                await _writable(sock)
        await asyncio.get_running_loop().sock_sendall(sock, body)

    def close(self) -> None:
        """Let the fork server end. Supervisors and ranks live on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
            self._process = None


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    fd = os.dup(sock.fileno())

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(fd, set_ready)
    try:
        await ready
    finally:
        loop.remove_writer(fd)
        os.close(fd)
