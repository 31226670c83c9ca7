"""The state as bytes: for snapshots, for the state digest, and for comparing a replay with what is live."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from gangline.core.model.accounting import account_anew
from gangline.core.model.codec import digest
from gangline.core.model.foldlife import index_jobs
from gangline.core.model.health import Death
from gangline.core.model.queues import Declaration, QueueTree
from gangline.core.model.reservations import Declared
from gangline.core.model.state import STATE_VERSION, Brake, Earmark, Job, Node, State
from gangline.core.model.usage import Usage


class BadSnapshot(Exception):
    """The bytes are not a state that this process can read."""


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """Layout of a stored state: everything in `State` that is not derived."""

    version: int
    index: int
    at_ms: int
    epoch: int
    digest: bytes
    leader: str
    jobs: dict[str, Job]
    nodes: dict[str, Node]
    brake: Brake
    submitted: int
    keys: dict[str, str]
    names: dict[str, str]
    finished: list[str]
    #: ids of active jobs: the order of their placement is not in the jobs themselves
    running: list[str]
    capacity_version: int
    queues: Declaration = Declaration()
    earmarks: dict[str, Earmark] = {}
    lost_gpu_ms: dict[str, int] = {}
    runtimes: dict[str, tuple[int, ...]] = {}
    reserved: list[str] = []
    reservations: dict[str, Declared] = {}
    usage: Usage = msgspec.field(default_factory=Usage)
    deaths: list[Death] = []


def dump_state(state: State) -> bytes:
    """Return the state as msgpack. Two states are equal exactly when their bytes are."""
    stored = _Stored(
        version=STATE_VERSION, index=state.index, at_ms=state.at_ms, epoch=state.epoch, digest=state.digest, leader=state.leader,
        jobs=state.jobs, nodes=state.nodes, brake=state.brake, queues=state.queues.declaration, usage=state.usage,
        submitted=state.submitted, keys=state.keys, names=state.names, finished=list(state.finished), running=list(state.running),
        capacity_version=state.capacity_version, earmarks=state.earmarks, lost_gpu_ms=state.lost_gpu_ms,
        runtimes=state.runtimes, reserved=list(state.reserved), reservations=state.reservations, deaths=state.deaths,
    )  # fmt: skip
    data: bytes = msgpack.packb(msgspec.to_builtins(stored, builtin_types=(bytes,), str_keys=True), use_bin_type=True)
    return data


def load_state(data: bytes) -> State:
    """Return the state in `data`, its derived parts rebuilt. Raises BadSnapshot."""
    try:
        # unpackb bounds every length by the size of the data itself.
        raw: Any = msgpack.unpackb(data, raw=False, strict_map_key=True)
        if not isinstance(raw, dict) or raw.get("version") != STATE_VERSION:
            raise BadSnapshot(f"a state of version {raw.get('version') if isinstance(raw, dict) else '?'}; this process reads {STATE_VERSION}")
        stored = msgspec.convert(raw, _Stored, str_keys=True)
        queues = QueueTree(stored.queues)
    except (msgpack.UnpackException, msgspec.ValidationError, ValueError, TypeError) as e:
        raise BadSnapshot(f"not a stored state: {e or type(e).__name__}") from e
    state = State(
        index=stored.index, at_ms=stored.at_ms, epoch=stored.epoch, digest=stored.digest, leader=stored.leader, jobs=stored.jobs,
        nodes=stored.nodes, brake=stored.brake, queues=queues, usage=stored.usage, submitted=stored.submitted, keys=stored.keys,
        names=stored.names, finished=dict.fromkeys(stored.finished), running=dict.fromkeys(stored.running),
        capacity_version=stored.capacity_version, earmarks=stored.earmarks, lost_gpu_ms=stored.lost_gpu_ms,
        runtimes=stored.runtimes, reserved=dict.fromkeys(stored.reserved), reservations=stored.reservations,
        deaths=stored.deaths,
    )  # fmt: skip
    if state.queues.half_lives_ms and not state.usage.clocks:
        account_anew(state, QueueTree(), state.at_ms)  # stored before usage was counted
    index_jobs(state)
    return state


def state_digest(state: State) -> str:
    """Return the digest that two replicas at one index must share, in hex."""
    return digest(dump_state(state)).hex()
