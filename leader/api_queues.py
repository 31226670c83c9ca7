"""Queues over HTTP: what is declared and used, and another declaration in its place."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from gangline.core.model.clusterfile import diff_words, parse_json, to_words
from gangline.core.model.problems import BadJob, Problem
from gangline.core.model.queues import Declaration, diff, warnings
from gangline.core.model.state import State
from gangline.core.model.strict_json import load_json
from gangline.core.model.topologies import changes
from gangline.leader.api_context import Context
from gangline.leader.api_http import MAX_BODY, Params, Refusal, bad_input
from gangline.leader.api_jobs import MAX_REASON, user_of
from gangline.leader.commands import DeclareQueues, admit
from gangline.leader.queuerows import capacity_warnings, queue_rows, topology_warnings

_ETAG = re.compile(r'"?([0-9]{1,16})"?')


class QueueRoutes:
    """The routes under /v1/queues. The ETag is the index of the entry that declared the queues, 0 before the first."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def queues(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/queues."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        present = state.queues.declaration
        body = {
            "queues": queue_rows(state, self._context.now_ms(state)),
            "declared": to_words(present) if present.queues else None,
            "index": present.index,
            "at_ms": present.at_ms or None,
            "by": present.by,
            "reason": present.reason,
        }
        return self._context.answer(body, index=state.index, headers=_tag(present.index))

    async def declare(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """PUT /v1/queues: the whole tree and all topologies, made from the declaration that If-Match names."""
        params = Params(request, "dry_run")
        dry_run = params.flag("dry_run")
        params.check()
        declared, reason = _read(body)
        command = DeclareQueues(
            declared.queues, _base(request), by=user_of(request), reason=reason, topologies=declared.topologies
        )
        state = await self._context.view()
        before = state.queues.declaration
        answer = _answer(state, declared)
        if dry_run:
            admit(state, command)
            return self._context.answer({**answer, "index": before.index, "dry_run": True}, index=state.index, headers=_tag(before.index))
        accepted = await self._context.execute_one(command)
        if accepted.replayed:
            answer["diff"] = diff_words(diff(declared.queues, declared.queues), [])
        return self._context.answer({**answer, "index": accepted.index, "dry_run": False}, index=accepted.index, headers=_tag(accepted.index))


def _answer(state: State, declared: Declaration) -> dict[str, Any]:
    """Say what another declaration would change, and what is probably not meant in it."""
    present, queues = state.queues.declaration, declared.queues
    return {
        "diff": diff_words(diff(present.queues, queues), changes(present.topologies, declared.topologies)),
        "warnings": warnings(queues) + capacity_warnings(state, queues) + topology_warnings(state, declared.topologies),
    }


def _read(body: bytes) -> tuple[Declaration, str]:
    """Return the declaration and the reason of a body: a cluster file in JSON, with `reason` beside `queues`. Raises Refusal."""
    try:
        document = load_json(body, MAX_BODY)
        reason = document.pop("reason", "") if type(document) is dict else ""
        if type(reason) is not str or len(reason) > MAX_REASON or not reason.isprintable():
            raise BadJob([Problem("/reason", f"A text of at most {MAX_REASON:,} printable characters, on one line.", "GL-1103")])
        return parse_json(document), reason
    except BadJob as e:
        raise bad_input(e.problems) from None


def _base(request: web.Request) -> int:
    header: str = request.headers.get("If-Match", "")
    if not header:
        detail = "name the declaration that yours was made from by If-Match: the ETag of GET /v1/queues"
        raise Refusal(428, "if_match_required", detail)
    found = _ETAG.fullmatch(header)
    if found is None:
        raise Refusal(400, "bad_header", "If-Match is the ETag of GET /v1/queues: an index in double quotes")
    return int(found[1])


def _tag(index: int) -> dict[str, str]:
    return {"ETag": f'"{index}"'}
