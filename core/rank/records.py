"""What a rank is told: its identity, why it was restarted, that it must leave. Plain records, read without trusting the text.

Named tuples rather than dataclasses: `dataclasses` alone would be most of this package's import time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class StaleGeneration(RuntimeError):
    """A newer generation of this job, or another job, has taken the checkpoint directory: this process must not write there."""


class Context(NamedTuple):
    """Who this process is. Outside Gangline: rank 0 of a world of one, generation 0 (torch's own variables are used when set)."""

    #: False outside Gangline
    inside: bool
    job: str
    job_name: str
    queue: str
    node: str
    #: rises with each restart, reschedule, resize or migration of the gang
    generation: int
    #: restarts so far
    restarts: int
    #: why this generation exists ("rank_failed", "node_lost", ...), "" in the first one
    restart_cause: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    #: of the job file, "" in a job without roles; which replica of it; and this rank among all that have the role
    role: str
    replica: int
    role_rank: int
    role_world_size: int
    #: host of the first rank of each role
    role_leaders: dict[str, str]
    master_addr: str
    master_port: int
    #: "" when the job file names none
    checkpoint_dir: str
    #: path of the file with this generation's events, one JSON object a line
    events_path: str


class RestartNotice(NamedTuple):
    """Why this generation exists, and where the one before it had got to."""

    #: rank_failed, node_lost, prepare_failed, hang, drain, preempted, resize, operator
    cause: str
    #: one sentence for people
    message: str = ""
    #: "application" or "infrastructure"
    failure_class: str = ""
    lost_ranks: tuple[int, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    new_nodes: tuple[str, ...] = ()
    old_world_size: int = 0
    new_world_size: int = 0
    failed_at_ms: int = 0
    #: newest checkpoint that the job had reported; step -1 when there was none
    checkpoint_step: int = -1
    checkpoint_path: str = ""
    restarts: int = 0
    #: from the failure to the start of this generation's ranks
    downtime_s: float = 0.0


class StopNotice(NamedTuple):
    """The gang must leave: save what is worth saving, acknowledge, exit. It is stopped at the deadline or when all have acknowledged.

    After a resize it starts again at once, with another number of ranks.
    """

    #: preemption, drain, resize or migration
    event: str
    cause: str
    message: str
    #: wall clock of the scheduler
    deadline_ms: int
    #: seconds that the gang was given when the notice was decided
    grace_s: float
    #: ranks that the next generation is to have, 0 when that is not known
    new_world_size: int = 0


def read_context(env: Mapping[str, str] = os.environ) -> Context:
    """Return the identity in the environment; what is missing or damaged has the value of a process that runs alone."""
    job = env.get("GANGLINE_JOB_ID", "")
    return Context(
        inside=bool(job),
        job=job,
        job_name=env.get("GANGLINE_JOB_NAME", ""),
        queue=env.get("GANGLINE_QUEUE", ""),
        node=env.get("GANGLINE_NODE", ""),
        generation=_number(env, "GANGLINE_GENERATION", 0),
        restarts=_number(env, "GANGLINE_RESTARTS", 0),
        restart_cause=env.get("GANGLINE_RESTART_CAUSE", ""),
        rank=_number(env, "RANK", 0),
        world_size=_number(env, "WORLD_SIZE", 1),
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", 1),
        node_rank=_number(env, "NODE_RANK", 0),
        role=env.get("GANGLINE_ROLE", ""),
        replica=_number(env, "GANGLINE_REPLICA", 0),
        role_rank=_number(env, "ROLE_RANK", _number(env, "RANK", 0)),
        role_world_size=_number(env, "ROLE_WORLD_SIZE", _number(env, "WORLD_SIZE", 1)),
        role_leaders=dict(pair.split("=", 1) for pair in env.get("GANGLINE_ROLE_LEADERS", "").split(",") if "=" in pair),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", 0),
        checkpoint_dir=env.get("GANGLINE_CHECKPOINT_DIR", ""),
        events_path=env.get("GANGLINE_EVENTS", ""),
    )


def restart_notice(event: Mapping[str, object]) -> RestartNotice:
    """Return the notice in a restart event; fields that are missing or of another type keep their defaults."""
    return RestartNotice(
        cause=_text(event, "cause"),
        message=_text(event, "message"),
        failure_class=_text(event, "failure_class"),
        lost_ranks=tuple(item for item in _items(event, "lost_ranks") if isinstance(item, int)),
        lost_nodes=tuple(item for item in _items(event, "lost_nodes") if isinstance(item, str)),
        new_nodes=tuple(item for item in _items(event, "new_nodes") if isinstance(item, str)),
        old_world_size=int(_real(event, "old_world_size")),
        new_world_size=int(_real(event, "new_world_size")),
        failed_at_ms=int(_real(event, "failed_at_ms")),
        checkpoint_step=int(_real(event, "checkpoint_step", -1)),
        checkpoint_path=_text(event, "checkpoint_path"),
        restarts=int(_real(event, "restarts")),
        downtime_s=_real(event, "downtime_s", max(0.0, (_real(event, "at_ms") - _real(event, "failed_at_ms")) / 1000)),
    )


def stop_notice(event: Mapping[str, object]) -> StopNotice:
    """Return the notice in an event that has a deadline."""
    return StopNotice(
        event=_text(event, "event"),
        cause=_text(event, "cause"),
        message=_text(event, "message"),
        deadline_ms=int(_real(event, "deadline_ms")),
        grace_s=_real(event, "grace_s"),
        new_world_size=int(_real(event, "new_world_size")),
    )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, ""))
    except ValueError:
        return default


def _text(event: Mapping[str, object], name: str) -> str:
    value = event.get(name)
    return value if isinstance(value, str) else ""


def _real(event: Mapping[str, object], name: str, default: float = 0.0) -> float:
    value = event.get(name)
    # Compared rather than converted: a NaN or an infinity is no number of seconds.
    return value if isinstance(value, (int, float)) and -1e18 < value < 1e18 else default


def _items(event: Mapping[str, object], name: str) -> list[object]:
    value = event.get(name)
    return value if isinstance(value, list) else []
