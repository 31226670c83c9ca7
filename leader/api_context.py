"""What the routes share: the service, reads at an index, writes that find the leader, and bounds on both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from gangline.core.model.state import State
from gangline.leader.api_http import JSON, Params, Refusal, encode, read_body
from gangline.leader.commands import Accepted, Command
from gangline.leader.metrics import Metrics
from gangline.leader.service import NotLeader, Service, Unavailable

#: names the scheduler that passed a write on; such a write is not passed on again
FORWARDED = "Gangline-Forwarded"

#: headers of a request that go with it to the leader, and of the leader's answer that come back
_PASSED_ON = ("Authorization", "Content-Type", "Idempotency-Key", "If-Match", "Gangline-User", "traceparent")
_PASSED_BACK = (
    "Content-Type", "ETag", "Retry-After", "Idempotent-Replayed", "WWW-Authenticate", "Gangline-Index", "Gangline-Epoch", "Gangline-Leader",
)  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
WriteHandler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class ApiOptions(msgspec.Struct, frozen=True):
    """How a scheduler serves its API."""

    host: str = "127.0.0.1"
    #: 0 takes any free one; the listener says which
    port: int = 7480
    #: file with one token a line; empty: no token is asked for, which only works on loopback
    token_file: str = ""
    #: names besides those of loopback under which others may call this scheduler
    allowed_hosts: tuple[str, ...] = ()
    #: open event and log streams
    max_streams: int = 256
    max_connections: int = 4096
    max_connections_per_address: int = 1024
    #: commands that wait for their commit; more are turned away
    max_pending: int = 20_000
    #: a body must have arrived, and a command be committed, within
    read_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    #: a connection without a request, or with half of one, is closed after
    idle_timeout_s: float = 75.0
    #: a stream whose client takes nothing for so long is dropped
    slow_reader_s: float = 10.0
    heartbeat_s: float = 15.0
    #: pause between two looks at a log that is followed: from the first after news to the last in silence
    log_poll_s: tuple[float, float] = (0.2, 2.0)
    #: what commands in ranks are signed with for agents, empty: none is run
    exec_key: bytes = b""


class Context:
    """One API: its service, options and open resources."""

    def __init__(self, service: Service, options: ApiOptions, metrics: Metrics) -> None:
        self.service = service
        self.options = options
        self.metrics = metrics
        #: the server is stopping: streams end
        self.closing = asyncio.Event()
        self._state: State | None = None
        self._index = 0
        self._pending = 0
        self._session: aiohttp.ClientSession | None = None

    # ---------------------------------------------------------------- answers

    def stamp(self, index: int = 0) -> dict[str, str]:
        """Return the headers that say what an answer is true at (0: what was seen last)."""
        state = self._state
        return {
            "Gangline-Index": str(index or self._index),
            "Gangline-Epoch": str(state.epoch if state is not None else 0),
            "Gangline-Leader": self.service.leader_name,
        }

    def answer(self, value: Any, *, status: int = 200, index: int = 0, headers: Mapping[str, str] | None = None) -> web.Response:
        """Return a JSON answer that is true at `index`."""
        merged = self.stamp(index)
        merged["Content-Type"] = JSON
        if headers:
            merged.update(headers)
        return web.Response(body=encode(value), status=status, headers=merged)

    # ---------------------------------------------------------------- reads

    @property
    def seen(self) -> State | None:
        """The state that was read last, for whoever does not mind that it is a little ahead or behind."""
        return self._state

    async def view(self, min_index: int = 0, wait_s: float = 0.0) -> State:
        """Return the state to be read before the next await. Raises Refusal when it does not reach `min_index` in time."""
        try:
            async with asyncio.timeout(wait_s + self.options.read_timeout_s):
                state = await self.service.view(min_index, wait_s)
        except TimeoutError:
            raise Refusal(
                503, "index_not_reached", f"this scheduler has not folded entry {min_index} yet; it is at {self._index}", retry_after_s=1
            ) from None
        self._state, self._index = state, state.index
        return state

    def now_ms(self, state: State) -> int:
        """Return the log time of a decision that would be made now."""
        return max(state.at_ms, self.service.now_ms())

    async def read(self, params: Params) -> State:
        """Return the state that the query asks for (`min_index`, `wait`). Raises Refusal for anything wrong with the query, too."""
        min_index, wait_s = params.number("min_index", 0, 10**16, 0), params.wait_s()
        params.check()
        return await self.view(min_index, wait_s)

    async def glance(self, within_s: float) -> State | None:
        """Return the state, or the last one seen when the scheduler cannot vouch for one quickly."""
        try:
            async with asyncio.timeout(within_s):
                state = await self.service.view()
        except TimeoutError:
            return self._state
        self._state, self._index = state, state.index
        return state

    # ---------------------------------------------------------------- writes

    def writes(self, handler: WriteHandler, limit: int) -> Handler:
        """Return a route that carries out `handler` on the leader, wherever the request arrived."""
        service, timeout_s = self.service, self.options.read_timeout_s

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await read_body(request, limit, timeout_s)
            if service.role != "leader":
                return await self.forward(request, body, service.leader_url)
            try:
                return await handler(request, body)
            except NotLeader as e:
                return await self.forward(request, body, e.url)

        return handle

    async def execute(self, commands: list[Command]) -> list[Accepted | Exception]:
        """Carry out commands. Raises NotLeader, and Refusal when the outcome is unknown or too much waits already."""
        if self._pending + len(commands) > self.options.max_pending:
            raise Refusal(503, "overloaded", f"{self._pending} commands wait for their commit already; say it again", retry_after_s=1)
        self._pending += len(commands)
        try:
            async with asyncio.timeout(self.options.write_timeout_s):
                return await self.service.execute(commands)
        except (Unavailable, TimeoutError) as e:
            raise unknown_outcome(str(e) or "the log did not answer in time") from None
        finally:
            self._pending -= len(commands)

    async def execute_one(self, command: Command) -> Accepted:
        """Carry out one command. Raises Refused, and what `execute` raises."""
        [result] = await self.execute([command])
        if isinstance(result, Unavailable):
            raise unknown_outcome(str(result))
        if isinstance(result, Exception):
            raise result
        if self._state is None:
            await self.glance(1.0)
        return result

    async def forward(self, request: web.Request, body: bytes, leader_url: str) -> web.Response:
        """Pass a write on to the leader and its answer back; one hop, never two."""
        if FORWARDED in request.headers or not leader_url:
            raise Refusal(503, "no_leader", "no scheduler leads at the moment; nothing was done, say it again", retry_after_s=1)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        headers[FORWARDED] = self.service.name
        url = leader_url.rstrip("/") + request.raw_path
        try:
            async with self.session().request(request.method, url, data=body or None, headers=headers, allow_redirects=False) as answer:
                back = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
                return web.Response(status=answer.status, body=await answer.read(), headers=back)
        except aiohttp.ClientConnectorError:
            raise Refusal(
                503, "leader_unreachable", f"{self.service.leader_name} leads but cannot be reached; nothing was done", retry_after_s=1
            ) from None
        except (aiohttp.ClientError, TimeoutError) as e:
            raise unknown_outcome(f"the leader did not answer ({e or type(e).__name__})") from None

    def session(self) -> aiohttp.ClientSession:
        """Return the connections to other schedulers and to agents."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.options.write_timeout_s + 5, sock_connect=3),
                connector=aiohttp.TCPConnector(limit=1000, limit_per_host=200),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    # ---------------------------------------------------------------- streams

    @asynccontextmanager
    async def stream_slot(self) -> AsyncIterator[None]:
        """Hold one of the bounded number of streams. Raises Refusal when all are taken."""
        if self.metrics.streams >= self.options.max_streams:
            raise Refusal(503, "too_many_streams", f"{self.options.max_streams} streams are open already", retry_after_s=5)
        self.metrics.streams += 1
        try:
            yield
        finally:
            self.metrics.streams -= 1

    async def close(self) -> None:
        """Give back what is open."""
        self.closing.set()
        if self._session is not None:
            await self._session.close()


def unknown_outcome(why: str) -> Refusal:
    """Return the refusal for a write that may or may not take effect."""
    return Refusal(503, "outcome_unknown", f"{why}; it may still take effect: say it again with the same Idempotency-Key", retry_after_s=1)


class Stream:
    """An answer without an end. Its client must keep reading."""

    def __init__(self, context: Context, request: web.Request, headers: Mapping[str, str]) -> None:
        self._context = context
        self._request = request
        self._response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **context.stamp(), **headers})

    async def open(self) -> None:
        """Send the headers."""
        await self._response.prepare(self._request)

    async def send(self, data: bytes) -> None:
        """Send data; a client that takes nothing for too long is dropped, which raises ConnectionResetError."""
        try:
            async with asyncio.timeout(self._context.options.slow_reader_s):
                await self._response.write(data)
        except TimeoutError:
            self._context.metrics.stream_dropped()
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client reads too slowly") from None

    async def close(self) -> web.StreamResponse:
        """End it in order."""
        await self._response.write_eof()
        return self._response

    @property
    def over(self) -> bool:
        """Nobody listens any more, or the server stops."""
        transport = self._request.transport
        return transport is None or transport.is_closing() or self._context.closing.is_set()
