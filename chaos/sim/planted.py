"""Known mistakes, to see that the simulation finds them. Each replaces a named function for the time of one run, in this process: production
code has no switch for them, and nothing but the simulation imports this module (tests/tidy checks that)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from gangline.chaos.sim import node
from gangline.chaos.sim.node import SimNode
from gangline.core.model import accounting, fold, foldholdings, statecodec
from gangline.core.model import events as ev
from gangline.core.model.documents import Desired
from gangline.core.model.foldsteps import enqueue
from gangline.core.model.state import Job, State
from gangline.core.policy import decide, recovery
from gangline.core.store import fencing, log, recover, watching
from gangline.core.store.api import Ambiguous, Compare, Put
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.leader import ingest, projector, term
from gangline.leader.commands import Accepted
from gangline.leader.term import Term
from gangline.nodeagent import liveness, reconcile


class Bug(msgspec.Struct, frozen=True):
    """One mistake: `make` makes it, and undoes it at the end of its block."""

    text: str
    make: Callable[[], AbstractContextManager[None]]


PLANTED: dict[str, Bug] = {}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Make a mistake for the time of the block; none for an empty name. Raises KeyError for one that is not known."""
    if not name:
        yield
        return
    with PLANTED[name].make():
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for the time of the block."""
    there = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, there)


class _HandlerOf:
    """The fold's handler of an event, as the attribute `it`."""

    def __init__(self, kind: type[ev.LogEvent]) -> None:
        self.__dict__["_kind"] = kind

    def __getattr__(self, name: str) -> Any:
        return fold._HANDLERS[self._kind]

    def __setattr__(self, name: str, value: Any) -> None:
        fold._HANDLERS[self._kind] = value


def _patches(text: str, *patches: tuple[Any, str, Any]) -> Bug:
    """Return a mistake that replaces these attributes: (owner, name, value)."""

    @contextlib.contextmanager
    def make() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, value in patches:
                stack.enter_context(replaced(owner, name, value))
            yield

    return Bug(text, make)


# ---------------------------------------------------------------- the log and the leader

_append, _take, _take_commands, _commit, _final = Log.append, watching._Follower._take, Term._take_commands, Term._commit, recovery._final


def _unguarded(keys: Keys, token: int) -> Compare:
    return Compare(keys.leader, "version", ">", -1)


async def _append_again_one_further(self: Log, data: bytes, *, index: int, nonce: bytes, token: int) -> int:
    compares = [fencing.guard(self._keys, token), Compare(self._keys.frame(index), "version", "==", 0)]
    try:
        result = await self._store.txn(compares, [Put(self._keys.frame(index), data)])
    except Ambiguous:
        return await _append(self, data, index=index + 1, nonce=nonce, token=token)
    if not result.succeeded:
        return await _append(self, data, index=index, nonce=nonce, token=token)
    return result.revision


def _take_from_header(self: Any, message: watching.Message) -> Any:
    batch = _take(self, message)
    self.resume_revision = self.next_revision = self.source.cluster.mvcc.revision + 1
    return batch


def _answer_at_once(self: Term, batch: Any) -> Any:
    answers = _take_commands(self, batch)
    for pending, answer in answers:
        if isinstance(answer, Accepted) and not pending.answer.done():
            pending.answer.set_result(answer)
    return answers


async def _project_and_commit(self: Term, batch: Any) -> None:
    self.projector.update(self.state, list(self.state.scratch.nodes))
    await asyncio.sleep(0.01)
    await _commit(self, batch)


def _attend_without_keys(state: State) -> None:
    decide.attend_to_all(state)
    state.keys.clear()


def _load_without_count(data: bytes) -> State:
    state = statecodec.load_state(data)
    state.submitted = 0
    return state


async def _write_unfenced(store: Any, keys: Keys, token: int, ops: Any, what: str, **more: Any) -> int:
    result = await store.txn([], ops)
    return int(result.revision)


def _endless_restarts(job: Any, rank: Any, kind: Any, now_ms: int) -> Any:
    final = _final(job, rank, kind, now_ms)
    return None if final is not None and final[0] == "restarts_exhausted" else final


def _one_is_enough(state: State, job: Job, now_ms: int) -> Any:
    if job.state == "preparing" and not job.released and any(p.prepared for p in job.parts.values()):
        first = next(p for p in job.parts.values() if p.prepared)
        return ev.GangReleased(job=job.id, generation=job.generation, master_addr=first.address, master_port=first.port)
    return _barrier(state, job, now_ms)


def _released_anyhow(state: State, e: ev.GangReleased, index: int, epoch: int, at_ms: int) -> None:
    job = state.jobs[e.job]
    job.released, job.master_addr, job.master_port = True, e.master_addr, e.master_port
    job.placed_at_ms = at_ms
    state.scratch.nodes.update(dict.fromkeys(job.parts))


def _held_twice(state: State, job: str, holding: Any, sign: int) -> None:
    _note_held(state, job, holding, sign)
    if sign > 0:
        _note_held(state, job, holding, sign)


def _late_exits_too(state: State, doc: Any, now_ms: int) -> list[ev.LogEvent]:
    found = _observed(state, doc, now_ms)
    holder = state.nodes.get(doc.node)
    held = holder.holdings if holder is not None else {}
    for gang in doc.gangs if not found else ():
        job = state.jobs.get(gang.job)
        if job is not None and job.state == "finished" and job.outcome != "succeeded" and gang.job in held:
            again = ev.GangRequeued(
                job=job.id, generation=job.generation, cause="node_lost", failure_class="infrastructure", message="still there"
            )
            return [again]
    return found


def _requeue_finished(state: State, e: ev.GangRequeued, index: int, epoch: int, at_ms: int) -> None:
    job = state.jobs[e.job]
    if job.state != "finished":
        _gang_requeued(state, e, index, epoch, at_ms)
        return
    job.state, job.outcome, job.parts = "queued", "", {}
    state.finished.pop(job.id, None)
    enqueue(state, job)


_barrier, _note_held, _observed = recovery._barrier, accounting.note_held, ingest.observed
_gang_requeued = fold._HANDLERS[ev.GangRequeued]

PLANTED |= {
    "append-without-fence": _patches("an append does not compare the election key", (log, "guard", _unguarded)),
    "index-plus-one": _patches("an append without an answer is sent again one index further", (Log, "append", _append_again_one_further)),
    "resume-from-header": _patches(
        "a watch goes on from the revision of the store instead of that of the last event", (watching._Follower, "_take", _take_from_header)
    ),
    "answered-before-commit": _patches(
        "a client is told that its job is accepted before it is in the log", (Term, "_take_commands", _answer_at_once)
    ),
    "projected-before-commit": _patches("nodes are told what is not in the log yet", (Term, "_commit", _project_and_commit)),
    "key-forgotten": _patches("a new leader knows no idempotency keys", (term, "attend_to_all", _attend_without_keys)),
    "timers-lost": _patches("a new leader looks at nothing that happened before", (term, "attend_to_all", lambda state: None)),
    "snapshot-without-field": _patches("a snapshot lacks the number of jobs submitted", (recover, "load_state", _load_without_count)),
    "old-epoch-accepted": _patches(
        "a deposed leader writes documents, and agents obey them", (projector, "write_fenced", _write_unfenced),
        (node, "refusal", lambda *a, **k: ""),
    ),
    "restarts-not-counted": _patches("the budget of restarts never ends", (recovery, "_final", _endless_restarts)),
    "no-backoff": _patches("a gang that fails again and again restarts at once", (recovery, "_backoff_ms", lambda job, now_ms: 0)),
    "partial-gang": _patches(
        "a gang starts when one of its nodes is ready", (recovery, "_barrier", _one_is_enough),
        (_HandlerOf(ev.GangReleased), "it", _released_anyhow),
    ),
    "quota-counted-twice": _patches("what a job holds is added to its queue twice", (foldholdings, "note_held", _held_twice)),
    "terminal-state-lost": _patches(
        "what a node still tells of a job that has ended puts it back into the queue", (ingest, "observed", _late_exits_too),
        (_HandlerOf(ev.GangRequeued), "it", _requeue_finished),
    ),
    "away-is-dead": _patches("a job that is to be kept on a node that is away runs elsewhere", (recovery, "_is_away", lambda state, job: False)),
}  # fmt: skip


# ---------------------------------------------------------------- nodes

_died, _document, _end = SimNode._died, SimNode._document, SimNode._end
_reconcile, _refusal = reconcile.reconcile, reconcile.refusal


def _stale_accepted(desired: Desired, **more: Any) -> str:
    return _refusal(desired, **(more | {"index": 0}))


def _records_lost(self: SimNode) -> None:
    for job, gang in self.gangs.items():
        self.gangs[job] = msgspec.structs.replace(gang, ranks=())
    _died(self)


def _without_dying(self: SimNode) -> Any:
    document = _document(self)
    if document is None or self.desired is None:
        return document
    wanted = {g.job for g in self.desired.gangs}
    return msgspec.structs.replace(document, gangs=tuple(g for g in document.gangs if g.job in wanted))


def _no_barrier(desired: Desired, local: Any, now: float) -> Any:
    return _reconcile(msgspec.structs.replace(desired, gangs=tuple(msgspec.structs.replace(g, phase="run") for g in desired.gangs)), local, now)


def _end_unseen(self: SimNode, key: tuple[str, int, int], code: int, cause: str) -> None:
    if self._agent is not None or cause:
        _end(self, key, code, cause)
        return
    run, timer = self._alive.pop(key)
    timer.cancel()
    run.ended, run.code = self.loop.time(), code


PLANTED |= {
    "fence-too-late": _patches("ranks of a node without a lease die after the lease, not before", (liveness, "margin", lambda ttl_s: -5.0)),
    "stale-desired-accepted": _patches("an agent obeys a document older than one it has seen", (node, "refusal", _stale_accepted)),
    "double-start": _patches("an agent that starts again does not know what runs", (SimNode, "_died", _records_lost)),
    "pid-reuse": _patches("a rank that ended while no agent looked is taken for another process with its pid", (SimNode, "_end", _end_unseen)),
    "gone-before-dead": _patches("a node says that a gang is gone while its ranks are dying", (SimNode, "_document", _without_dying)),
    "device-still-held": _patches("a rank starts on a device that another one has not left", (reconcile, "_held", lambda ranks, local: False)),
    "started-while-fenced": _patches(
        "an agent without a lease starts what an old document says", (SimNode, "_may_start", lambda self, desired: True)
    ),
    "no-barrier": _patches("an agent starts its part before the whole gang is ready", (node, "reconcile", _no_barrier)),
}  # fmt: skip
