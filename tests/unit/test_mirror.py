"""The mirror that has been kept in step decides like one that was built from nothing: a leader of long standing, and one that just took over."""

from __future__ import annotations

import random

import pytest
import test_policy

from gangline.core.model import events as ev
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Gang, Resources, Role, TopologyRequest
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.decide import attend_to_all, decide, wake
from gangline.core.policy.schedule import schedule


class Story:
    """Random things happen to a cluster."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.c = test_policy.Cluster("n1", "n2", "n3", "n4")
        if self.rng.random() < 0.5:
            self.declare()
        self.number = 0

    def declare(self) -> None:
        rng = self.rng
        queues = tuple(
            QueueSpec(q, quota=Amounts(gpus_milli=rng.randrange(0, 20) * 1000), limit=Amounts(gpus_milli=rng.choice([None, 16_000])))
            for q in ("a", "b", "default")
        )
        self.c.add(ev.QueuesDeclared(queues=queues))

    def happens(self) -> None:
        """One thing."""
        rng, c = self.rng, self.c
        c.now += rng.randrange(0, 20_000)
        active = [j for j in c.state.jobs.values() if j.active]
        match rng.randrange(9):
            case 0 | 1 | 2:
                self.number += 1
                unit, parts = rng.choice([1, 1, 2, 8]), rng.randrange(1, 4)
                least = rng.choice([parts, parts, 1])
                more = {"roles": self.roles()} if rng.random() < 0.3 else {}
                c.submit(
                    f"j{self.number}", **more, gang=Gang(parts * unit, least * unit, unit if unit > 1 else 0),
                    priority=rng.choice([10, 50, 90, 120]), preemptible=rng.random() < 0.8, queue=rng.choice(["a", "b", "default"]),
                    resources=Resources(gpus=rng.choice([0, 1, 1, 1]), cpus_milli=100),
                )  # fmt: skip
            case 3 if active:
                self.end(rng.choice(active))
            case 4 if active:
                job = rng.choice(active)
                c.add(ev.JobStopRequested(job=job.id))
            case 5:
                node = rng.choice(list(c.state.nodes.values()))
                if node.status == "up":
                    c.add(ev.NodeLost(node=node.id, cause="lease_expired", message=""))
                else:
                    c.join(node.id, gpus=rng.choice([8, 8, 7]))
            case 6:
                action = rng.choice(["cordon", "uncordon", "drain", "undrain"])
                c.add(ev.NodeAdministered(node=rng.choice(list(c.state.nodes)), action=action))
            case _:
                self.go_on(active)

    def roles(self) -> tuple[Role, ...]:
        """A few kinds of rank, some of them in replicas."""
        rng = self.rng

        def role(name: str) -> Role:
            ranks = rng.randrange(1, 4)
            where = TopologyRequest(**{rng.choice(["required", "preferred", "balanced", "spread"]): "hostname"}) if rng.random() < 0.5 else None
            gang = Gang(ranks, rng.randrange(1, ranks + 1))
            return Role(name, gang, Resources(gpus=rng.randrange(3), cpus_milli=100), topology=where or TopologyRequest())

        group = Role("g", replicas=2, min_replicas=rng.choice([1, 2]), roles=(role("x"), role("y")))
        return (role("a"), rng.choice([role("b"), group]))

    def go_on(self, active: list[object]) -> None:
        """What agents would report: gangs start, and what should be gone is gone."""
        for job in active:
            if job.state in ("placed", "preparing") and not job.lingering:  # type: ignore[attr-defined]
                self.c.run(job.id)  # type: ignore[attr-defined]
        for node in list(self.c.state.nodes.values()):
            for job_id, holding in list(node.holdings.items()):
                if holding.leaving_since and node.status == "up":
                    self.c.add(ev.PartReleased(job=job_id, node=node.id))

    def end(self, job: object) -> None:
        for node, part in job.parts.items():  # type: ignore[attr-defined]
            exits = tuple(ev.RankExit(r, x.generation, self.rng.choice([0, 0, 1])) for r, x in part.ranks.items() if not x.exited)
            if exits and job.state != "restarting" and job.id in self.c.state.nodes[node].holdings:  # type: ignore[attr-defined]
                self.c.add(ev.RanksExited(job=job.id, node=node, exits=exits))  # type: ignore[attr-defined]


def moves(events: list[ev.LogEvent]) -> list[ev.LogEvent]:
    """Leave out reservations: each leader plans them from time to time, and one that has just taken over does so at once."""
    return [e for e in events if not isinstance(e, ev.GangReserved)]


@pytest.mark.parametrize("seed", range(30))
def test_kept_in_step_is_like_built_from_nothing(seed: int) -> None:
    story = Story(seed)
    for _ in range(60):
        story.happens()
        state = story.c.state
        fresh = load_state(dump_state(state))
        attend_to_all(fresh)
        wake(state, story.c.now)
        state.scratch.queue_dirty = True
        assert moves(schedule(state, story.c.now)) == moves(schedule(fresh, story.c.now))
        state.scratch.queue_dirty = True
        story.c.cycle()
        assert decide(state, story.c.now) == []
        attend_to_all(fresh := load_state(dump_state(state)))
        assert moves(decide(fresh, story.c.now)) == [], "a leader that takes over finds nothing left to decide"
