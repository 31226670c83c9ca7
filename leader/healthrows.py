"""What the HTTP API says of the health of a node and of its GPUs: docs/api.md. Pure."""

from __future__ import annotations

import msgspec

from gangline.core.model.health import NODE
from gangline.core.model.state import Node, State
from gangline.core.policy.blame import blamed_jobs, evidence
from gangline.core.policy.health import strikes


class SymptomRow(msgspec.Struct, frozen=True):
    """One thing that was seen."""

    code: str
    message: str
    at_ms: int
    #: strikes that it was worth when it was seen
    strikes: float
    #: what it calls for by itself, "" for nothing
    action: str
    #: it counts no longer: it was mended, or tested since
    past: bool


class AilmentRow(msgspec.Struct, frozen=True):
    """A GPU, or the node as a whole (index and gpu null), of which something is known."""

    gpu: str | None
    index: int | None
    state: str
    since_ms: int | None
    cause: str
    message: str
    action: str
    until_ms: int | None
    strikes: float
    #: times that it was withdrawn, as far as they are kept
    withdrawn: int
    #: the job that tests it, and who said so where somebody did
    burn_in: str | None
    by: str | None
    #: newest first
    symptoms: list[SymptomRow]


class DeathRow(msgspec.Struct, frozen=True):
    """A job that died here: on which GPUs, how many times, and the last time."""

    job: str
    gpus: list[str]
    times: int
    at_ms: int
    message: str
    #: nodes on which it has died: so many that it is to blame itself; 0: it is not
    blamed_itself: int


class HealthRow(msgspec.Struct, frozen=True):
    """All that is known of the health of a node."""

    node: str
    #: worst state of the node itself and of its GPUs
    state: str
    spare: bool
    ailments: list[AilmentRow]
    deaths: list[DeathRow]


_WORST = ("unhealthy", "quarantined", "repair", "burn_in", "suspect", "healthy")


def worst(node: Node) -> str:
    """Return the worst state of a node and its GPUs."""
    states = {ailment.state for ailment in node.health.values()}
    return next((state for state in _WORST if state in states), "healthy")


def health_row(state: State, node: Node, now_ms: int) -> HealthRow:
    """Return all that is known; strikes as of `now_ms`, log time."""
    index = {gpu.uuid: gpu.index for gpu in node.registration.gpus}
    ailments = [
        AilmentRow(
            uuid or None, index.get(uuid), a.state, a.since_ms or None, a.cause, a.message, a.action, a.until_ms or None,
            round(strikes(a, now_ms), 2), len(a.withdrawn_ms), a.burn_in or None, a.by or None,
            [SymptomRow(s.code, s.message, s.at_ms, s.weight / 1000, s.action, s.at_ms <= a.cleared_ms) for s in reversed(a.symptoms)],
        )
        for uuid, a in sorted(node.health.items(), key=lambda item: (item[0] != NODE, index.get(item[0], 1 << 20)))
    ]  # fmt: skip
    blamed = blamed_jobs(state.deaths, now_ms)
    deaths = [DeathRow(d.job, list(d.devices), d.count, d.at_ms, d.message, blamed.get(d.job, 0)) for d in evidence(state, node)]
    return HealthRow(node.id, worst(node), node.spare, ailments, deaths)
