"""Nodes, health, the brake, the state digest and metrics over HTTP."""

from __future__ import annotations

import re
import time
from typing import Literal, cast, get_args

import msgspec
from aiohttp import web

from gangline.core.model.codec import digest
from gangline.core.model.nearest import nearest
from gangline.core.model.problems import Problem
from gangline.core.model.state import Node, State
from gangline.core.model.statecodec import dump_state
from gangline.leader.api_context import Context
from gangline.leader.api_http import Params, Refusal, bad_input, body_as
from gangline.leader.api_jobs import MAX_REASON, user_of
from gangline.leader.commands import Administer, SetBrake, SetHealth
from gangline.leader.healthrows import health_row
from gangline.leader.rows import node_row

Action = Literal["cordon", "uncordon", "drain", "undrain", "confirm_dead"]
SettableHealth = Literal["quarantined", "repair", "burn_in", "healthy"]

#: a health answer waits no longer for the state to be vouched for
HEALTH_S = 0.5
#: a digest of the whole state takes at most this part of the scheduler's time
DIGEST_SHARE = 0.05
MAX_DEADLINE_S = 31 * 86_400.0


class Word(msgspec.Struct, forbid_unknown_fields=True):
    """Body of an operator's word about a node."""

    reason: str = ""
    deadline_s: float = 0.0


class HealthWord(msgspec.Struct, forbid_unknown_fields=True):
    """Body of an operator's word about the health of a node or GPU."""

    state: str
    gpu: str = ""
    reason: str = ""


class BrakeWord(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a change of the brake."""

    on: bool
    reason: str = ""


class ClusterRoutes:
    """Routes about the cluster as a whole and its nodes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        #: index and digest that were computed last, when the next one may be computed
        self._digest = (-1, "")
        self._digest_due = 0.0

    async def health(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/health: always answers, from what is known."""
        service = self._context.service
        state = await self._context.glance(HEALTH_S)
        body = {
            "name": service.name,
            "role": service.role,
            "leader": service.leader_name,
            "leader_url": service.leader_url,
            "epoch": state.epoch if state is not None else 0,
            "index": state.index if state is not None else 0,
            "store": "ok" if service.store_ok else "unreachable",
            "brake": state is not None and state.brake.on,
            "lag_s": round(service.lag_s, 3),
        }
        return self._context.answer(body)

    async def nodes(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/nodes."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        return self._context.answer({"nodes": [node_row(state.nodes[n]) for n in sorted(state.nodes, key=_natural)]}, index=state.index)

    async def node(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/nodes/{node}."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        return self._context.answer(node_row(_find_node(state, request.match_info["node"])), index=state.index)

    async def node_health(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/nodes/{node}/health."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        return self._context.answer(health_row(state, _find_node(state, request.match_info["node"]), state.at_ms), index=state.index)

    async def set_health(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """POST /v1/nodes/{node}/health."""
        node, word = request.match_info["node"], body_as(body, HealthWord)
        _check_text("/reason", word.reason)
        _check_text("/gpu", word.gpu)
        states = get_args(SettableHealth)
        if word.state not in states:
            raise bad_input([Problem("/state", f"One of {', '.join(states)}.", "GL-1104", nearest(word.state[:50], states))])
        command = SetHealth(node, word.gpu, cast(SettableHealth, word.state), by=user_of(request), reason=word.reason)
        accepted = await self._context.execute_one(command)
        state = await self._context.view(accepted.index, 1.0)
        return self._context.answer(health_row(state, _find_node(state, node), state.at_ms), index=state.index)

    async def administer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """POST /v1/nodes/{node}:{action}."""
        node, action = request.match_info["node"], request.match_info["action"]
        actions = get_args(Action)
        if action not in actions:
            detail = f"{action[:50]!r} is none of {', '.join(actions)}" + _meant(nearest(action, actions))
            raise Refusal(404, "no_such_action", detail)
        word = body_as(body, Word)
        _check_text("/reason", word.reason)
        if not 0 <= word.deadline_s <= MAX_DEADLINE_S or (word.deadline_s and action != "drain"):
            raise bad_input([Problem("/deadline_s", f"From 0 to {MAX_DEADLINE_S:,.0f}, and only for a drain.", "GL-1104")])
        command = Administer(node, cast(Action, action), by=user_of(request), reason=word.reason, deadline_s=word.deadline_s)
        accepted = await self._context.execute_one(command)
        state = await self._context.view(accepted.index, 1.0)
        return self._context.answer(node_row(_find_node(state, node)), index=state.index)

    async def brake(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """POST /v1/brake."""
        word = body_as(body, BrakeWord)
        _check_text("/reason", word.reason)
        accepted = await self._context.execute_one(SetBrake(word.on, by=user_of(request), reason=word.reason))
        state = await self._context.view(accepted.index, 1.0)
        return self._context.answer({"on": state.brake.on, "message": state.brake.message, "index": accepted.index}, index=state.index)

    async def state(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/state. Folds everything into bytes, so it is not had more often than the scheduler can afford."""
        state = await self._context.read(Params(request, "min_index", "wait"))
        index, text = self._digest
        if index != state.index:
            began = time.monotonic()
            if began < self._digest_due:
                raise Refusal(429, "too_often", "digests of a large state are rationed", retry_after_s=max(1, round(self._digest_due - began)))
            index, text = self._digest = (state.index, digest(dump_state(state)).hex())
            ended = time.monotonic()
            self._digest_due = ended + (ended - began) / DIGEST_SHARE if ended - began > 0.02 else 0.0
        return self._context.answer({"index": index, "digest": text}, index=index)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics."""
        await self._context.glance(HEALTH_S)
        body = self._context.metrics.telemetry.prometheus()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _find_node(state: State, name: str) -> Node:
    node = state.nodes.get(name)
    if node is None:
        near = nearest(name[:100], list(state.nodes)) if len(state.nodes) <= 2000 else ""
        raise Refusal(404, "no_such_node", f"there is no node {name[:100]!r}" + _meant(near))
    return node


def _meant(near: str) -> str:
    return f"; did you mean {near}?" if near else ""


def _check_text(pointer: str, text: str) -> None:
    if len(text) > MAX_REASON or not text.isprintable():
        raise bad_input([Problem(pointer, f"A text of at most {MAX_REASON:,} printable characters, on one line.", "GL-1103")])


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort n2 before n10."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name)]
