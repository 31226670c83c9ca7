"""What would become of a job, over HTTP: nothing is written, so any scheduler answers; on a large cluster a standby asks the leader.

The passes run between two awaits, so nothing else is done meanwhile: plans are rationed to a small share
of the scheduler's time.
"""

from __future__ import annotations

import time

from aiohttp import web

from gangline.core.model.events import JobSubmitted
from gangline.core.model.jobfile import MAX_BYTES, parse_json_spec
from gangline.core.model.problems import BadJob
from gangline.core.policy.plan import cheap, plan
from gangline.leader.api_context import Context
from gangline.leader.api_http import Params, Refusal, bad_input, read_body
from gangline.leader.api_jobs import new_job_id, user_of
from gangline.leader.commands import Submit, admit
from gangline.leader.planrows import plan_row

#: share of the scheduler's time that plans may take, and how short one is that is not counted
PLAN_SHARE = 0.1
_FREE_S = 0.02


class PlanRoutes:
    """The route that asks what would be."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._due = 0.0

    async def plan(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/jobs:plan. The body is that of a submission."""
        body = await read_body(request, MAX_BYTES, self._context.options.read_timeout_s)
        user = user_of(request)
        try:
            spec = parse_json_spec(body)
        except BadJob as e:
            raise bad_input(e.problems) from None
        state = await self._context.read(Params(request, "min_index", "wait"))
        if not cheap(state):
            return await self._ask_leader(request, body)
        event = admit(state, Submit(new_job_id(), spec, user))  # raises what a submission would be refused with
        spec = event.spec if isinstance(event, JobSubmitted) else spec
        began = time.monotonic()
        if began < self._due:
            raise Refusal(429, "too_often", "plans are rationed on a large cluster", retry_after_s=max(1, round(self._due - began)))
        found = plan(state, spec, self._context.now_ms(state), user)
        ended = time.monotonic()
        self._due = ended + (ended - began) / PLAN_SHARE if ended - began > _FREE_S else 0.0
        return self._context.answer(plan_row(state, spec, found), index=state.index)

    async def _ask_leader(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """On a large cluster only the leader has at hand what the passes work on."""
        service = self._context.service
        if service.role == "leader":
            raise Refusal(503, "unavailable", "this scheduler has only just begun to lead; ask again", retry_after_s=1)
        return await self._context.forward(request, body, service.leader_url)
