"""What the ranks of a job print, passed on from the agents that have it.

An agent answers `GET {agent_url}/v1/logs/{job}/{rank}?generation=&offset=&limit=&tail=` with the bytes and the headers Gangline-Log-Offset
(position of the first of them), -Size (of the whole log so far), -Generation and -Ended (the rank writes no more). A log
that is followed is read piece by piece until the job is over; when the gang restarts, the log of the new generation follows after a line that
says so.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from gangline.core.model.arrays import element_id, indices_from
from gangline.core.model.roles import asked
from gangline.core.model.state import Job, Rank, State
from gangline.leader.api_context import Context, Stream
from gangline.leader.api_http import Params, Refusal
from gangline.leader.api_jobs import find_job

MAX_LIMIT = 4 << 20
#: nodes of the placement before that are asked for the log of an older generation
MAX_OLD_NODES = 8
_CHUNK = 64 << 10
_HEADERS = ("Gangline-Log-Offset", "Gangline-Log-Size", "Gangline-Log-Generation", "Gangline-Log-Ended")
_TEXT = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
#: reads in silence after the end of a job: its last words may still be on the way
_LAST_LOOKS = 2


class LogRoutes:
    """GET /v1/jobs/{job}/logs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Pass on what the agent has, once or for as long as the job runs."""
        params = Params(request, "rank", "generation", "offset", "limit", "tail", "follow", "min_index", "wait")
        rank = params.number("rank", 0, 10**6, 0)
        generation = params.number("generation", 1, 10**9, 0)
        bounds = {"offset": 10**15 - 1, "limit": MAX_LIMIT, "tail": 10**9}
        query = {name: n for name, most in bounds.items() if (n := params.number(name, 0, most, -1)) >= 0}
        follow = params.flag("follow")
        state = await self._context.read(params)
        job = find_job(state, request.match_info["job"])
        if job.elements is not None:
            first = next(indices_from(job.spec.array, 0)) if job.spec.array is not None else 0
            raise Refusal(409, "is_array", f"{job.id} is an array: its elements print, each for itself, as {element_id(job.id, first)}")
        if rank >= asked(job.spec).ranks:
            raise Refusal(404, "no_such_rank", f"{job.id} has ranks 0 to {asked(job.spec).ranks - 1}")
        if follow:
            async with self._context.stream_slot():
                return await _Follower(self._context, request, job.id, rank, generation, query).run()
        answer = await _ask(self._context, _places(state, job, rank, generation), query)
        try:
            stream = Stream(self._context, request, {**_TEXT, **_log_headers(answer)})
            await stream.open()
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await stream.send(chunk)
            return await stream.close()
        finally:
            answer.close()


class _Follower:
    """Reads one rank's log to its end, and then that of the next generation, until the job is over."""

    def __init__(self, context: Context, request: web.Request, job: str, rank: int, fixed: int, query: dict[str, int]) -> None:
        self._context = context
        self._request = request
        self._job = job
        self._rank = rank
        #: the only generation that is asked for, 0 for all from now on
        self._fixed = fixed
        self._generation = fixed
        self._query = query
        self._stream: Stream | None = None

    async def run(self) -> web.StreamResponse:
        """Send until the job is over or nobody listens."""
        first_s, last_s = self._context.options.log_poll_s
        pause_s, quiet = first_s, 0
        while self._stream is None or not self._stream.over:
            state = await self._context.view()
            job = state.jobs.get(self._job)
            now = job.rank(self._rank) if job is not None else None
            self._generation = self._generation or (now.generation if now is not None else 0)
            news = await self._read(state, job) if job is not None and self._generation else False
            await self._opened({})  # whoever follows hears at once that there is nothing yet
            if not news and now is not None and await self._advance(now):
                continue
            quiet = 0 if news else quiet + 1
            pause_s = first_s if news else min(last_s, pause_s * 1.5)
            if quiet >= _LAST_LOOKS and (job is None or job.state == "finished" or 0 < self._fixed < job.generation):
                break
            await asyncio.sleep(pause_s)
        assert self._stream is not None
        return await self._stream.close()

    async def _read(self, state: State, job: Job) -> bool:
        """Send what is new; nothing is new while there is no log yet or its agent cannot be reached."""
        try:
            answer = await _ask(self._context, _places(state, job, self._rank, self._generation), self._query)
        except Refusal as e:
            if self._stream is None and (e.status == 416 or job.state == "finished"):
                raise
            return False
        try:
            stream = await self._opened(_log_headers(answer))
            at = answer.headers.get("Gangline-Log-Offset", "")
            offset = int(at) if at.isdecimal() else self._query.get("offset", 0)
            start = offset
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await stream.send(chunk)
                offset += len(chunk)
        except aiohttp.ClientError:
            pass  # what has been sent counts; the rest is read next time
        finally:
            answer.close()
        self._query = {**self._query, "offset": offset}
        self._query.pop("tail", None)
        return offset > start

    async def _advance(self, now: Rank) -> bool:
        """Go on with the next generation when it has begun and the one before has nothing more to say."""
        if self._fixed or now.generation <= self._generation or not now.started:
            return False
        self._generation = now.generation
        self._query = {**self._query, "offset": 0}
        await (await self._opened({})).send(b"\n[gangline: generation %d]\n" % now.generation)
        return True

    async def _opened(self, headers: dict[str, str]) -> Stream:
        if self._stream is None:
            still_true = {name: value for name, value in headers.items() if name not in ("Gangline-Log-Size", "Gangline-Log-Ended")}
            self._stream = Stream(self._context, self._request, {**_TEXT, **still_true})
            await self._stream.open()
        return self._stream


def _places(state: State, job: Job, rank: int, generation: int) -> list[tuple[str, str, int]]:
    """Return (node, address of the log, generation) in the order in which they are to be asked. Raises Refusal when there is none."""
    now = job.rank(rank)
    nodes = [node for node, part in job.parts.items() if rank in part.ranks]
    if now is None or (generation and generation != now.generation):
        nodes += [n for n in job.previous_nodes[:MAX_OLD_NODES] if n not in nodes]
    wanted = generation or (now.generation if now is not None else job.generation)
    places: list[tuple[str, str, int]] = []
    for node in nodes:
        url = state.nodes[node].registration.agent_url if node in state.nodes else ""
        if urlsplit(url).scheme in ("http", "https"):
            places.append((node, f"{url.rstrip('/')}/v1/logs/{job.id}/{rank}", wanted))
    if not places:
        detail = f"rank {rank} of {job.id} has not been on any node yet" if not nodes else f"the agent of {', '.join(nodes)} serves no logs"
        raise Refusal(404, "no_log", detail)
    return places


async def _ask(context: Context, places: list[tuple[str, str, int]], query: dict[str, int]) -> aiohttp.ClientResponse:
    """Return the answer of the first agent that has the log, to be closed by the caller. Raises Refusal."""
    refusal: Refusal | None = None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=context.options.read_timeout_s)
    for node, url, generation in places:
        try:
            wanted = {"generation": generation, **query}
            answer = await context.session().get(url, params=wanted, allow_redirects=False, timeout=timeout)
        except (aiohttp.ClientError, TimeoutError) as e:
            refusal = Refusal(502, "agent_unreachable", f"the agent of {node}, which has the log, cannot be reached ({e or type(e).__name__})")
            continue
        if answer.status == 200:
            return answer
        answer.close()
        if answer.status == 416:
            raise Refusal(416, "beyond_the_end", "the log is shorter than that", headers=_log_headers(answer))
        if answer.status == 404:
            refusal = refusal or Refusal(404, "no_log", f"{node} has no log of generation {generation} of this rank")
        else:
            refusal = Refusal(502, "agent_refused", f"the agent of {node} answered {answer.status}")
    assert refusal is not None
    raise refusal


def _log_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _HEADERS if name in answer.headers}
