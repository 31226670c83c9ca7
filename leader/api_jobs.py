"""Jobs over HTTP: submit, list, look at, stop."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gangline.core.model.arrays import array_text, element_id, split_element
from gangline.core.model.jobfile import MAX_BYTES, MAX_JOBS, parse_json_spec
from gangline.core.model.naming import as_job, find_id
from gangline.core.model.nearest import nearest
from gangline.core.model.problems import BadJob, Problem
from gangline.core.model.spec import JobSpec
from gangline.core.model.state import Job, State
from gangline.core.model.strict_json import load_json
from gangline.leader.api_context import Context, unknown_outcome
from gangline.leader.api_http import MAX_BODY, Params, Refusal, bad_input, body_as, printable_header, problem
from gangline.leader.commands import Accepted, Command, Hold, Refused, Release, Stop, Submit
from gangline.leader.rows import SHOWN_STATES, JobRow, job_row, shown_state, whole_job

MAX_PAGE = 500
MAX_KEY = 255
MAX_USER = 255
MAX_REASON = 1000

#: specs of a batch that are read in one go before others get a turn
_BATCH_STEP = 100

#: cursors go from one scheduler to another, and say nothing that a listing would not: the seal keeps made-up ones out, not secrets in
_SEAL = b"gangline jobs cursor"

#: characters of the ids that we make: lower-case base 32 without what is easily misread
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_ACTIVE = frozenset({"placed", "preparing", "running", "restarting", "preempting", "resizing"})


class HoldWord(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/jobs/{job}:hold and :release."""

    reason: str = ""
    #: hold only: a job that runs is asked to leave
    requeue: bool = False


def new_job_id() -> str:
    """Return a fresh id: "j" and 35 random bits."""
    bits = int.from_bytes(os.urandom(5)) >> 5
    return "j" + "".join(_ALPHABET[(bits >> shift) & 31] for shift in (30, 25, 20, 15, 10, 5, 0))


def find_job(state: State, ref: str) -> Job:
    """Return the job with this id, else the newest of this name, else the one whose id begins so; an index behind it means an element.

    An element that is not a job (yet, or any more) is what its array says of it. Raises Refusal 404 or 409.
    """
    if (known := find_id(state, ref)) is not None:
        return _known(state, known)
    found = [job for job in state.jobs.values() if not job.array and job.id.startswith(ref)] if ref else []
    if not found and (split := split_element(ref)) is not None:
        array = find_job(state, split[0])
        if (element := find_id(state, element_id(array.id, split[1]))) is not None:
            return _known(state, element)
        if array.elements is not None and array.spec.array is not None:
            raise Refusal(404, "no_such_element", f"{array.id} has the elements {array_text(array.spec.array)}, and not {split[1]}")
    if not found:
        raise Refusal(404, "no_such_job", f"there is no job {ref[:100]!r}, by id, name or beginning of an id")
    if len(found) > 1:
        candidates = [job.id for job in reversed(found)][:10]
        raise Refusal(409, "ambiguous", f"{len(found)} jobs have an id that begins with {ref!r}: {', '.join(candidates)}", candidates=candidates)
    return found[0]


def _known(state: State, job_id: str) -> Job:
    job = as_job(state, job_id)
    assert job is not None, f"{job_id} was found"
    return job


class JobRoutes:
    """The routes under /v1/jobs but for story and logs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    # ---------------------------------------------------------------- writes

    async def submit(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """POST /v1/jobs."""
        headers = request.headers
        key = printable_header(request, "Idempotency-Key", MAX_KEY) if "Idempotency-Key" in headers else ""
        user = user_of(request) if "Gangline-User" in headers else ""
        try:
            spec = parse_json_spec(body)
        except BadJob as e:
            raise bad_input(e.problems) from None
        context = self._context
        tracing = context.metrics.telemetry
        with tracing.span("submit", traceparent=headers.get("traceparent", "") if tracing.tracing else "") as span:
            command = Submit(new_job_id(), spec, user, key, body_digest(spec, user) if key else "", span.trace_id)
            accepted = await context.execute_one(command)
            span.at(accepted.index)
        answer = {"job": accepted.subject, "name": spec.name, "state": "queued", "index": accepted.index}
        if not accepted.replayed:
            return context.answer(answer, status=201, index=accepted.index)
        state = await context.view(accepted.index, 1.0)
        if (job := state.jobs.get(accepted.subject)) is not None:
            answer["state"] = shown_state(job)
        return context.answer(answer, headers={"Idempotent-Replayed": "true"})

    async def submit_batch(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """POST /v1/jobs:batch. Every job is accepted or refused by itself."""
        key = printable_header(request, "Idempotency-Key", MAX_KEY - 5)
        user = user_of(request)
        items = _batch_items(body)
        results: list[Any] = [None] * len(items)
        commands: list[Command] = []
        places: list[int] = []
        for i, item in enumerate(items):
            if i % _BATCH_STEP == _BATCH_STEP - 1:
                await asyncio.sleep(0)  # others, the lease among them, get their turn
            try:
                spec, own_key = _batch_item(item, f"{key}-{i}" if key else "", measured=len(body) > MAX_BYTES)
            except BadJob as e:
                results[i] = {"problem": bad_input(e.problems).document}
                continue
            commands.append(Submit(new_job_id(), spec, user, own_key, body_digest(spec, user) if own_key else ""))
            places.append(i)
        index = 0
        if commands:
            outcomes = await self._context.execute(commands)
            for i, command, outcome in zip(places, commands, outcomes, strict=True):
                results[i] = _batch_result(command, outcome)
                if isinstance(outcome, Accepted):
                    index = max(index, outcome.index)
        else:
            index = (await self._context.view()).index
        return self._context.answer({"results": results, "index": index}, index=index)

    async def stop(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """DELETE /v1/jobs/{job}."""
        params = Params(request, "reason")
        reason = params.text("reason", MAX_REASON)
        params.check()
        job = find_job(await self._context.view(), request.match_info["job"])
        accepted = await self._context.execute_one(Stop(job.id, by=user_of(request), reason=reason))
        state = await self._context.view(accepted.index, 1.0)
        job = as_job(state, job.id) or job
        answer = {"job": job.id, "state": shown_state(job), "index": max(accepted.index, job.index)}
        return self._context.answer(answer, status=200 if job.state == "finished" else 202)

    async def act(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """POST /v1/jobs/{job}:hold and :release."""
        action, word = request.match_info["action"], body_as(body, HoldWord)
        if action not in ("hold", "release"):
            near = nearest(action, ("hold", "release"))
            raise Refusal(404, "no_such_action", f"{action[:50]!r} is none of hold, release{f'; did you mean {near}?' if near else ''}")
        if len(word.reason) > MAX_REASON or not word.reason.isprintable():
            raise bad_input([Problem("/reason", f"A text of at most {MAX_REASON:,} printable characters.", "GL-1104")])
        if word.requeue and action == "release":
            raise bad_input([Problem("/requeue", "Only a hold can ask a job to leave.", "GL-1108")])
        job, by = find_job(await self._context.view(), request.match_info["job"]), user_of(request)
        command = Hold(job.id, by, word.reason, word.requeue) if action == "hold" else Release(job.id, by, word.reason)
        accepted = await self._context.execute_one(command)
        state = await self._context.view(accepted.index, 1.0)
        return self._context.answer(whole_job(as_job(state, job.id) or job), index=state.index)

    # ---------------------------------------------------------------- reads

    async def show(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/jobs/{job}."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        return self._context.answer(whole_job(find_job(state, request.match_info["job"])), index=state.index)

    async def list(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/jobs: pages go from the newest job to older ones, and leave out what was submitted after the first page."""
        params = Params(request, "state", "queue", "user", "name", "array", "elements", "limit", "cursor", "min_index", "wait")
        states = _states(params)
        queue, user, name = params.text("queue"), params.text("user"), params.text("name")
        array, elements = params.text("array"), params.flag("elements")
        limit = params.number("limit", 1, MAX_PAGE, 100)
        first_index, below = self._open_cursor(params)
        state = await self._context.read(params)
        rows: list[JobRow] = []
        more = False
        last = (0, 0)
        for job in _elements_of(find_job(state, array), state) if array else _newest_first(state, states, elements):
            if below and (_place(job) >= below or job.submitted_index > first_index):
                continue
            if (job.array and not (array or elements)) or (states and shown_state(job) not in states):
                continue
            if (queue and job.spec.queue != queue) or (user and job.user != user) or (name and job.spec.name != name):
                continue
            if len(rows) == limit:
                more = True
                break
            rows.append(job_row(job))
            last = _place(job)
        cursor = self._seal_cursor(first_index or state.index, last) if more else None
        return self._context.answer({"jobs": rows, "cursor": cursor}, index=state.index)

    def _seal_cursor(self, index: int, last: tuple[int, int]) -> str:
        """Return an opaque cursor: the index of the listing's first page, and number and position in its array of the last job shown."""
        text = f"{index}.{last[0]}.{-last[1]}".encode()
        return base64.urlsafe_b64encode(self._mac(text) + text).decode().rstrip("=")

    def _open_cursor(self, params: Params) -> tuple[int, tuple[int, int] | None]:
        cursor = params.text("cursor")
        if not cursor:
            return 0, None
        try:
            data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
            if hmac.compare_digest(data[:8], self._mac(data[8:])):
                index, number, position = data[8:].split(b".")
                return int(index), (int(number), -int(position))
        except (binascii.Error, ValueError):
            pass
        params.refuse("cursor", "a cursor that a listing gave; begin the listing anew")
        return 0, None

    @staticmethod
    def _mac(text: bytes) -> bytes:
        return hashlib.blake2b(text, key=_SEAL, digest_size=8).digest()


def user_of(request: web.Request) -> str:
    """Return who says to be asking: `Gangline-User`, percent-encoded when it is not plain ASCII. Raises Refusal."""
    user = unquote(printable_header(request, "Gangline-User", 3 * MAX_USER))
    if len(user) > MAX_USER or not user.isprintable():
        raise Refusal(400, "bad_header", f"Gangline-User has at most {MAX_USER} printable characters")
    return user


def body_digest(spec: JobSpec, user: str) -> str:
    """Return the digest that tells a repeated submission from another one with the same key; spelling and order of fields do not count."""
    data = msgspec.msgpack.encode([user, spec], order="deterministic")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _batch_items(body: bytes) -> list[Any]:
    try:
        document = load_json(body, MAX_BODY)
    except BadJob as e:
        raise bad_input(e.problems) from None
    if not isinstance(document, dict) or set(document) != {"jobs"} or not isinstance(document["jobs"], list):
        raise bad_input([Problem("", 'A batch is {"jobs": [spec, ...]} and nothing else.', "GL-1102")])
    items = document["jobs"]
    if not 1 <= len(items) <= MAX_JOBS:
        raise bad_input([Problem("/jobs", f"{len(items):,} jobs; a batch has from 1 to {MAX_JOBS:,}.", "GL-1110")])
    return items


def _batch_item(item: Any, key: str, *, measured: bool) -> tuple[JobSpec, str]:
    """Return spec and key of one job of a batch. Raises BadJob."""
    if isinstance(item, dict) and "spec" in item:
        if unknown := set(item) - {"spec", "idempotency_key"}:
            raise BadJob([Problem(f"/{min(unknown)}", "There is no such field beside spec.", "GL-1101")])
        key = item.get("idempotency_key", key)
        if not isinstance(key, str) or len(key) > MAX_KEY or not (key.isascii() and (key.isprintable() or not key)):
            raise BadJob([Problem("/idempotency_key", f"A key is a text of at most {MAX_KEY} printable ASCII characters.", "GL-1102")])
        item = item["spec"]
    if measured and len(msgspec.json.encode(item)) > MAX_BYTES:
        raise BadJob([Problem("", f"The job is larger than {MAX_BYTES:,} bytes.", "GL-1002")])
    return parse_json_spec(item), key


def _batch_result(command: Command, outcome: Accepted | Exception) -> dict[str, Any]:
    match outcome:
        case Accepted():
            result = {"job": outcome.subject, "name": cast(Submit, command).spec.name, "state": "queued", "index": outcome.index}
            return result | {"replayed": True} if outcome.replayed else result
        case Refused():
            return {"problem": problem(outcome.status, outcome.code, outcome.message)}
        case _:
            return {"problem": unknown_outcome(str(outcome) or type(outcome).__name__).document}


def _states(params: Params) -> frozenset[str]:
    given = frozenset(filter(None, params.text("state").split(",")))
    if not given <= SHOWN_STATES:
        params.refuse("state", f"one or more of {', '.join(sorted(SHOWN_STATES))}")
    return given


def _place(job: Job) -> tuple[int, int]:
    """Return the place of a job in a listing, the largest first: by age, an array before its elements, and these in order."""
    return (job.number, -job.position - 1 if job.array else 0)


def _newest_first(state: State, states: frozenset[str], elements: bool) -> Iterator[Job]:
    """Return the jobs that may be in these states: all, or only the few that are active when nothing else is asked for."""
    if states and states <= _ACTIVE:
        return iter(sorted((state.jobs[j] for j in (*state.running, *state.arrays)), key=_place, reverse=True))
    if elements:  # they come to be long after their array was submitted
        return iter(sorted(state.jobs.values(), key=_place, reverse=True))
    return (job for job in reversed(state.jobs.values()) if not job.array)


def _elements_of(array: Job, state: State) -> list[Job]:
    """Return the elements of an array that are jobs, in order; the last that have ended, and those that are live."""
    if array.elements is None:
        raise Refusal(409, "no_array", f"{array.id} is no array, so it has no elements")
    if array.state == "finished":
        return sorted((job for job in state.jobs.values() if job.array == array.id), key=lambda job: job.position)
    known = [*array.elements.kept, *array.elements.live]
    return sorted((state.jobs[job] for job in known if job in state.jobs), key=lambda job: job.position)
