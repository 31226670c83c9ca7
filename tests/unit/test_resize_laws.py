"""Laws of gangs that change their size, over random clusters whose ranks do as they are told: it comes to rest, and who takes over agrees."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from policycluster import Cluster

from gangline.core.model import events as ev
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.roles import wrong_sizes
from gangline.core.model.spec import Elastic, Gang, Resources, TopologyRequest
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.decide import attend_to_all, decide

#: rounds of one minute after the last thing that happened
ROUNDS = 30
RESTS = 6


def cluster(rng: random.Random) -> Cluster:
    c = Cluster()
    for i in range(rng.randint(2, 6)):
        c.join(f"n{i}", rng.choice((4, 8)), rack=f"r{i // 2}")
    if rng.random() < 0.7:
        queues = [QueueSpec(q, quota=Amounts(rng.choice((0, 4_000, 8_000)), None, None), limit=Amounts()) for q in ("default", "p", "q")]
        c.add(ev.QueuesDeclared(queues=tuple(queues)))
    return c


def submit(c: Cluster, rng: random.Random, number: int) -> None:
    unit = rng.choice((1, 1, 2, 4))
    least = unit * rng.randint(1, 3)
    gang = Gang(least + unit * rng.choice((0, 1, 2, 4)), least, unit if unit > 1 else 0)
    queue = rng.choice(("default", "p", "q")) if c.state.queues.declared else "default"
    near = rng.choice(("", "", "required", "preferred"))
    c.submit(
        f"j{number}", gang=gang, resources=Resources(gpus=rng.choice((1, 1, 2)), cpus_milli=100), queue=queue, priority=rng.choice((10, 50, 90)),
        preemptible=rng.random() < 0.8, elastic=Elastic(rng.choice((30.0, 90.0))), topology=TopologyRequest(**({near: "rack"} if near else {})),
    )


def obey(c: Cluster) -> None:
    """Ranks and agents do what they are asked to."""
    for job in list(c.state.jobs.values()):
        if job.state in ("preempting", "resizing"):
            for node, part in job.parts.items():
                if not part.acknowledged:
                    c.add(ev.StopAcknowledged(job=job.id, generation=job.generation, node=node))
    c.cycle()
    c.release()
    c.cycle()
    c.run_all()


def happen(c: Cluster, rng: random.Random, number: int) -> None:
    running = [j.id for j in c.state.jobs.values() if j.state == "running"]
    up = [n.id for n in c.state.nodes.values() if n.status == "up"]
    what = rng.randrange(6)
    if what <= 2:
        submit(c, rng, number)
    elif what == 3 and running:
        c.end(rng.choice(running))
    elif what == 4 and len(up) > 2:
        c.add(ev.NodeLost(node=rng.choice(up), cause="lease_expired", message="gone"))
    elif what == 5:
        for node in c.state.nodes.values():
            if node.status == "lost":
                c.add(ev.NodeJoined(registration=node.registration))
                break


def check(c: Cluster) -> None:
    for job in c.state.jobs.values():
        if job.active:
            assert not wrong_sizes(job.spec, job.sizes()), job
        if job.active and job.spec.topology.required:
            assert len({c.state.nodes[n].registration.labels["rack"] for n in job.parts}) == 1, job
    other = load_state(dump_state(c.state))
    attend_to_all(other)
    # Reservations are planned from time to time only, and what is said of waiting may follow them.
    assert [e for e in decide(other, c.now) if not isinstance(e, ev.GangReserved | ev.GangsDeferred)] == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_it_comes_to_rest_and_who_takes_over_decides_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    c = cluster(rng)
    for number in range(rng.randint(4, 14)):
        happen(c, rng, number)
        c.now += rng.choice((1_000, 40_000, 100_000))
        c.state.scratch.queue_dirty = True
        c.cycle()
        check(c)
        if rng.random() < 0.7:
            obey(c)
    quiet = 0
    for _ in range(ROUNDS):
        before = len(c.log)
        c.now += 60_000
        c.state.scratch.queue_dirty = True
        c.cycle()
        check(c)
        obey(c)
        decided = [e for e in c.log[before:] if not isinstance(e, ev.GangsDeferred)]
        quiet = 0 if decided else quiet + 1
        if quiet == RESTS:
            return
    raise AssertionError(f"still moving: {[type(e).__name__ for e in c.log[-10:]]}")
