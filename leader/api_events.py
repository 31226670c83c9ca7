"""The log over HTTP: events as they come, and the story of one job.

A stream sends whole frames, and its id stands on the last event of a frame only: whoever resumes after that id has every event of every frame,
at worst some of them twice, never one too few.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from gangline.core.model import events as ev
from gangline.core.model.codec import Frame
from gangline.core.model.narrate import JobStory, concerns, sentence
from gangline.core.model.state import Job, State
from gangline.leader.api_context import Context, Stream
from gangline.leader.api_http import Params, Refusal, encode
from gangline.leader.api_jobs import find_job
from gangline.leader.rows import without_secrets
from gangline.leader.service import Gone

#: entries of one story; a job with a longer one has its first and last entries told
MAX_STORY = 10_000
#: stories read at the same time, and frames after which others get a turn
MAX_STORIES = 4
_FRAMES_STEP = 100
#: after the end of a job its nodes still report that they are empty: its grace and this
_AFTERMATH_MS = 120_000
#: frames whose JSON is kept for other streams
_KEPT = 256
#: how soon a reader notices that its stream is over
_CHECK_S = 1.0


class Entry(msgspec.Struct, frozen=True):
    """One event with what it means."""

    index: int
    epoch: int
    at_ms: int
    event: str
    message: str
    body: Any


class EventRoutes:
    """The routes that read the log."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._encoded: dict[int, list[tuple[tuple[str, ...], tuple[str, ...], bytes]]] = {}
        self._stories = asyncio.Semaphore(MAX_STORIES)

    async def story(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/jobs/{job}/story."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        job = find_job(state, request.match_info["job"])
        async with self._stories:
            entries, truncated = await self._tell(job, state)
        body = {"job": job.id, "entries": entries}
        return self._context.answer(body | {"truncated": True} if truncated else body, index=state.index)

    async def _tell(self, job: Job, state: State) -> tuple[list[Entry], bool]:
        story, until = JobStory(job.id), state.index
        ended_ms = job.ended_at_ms + int(job.spec.preemption.grace_s * 1000) + _AFTERMATH_MS if job.state == "finished" else 0
        entries: list[Entry] = []
        truncated = False
        frames = self._context.service.entries(job.submitted_index)
        try:
            async for frame in frames:
                if frame.index > until or (ended_ms and frame.at_ms > ended_ms):
                    break
                entries += [_entry(frame, event, job.id) for event in frame.events if story.tells(event)]
                if len(entries) > MAX_STORY:
                    del entries[MAX_STORY // 2 : -MAX_STORY // 2]
                    truncated = True
                if frame.index % _FRAMES_STEP == 0:
                    await asyncio.sleep(0)
        except Gone as e:
            raise gone(e) from None
        finally:
            await _close(frames)
        return entries, truncated

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/events."""
        params = Params(request, "from", "job", "node", "follow", "min_index", "wait")
        first = params.number("from", 1, 10**16, 0)
        resumed = request.headers.get("Last-Event-ID", "")
        if resumed.isascii() and resumed.isdigit() and len(resumed) <= 16:
            first = int(resumed) + 1
        job, node, follow = params.text("job"), params.text("node"), params.flag("follow")
        wait_s = params.wait_s()
        state = await self._context.read(params)
        if first > state.index + 1:
            state = await self._await_index(first - 1, wait_s or 2.0)
        sse = "text/event-stream" in request.headers.get("Accept", "")
        job = _job_id(state, job)
        until = 0 if follow else state.index
        first = first or (state.index + 1 if follow else await self._oldest())
        headers = {"Content-Type": "text/event-stream; charset=utf-8" if sse else "application/x-ndjson; charset=utf-8"}
        async with self._context.stream_slot():
            reader = _Reader(self._context.service.entries(first, follow=follow))
            try:
                if first <= state.index:
                    await reader.begin()
                stream = Stream(self._context, request, headers)
                await stream.open()
                await self._pump(reader, stream, _Format(sse, job, node), until, first)
                return await stream.close()
            except Gone as e:
                raise gone(e) from None
            finally:
                await reader.close()

    async def _await_index(self, index: int, wait_s: float) -> State:
        try:
            return await self._context.view(index, wait_s)
        except Refusal:
            raise Refusal(400, "index_in_the_future", f"entry {index} has not been written yet") from None

    async def _oldest(self) -> int:
        """Return the first entry that can still be read."""
        frames = self._context.service.entries(1)
        try:
            async for frame in frames:
                return frame.index
        except Gone as e:
            return e.first
        finally:
            await _close(frames)
        return 1

    async def _pump(self, reader: _Reader, stream: Stream, form: _Format, until: int, first: int) -> None:
        """Send frames until `until` (0: without end); a sign of life when there are none for a while."""
        loop = asyncio.get_running_loop()
        heartbeat_s = self._context.options.heartbeat_s
        seen, told = first - 1, first - 1
        due = loop.time() + heartbeat_s
        while not (until and seen >= until) and not stream.over:
            frame = await reader.next(min(_CHECK_S, max(0.0, due - loop.time())))
            if frame is not None:
                if until and frame.index > until:
                    return
                seen = frame.index
                data = form.frame(frame.index, self._lines(frame))
                if data:
                    await stream.send(data)
                    told, due = seen, loop.time() + heartbeat_s
                elif frame.index % _FRAMES_STEP == 0:
                    await asyncio.sleep(0)
            elif reader.ended:
                return
            if loop.time() >= due:
                if form.sse:
                    await stream.send(b": alive\n\n" if seen == told else b"id: %d\n: alive\n\n" % seen)
                    told = seen
                due = loop.time() + heartbeat_s

    def _lines(self, frame: Frame) -> list[tuple[tuple[str, ...], tuple[str, ...], bytes]]:
        """Return jobs, nodes and JSON of each event of a frame; several streams at the end of the log share the work."""
        lines = self._encoded.get(frame.index)
        if lines is None:
            lines = [(*concerns(event), encode(_entry(frame, event, ""))) for event in frame.events]
            self._encoded[frame.index] = lines
            if len(self._encoded) > _KEPT:
                del self._encoded[next(iter(self._encoded))]
        return lines


class _Format:
    """What one stream wants to see, and how."""

    def __init__(self, sse: bool, job: str, node: str) -> None:
        self.sse = sse
        self._job = job
        self._node = node

    def frame(self, index: int, lines: list[tuple[tuple[str, ...], tuple[str, ...], bytes]]) -> bytes:
        """Return what the stream sends for a frame, empty when nothing of it concerns the reader."""
        job, node = self._job, self._node
        shown = [line for jobs, nodes, line in lines if (not job or job in jobs) and (not node or node in nodes)]
        if not shown:
            return b""
        if not self.sse:
            return b"\n".join(shown) + b"\n"
        *before, last = shown
        return b"".join(b"data: %b\n\n" % line for line in before) + b"id: %d\ndata: %b\n\n" % (index, last)


class _Reader:
    """Reads frames with a timeout that loses none: what was asked for is kept until it comes."""

    def __init__(self, frames: AsyncIterator[Frame]) -> None:
        self._frames = frames
        self._asked: asyncio.Future[Frame] | None = None
        self.ended = False

    async def begin(self) -> None:
        """Raise Gone when the first frame is archived; wait only a moment for it."""
        self._ask()
        assert self._asked is not None
        await asyncio.wait((self._asked,), timeout=0.2)
        if self._asked.done() and isinstance(e := self._asked.exception(), Gone):
            raise e

    async def next(self, timeout_s: float) -> Frame | None:
        """Return the next frame, None when there is none yet or, with `ended`, no more."""
        self._ask()
        asked = self._asked
        assert asked is not None
        if not asked.done():
            await asyncio.wait((asked,), timeout=timeout_s)
            if not asked.done():
                return None
        self._asked = None
        try:
            return asked.result()
        except StopAsyncIteration:
            self.ended = True
            return None

    async def close(self) -> None:
        """Stop reading."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait((self._asked,))
            if not self._asked.cancelled():
                self._asked.exception()  # nobody else will look at it
        await _close(self._frames)

    def _ask(self) -> None:
        if self._asked is None and not self.ended:
            self._asked = asyncio.ensure_future(_next(self._frames))


async def _next(frames: AsyncIterator[Frame]) -> Frame:
    return await anext(frames)


async def _close(frames: AsyncIterator[Frame]) -> None:
    close = getattr(frames, "aclose", None)
    if close is not None:
        await close()


def gone(e: Gone) -> Refusal:
    """Return the refusal for entries that the store no longer has."""
    return Refusal(410, "compacted", f"the log in the store begins at {e.first}; what came before is in the archive", first=e.first)


def _job_id(state: State, ref: str) -> str:
    """Return the id of the job that is meant; of a job that is forgotten, its id will do."""
    if not ref:
        return ""
    try:
        return find_job(state, ref).id
    except Refusal as e:
        if e.status == 409:
            raise
        return ref


def _entry(frame: Frame, event: ev.LogEvent, about: str) -> Entry:
    shown: Any = event
    if isinstance(event, ev.JobSubmitted):
        shown = msgspec.structs.replace(event, spec=without_secrets(event.spec))
    return Entry(frame.index, frame.epoch, frame.at_ms, event.NAME, sentence(event, about), shown)
