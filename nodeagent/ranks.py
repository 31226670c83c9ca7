"""The processes of this node's ranks: starts them, sends commands to their supervisors, and reads what supervisors write.

What it learns goes to `on_status`, once for each change of a status file. The file is the truth; a hint in the FIFO says where to look, the
end of a supervisor's pidfd says so too, and while a start is awaited a timer looks besides, because hints may be lost.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from gangline.core.telemetry import Log
from gangline.nodeagent import adoption, rankfile
from gangline.nodeagent.adoption import RankStatus, Supervised
from gangline.nodeagent.jobsocket import RankRef
from gangline.nodeagent.launcher import Launch, Launcher
from gangline.nodeagent.statedir import StateDir, is_safe

_RESCAN_S = 0.25
#: a rank that nothing is heard of for so long has not been started, and will not be
START_TIMEOUT_S = 30.0
#: starts that the fork server works on at the same time
STARTS_AT_ONCE = max(4, 2 * (os.cpu_count() or 1))
_HINTS_BYTES = 1 << 16


async def _nothing_to_bury(status: RankStatus) -> None:
    """What a rank without isolation leaves."""


class Ranks:
    """Processes of ranks by their reference. Lives on one event loop."""

    def __init__(self, state: StateDir, launcher: Launcher, boot_id: str, on_status: Callable[[RankRef, RankStatus], None], log: Log) -> None:
        """`on_status` must not raise."""
        self._state = state
        self._root = str(state.root)
        self._launcher = launcher
        self._boot_id = boot_id
        self._on_status = on_status
        self._log = log
        self._supervised: dict[RankRef, Supervised] = {}
        #: not executing yet, as far as we know, with the moment of the request
        self._pending: dict[RankRef, tuple[Launch, int, float]] = {}
        #: which of them wait for their turn, and when the others were handed to the fork server
        self._waiting: deque[RankRef] = deque()
        self._sent_at: dict[RankRef, float] = {}
        #: commands that wait for a supervisor to be kicked
        self._unread: set[RankRef] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rescan: asyncio.TimerHandle | None = None
        #: called with the seconds from the request to start until the command executes
        self.on_start_seconds: Callable[[float], None] = lambda seconds: None
        #: kills and removes what a rank has left outside of its session: control groups, a container
        self.bury: Callable[[RankStatus], Coroutine[Any, Any, None]] = _nothing_to_bury
        self._notify_fd = -1

    def open(self) -> None:
        """Listen to supervisors and start the fork server. What was adopted before is looked at from now on."""
        self._notify_fd = self._state.open_notify()
        asyncio.get_running_loop().add_reader(self._notify_fd, self._on_hints)
        self._launcher.start()

    def close(self) -> None:
        """Let go of everything. Ranks and supervisors live on."""
        loop = asyncio.get_running_loop()
        for task in self._tasks:
            task.cancel()
        if self._rescan is not None:
            self._rescan.cancel()
        for ref in list(self._supervised):
            self._let_go(ref)
        if self._notify_fd >= 0:
            loop.remove_reader(self._notify_fd)
            os.close(self._notify_fd)
        self._launcher.close()

    def start(self, launches: Sequence[tuple[Launch, int]]) -> None:
        """Start ranks, each with the descriptor of its reserved port or -1. They report through `on_status`."""
        now = time.monotonic()
        for launch, fd in launches:
            ref = RankRef(launch.job, launch.generation, launch.rank)
            self._pending[ref] = (launch, fd, now)
            self._waiting.append(ref)
        self._send()

    def command(self, ref: RankRef, line: str) -> None:
        """Have the supervisor do something: at once, or as soon as there is one."""
        supervised = self._supervised.get(ref)
        try:
            self._append_command(ref, line.replace("\n", " ").encode() + b"\n")
        except OSError as e:
            self._log.error("command_not_written", gang=ref.job, rank=ref.rank, message="the supervisor is told by signal instead", error=e)
            if supervised is not None and line.startswith("stop "):
                self._terminate(ref, supervised)
            return
        if supervised is not None:
            supervised.kick()
        else:
            self._unread.add(ref)

    def _terminate(self, ref: RankRef, supervised: Supervised) -> None:
        """Make a supervisor stop its rank, if that is still this one: the file tells it before the supervisor takes another."""
        status = adoption.read_status(self._status_path(ref))
        if status is None or status.state != "exited":
            supervised.terminate()

    def _append_command(self, ref: RankRef, data: bytes) -> None:
        path = f"{self._root}/{rankfile.control_path(ref.job, ref.generation, ref.rank)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)

    def adopt(self, ref: RankRef, status: RankStatus) -> RankStatus:
        """Take over a rank of an earlier agent, and return what is true of it now."""
        if status.state == "exited":
            return status
        if self._hold(ref, status):
            # It may have written its end between our reading the file and holding on to it.
            return adoption.read_status(self._status_path(ref)) or status
        return self._bury(ref, status)

    def look(self, ref: RankRef) -> None:
        """Read a status file and pass it on."""
        status = adoption.read_status(self._status_path(ref))
        if status is None:
            return
        if ref in self._pending and status.state != "starting":
            self.on_start_seconds(time.monotonic() - self._pending[ref][2])
            self._settled(ref)
        if status.state == "exited":
            self._let_go(ref)
        elif ref not in self._supervised and not self._hold(ref, status):
            status = self._bury(ref, status)
        self._on_status(ref, status)

    def _hold(self, ref: RankRef, status: RankStatus) -> bool:
        supervised = adoption.hold(status, self._boot_id)
        if supervised is None:
            return False
        self._supervised[ref] = supervised
        asyncio.get_running_loop().add_reader(supervised.pidfd, self._supervisor_ended, ref)
        if ref in self._unread:
            self._unread.discard(ref)
            supervised.kick()
        return True

    def _let_go(self, ref: RankRef) -> None:
        self._unread.discard(ref)
        supervised = self._supervised.pop(ref, None)
        if supervised is not None:
            asyncio.get_running_loop().remove_reader(supervised.pidfd)
            supervised.close()

    def _supervisor_ended(self, ref: RankRef) -> None:
        self._let_go(ref)
        self.look(ref)

    def _bury(self, ref: RankRef, status: RankStatus) -> RankStatus:
        """Return the end of a rank whose supervisor is gone: the one that it wrote last, else one that says so."""
        newest = adoption.read_status(self._status_path(ref)) or status
        if newest.state != "exited":
            newest = adoption.orphaned(newest, self._boot_id)
            self._spawn_burial(newest)
            adoption.save_status(self._status_path(ref), newest)
        return newest

    def _spawn_burial(self, status: RankStatus) -> None:
        if status.boot_id == self._boot_id and status.supervisor:
            task = asyncio.get_running_loop().create_task(self.bury(status))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _on_hints(self) -> None:
        """Look where supervisors have pointed, in lines of "job generation rank"."""
        try:
            data = os.read(self._notify_fd, _HINTS_BYTES)
        except BlockingIOError:
            return
        for line in dict.fromkeys(data.decode("utf-8", "replace").splitlines()):
            job, _, numbers = line.partition(" ")
            generation, _, rank = numbers.partition(" ")
            if is_safe(job) and generation.isdecimal() and rank.isdecimal():
                self.look(RankRef(job, int(generation), int(rank)))

    def _settled(self, ref: RankRef) -> None:
        """A start has come to something: the next one may go."""
        self._pending.pop(ref, None)
        self._sent_at.pop(ref, None)
        self._send()

    def _send(self) -> None:
        """Hand starts over, as many at a time as the machine can make: a large gang must not starve what is running already."""
        launches = []
        while self._waiting and len(self._sent_at) < STARTS_AT_ONCE:
            ref = self._waiting.popleft()
            launch, fd, _ = self._pending[ref]
            self._sent_at[ref] = time.monotonic()
            launches.append((launch, fd))
        if launches:
            self._spawn(launches)

    def _spawn(self, launches: Sequence[tuple[Launch, int]]) -> None:
        task = asyncio.get_running_loop().create_task(self._launch(launches))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _launch(self, launches: Sequence[tuple[Launch, int]]) -> None:
        try:
            await self._launcher.launch(launches)
        except OSError as e:
            self._log.error("launcher_failed", message="the fork server is gone, it is started again", error=e)
        if self._rescan is None and self._pending:
            self._rescan = asyncio.get_running_loop().call_later(_RESCAN_S, self._look_for_pending)

    def _look_for_pending(self) -> None:
        """Look at starts whose hint did not come, and repeat requests that died with a fork server: nothing starts twice."""
        self._rescan = None
        for ref, sent_at in list(self._sent_at.items()):
            self.look(ref)
            if ref in self._sent_at and time.monotonic() > sent_at + START_TIMEOUT_S:
                self._give_up(ref, self._pending[ref][0])
        if not self._pending:
            return
        if self._launcher.running:
            self._rescan = asyncio.get_running_loop().call_later(_RESCAN_S, self._look_for_pending)
        else:
            self._spawn([self._pending[ref][:2] for ref in self._sent_at])

    def _give_up(self, ref: RankRef, launch: Launch) -> None:
        """Report a rank that has not come to be. Its status file is claimed, so that it cannot start later on; or there is no space for one."""
        status = adoption.not_started(launch, f"not started within {START_TIMEOUT_S:g} s; see the agent's log")
        try:
            fd = rankfile.claim(self._status_path(ref), msgspec.to_builtins(status))
            if fd < 0:
                return
            os.close(fd)
        except OSError as e:
            self._log.error("start_given_up", gang=ref.job, rank=ref.rank, error=e)
        self._settled(ref)
        self._on_status(ref, status)

    def _status_path(self, ref: RankRef) -> str:
        return f"{self._root}/{rankfile.status_path(ref.job, ref.generation, ref.rank)}"
