"""What the agent serves over HTTP: health, metrics, the logs of its ranks, and commands inside of them that a scheduler has signed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from gangline.core.model.execwire import MAX_BODY
from gangline.core.telemetry import Telemetry
from gangline.nodeagent import logs
from gangline.nodeagent.execute import Execute

LIMIT_MAX = 1 << 22
_LIMIT = 1 << 20
_HEADERS = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'", "Cache-Control": "no-store"}


class AgentHttp:
    """The server. `url` is known after `start`."""

    def __init__(
        self, state_dir: Path, telemetry: Telemetry, *,
        health: Callable[[], dict[str, object]], ended: Callable[[str, int, int], bool], execute: Execute,
    ) -> None:  # fmt: skip
        """`ended` tells whether a rank, given as job, generation and rank, writes no more."""
        self._logs = state_dir / "logs"
        self._telemetry = telemetry
        self._health = health
        self._ended = ended
        self._execute = execute
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/logs/{job}/{rank}", self._log)
        app.router.add_post("/v1/exec/{job}/{rank}", self._exec)
        app.on_response_prepare.append(_add_headers)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        sockets = site._server.sockets if isinstance(site._server, asyncio.Server) else ()
        return int(sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop connections."""
        await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response(self._health())

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._telemetry.prometheus(), content_type="text/plain", charset="utf-8")

    async def _log(self, request: web.Request) -> web.Response:
        job = request.match_info["job"]
        rank = _number(request.match_info["rank"], "rank")
        query = {name: _number(request.query[name], name) for name in ("generation", "offset", "limit", "tail") if name in request.query}
        limit = min(LIMIT_MAX, query.get("limit", query.get("tail", _LIMIT)))
        tail = query.get("tail")
        try:
            chunk = await asyncio.to_thread(
                logs.read, self._logs, job, rank, generation=query.get("generation"), offset=query.get("offset"), limit=limit,
                tail=None if tail is None else min(tail, limit),
            )  # fmt: skip
        except logs.NoLog as e:
            raise web.HTTPNotFound(text=f"{e}\n") from None
        except ValueError as e:
            raise web.HTTPRequestRangeNotSatisfiable(text=f"{e}\n") from None
        headers = {
            "Gangline-Log-Offset": str(chunk.offset),
            "Gangline-Log-Size": str(chunk.size),
            "Gangline-Log-Generation": str(chunk.generation),
            "Gangline-Log-Ended": "true" if self._ended(job, chunk.generation, rank) else "false",
        }
        return web.Response(body=chunk.data, headers=headers, content_type="text/plain", charset="utf-8")

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        return await self._execute.handle(request, _number(request.match_info["rank"], "rank"))


def _number(text: str, name: str) -> int:
    """Return a number that a client gave; anything but 1 to 15 decimal digits is a bad request."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise web.HTTPBadRequest(text=f"{name} must be a whole number from 0 on, not {text[:40]!r}\n")
    return int(text)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
