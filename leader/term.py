"""One term as leader: the loop that everything goes through.

    commands, registrations, observed documents, missing leases, timers
        │   1. ingest: each becomes events, checked by folding them
        │   2. decide, until nothing is left to decide
        │   3. commit: all of it as one log entry, fenced
        │   4. answer the clients, project to the nodes
        └── and again, with everything that arrived meanwhile

Between the first fold and the commit the state holds what is not yet true. Nobody outside reads it then (`Scheduler.view` waits), and when
the commit fails, the term is over and the state is thrown away.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from gangline.core.model import events as ev
from gangline.core.model.codec import Frame
from gangline.core.model.fold import IllegalTransition
from gangline.core.model.state import State
from gangline.core.policy.decide import attend_to_all, decide, settle, wake
from gangline.core.policy.stragglers import Paces
from gangline.core.store.api import OutOfSpace, Store
from gangline.core.store.election import Leadership
from gangline.core.store.fencing import Fenced
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.core.telemetry import Log as Journal
from gangline.leader import ingest
from gangline.leader.batch import Batch, Sealed
from gangline.leader.clock import LogClock
from gangline.leader.commands import Accepted, Command, Refused, admit
from gangline.leader.metrics import Metrics
from gangline.leader.projector import Projector
from gangline.leader.service import NotLeader, Unavailable
from gangline.leader.watchers import NodeInbox

#: a cycle takes no more commands than this; the rest wait for the next one
_COMMANDS_PER_CYCLE = 2_000
#: what a cycle's sentence counts
_WORTH_TELLING: tuple[tuple[type[ev.LogEvent], str], ...] = (
    (ev.JobSubmitted, "submitted"), (ev.GangPlaced, "placed"), (ev.GangReleased, "released"), (ev.RanksExited, "reports of ended ranks"),
    (ev.GangRestarting, "restarting"), (ev.RankRestarting, "restarting a rank"), (ev.GangPreempting, "asked to leave"),
    (ev.GangRequeued, "queued again"), (ev.GangFinished, "finished"), (ev.NodeJoined, "nodes joined"), (ev.NodeLost, "nodes lost"),
    (ev.BrakeSet, "changes of the brake"),
)  # fmt: skip
#: far more rounds of deciding than a cycle can need; a policy that goes on has a fault
_ROUNDS = 64
#: seconds of deciding after which a cycle commits what it has, and leaves the rest to the next one: leases are renewed in between
_DECIDE_S = 1.0
#: a node that should be alive and is not has its lease's time and this long to show itself to a new leader
_GRACE_S = 1.0
#: the store refuses writes until somebody makes space: try the same frame again so often
_SPACE_RETRY_S = 1.0
#: after a cycle, the next one lets others have this part of the time that it took, at most so long: what has arrived meanwhile is read then.
#: Without that, long cycles would take in what comes first after each of them, one document at a time, while all others wait
_GATHER_PART = 0.15
_GATHER_MOST_S = 0.05
_GATHER_LEAST_S = 0.002
#: look at the brake and the like at least so often
_IDLE_S = 15.0


class Deposed(Exception):
    """The term is over: the message says why."""


class Pending(msgspec.Struct):
    """A command and whoever waits for its answer."""

    command: Command
    answer: asyncio.Future[Accepted]


class Term:
    """The leader's work between winning an election and losing it."""

    def __init__(
        self, *, name: str, store: Store, keys: Keys, log: Log, leadership: Leadership, state: State, clock: LogClock,
        metrics: Metrics, journal: Journal, on_frame: Callable[[Frame], None], monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`state` is folded up to the end of the log, and belongs to the term from now on."""
        self.name = name
        self.state = state
        self.leadership = leadership
        self.projector = Projector(store, keys, leadership.token)
        #: set while everything in the state is committed
        self.clean = asyncio.Event()
        self.clean.set()
        #: the store refuses writes for want of space
        self.out_of_space = False
        #: events committed in this term, by which the snapshotter knows how long the tail has become
        self.events_written = 0
        self._store = store
        self._keys = keys
        self._log = log
        self._clock = clock
        self._metrics = metrics
        self._telemetry = metrics.telemetry
        self._journal = journal
        self._on_frame = on_frame
        self._wake = asyncio.Event()
        self._inbox = NodeInbox(store, keys, self._wake.set, monotonic)
        self._pending: list[Pending] = []
        self._paces = Paces()
        #: commands of the cycle under way: whether they are in the log is not known before its commit
        self._taken: list[Pending] = []
        self._next_timer: int | None = None
        self._monotonic = monotonic
        #: seconds that the last cycle took
        self._took_s = 0.0
        self._stopping = False
        self._over = False

    async def run(self) -> None:
        """Lead until stopped, or raise: Deposed, or the store's error that ended the term."""
        tasks: list[asyncio.Task[object]] = []
        try:
            await self._take_over()
            lost = asyncio.create_task(self.leadership.lost.wait())
            loops = (self._inbox.run, self.projector.run, self._loop)
            tasks = [lost, *(asyncio.create_task(loop()) for loop in loops)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {lost}:
                task.result()
            if lost in done:
                raise Deposed(self.leadership.reason)
        finally:
            self._over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._refuse_pending()

    async def execute(self, commands: list[Command]) -> list[Accepted | Exception]:
        """See Service.execute."""
        if self._over or self._stopping:
            raise NotLeader("", "")
        waiting = [Pending(c, asyncio.get_running_loop().create_future()) for c in commands]
        self._pending.extend(waiting)
        self._wake.set()
        out: list[Accepted | Exception] = []
        for p in waiting:
            try:
                out.append(await p.answer)
            except (Refused, Unavailable) as e:
                out.append(e)
        return out

    def stop(self) -> None:
        """Hand over: finish the cycle, say so in the log, and end."""
        self._stopping = True
        self._wake.set()

    # ---------------------------------------------------------------- taking over

    async def _take_over(self) -> None:
        """Write the election, learn what the nodes say, and look at everything once."""
        self._clock.start_from(self.state.at_ms)
        batch = self._begin()
        batch.add(ev.LeaderElected(scheduler=self.name))
        await self._commit(batch)
        kvs = await self._inbox.start()
        specs = await self._store.range(self._keys.jobs, keys_only=True)
        self.projector.adopt(kvs, specs.kvs)
        grace = {n.id: (n.registration.lease_ttl_s or 10.0) + _GRACE_S for n in self.state.nodes.values() if n.status == "up"}
        self._inbox.expect(grace)
        attend_to_all(self.state)
        self.projector.withdraw_unknown(self.state)
        self._wake.set()
        self._journal.info("leading", epoch=self.leadership.token, index=self.state.index, nodes=len(self.state.nodes))

    # ---------------------------------------------------------------- the loop

    async def _loop(self) -> None:
        while not self._stopping:
            await self._inbox.wait(self._wake, self._idle_s())
            gather_s = min(self._took_s * _GATHER_PART, _GATHER_MOST_S)
            if gather_s >= _GATHER_LEAST_S:
                await asyncio.sleep(gather_s)
            self._wake.clear()
            if not self.leadership.valid():
                # Blocked or cut off for too long: whoever waits is better served by another leader.
                if self.leadership.lost.is_set():
                    return
                await asyncio.sleep(0.05)
                self._wake.set()
                continue
            await self.cycle()
        batch = self._begin()
        batch.add(ev.LeaderResigned(scheduler=self.name))
        await self._commit(batch)

    def _idle_s(self) -> float:
        waits = [_IDLE_S]
        if self._next_timer is not None:
            waits.append(self._clock.seconds_until(self._next_timer))
        later = self._inbox.due()[1]
        if later is not None:
            waits.append(later)
        return min(waits)

    async def cycle(self) -> None:
        """Take in everything that has arrived, decide, commit, answer, project."""
        started, began = time.monotonic(), self._monotonic()
        now = self._clock.now_ms()
        batch = self._begin(now)
        answers = self._take_commands(batch)
        self._take_nodes(batch, now)
        with self._telemetry.span("decide", batch.index):
            rounds, settled = self._decide(batch, now)
        if batch:
            await self._commit(batch)
        if settled:
            self._next_timer = settle(self.state, now)
        else:
            self._wake.set()
        self._report_faults()
        for pending, answer in answers:
            if not pending.answer.done():
                if isinstance(answer, Accepted):
                    pending.answer.set_result(answer)
                else:
                    pending.answer.set_exception(answer)
        self._taken = []
        with self._telemetry.span("project", self.state.index):
            projected = self._project(batch)
        took_s = time.monotonic() - started
        self._took_s = self._monotonic() - began
        self._metrics.cycled(took_s)
        self._journal.info(
            "cycle", index=self.state.index, epoch=batch.epoch, events=sum(len(s.frame.events) for s in batch.frames), rounds=rounds,
            commands=len(answers), projected=projected, pending=len(self.state.queue), active=len(self.state.running),
            took_ms=round(took_s * 1000, 2), message=_in_words(batch, self.state),
        )  # fmt: skip

    def _begin(self, now_ms: int | None = None) -> Batch:
        return Batch(self.state, self.leadership.token, max(self._clock.now_ms() if now_ms is None else now_ms, self.state.at_ms))

    def _take_commands(self, batch: Batch) -> list[tuple[Pending, Accepted | Exception]]:
        taken, self._pending = self._pending[:_COMMANDS_PER_CYCLE], self._pending[_COMMANDS_PER_CYCLE:]
        self._taken = taken
        if self._pending:
            self._wake.set()
        return [(p, self._admit(batch, p.command)) for p in taken if not p.answer.cancelled()]

    def _admit(self, batch: Batch, command: Command) -> Accepted | Exception:
        try:
            event = admit(self.state, command)
            if isinstance(event, Accepted):
                return event
            return Accepted(batch.add(event), _subject(command))
        except Refused as e:
            return e
        except IllegalTransition as e:
            return Refused(409, "conflict", str(e))

    def _take_nodes(self, batch: Batch, now: int) -> None:
        inbox = self._inbox
        docs, inbox.observed = inbox.observed, {}
        for node, problem in inbox.unreadable.items():
            self._journal.warning("unreadable_document", node=node, message=problem)
        inbox.unreadable.clear()
        registrations, inbox.registrations = inbox.registrations, {}
        for node in sorted(registrations):
            self._fold(batch, ingest.registered(self.state, registrations[node]))
        due, _ = inbox.due()
        if due:
            self._fold(batch, ingest.vanished(self.state, due, sorted(inbox.missing), now))
            for node in due:
                known = self.state.nodes.get(node)
                if known is None or known.status == "lost":
                    del inbox.missing[node]
        for node in sorted(docs):
            self._fold(batch, ingest.observed(self.state, docs[node], now))
            self._fold(batch, self._paces.take(self.state, docs[node], now))
        if docs:
            self._paces.forget(self.state)

    def _decide(self, batch: Batch, now: int) -> tuple[int, bool]:
        """Decide and fold until nothing is left to decide, or it has taken long. Returns the number of rounds, and whether nothing is left."""
        began = self._monotonic()
        wake(self.state, now)
        for round_number in range(_ROUNDS):
            decisions = decide(self.state, now)
            if not decisions or not self._fold(batch, decisions):
                return round_number, True
            if self._monotonic() - began > _DECIDE_S:
                return round_number + 1, False
        self._journal.error("policy_does_not_settle", index=self.state.index, message=f"still deciding after {_ROUNDS} rounds")
        self._wake.set()
        return _ROUNDS, True

    def _fold(self, batch: Batch, events: list[ev.LogEvent]) -> int:
        """Fold events and return how many were legal; one that is not is a fault of ours, and must not stop all the others."""
        folded = 0
        for event in events:
            try:
                batch.add(event)
                folded += 1
            except IllegalTransition as e:
                self._journal.error("illegal_event", index=batch.index, message=str(e), body=repr(event))
                self.state.scratch.jobs.pop(getattr(event, "job", ""), None)
        return folded

    def _report_faults(self) -> None:
        for job, message in self.state.scratch.faults.items():
            self._journal.error("policy_error", index=self.state.index, gang=job, message=message)
        self.state.scratch.faults.clear()
        for job, message in self.state.scratch.withheld.items():
            self._journal.error("eviction_withheld", index=self.state.index, gang=job, message=message)
            self._metrics.withheld()
        self.state.scratch.withheld.clear()

    # ---------------------------------------------------------------- commit and project

    async def _commit(self, batch: Batch) -> None:
        self.clean.clear()
        for sealed in batch.finish():
            await self._append(sealed)
            self.events_written += len(sealed.frame.events)
            self._on_frame(sealed.frame)
        self.clean.set()

    async def _append(self, sealed: Sealed) -> None:
        frame = sealed.frame
        while True:
            if not self.leadership.valid() and self.leadership.lost.is_set():
                raise Deposed(self.leadership.reason)
            try:
                began = time.monotonic()
                with self._telemetry.span("append", frame.index):
                    await self._log.append(sealed.data, index=frame.index, nonce=frame.nonce, token=self.leadership.token)
                self._metrics.appended(time.monotonic() - began, "ok")
                self.out_of_space = False
                return
            except Fenced:
                self._metrics.appended(time.monotonic() - began, "fenced")
                raise
            except OutOfSpace as e:
                self._metrics.appended(time.monotonic() - began, "out_of_space")
                if not self.out_of_space:
                    self._journal.error("store_out_of_space", index=frame.index, epoch=frame.epoch, message=str(e))
                self.out_of_space = True
                await asyncio.sleep(_SPACE_RETRY_S)

    def _project(self, batch: Batch) -> int:
        nodes = list(self.state.scratch.nodes)
        self.state.scratch.nodes.clear()
        changed = self.projector.update(self.state, nodes)
        self.projector.withdraw(e.job for s in batch.frames for e in s.frame.events if isinstance(e, ev.GangFinished))
        return changed

    def _refuse_pending(self) -> None:
        """Answer those still waiting: the commands of the last cycle may or may not be in the log, the others certainly are not."""
        unknown = Unavailable("the leader changed while the command was being committed; send it again with the same idempotency key")
        for pending in self._taken:
            if not pending.answer.done():
                pending.answer.set_exception(unknown)
        for pending in self._pending:
            if not pending.answer.done():
                pending.answer.set_exception(Unavailable("the leader changed before it took the command; send it again"))
        self._taken, self._pending = [], []


def _in_words(batch: Batch, state: State) -> str:
    """The cycle in one sentence."""
    counts = Counter(type(e) for s in batch.frames for e in s.frame.events)
    told = [f"{n} {what}" for kind, what in _WORTH_TELLING if (n := counts[kind])]
    return f"{', '.join(told) or 'nothing new'}; {len(state.queue)} waiting, {len(state.running)} placed"


def _subject(command: Command) -> str:
    return getattr(command, "job", "") or getattr(command, "node", "") or "brake"
