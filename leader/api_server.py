"""Listening: connections are bounded, in all and from one address, and one that asks nothing is closed. RELIABILITY B5, B70."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from aiohttp import web

from gangline.leader.api_context import ApiOptions
from gangline.leader.api_http import Refusal, encode, problem

#: streams and requests get so long to end when the server stops
STOP_S = 2.0

#: what clients do wrong is answered, not logged
_SILENT = logging.getLogger("gangline.leader.api")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False

_FULL_BODY = encode(problem(503, "too_many_connections", "as many connections are open as this scheduler takes"))
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


class Listener:
    """Serves an application on the address of its options. `url` is set once it has started."""

    def __init__(self, app: web.Application, options: ApiOptions) -> None:
        self._options = options
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S, handle_signals=False)
        self._server: asyncio.Server | None = None
        self._open: Counter[str] = Counter()
        self._total = 0
        self.url = ""

    async def start(self) -> None:
        """Bind and listen. Raises OSError when the address is taken."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, self._options.host or None, self._options.port, backlog=1024)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening, end streams, let requests finish for a moment."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _connect(self) -> asyncio.Protocol:
        return _Connection(self, self._runner.server, self._options)

    def admit(self, address: str) -> bool:
        """Count a connection from `address`, unless there are too many already."""
        options = self._options
        if self._total >= options.max_connections or self._open[address] >= options.max_connections_per_address:
            return False
        self._open[address] += 1
        self._total += 1
        return True

    def leave(self, address: str) -> None:
        """An admitted connection is gone."""
        self._total -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class _Connection(web.RequestHandler):
    """One connection: counted, and its protocol errors answered like all others."""

    __slots__ = ("_address", "_listener")

    def __init__(self, listener: Listener, server: Any, options: ApiOptions) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=options.idle_timeout_s,
            lingering_time=1.0,
            auto_decompress=False,
            logger=_SILENT,
            access_log=None,  # type: ignore[arg-type]
        )
        self._listener = listener
        self._address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it or turn it away."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        if not self._listener.admit(address):
            assert isinstance(transport, asyncio.Transport)
            transport.write(_FULL)
            transport.close()
            return
        self._address = address
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of a connection that was turned away are dropped."""
        if self._address is not None:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Count it out."""
        if self._address is not None:
            self._listener.leave(self._address)
            super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is not HTTP, or failed outside of every route."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        first_line = (message or "the request cannot be carried out").strip().splitlines()[0] if message else "the request cannot be read"
        response = Refusal(status, "bad_request" if status == 400 else "internal", first_line[:200]).response()
        response.force_close()
        return response
