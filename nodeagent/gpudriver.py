"""The agent's end of the process that asks the driver of the GPUs (`gpuprocess.py`): a deadline for each question, and a new process when one
hangs or crashes. Nothing here ever waits for the driver itself, so neither the heartbeat nor the ranks notice when it hangs.

A process that has missed a deadline is killed. One that hangs in the kernel does not die of that: it is left alone, and when there are
`UNDEAD_MAX` of them no more are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Literal

from gangline.core.telemetry import Log
from gangline.nodeagent.gpudata import HEAD_BYTES, Answer, Happened, Hopeless, Question, Request, decode_message, framed

#: seconds until a process is started again after it had to be killed or has crashed, doubled from the first to the last
BACKOFF_S = (1.0, 60.0)
UNDEAD_MAX = 3
#: a process whose end of the socket has closed is about to end
_ENDING_LOOKS, _ENDING_PAUSE_S = 50, 0.01
_COMMAND = (sys.executable, "-m", "gangline.nodeagent.gpuprocess")

DriverState = Literal["answers", "silent", "failed", "absent"]


class DriverError(OSError):
    """The driver has not answered, or said that it cannot; the message is for people."""


class GpuDriver:
    """Asks the driver, one question at a time. Lives on one event loop."""

    def __init__(
        self, happened: Callable[[Happened], None], log: Log, *, command: tuple[str, ...] = _COMMAND, backoff_s: float = BACKOFF_S[0]
    ) -> None:
        """`happened` is called with each event of the driver."""
        self._happened = happened
        self._log = log
        self._command = command
        self._first_backoff_s = self._backoff_s = backoff_s
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        #: killed and perhaps not dead yet
        self._undead: list[subprocess.Popen[bytes]] = []
        self._waiting: asyncio.Future[Answer] | None = None
        self._lock = asyncio.Lock()
        self._number = 0
        self._not_before = 0.0
        #: how it is, why, since when by the wall clock, and how often the process was started again
        self.state: DriverState = "answers"
        self.message = ""
        self.since_ms = 0
        self.restarts = 0

    @property
    def pid(self) -> int:
        """The pid of the process, 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def pause_s(self) -> float:
        """Seconds until it is worth asking again."""
        return max(0.0, self._not_before - time.monotonic())

    async def ask(self, what: Question, deadline_s: float) -> Answer:
        """Return the answer. Raises DriverError: the driver cannot do it, is silent, has crashed, is absent, or it is too soon to try again."""
        async with self._lock:
            if self._process is None:
                await self._start()
            assert self._writer is not None
            self._number += 1
            self._waiting = asyncio.get_running_loop().create_future()
            self._writer.write(framed(Request(self._number, what)))
            try:
                async with asyncio.timeout(deadline_s):
                    found = await self._waiting
            except TimeoutError:
                self.give_up("silent", f"the driver of the GPUs has not answered within {deadline_s:g} s ({type(what).__name__})")
                raise DriverError(self.message) from None
            finally:
                self._waiting = None
            if found.error:
                raise DriverError(found.error)
            self._backoff_s = self._first_backoff_s
            self._enter("answers", "")
            return found

    def give_up(self, state: DriverState, message: str) -> None:
        """Kill the process, and start no other before its time; who waits for an answer gets this message."""
        self._enter(state, message)
        self._not_before = time.monotonic() + (BACKOFF_S[1] if state == "absent" else self._backoff_s)
        self._backoff_s = min(BACKOFF_S[1], self._backoff_s * 2)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(DriverError(message))
        self.close()

    def renew(self) -> None:
        """Have the next question asked by a new process, which sees GPUs as they are now."""
        self.close()
        self._not_before = 0.0

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            if process.poll() is None:
                self._undead.append(process)

    # ---------------------------------------------------------------- the process

    async def _start(self) -> None:
        self._undead = [p for p in self._undead if p.poll() is None]
        if self.pause_s > 0:
            raise DriverError(self.message)
        if len(self._undead) >= UNDEAD_MAX:
            self._not_before = time.monotonic() + BACKOFF_S[1]
            raise DriverError(f"{self.message}; {len(self._undead)} processes hang in the driver and cannot be killed: boot the node")
        self.restarts += self.since_ms > 0
        self._process, ours = _spawn(self._command)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.get_running_loop().create_task(self._read(self._process, reader))

    async def _read(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader) -> None:
        """Take in what comes until the process is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, ValueError):
            while True:
                size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "big")
                match decode_message.decode(await reader.readexactly(size)):
                    case Answer() as answer:
                        if answer.id == self._number and self._waiting is not None and not self._waiting.done():
                            self._waiting.set_result(answer)
                    case Happened() as happened:
                        self._happened(happened)
                    case Hopeless(reason):
                        self.give_up("absent", reason)
                        return
        for _ in range(_ENDING_LOOKS):
            if process.poll() is not None:
                break
            await asyncio.sleep(_ENDING_PAUSE_S)
        code = process.poll()
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"
        self.give_up("failed", f"the process that asks the driver of the GPUs has ended {how}: the driver's library may have crashed")

    def _enter(self, state: DriverState, message: str) -> None:
        if state != self.state or not self.since_ms:
            self.since_ms = time.time_ns() // 1_000_000
            if state == "answers":
                self._log.info("gpu_driver", state=state)
            else:
                self._log.error("gpu_driver", state=state, message=message)
        self.state, self.message = state, message


def _spawn(command: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process with one end of a socket as its standard input, and return it with the other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        return subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True), ours
