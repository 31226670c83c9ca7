"""Commands that people run beside a rank, inside its isolation: `POST /v1/exec/{job}/{rank}` of the agent, signed by a scheduler.

They live no longer than their rank and their request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from gangline.core.model import execwire as wire
from gangline.core.telemetry import Log
from gangline.nodeagent.isolation import Refused

#: commands at the same time on one node
COMMANDS_MAX = 16
_READ_BYTES = 1 << 16
#: how often it is looked whether the rank is still there
_LOOK_S = 0.2
_DRAIN_S = 2.0


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request."""

    command: list[str]
    #: who wants it, for the agent's log
    user: str = ""


class Inside(msgspec.Struct, frozen=True):
    """How to get into a rank."""

    argv: list[str]
    #: whether the rank still runs
    alive: Callable[[], bool]


class NoSuchRank(Exception):
    """It does not run here; the message is for people."""


def read_key(path: Path | None) -> bytes:
    """Return the key in a file, b"" for no file. Raises ValueError for one that is too short or that others can read, OSError."""
    if path is None:
        return b""
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} can be read by others: chmod 600 {path}")
    return wire.good_key(path.read_bytes())


class Execute:
    """The route."""

    def __init__(self, node: str, key: bytes, inside: Callable[[str, int, list[str]], Inside], log: Log) -> None:
        """`inside` returns how to run a command in a rank, or raises NoSuchRank or Refused. Without a key everything is refused."""
        self._node = node
        self._key = key
        self._inside = inside
        self._log = log
        self._running = 0
        #: nonces that have been used, with the moment from which on they are no good anyway
        self._used: dict[str, int] = {}

    async def handle(self, request: web.Request, rank: int) -> web.StreamResponse:
        """Run one command and send its output."""
        job, body = request.match_info["job"], await request.read()
        self._check(job, rank, body, request.headers.get(wire.AUTHORIZATION, ""))
        try:
            asked = msgspec.json.decode(body, type=Command)
            if not asked.command or not all(asked.command) or any("\0" in word for word in asked.command):
                raise ValueError("the command is empty, or has an empty or a NUL in it")
            inside = self._inside(job, rank, asked.command)
        except NoSuchRank as e:
            raise web.HTTPNotFound(text=f"{e}\n") from None
        except (ValueError, Refused) as e:
            raise web.HTTPBadRequest(text=f"{e}\n") from None
        if self._running >= COMMANDS_MAX:
            raise web.HTTPServiceUnavailable(text=f"{COMMANDS_MAX} commands run on this node already\n")
        self._log.info("exec", gang=job, rank=rank, user=asked.user, command=asked.command)
        self._running += 1
        try:
            return await self._run(request, inside)
        finally:
            self._running -= 1

    def _check(self, job: str, rank: int, body: bytes, header: str) -> None:
        if not self._key:
            raise web.HTTPForbidden(text="this agent runs no commands: it has no --exec-key-file\n")
        now_ms = time.time_ns() // 1_000_000
        found = wire.allowed(self._key, self._node, job, rank, body, header, now_ms)
        if found is None or found[0] in self._used:
            self._log.warning("exec_refused", gang=job, rank=rank, message="it was not signed with this agent's key, or not for now")
            raise web.HTTPForbidden(text="the request is not signed with this agent's key, or not for now\n")
        self._used = {nonce: until for nonce, until in self._used.items() if until > now_ms}
        self._used[found[0]] = found[1]

    async def _run(self, request: web.Request, inside: Inside) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/")}
        try:
            process = await asyncio.create_subprocess_exec(
                *inside.argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                start_new_session=True, env=env,
            )  # fmt: skip
        except OSError as e:
            await response.write(wire.frame(wire.FAILED, f"cannot be started: {e.strerror}".encode()))
            return response
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            asyncio.ensure_future(_pump(process.stdout, wire.OUT, response)),
            asyncio.ensure_future(_pump(process.stderr, wire.ERR, response)),
        ]
        try:
            while process.returncode is None and inside.alive():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(process.wait()), _LOOK_S)
                if any(pump.done() and pump.exception() for pump in pumps):
                    break  # nobody listens
            ended = process.returncode
            _kill(process)
            # What it has left in the background may hold the pipes open for ever.
            await asyncio.wait(pumps, timeout=_DRAIN_S)
            word = (wire.EXIT, str(ended).encode()) if ended is not None else (wire.FAILED, b"the rank has ended, and the command with it")
            await response.write(wire.frame(*word))
            return response
        finally:
            if process.returncode is None:
                _kill(process)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await process.wait()


async def _pump(source: asyncio.StreamReader, kind: bytes, response: web.StreamResponse) -> None:
    while data := await source.read(_READ_BYTES):
        await response.write(wire.frame(kind, data))


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill its process group: at once when it has ended itself, while the group's number cannot be another's yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
