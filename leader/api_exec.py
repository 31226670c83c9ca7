"""Commands inside running ranks, passed on to the agents that have them.

POST /v1/jobs/{job}/exec with {"rank": 0, "command": ["nvidia-smi"]} is answered with the frames of core/model/execwire.py as the command runs.
The scheduler finds the rank's node, signs the request with the key that it shares with the agents, and passes the output on.
"""

from __future__ import annotations

import secrets
import time
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from gangline.core.model import execwire as wire
from gangline.core.model.jobfile import MAX_ARGS
from gangline.core.model.state import State
from gangline.leader.api_context import Context, Stream
from gangline.leader.api_http import Params, Refusal, body_as, encode, read_body
from gangline.leader.api_jobs import find_job, user_of

_CHUNK = 64 << 10


class ExecWord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body."""

    command: list[str]
    rank: int = 0


class ExecRoutes:
    """POST /v1/jobs/{job}/exec."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def execute(self, request: web.Request) -> web.StreamResponse:
        """Run a command in a rank and send its output."""
        context = self._context
        params = Params(request)
        params.check()
        word = body_as(await read_body(request, wire.MAX_BODY // 2, context.options.read_timeout_s), ExecWord)
        if not 1 <= len(word.command) <= MAX_ARGS or not all(word.command) or any("\0" in part for part in word.command):
            raise Refusal(400, "bad_command", f"a command is 1 to {MAX_ARGS} texts, none of them empty or with a NUL character in it")
        if not context.options.exec_key:
            raise Refusal(403, "exec_switched_off", "this scheduler runs no commands in ranks: it has no --exec-key-file")
        state = await context.view()
        job = find_job(state, request.match_info["job"]).id
        node, url = _place(state, job, word.rank)
        body = encode({"command": word.command, "user": user_of(request)})
        until_ms = time.time_ns() // 1_000_000 + wire.GOOD_FOR_MS
        signed = wire.sign(context.options.exec_key, node, job, word.rank, body, secrets.token_hex(12), until_ms)
        async with context.stream_slot():
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=3)
            try:
                answer = await context.session().post(
                    url, data=body, headers={wire.AUTHORIZATION: signed}, allow_redirects=False, timeout=timeout
                )
            except (aiohttp.ClientError, TimeoutError) as e:
                raise Refusal(502, "agent_unreachable", f"the agent of {node} cannot be reached ({e or type(e).__name__})") from None
            try:
                return await self._pass_on(request, node, answer)
            finally:
                answer.close()

    async def _pass_on(self, request: web.Request, node: str, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        if answer.status != 200:
            said = (await answer.content.read(1000)).decode("utf-8", "replace").strip()
            if answer.status == 404:
                raise Refusal(409, "not_running", said)
            raise Refusal(400 if answer.status == 400 else 502, "agent_refused", f"the agent of {node} refuses: {said or answer.status}")
        stream = Stream(self._context, request, {"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"})
        await stream.open()
        try:
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await stream.send(chunk)
        except aiohttp.ClientError as e:
            await stream.send(wire.frame(wire.FAILED, f"the agent of {node} is gone: {e}".encode()))
        return await stream.close()


def _place(state: State, job: str, rank: int) -> tuple[str, str]:
    """Return (node, address) of a running rank. Raises Refusal."""
    found = state.jobs[job]
    node = next((node for node, part in found.parts.items() if rank in part.ranks), "")
    now = found.rank(rank)
    if not node or now is None or not now.started or now.exited:
        raise Refusal(409, "not_running", f"rank {rank} of {job} does not run now")
    url = state.nodes[node].registration.agent_url if node in state.nodes else ""
    if urlsplit(url).scheme not in ("http", "https"):
        raise Refusal(409, "not_running", f"the agent of {node} cannot be asked")
    return node, f"{url.rstrip('/')}/v1/exec/{job}/{rank}"
