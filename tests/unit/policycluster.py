"""A cluster for tests of the policy: the production `decide`, the fold, and a time that the test sets. No store, no agents."""

from __future__ import annotations

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.fold import apply, seal
from gangline.core.model.spec import Gang, JobSpec, Resources
from gangline.core.model.state import Job, State
from gangline.core.policy.decide import decide, settle, wake

#: rounds of deciding that a cycle may take, as in leader/term.py
ROUNDS = 64


class Cluster:
    """Folds events and decisions. `log` has all of them."""

    #: log time at which it begins
    BEGINS_MS = 1_000_000

    def __init__(self, *nodes: str, gpus: int = 8, model: str = "H100") -> None:
        self.state = State()
        self.now = self.BEGINS_MS
        self.log: list[ev.LogEvent] = []
        self.add(ev.LeaderElected(scheduler="s"))
        for node in nodes:
            self.join(node, gpus, model)

    def join(self, node: str, gpus: int = 8, model: str = "H100", boot: str = "b", **labels: str) -> None:
        devices = tuple(Gpu(i, f"{node}-{i}", model, 80_000) for i in range(gpus))
        self.add(ev.NodeJoined(registration=Registration(node, f"id-{node}", boot, node, "", devices, 64_000, 512_000, labels)))

    def add(self, *events: ev.LogEvent) -> None:
        for event in events:
            apply(self.state, event, self.state.index + 1, 1, self.now)
            self.log.append(event)
        seal(self.state, self.state.index + 1, bytes(32))

    def submit(self, job: str, ranks: int = 1, gpus: int = 1, *, user: str = "", **more: object) -> None:
        gang = more.pop("gang", Gang(ranks, ranks))
        resources = more.pop("resources", Resources(gpus=gpus, cpus_milli=100))
        spec = JobSpec(("x",), gang=gang, resources=resources, **more)  # type: ignore[arg-type]
        self.add(ev.JobSubmitted(job=job, spec=spec, user=user))

    def cycle(self) -> list[ev.LogEvent]:
        """Decide until nothing is left to decide, as a leader does."""
        wake(self.state, self.now)
        out: list[ev.LogEvent] = []
        for _ in range(ROUNDS):
            decisions = decide(self.state, self.now)
            if not decisions:
                settle(self.state, self.now)
                assert not self.state.scratch.faults, self.state.scratch.faults
                return out
            self.add(*decisions)
            out += decisions
        raise AssertionError(f"still deciding after {ROUNDS} rounds: {out[-3:]}")

    def at(self, seconds: float) -> list[ev.LogEvent]:
        """Let so many seconds pass, and decide."""
        self.now += int(seconds * 1000)
        return self.cycle()

    def job(self, job: str) -> Job:
        return self.state.jobs[job]

    def states(self, *jobs: str) -> list[str]:
        return [self.job(j).state for j in jobs]

    def code(self, job: str) -> str:
        """The recorded reason why it waits."""
        deferral = self.job(job).deferral
        return deferral.code if deferral is not None else ""

    def run(self, *jobs: str) -> None:
        """Take placed gangs over the barrier to running."""
        for job in jobs:
            j = self.job(job)
            if len(j.parts) > 1:
                for node in j.nodes():
                    self.add(ev.NodePrepared(job=job, generation=j.generation, node=node, address=node, port=1))
                self.cycle()
            for node, part in list(j.parts.items()):
                waiting = tuple(r for r, rank in part.ranks.items() if not rank.started)
                self.add(ev.RanksStarted(job=job, generation=j.generation, node=node, ranks=waiting))
            assert j.state == "running"

    def run_all(self) -> None:
        """Take all placed gangs to running."""
        self.run(*[j.id for j in self.state.jobs.values() if j.state in ("placed", "preparing")])

    def end(self, job: str, code: int = 0) -> None:
        """All its ranks end."""
        j = self.job(job)
        for node, part in j.parts.items():
            exits = tuple(ev.RankExit(n, r.generation, code) for n, r in part.ranks.items() if not r.exited)
            if exits:
                self.add(ev.RanksExited(job=job, node=node, exits=exits))

    def release(self) -> None:
        """What no longer should be on a node has gone from it."""
        for node in self.state.nodes.values():
            for job, holding in list(node.holdings.items()):
                if holding.leaving_since:
                    self.add(ev.PartReleased(job=job, node=node.id))


def of(events: list[ev.LogEvent], kind: type[ev.LogEvent]) -> list[ev.LogEvent]:
    return [e for e in events if isinstance(e, kind)]
