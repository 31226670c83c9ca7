"""A good log with everything that is written beside it, made as a cluster makes it: the production policy decides, nodes obey.

A test takes it, breaks one thing, and looks what the checker says. Frames are kept as their parts, so that a broken one is encoded again with
all that follow, and nothing but what was broken is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from gangline.chaos.checker import Entry, NodeView, Operation, RankLife, entries_of
from gangline.chaos.checker.evidence import LiveRank
from gangline.core.model import events as ev
from gangline.core.model.codec import digest, encode_event, encode_frame
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.fold import apply, seal
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Gang, JobSpec, Resources, Restart
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state, state_digest
from gangline.core.policy.decide import attend_to_all, decide, settle, wake

E = TypeVar("E", bound=ev.LogEvent)


class Written(msgspec.Struct):
    """The parts of one frame."""

    index: int
    epoch: int
    at_ms: int
    events: list[ev.LogEvent]
    revision: int


class Story:
    """A cluster that does what it should, and its log."""

    def __init__(self, epoch: int = 10) -> None:
        self.state = State()
        self.epoch = epoch
        self.revision = epoch
        self.now = 1_800_000_000_000
        self.written: list[Written] = []
        self.lives: list[RankLife] = []
        self.operations: list[Operation] = []
        self.snapshots: dict[int, bytes] = {}
        self._alive: dict[tuple[str, int, int], RankLife] = {}
        self._elect("s1")

    # ---------------------------------------------------------------- writing

    def cycle(self, *happened: ev.LogEvent, after_s: float = 1.0) -> list[ev.LogEvent]:
        """Take in what has happened and decide, as a leader does. Returns the decisions."""
        self.now += int(after_s * 1000)
        index, events = self.state.index + 1, list(happened)
        for event in happened:
            apply(self.state, event, index, self.epoch, self.now)
        wake(self.state, self.now)
        decided: list[ev.LogEvent] = []
        while step := decide(self.state, self.now):
            for event in step:
                apply(self.state, event, index, self.epoch, self.now)
            decided += step
        settle(self.state, self.now)
        if events + decided:
            self._write([*events, *decided])
        return decided

    def failover(self, name: str) -> None:
        """Another scheduler leads."""
        self.revision += 1
        self.epoch = self.revision
        self._elect(name)

    def _elect(self, name: str) -> None:
        self.now += 1_000
        event = ev.LeaderElected(scheduler=name)
        apply(self.state, event, self.state.index + 1, self.epoch, self.now)
        self._write([event])
        attend_to_all(self.state)

    def _write(self, events: list[ev.LogEvent]) -> None:
        self.revision += 1
        written = Written(self.state.index + 1, self.epoch, self.now, events, self.revision)
        self.written.append(written)
        previous = self.state.digest
        seal(self.state, written.index, digest(_bytes(written, previous)))

    # ---------------------------------------------------------------- what happens

    def join(self, *nodes: str, gpus: int = 4) -> None:
        for node in nodes:
            devices = tuple(Gpu(i, f"GPU-{node}-{i}", "H100", 80_000) for i in range(gpus))
            reg = Registration(node, f"id-{node}", "b1", node, "", devices, 64_000, 512_000)
            self.cycle(ev.NodeJoined(registration=reg), after_s=0.1)

    def submit(self, job: str, ranks: int = 1, **more: Any) -> None:
        resources = more.pop("resources", Resources(gpus=1, cpus_milli=100))
        spec = JobSpec(("train",), gang=Gang(ranks, ranks), resources=resources, **more)
        self.cycle(ev.JobSubmitted(job=job, spec=spec, idempotency_key=f"key-{job}", body_digest="d"))
        self.operations.append(Operation(op="submit", outcome="ok", key=f"key-{job}", job=job, index=self.state.index))
        self.operations.append(Operation(op="read", outcome="ok", job=job, after=self.state.index, index=self.state.index))

    def start(self, job: str) -> None:
        """The nodes of a placed gang prepare, and start its ranks."""
        j = self.state.jobs[job]
        if len(j.parts) > 1:
            for node in j.nodes():
                self.cycle(ev.NodePrepared(job=job, generation=j.generation, node=node, address=node, port=1), after_s=0.05)
        acted_on = self.state.index
        for node, part in j.parts.items():
            waiting = [(n, r) for n, r in part.ranks.items() if not r.started]
            for number, rank in waiting:
                life = RankLife(
                    node=node, job=job, rank=number, generation=rank.generation, gpus=rank.gpus, share=rank.share, clock=f"boot of {node}",
                    started_s=self.now / 1000, started_ms=self.now, index=acted_on, epoch=self.epoch,
                )  # fmt: skip
                self._alive[job, number, rank.generation] = life
            self.cycle(ev.RanksStarted(job=job, generation=j.generation, node=node, ranks=tuple(n for n, _ in waiting)), after_s=0.05)

    def die(self, job: str, *ranks: int, code: int = 0, cause: str = "") -> list[ev.LogEvent]:
        """Ranks of a gang end, all of them without `ranks`; returns what is decided about it."""
        j, decided = self.state.jobs[job], list[ev.LogEvent]()
        for node, part in list(j.parts.items()):
            dead = [(n, r.generation) for n, r in part.ranks.items() if not r.exited and (not ranks or n in ranks)]
            for number, generation in dead:
                self._end(job, number, generation, code, cause)
            if dead:
                exits = tuple(ev.RankExit(n, g, code, cause, at_ms=self.now) for n, g in dead)
                decided += self.cycle(ev.RanksExited(job=job, node=node, exits=exits), after_s=0.05)
        return decided

    def stopped(self, job: str) -> None:
        """What of a gang is not wanted any more is gone from its nodes."""
        for job_id, number, generation in [k for k in self._alive if k[0] == job]:
            rank = self.state.jobs[job].rank(number)
            if rank is None or rank.generation != generation or self.state.jobs[job].state in ("queued", "finished", "restarting"):
                self._end(job_id, number, generation, -15, "stopped")
        for node in self.state.nodes.values():
            held = node.holdings.get(job)
            if held is not None and held.leaving_since:
                self.cycle(ev.PartReleased(job=job, node=node.id), after_s=0.05)

    def lose(self, node: str) -> list[ev.LogEvent]:
        """A node is gone, and its ranks were fenced before that."""
        for key, life in list(self._alive.items()):
            if life.node == node:
                self._end(*key, -9, "fenced")
        return self.cycle(ev.NodeLost(node=node, cause="lease_expired", message="gone"), after_s=8.0)

    def _end(self, job: str, number: int, generation: int, code: int, cause: str) -> None:
        life = self._alive.pop((job, number, generation), None)
        if life is not None:
            self.now += 20
            ended = {"ended": "seen", "ended_s": self.now / 1000, "ended_ms": self.now, "code": code, "cause": cause}
            self.lives.append(msgspec.structs.replace(life, **ended))

    def snapshot(self) -> None:
        self.snapshots[self.state.index] = dump_state(self.state)

    # ---------------------------------------------------------------- for the checker

    def evidence(self) -> dict[str, Any]:
        """Return what `examine` takes."""
        alive = [*self._alive.values()]
        views = [
            NodeView(node=n, at_ms=self.now, live=tuple(LiveRank(x.job, x.rank, x.generation) for x in alive if x.node == n))
            for n, node in self.state.nodes.items()
        ]
        return {
            "agent_records": [*self.lives, *alive], "client_history": list(self.operations), "nodes": views,
            "snapshots": dict(self.snapshots), "replicas": {"s1": (self.state.index, state_digest(self.state))},
        }  # fmt: skip

    def entries(self) -> list[Entry]:
        return list(entries_of(raw(self.written)))

    def find(self, kind: type[E], number: int = 0, **fields: object) -> tuple[Written, int, E]:
        """Return the nth event of a kind, with these fields, in its frame."""
        found = [
            (w, at, e) for w in self.written for at, e in enumerate(w.events)
            if isinstance(e, kind) and all(getattr(e, name) == value for name, value in fields.items())
        ]  # fmt: skip
        return found[number]

    def change(self, kind: type[E], number: int = 0, where: dict[str, object] | None = None, **changed: object) -> int:
        """Change fields of an event and return the index of its entry."""
        written, at, event = self.find(kind, number, **(where or {}))
        written.events[at] = msgspec.structs.replace(event, **changed)
        return written.index

    def drop(self, kind: type[E], number: int = 0, **fields: object) -> int:
        """Take an event out of its frame."""
        written, at, _ = self.find(kind, number, **fields)
        del written.events[at]
        return written.index

    def cut(self, index: int) -> None:
        """Forget everything after an entry."""
        self.written = [w for w in self.written if w.index <= index]


def raw(written: list[Written]) -> Iterator[tuple[int, bytes, int]]:
    """Yield the frames, encoded as one chain."""
    previous = bytes(32)
    for each in written:
        data = _bytes(each, previous)
        previous = digest(data)
        yield each.index, data, each.revision


def _bytes(written: Written, previous: bytes) -> bytes:
    nonce = f"nonce-{written.index:08d}".encode()
    return encode_frame(written.index, written.epoch, written.at_ms, previous, nonce, [encode_event(e) for e in written.events])


def good_story(rounds: int = 1) -> Story:
    """Return a story in which gangs are placed, fail, wait, move and end, under two leaders and in queues.

    Only the first round has faults: of more, the policy would blame the nodes.
    """
    story = Story()
    queues = (QueueSpec("default"), QueueSpec("lab", quota=Amounts(2_000), limit=Amounts(4_000)))
    story.cycle(ev.QueuesDeclared(queues=queues, by="root"))
    story.join("n1", "n2", "n3")
    for at in range(rounds):
        _round(story, f"r{at}-", faults=at == 0)
    return story


def _round(story: Story, name: str, faults: bool) -> None:
    wide, lab, fixed, one = (f"{name}{x}" for x in ("wide", "lab", "fixed", "one"))
    story.submit(wide, ranks=6, restart=Restart(max_restarts=2, backoff_initial_s=20.0))
    story.start(wide)
    story.submit(lab, ranks=3, queue="lab")
    story.submit(fixed, queue="lab", preemptible=False)
    story.start(lab)
    story.start(fixed)
    # Twice its first rank fails; the second time it has to wait.
    for _ in range(2 if faults else 0):
        story.die(wide, 0, code=1)
        story.stopped(wide)
        story.cycle(after_s=25.0)
        story.start(wide)
    story.snapshot()
    story.failover("s2")
    story.cycle(after_s=0.0)
    lost = story.state.jobs[wide].nodes()[0]
    story.die(lab)
    story.stopped(lab)
    if faults:
        story.lose(lost)
        story.stopped(wide)
        story.cycle(after_s=1.0)
        story.join(lost)
    if story.state.jobs[wide].state == "placed":
        story.start(wide)
    story.submit(one)
    story.start(one)
    story.cycle(ev.JobStopRequested(job=one, by="ann", reason="enough"))
    story.stopped(one)
    story.die(wide)
    story.stopped(wide)
    if story.state.jobs[fixed].state == "running":
        story.die(fixed)
    story.stopped(fixed)
