"""Reservations over HTTP: nodes, or GPUs, kept for some jobs or for maintenance in a window of time."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from aiohttp import web

from gangline.core.model.problems import Problem
from gangline.core.model.reservations import MAX_NODES, MAX_OWNERS, WHOLE, Declared, KeptNode, Reservation
from gangline.core.model.state import State
from gangline.leader.api_context import Context
from gangline.leader.api_http import Params, bad_input, body_as
from gangline.leader.api_jobs import MAX_REASON, user_of
from gangline.leader.commands import Reserve, Unreserve

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
#: the longest that a reservation lasts, and how far ahead it starts, at most
_FARTHEST_S = 366 * 86_400.0
_MOST_GPUS = 1_000_000


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A reservation as it is asked for. `start_ms` 0: `start_in_s` from now; `end_ms` 0: after `length_s`."""

    name: str
    nodes: list[str] = []
    gpus: int = 0
    start_ms: int = 0
    start_in_s: float = 0.0
    end_ms: int = 0
    length_s: float = 0.0
    queues: list[str] = []
    users: list[str] = []
    maintenance: bool = False
    deadline_s: float = 0.0
    reason: str = ""


class ReservationRoutes:
    """The routes under /v1/reservations."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def list(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/reservations: those that are in force or planned, by their start."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        rows = [row(state, d) for d in sorted(state.reservations.values(), key=lambda d: (d.reservation.start_ms, d.reservation.name))]
        return self._context.answer({"reservations": rows}, index=state.index)

    async def create(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """POST /v1/reservations."""
        asked = body_as(body, Body)
        now_ms = self._context.now_ms(await self._context.view())
        problems = _problems(asked, now_ms)
        if problems:
            raise bad_input(problems)
        start_ms = _start_ms(asked, now_ms)
        reservation = Reservation(
            asked.name, tuple(KeptNode(node) for node in asked.nodes), start_ms, asked.end_ms or start_ms + int(asked.length_s * 1000),
            tuple(asked.queues), tuple(asked.users), asked.maintenance, asked.deadline_s, user_of(request), asked.reason,
        )  # fmt: skip
        accepted = await self._context.execute_one(Reserve(reservation, asked.gpus))
        state = await self._context.view(accepted.index, 1.0)
        declared = state.reservations.get(asked.name) or Declared(reservation)
        return self._context.answer(row(state, declared), index=state.index)

    async def delete(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """DELETE /v1/reservations/{name}."""
        params = Params(request, "reason")
        reason = params.text("reason", MAX_REASON)
        params.check()
        name = request.match_info["name"]
        accepted = await self._context.execute_one(Unreserve(name, user_of(request), reason))
        return self._context.answer({"name": name, "index": accepted.index}, index=accepted.index)


def row(state: State, declared: Declared) -> dict[str, Any]:
    """Return what the API says of a reservation."""
    r = declared.reservation
    known = {kept.node: state.nodes.get(kept.node) for kept in r.nodes}
    of = {name: len(node.registration.gpus) if node is not None else 0 for name, node in known.items()}
    return {
        "name": r.name,
        "state": "ending" if declared.over else "active" if declared.begun else "planned",
        "start_ms": r.start_ms,
        "end_ms": r.end_ms,
        "nodes": [{"node": kept.node, "gpus": None if kept.gpus == WHOLE else kept.gpus} for kept in r.nodes],
        "gpus": sum(of[kept.node] if kept.gpus == WHOLE else kept.gpus for kept in r.nodes),
        "unavailable": [name for name, node in known.items() if node is None or node.status != "up"],
        "queues": list(r.queues),
        "users": list(r.users),
        "maintenance": r.maintenance,
        "deadline_s": r.deadline_s,
        "by": r.by,
        "reason": r.reason,
    }


def _start_ms(asked: Body, now_ms: int) -> int:
    return asked.start_ms or now_ms + int(asked.start_in_s * 1000)


def _problems(asked: Body, now_ms: int) -> list[Problem]:
    out: list[Problem] = []

    def check(good: bool, pointer: str, message: str, code: str = "GL-1104") -> None:
        if not good:
            out.append(Problem(pointer, message, code))

    check(_NAME.fullmatch(asked.name) is not None, "/name", "Letters, digits, dots, dashes and underscores, at most 63.", "GL-1103")
    check(bool(asked.nodes) != bool(asked.gpus), "/nodes", "Either nodes, or a number of GPUs.", "GL-1108")
    check(len(asked.nodes) <= MAX_NODES and len(set(asked.nodes)) == len(asked.nodes), "/nodes", f"At most {MAX_NODES:,}, each once.")
    check(0 <= asked.gpus <= _MOST_GPUS, "/gpus", f"From 1 to {_MOST_GPUS:,}.")
    owners = len(asked.queues) + len(asked.users)
    check(owners <= MAX_OWNERS, "/queues", f"At most {MAX_OWNERS} queues and users together.")
    check(asked.maintenance != bool(owners), "/maintenance", "Either maintenance, or queues or users that it is for.", "GL-1108")
    check(not (asked.start_ms and asked.start_in_s), "/start_ms", "Either start_ms or start_in_s.", "GL-1108")
    check(bool(asked.end_ms) != bool(asked.length_s), "/end_ms", "Either end_ms or length_s.", "GL-1108")
    check(0 <= asked.start_in_s <= _FARTHEST_S and 0 <= asked.length_s <= _FARTHEST_S, "/length_s", f"At most {_FARTHEST_S:,.0f} s.")
    start_ms = _start_ms(asked, now_ms)
    end_ms = asked.end_ms or start_ms + int(asked.length_s * 1000)
    check(abs(start_ms - now_ms) <= _FARTHEST_S * 1000, "/start_ms", "Within a year from now.")
    check(end_ms > max(start_ms, now_ms), "/end_ms", "Behind the start, and not over yet.", "GL-1108")
    check(end_ms - start_ms <= _FARTHEST_S * 1000, "/end_ms", "At most a year behind the start.")
    check(0 <= asked.deadline_s <= _FARTHEST_S and (not asked.deadline_s or asked.maintenance), "/deadline_s", "Only for maintenance.")
    check(len(asked.reason) <= MAX_REASON and asked.reason.isprintable(), "/reason", f"At most {MAX_REASON:,} printable characters.", "GL-1103")
    return out
