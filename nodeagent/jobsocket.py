"""The unix socket on which ranks of this node report progress and hear events.

Protocol, JSON lines in both directions:

    rank  → agent   {"type":"hello","token":"..."}                      the first line, within HELLO_TIMEOUT_S
                    {"type":"progress","step":N,"busy_ms":M}            M, the time of its own work in a step, may be left out
                    {"type":"checkpoint","step":N,"path":"..."}
                    {"type":"ack"}                                      stop notice heard, and everything worth keeping saved
    agent → rank    {"event":"start"|"restart"|"preemption"|...,...}    those of its generation so far, then new ones as they come
                    {"event":"error","code":"...","message":"..."}      the last line before the agent hangs up

Ranks run code that nobody here has read, so every line is hostile until proved otherwise:

- what reaches `on_message` is rebuilt from checked fields: known types only, steps that fit an int64, paths that are valid UTF-8;
- lines, connections, stored events and unsent bytes are bounded; who floods is read more slowly, who does not read is dropped;
- a rank is who its token says, and the token dies with it (`dismiss`).

A message of an unknown type is ignored, so that a newer SDK works with an older agent. After a restart the agent admits the ranks
that it has adopted before `start`, otherwise they are turned away until their next attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

#: longest path in bytes that the kernel takes for a unix socket (`sun_path` is 108 bytes with its final NUL)
PATH_BYTES_MAX = 107
#: a connection that has not introduced itself after this time is closed
HELLO_TIMEOUT_S = 10.0
#: longest line that is read, without its newline
LINE_BYTES_MAX = 16_384
#: all connections together, those that have not introduced themselves included
CONNECTIONS_MAX = 4_096
#: connections with the same token: a rank and the helpers that it has forked
CONNECTIONS_PER_RANK_MAX = 16
#: events kept for those of a generation who connect later; the oldest go first
EVENTS_KEPT_MAX = 256
EVENTS_KEPT_BYTES_MAX = 1 << 19
#: generations with stored events that no rank is admitted for (yet)
IDLE_STREAMS_MAX = 1_024
#: a connection with more unsent bytes than this is dropped
UNSENT_BYTES_MAX = 1 << 20
#: messages that one connection may send at once, and per second in the long run
BURST_MAX = 200
RATE_PER_S = 100.0

STEP_MAX = 2**63 - 1
#: a step that took a month is no step
BUSY_MS_MAX = 31 * 86_400_000
TOKEN_CHARS_MAX = 256
CHECKPOINT_PATH_BYTES_MAX = 4_096


@dataclass(frozen=True)
class RankRef:
    """One rank of one generation of a job."""

    job: str
    generation: int
    rank: int


class BadMessage(ValueError):
    """A line that no honest rank sends. `code` is for machines."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class JobSocket:
    """Server of the socket. Everything runs on the event loop that called `start`; nothing here blocks it."""

    def __init__(self, path: Path, on_message: Callable[[RankRef, dict[str, object]], None], *, mode: int = 0o600) -> None:
        """`on_message` gets each checked message and must not raise; `mode` is that of the socket file."""
        self._path = path
        self._on_message = on_message
        self._mode = mode
        self._server: asyncio.Server | None = None
        self._inode: tuple[int, int] | None = None
        self._refs: dict[str, RankRef] = {}
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._connections: dict[_Connection, None] = {}

    async def start(self) -> None:
        """Listen. Raises ValueError for a path that is too long, FileExistsError if something that is no socket is in the way."""
        size = len(os.fsencode(self._path))
        if size > PATH_BYTES_MAX:
            raise ValueError(
                f"socket path {self._path} has {size} bytes, the kernel allows {PATH_BYTES_MAX}: "
                "give the agent a shorter state directory"
            )
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                raise FileExistsError(f"{self._path} is in the way of the job socket and is not a socket: remove it")
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(self._path))
            # Nobody can connect before listen, so nobody sees the socket with another mode than this one.
            os.chmod(self._path, self._mode)
            info = os.lstat(self._path)
            self._inode = (info.st_dev, info.st_ino)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _Connection(self, loop), sock=listener, backlog=1024)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """Hang up on everybody and remove the socket file. Ranks reconnect to the next agent by themselves."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in list(self._connections):
            connection.hang_up()
        await server.wait_closed()
        with contextlib.suppress(FileNotFoundError):
            info = os.lstat(self._path)
            if (info.st_dev, info.st_ino) == self._inode:
                os.unlink(self._path)

    def admit(self, token: str, ref: RankRef) -> None:
        """Let the rank that says `token` be `ref`. Doing it twice changes nothing."""
        known = self._refs.get(token)
        if known == ref:
            return
        if known is not None:
            self.dismiss(token)
        self._refs[token] = ref
        self._stream(ref.job, ref.generation).tokens.add(token)

    def dismiss(self, token: str) -> None:
        """Forget the token and hang up on who used it; with the last token of a generation its events are forgotten too."""
        ref = self._refs.get(token)
        if ref is None:
            return
        stream = self._streams[(ref.job, ref.generation)]
        for connection in [c for c in stream.connections if c.token == token]:
            connection.hang_up()
        stream.tokens.discard(token)
        del self._refs[token]
        if not stream.tokens:
            del self._streams[(ref.job, ref.generation)]

    def publish(self, job: str, generation: int, event: dict[str, object]) -> None:
        """Send an event to the ranks of one generation, and keep it for those who connect later."""
        line = msgspec.json.encode(event) + b"\n"
        stream = self._stream(job, generation)
        stream.keep(line)
        for connection in list(stream.connections):
            connection.send(line)

    def _stream(self, job: str, generation: int) -> _Stream:
        key = (job, generation)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
            idle = [k for k, other in self._streams.items() if not other.tokens and k != key]
            for old in (k for i, k in enumerate(idle) if (k[0] == job and k[1] < generation) or i < len(idle) - IDLE_STREAMS_MAX):
                del self._streams[old]
        return stream

    # What connections call.

    def opened(self, connection: _Connection) -> None:
        """Take a new connection in; a full house sends away the oldest one that has not introduced itself, maybe the newcomer."""
        self._connections[connection] = None
        if len(self._connections) > CONNECTIONS_MAX:
            stranger = next(c for c in self._connections if c.token is None)
            stranger.refuse("too_many_connections", f"the agent serves {CONNECTIONS_MAX} connections already")

    def closed(self, connection: _Connection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)
        for stream in self._streams_of(connection.token):
            stream.connections.pop(connection, None)

    def hello(self, connection: _Connection, token: str) -> None:
        """Recognise a rank by its token and send it the events so far. Raises BadMessage."""
        if token not in self._refs:
            raise BadMessage("unknown_token", "no rank on this node has this token (or not any more)")
        for stream in self._streams_of(token):
            if sum(c.token == token for c in stream.connections) >= CONNECTIONS_PER_RANK_MAX:
                raise BadMessage("too_many_connections", f"this rank has {CONNECTIONS_PER_RANK_MAX} connections already")
            connection.token = token
            stream.connections[connection] = None
            connection.send(b"".join(stream.events))

    def deliver(self, token: str, message: dict[str, object]) -> None:
        """Pass on a message that has been checked."""
        ref = self._refs.get(token)
        if ref is not None:
            self._on_message(ref, message)

    def _streams_of(self, token: str | None) -> Iterator[_Stream]:
        ref = self._refs.get(token) if token is not None else None
        if ref is not None:
            yield self._streams[(ref.job, ref.generation)]


@dataclass(eq=False)
class _Stream:
    """One generation of a job: its events so far and who listens. `tokens` are those admitted for it."""

    events: deque[bytes] = field(default_factory=deque)
    size_bytes: int = 0
    tokens: set[str] = field(default_factory=set)
    connections: dict[_Connection, None] = field(default_factory=dict)

    def keep(self, line: bytes) -> None:
        """Store an event, and let the oldest go that do not fit any more."""
        self.events.append(line)
        self.size_bytes += len(line)
        while len(self.events) > EVENTS_KEPT_MAX or self.size_bytes > EVENTS_KEPT_BYTES_MAX:
            self.size_bytes -= len(self.events.popleft())


class _Connection(asyncio.Protocol):
    """One connection: bytes to lines, lines to checked messages, at a bounded rate. It has a token after its hello."""

    def __init__(self, owner: JobSocket, loop: asyncio.AbstractEventLoop) -> None:
        self.token: str | None = None
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._hello_timer: asyncio.TimerHandle | None = None
        self._resume_timer: asyncio.TimerHandle | None = None
        self._allowance = float(BURST_MAX)
        self._allowance_at = loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        reason = f"no hello within {HELLO_TIMEOUT_S:g} s"
        self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self.refuse, "no_hello", reason)
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._read()

    def send(self, data: bytes) -> None:
        """Send without waiting; a rank that does not read is dropped."""
        transport = self._transport
        if transport is None or not data:
            return
        transport.write(data)
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.hang_up()

    def refuse(self, code: str, message: str) -> None:
        """Say why, once, and hang up."""
        transport = self._transport
        if transport is not None:
            self._finish()
            transport.write(json.dumps({"event": "error", "code": code, "message": message}).encode() + b"\n")
            transport.close()
            # `close` waits until the peer has taken the line; one that never reads must not keep the connection.
            self._loop.call_later(HELLO_TIMEOUT_S, transport.abort)

    def hang_up(self) -> None:
        """Close at once, unsent bytes are lost."""
        transport = self._transport
        if transport is not None:
            self._finish()
            transport.abort()

    def _read(self) -> None:
        """Handle the lines that are there, as many as the rate allows; the rest waits, and so does the sender."""
        now = self._loop.time()
        self._allowance = min(BURST_MAX, self._allowance + (now - self._allowance_at) * RATE_PER_S)
        self._allowance_at = now
        start = 0
        try:
            while self._transport is not None:
                end = self._buffer.find(b"\n", start)
                if (end if end >= 0 else len(self._buffer)) - start > LINE_BYTES_MAX:
                    raise BadMessage("line_too_long", f"a line may have {LINE_BYTES_MAX} bytes")
                if end < 0:
                    break
                if self._allowance < 1:
                    self._pause()
                    break
                self._allowance -= 1
                line = bytes(self._buffer[start:end])
                start = end + 1
                self._line(line)
        except BadMessage as bad:
            self.refuse(bad.code, str(bad))
        del self._buffer[:start]

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        message = parse(line)
        if self.token is not None:
            if message is not None:
                self._owner.deliver(self.token, message)
            return
        if message is None or message["type"] != "hello":
            raise BadMessage("no_hello", 'the first line must be {"type":"hello","token":"..."}')
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._owner.hello(self, str(message["token"]))

    def _pause(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()
        self._resume_timer = self._loop.call_later(10 / RATE_PER_S, self._resume)

    def _resume(self) -> None:
        self._resume_timer = None
        self._read()
        if self._resume_timer is None and self._transport is not None:
            self._transport.resume_reading()

    def _finish(self) -> None:
        self._transport = None
        self._buffer.clear()
        for timer in (self._hello_timer, self._resume_timer):
            if timer is not None:
                timer.cancel()
        self._owner.closed(self)


def parse(line: bytes) -> dict[str, object] | None:
    """Return the message in a line, rebuilt from its checked fields; None for an unknown type. Raises BadMessage."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        raise BadMessage("bad_json", "a line is not JSON") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise BadMessage("bad_message", 'a line must be an object with a "type"')
    match raw["type"]:
        case "hello":
            token = raw.get("token")
            if not isinstance(token, str) or not 0 < len(token) <= TOKEN_CHARS_MAX:
                raise BadMessage("unknown_token", f"hello needs a token of 1 to {TOKEN_CHARS_MAX} characters")
            return {"type": "hello", "token": token}
        case "progress":
            busy = raw.get("busy_ms")
            known = isinstance(busy, int) and not isinstance(busy, bool) and 0 < busy <= BUSY_MS_MAX
            return {"type": "progress", "step": _step(raw)} | ({"busy_ms": busy} if known else {})
        case "checkpoint":
            return {"type": "checkpoint", "step": _step(raw), "path": _path(raw)}
        case "ack":
            return {"type": "ack"}
        case _:
            return None


def _step(raw: dict[str, object]) -> int:
    step = raw.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= STEP_MAX:
        raise BadMessage("bad_message", f'{raw["type"]} needs a "step", an integer from 0 to 2^63-1')
    return step


def _path(raw: dict[str, object]) -> str:
    path = raw.get("path", "")
    try:
        # Lone surrogates are legal in JSON and poison for whatever has to write the path down again.
        good = isinstance(path, str) and len(path.encode()) <= CHECKPOINT_PATH_BYTES_MAX and path.isprintable()
    except UnicodeEncodeError:
        good = False
    if not good:
        raise BadMessage("bad_message", f'"path" must be printable UTF-8 of at most {CHECKPOINT_PATH_BYTES_MAX} bytes')
    return str(path)
