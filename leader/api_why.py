"""Why a job is where it is, over HTTP. The reason is read from the record, never worked out again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from aiohttp import web

from gangline.core.model.codec import Frame
from gangline.core.model.naming import as_job
from gangline.core.model.narrate import concerns, sentence
from gangline.core.model.state import Job
from gangline.leader.api_context import Context
from gangline.leader.api_http import Params
from gangline.leader.api_jobs import find_job
from gangline.leader.service import Gone
from gangline.leader.whyrows import RecordRow, when_row, why_row

#: frames before the last change of a job in which the entries behind its state are looked for
_LOOK_BACK = 2_000
#: entries of these kinds make a state; the last of each kind is shown
_TELLING = (
    "gang_placed", "gang_restarting", "rank_restarting", "gang_preempting", "gang_resizing", "gang_requeued", "gang_finished",
    "job_stop_requested", "job_held", "job_released",
)  # fmt: skip
_FRAMES_STEP = 100
#: answers that read the log at the same time
_READERS = 4


class WhyRoutes:
    """The routes that explain."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._readers = asyncio.Semaphore(_READERS)

    async def why(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/jobs/{job}/why."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        job = find_job(state, request.match_info["job"])
        deferral = job.deferral if job.state in ("queued", "array") else None
        async with self._readers:
            at_ms = await self._time_of(deferral.index) if deferral is not None else None
            records = await self._records(job, job.submitted_index, job.index)
        # The state went on meanwhile: what is said of the others is as of now, and so is the rest.
        state = await self._context.view()
        job = as_job(state, job.id) or job
        if deferral is None or job.deferral is None or job.deferral.index != deferral.index:
            at_ms = None
        return self._context.answer(why_row(state, job, self._context.now_ms(state), at_ms, records), index=state.index)

    async def when(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/jobs/{job}/when."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        job = find_job(state, request.match_info["job"])
        return self._context.answer(when_row(state, job, self._context.now_ms(state)), index=state.index)

    async def _time_of(self, index: int) -> int | None:
        frames = self._frames(index)
        try:
            async for frame in frames:
                return frame.at_ms if frame.index == index else None
        except Gone:
            return None
        finally:
            await frames.aclose()
        return None

    async def _records(self, job: Job, submitted: int, last: int) -> list[RecordRow]:
        """Return the last entry of each kind that made the job's state, as far as they are near and still in the log."""
        found: dict[str, RecordRow] = {}
        frames = self._frames(max(submitted, last - _LOOK_BACK))
        try:
            async for frame in frames:
                if frame.index > last:
                    break
                for event in frame.events:
                    if event.NAME in _TELLING and job.id in concerns(event)[0]:
                        found[event.NAME] = RecordRow(frame.index, frame.at_ms, event.NAME, sentence(event, job.id))
                if frame.index % _FRAMES_STEP == 0:
                    await asyncio.sleep(0)
        except Gone:
            pass
        finally:
            await frames.aclose()
        return sorted(found.values(), key=lambda row: row.index)

    def _frames(self, first: int) -> AsyncGenerator[Frame]:
        return cast(AsyncGenerator[Frame], self._context.service.entries(first))
