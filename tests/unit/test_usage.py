"""Usage of queues and users, folded from the log."""

from __future__ import annotations

import math
import random

import pytest
import test_policy
from hypothesis import given
from hypothesis import strategies as st

from gangline.core.model import events as ev
from gangline.core.model.queues import Amounts, Declaration, QueueSpec, QueueTree
from gangline.core.model.spec import Gang, JobSpec, Resources
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.model.usage import LN2, Account, Usage, declared, faded, take_in, usage_of, usage_of_users, used_by

HOUR_MS = 3_600_000


@given(st.integers(0, 40 * HOUR_MS), st.integers(60_000, 366 * 24 * HOUR_MS))
def test_what_fades(elapsed_ms: int, half_life_ms: int) -> None:
    assert math.isclose(faded(elapsed_ms, half_life_ms), -math.expm1(-elapsed_ms / half_life_ms * LN2), rel_tol=1e-13, abs_tol=0)


def test_fading_has_these_bits() -> None:
    # A state's digest depends on every bit: these must be the same on every machine.
    bits = ["0x0.0p+0", "0x1.026c7ae9bce41p-19", "0x1.a68056b0a470ep-3", "0x1.0000000000000p-1", "0x1.c00005a72c655p-1"]
    assert [faded(ms, HOUR_MS).hex() for ms in (0, 10, HOUR_MS // 3, HOUR_MS, 3 * HOUR_MS + 7)] == bits


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, HOUR_MS)), min_size=1, max_size=8), st.integers(60_000, 9 * HOUR_MS))
def test_an_account_is_the_decayed_integral(pieces: list[tuple[int, int]], half_life_ms: int) -> None:
    tree = QueueTree(Declaration((QueueSpec("q", usage_half_life_s=half_life_ms / 1000),), 1))
    usage, now, held = Usage(), 1_000, 0
    for gpus, length in pieces:
        take_in(usage, tree, "q", "u", (gpus - held, 0, 0), now)
        held, now = gpus, now + length
    end, start, expected = now, 1_000, 0.0
    tau = half_life_ms / 1000 / math.log(2)
    for gpus, length in pieces:
        expected += gpus * tau * (2 ** (-(end - start - length) / half_life_ms) - 2 ** (-(end - start) / half_life_ms))
        start += length
    account = usage.queues.get("q", Account())
    assert math.isclose(used_by(account, half_life_ms, end)[0], expected, rel_tol=1e-9, abs_tol=1e-6)


class Story:
    """One queue tree with a half-life, a node of 8 GPUs, and jobs of users."""

    def __init__(self, half_life_s: float = 3600.0) -> None:
        self.c = test_policy.Cluster()
        self.declare(half_life_s)
        self.c.join("n1")

    def declare(self, half_life_s: float, b: float | None = None) -> None:
        queues = (
            QueueSpec("top", usage_half_life_s=half_life_s), QueueSpec("top/a", user_fairness=True), QueueSpec("top/b", usage_half_life_s=b),
            QueueSpec("default", quota=Amounts(0)),
        )  # fmt: skip
        self.c.add(ev.QueuesDeclared(queues=queues))

    def hold(self, job: str, queue: str, user: str, gpus: int) -> None:
        spec = JobSpec(("x",), queue=queue, resources=Resources(gpus=gpus, cpus_milli=100))
        self.c.add(ev.JobSubmitted(job=job, spec=spec, user=user))
        self.c.cycle()
        assert self.c.job(job).state == "placed"

    def gone(self, job: str) -> None:
        self.c.add(ev.GangFinished(job=job, outcome="succeeded", cause="", message=""))
        for node in list(self.c.state.nodes.values()):
            if job in node.holdings:
                self.c.add(ev.PartReleased(job=job, node=node.id))

    def usage(self, queue: str) -> float | None:
        found = usage_of(self.c.state.usage, self.c.state.queues, queue, self.c.now)
        return None if found is None else found[0]

    def users(self) -> dict[str, float]:
        return {user: parts[0] for user, parts in usage_of_users(self.c.state.usage, self.c.state.queues, "top/a", self.c.now).items()}


def test_what_is_held_counts_for_the_queue_those_above_and_the_user() -> None:
    s = Story()
    s.hold("x", "top/a", "ann", 2)
    s.hold("y", "top/a", "bob", 1)
    s.hold("z", "top/b", "ann", 4)
    assert s.usage("top/a") == 0.0, "no time has passed"
    s.c.now += HOUR_MS
    assert [s.usage(q) for q in ("top", "top/a", "top/b", "default")] == [pytest.approx(7 / 8), pytest.approx(3 / 8), pytest.approx(4 / 8), None]
    assert s.users() == {"ann": pytest.approx(2 / 8), "bob": pytest.approx(1 / 8)}


def test_what_was_used_a_half_life_ago_counts_half() -> None:
    s = Story()
    s.hold("x", "top/a", "ann", 8)
    s.c.now += HOUR_MS
    s.gone("x")
    # An hour of 8 GPUs, then one of none: the older hour weighs half of the younger.
    s.c.now += HOUR_MS
    assert s.usage("top/a") == pytest.approx(1 / 3)
    s.c.now += HOUR_MS
    assert s.usage("top/a") == pytest.approx(1 / 7)


def test_usage_is_a_part_of_what_the_nodes_had() -> None:
    s = Story()
    s.hold("x", "top/a", "ann", 8)
    s.c.now += HOUR_MS
    s.c.join("n2")
    s.c.now += HOUR_MS
    assert s.usage("top/a") == pytest.approx((8 / 2 + 8) / (8 / 2 + 16))
    s.c.add(ev.NodeLost(node="n2", cause="lease_expired", message=""))
    s.c.now += HOUR_MS
    assert s.usage("top/a") == pytest.approx((8 / 4 + 8 / 2 + 8) / (8 / 4 + 16 / 2 + 8))


def test_what_still_dies_is_held_until_its_node_says_that_it_is_gone() -> None:
    s = Story()
    s.hold("x", "top/a", "ann", 8)
    s.c.add(ev.GangFinished(job="x", outcome="cancelled", cause="", message=""))
    s.c.now += HOUR_MS
    assert s.usage("top/a") == pytest.approx(1.0)
    s.c.add(ev.PartReleased(job="x", node="n1"))
    assert s.c.state.usage.queues["top/a"].held == (0, 0, 0)


def test_another_half_life_keeps_the_usage_so_far() -> None:
    s = Story()
    s.hold("x", "top/a", "ann", 8)
    s.c.now += HOUR_MS
    s.gone("x")
    s.c.now += HOUR_MS
    before, users = s.usage("top/a"), s.users()
    s.declare(7200.0, b=600.0)
    assert s.usage("top/a") == pytest.approx(before)
    assert s.users() == pytest.approx(users)
    assert list(s.c.state.usage.clocks) == [7_200_000, 600_000]
    # In the long run it is as if it had always been so.
    s.c.now += 200 * HOUR_MS
    assert s.usage("top/a") == pytest.approx(0.0, abs=1e-12)
    s.declare(0.0, b=600.0)
    assert s.usage("top/a") is None
    assert (list(s.c.state.usage.queues), list(s.c.state.usage.clocks)) == ([], [600_000])
    s.declare(0.0)
    assert s.c.state.usage == Usage()


def test_what_is_held_when_a_half_life_is_declared_counts_from_then_on() -> None:
    s = Story(0.0)
    s.hold("x", "top/a", "ann", 4)
    s.c.now += 5 * HOUR_MS
    assert s.c.state.usage == Usage()
    s.declare(3600.0)
    assert s.usage("top/a") == 0.0
    s.c.now += 1
    assert s.usage("top/a") == pytest.approx(0.5)
    s.gone("x")
    assert s.c.state.usage.queues["top/a"].held == (0, 0, 0)


def test_users_who_were_not_seen_for_long_are_forgotten() -> None:
    s = Story()
    for number in range(20):
        s.hold(f"x{number}", "top/a", f"user{number}", 1)
        s.c.now += HOUR_MS
        s.gone(f"x{number}")
        s.c.now += 10 * HOUR_MS
    assert list(s.c.state.usage.users["top/a"]) == [f"user{n}" for n in range(17, 20)]


def test_a_state_that_was_stored_before_usage_was_counted() -> None:
    s = Story()
    s.hold("x", "top/a", "ann", 2)
    s.c.state.usage = Usage()
    state = load_state(dump_state(s.c.state))
    assert state.usage.queues["top/a"].held[0] == 2_000
    assert state.usage.clocks[HOUR_MS].held[0] == 8_000


@pytest.mark.parametrize("seed", range(10))
def test_accounts_hold_what_the_nodes_say(seed: int) -> None:
    """Whatever happens: what is held by the accounts is what is held on the nodes, and no usage is beyond everything."""
    rng = random.Random(seed)
    s = Story()
    s.c.join("n2")
    for number in range(80):
        s.c.now += rng.randrange(HOUR_MS)
        jobs = [j for j in s.c.state.jobs.values() if j.active]
        match rng.randrange(6):
            case 0 | 1:
                spec = JobSpec(
                    ("x",), queue=rng.choice(["top/a", "top/b", "default"]), resources=Resources(gpus=rng.randrange(3), cpus_milli=100),
                    gang=Gang(*[rng.randrange(1, 5)] * 2),
                )  # fmt: skip
                s.c.add(ev.JobSubmitted(job=f"j{number}", spec=spec, user=rng.choice(["ann", "bob", ""])))
            case 2 if jobs:
                s.c.add(ev.GangFinished(job=rng.choice(jobs).id, outcome="succeeded", cause="", message=""))
            case 3:
                node = rng.choice(list(s.c.state.nodes.values()))
                s.c.add(ev.NodeLost(node=node.id, cause="lease_expired", message="")) if node.status == "up" else s.c.join(node.id)
            case 4:
                for node in s.c.state.nodes.values():
                    for job, holding in list(node.holdings.items()):
                        if holding.leaving_since and node.status == "up":
                            s.c.add(ev.PartReleased(job=job, node=node.id))
            case _:
                s.declare(rng.choice([0.0, 600.0, 3600.0]), b=rng.choice([None, 0.0, 60.0]))
        s.c.cycle()
        state = s.c.state
        for path, account in state.usage.queues.items():
            held = [(h, state.jobs[j].spec.queue) for n in state.nodes.values() for j, h in n.holdings.items()]
            mine = [h for h, queue in held if queue == path or queue.startswith(path + "/")]
            assert account.held == (sum(1_000 * len(h.gpus) for h in mine), sum(h.cpus_milli for h in mine), sum(h.memory_mib for h in mine))
            assert all(used >= 0 for used in account.used)
        for path in state.usage.queues:
            assert (s.usage(path) or 0.0) <= 1.0 + 1e-9 or any(n.status == "lost" and n.holdings for n in state.nodes.values())
        up = [n for n in state.nodes.values() if n.status == "up"]
        assert all(clock.held[0] == 8_000 * len(up) for clock in state.usage.clocks.values())
        assert dump_state(load_state(dump_state(state))) == dump_state(state)


def test_a_declaration_is_a_pure_function_of_the_accounts() -> None:
    tree = QueueTree(Declaration((QueueSpec("q", usage_half_life_s=60.0),), 1))
    old = Usage()
    take_in(old, tree, "q", "u", (1, 0, 0), 5)
    again = declared(old, tree, tree, [("q", "u", (1, 0, 0)), ("gone", "u", (1, 0, 0))], (8, 0, 0), 10)
    assert again.queues["q"].held == (1, 0, 0)
    assert old.queues["q"].at_ms == 5
