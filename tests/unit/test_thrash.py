"""Evictions end: random clusters through the production `decide` and the fold, with time, until nothing is left to decide."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from policycluster import Cluster

from gangline.core.model import events as ev
from gangline.core.model.queues import Amounts, QueueSpec, Weights
from gangline.core.model.spec import Preemption
from gangline.core.model.state import State

#: of some minutes each: longer than grace, protection and the rest between two moves together
ROUNDS = 40
STEP_S = 120.0
#: at the end of which nobody is asked to leave any more
QUIET = 8


def declared(rng: random.Random, gpus: int, by_model: bool = False) -> tuple[QueueSpec, ...]:
    """A tree of two to four leaves, below two parents or none, with quotas that may add up to more than there is.

    `by_model`: amounts of GPU models besides, usage that counts, users in turns, and minimum runtimes.
    """

    def amounts(unlimited: float) -> Amounts:
        return Amounts() if rng.random() < unlimited else Amounts(
            gpus_milli=rng.randint(0, gpus) * 1000, cpus_milli=rng.choice([None, None, rng.randint(1, 64) * 1000])
        )  # fmt: skip

    def models() -> dict[str, int]:
        return {model: rng.randint(0, gpus) * 1000 for model in ("A100", "H100") if rng.random() < 0.5}

    def queue(path: str) -> QueueSpec:
        spec = QueueSpec(
            path, quota=amounts(0.1), limit=amounts(0.8), over_quota_weight=Weights(rng.randint(0, 3), 1, 1),
            priority=rng.choice([100, 100, 200]),
        )  # fmt: skip
        if not by_model:
            return spec
        weights = {model: float(rng.randint(0, 3)) for model in models()}
        return replace(
            spec, quota=replace(spec.quota, models=models()), limit=replace(spec.limit, models=models() if rng.random() < 0.3 else {}),
            over_quota_weight=replace(spec.over_quota_weight, models=weights), user_fairness=rng.random() < 0.5,
            preempt_min_runtime_s=rng.choice([None, 20.0]), usage_half_life_s=rng.choice([None, 0.0, 60.0]),
        )  # fmt: skip

    if rng.random() < 0.5:
        return tuple(queue(name) for name in "abc"[: rng.randint(2, 3)])
    return tuple(queue(path) for path in ("x", "x/a", "x/b", "y", "y/c", "y/d")[: rng.choice([5, 6])])


def leaves(queues: tuple[QueueSpec, ...]) -> list[str]:
    return [q.path for q in queues if not any(other.parent == q.path for other in queues)]


def allocated(state: State, queue: str) -> dict[str, int]:
    """What placed gangs at or below a queue hold, those that are leaving left out."""
    jobs = [state.jobs[j] for j in state.running]
    mine = [j for j in jobs if j.state != "preempting" and (j.spec.queue == queue or j.spec.queue.startswith(f"{queue}/"))]
    models: dict[str, int] = {}
    for job in mine:
        for node, part in job.parts.items():
            model = state.nodes[node].registration.gpus[0].model
            models[model] = models.get(model, 0) + sum(len(rank.gpus) for rank in part.ranks.values()) * 1000
    return models | {
        "gpus_milli": sum(j.world_size * j.spec.resources.gpus * 1000 for j in mine),
        "cpus_milli": sum(j.world_size * j.spec.resources.cpus_milli for j in mine),
    }


def within_quota(state: State, queue: str) -> bool:
    quota, has = state.queues.specs[queue].quota, allocated(state, queue)
    amounts = {"gpus_milli": quota.gpus_milli, "cpus_milli": quota.cpus_milli, **quota.models}
    return all(amount is None or has.get(what, 0) <= amount for what, amount in amounts.items())


def side(of_queue: str, against: str) -> str:
    """The ancestor of a queue below which it parts from another."""
    mine, other = of_queue.split("/"), against.split("/")
    at = next(i for i in range(len(mine)) if other[: i + 1] != mine[: i + 1])
    return "/".join(mine[: at + 1])


class Judged(Cluster):
    """Looks at each reclaim when it is decided."""

    def add(self, *events: ev.LogEvent) -> None:
        for event in events:
            if isinstance(event, ev.GangPreempting) and event.cause == "reclaimed":
                victim, winner = self.job(event.job).spec.queue, self.job(event.beneficiary).spec.queue
                theirs = side(victim, winner)
                assert not within_quota(self.state, theirs), f"{theirs} is within quota and loses {event.job}"
                self.judge_models(event.job, victim, theirs)
            super().add(event)


    def judge_models(self, job: str, victim: str, theirs: str) -> None:
        """No queue from the victim's up to its side has less of a model than its quota of it, and gives."""
        models = {self.state.nodes[node].registration.gpus[0].model for node in self.job(job).parts}
        while len(victim) >= len(theirs):
            for model, quota in self.state.queues.specs[victim].quota.models.items():
                if model in models and self.job(job).spec.resources.gpus:
                    has = allocated(self.state, victim).get(model, 0)
                    assert has > quota, f"{victim} has {has} of {model}, within its quota of {quota}, and loses {job}"
            victim = victim.rpartition("/")[0]


def check_limits(c: Cluster) -> None:
    """No queue has more than its limits, nor more than its quotas of what cannot be preempted, of any GPU model."""
    for path, spec in c.state.queues.specs.items():
        for model, limit in spec.limit.models.items():
            assert allocated(c.state, path).get(model, 0) <= limit, f"{path} is above its limit of {model}"


def submit(c: Cluster, rng: random.Random, name: str, queues: list[str]) -> None:
    ranks = rng.choice([1, 1, 2, 3, 4, 6])
    c.submit(
        name, ranks=ranks, gpus=rng.choice([1, 1, 2, 4]), queue=rng.choice(queues), priority=(priority := rng.choice([20, 50, 50, 75, 100])),
        preemptible=priority < 100, preemption=Preemption(grace_s=rng.choice([0, 5, 10])), user=rng.choice(["ann", "bob"]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_evictions_end_and_are_never_in_vain(seed: int) -> None:
    rng = random.Random(seed)
    play(Judged(*[f"n{i}" for i in range(rng.randint(1, 4))], gpus=4), rng, by_model=False)


@pytest.mark.parametrize("seed", range(60))
def test_so_they_do_with_amounts_by_model_usage_and_turns(seed: int) -> None:
    rng = random.Random(seed)
    c = Judged()
    for i in range(rng.randint(2, 4)):
        c.join(f"n{i}", 4, model=rng.choice(["A100", "H100"]))
    play(c, rng, by_model=True)


def play(c: Judged, rng: random.Random, by_model: bool) -> None:
    queues = declared(rng, 4 * len(c.state.nodes), by_model)
    c.add(ev.QueuesDeclared(queues=queues))
    some = leaves(queues)
    names = [f"j{i}" for i in range(rng.randint(4, 14))]
    for name in names[: len(names) // 2]:
        submit(c, rng, name, some)
    c.at(1)
    c.run_all()
    c.at(120)
    for name in names[len(names) // 2 :]:
        submit(c, rng, name, some)
    evictions: list[int] = []
    for _ in range(ROUNDS):
        check_limits(c)
        before = len(c.log)
        for job in c.state.running:
            if c.job(job).state == "running" and rng.random() < 0.5:
                c.add(ev.CheckpointReported(job=job, generation=c.job(job).generation, step=1, path="/c"))
        c.at(STEP_S)
        made_for = list(c.state.earmarks)
        c.now += 10_000
        c.cycle()
        c.release()
        c.cycle()
        placed = {e.job for e in c.log[before:] if isinstance(e, ev.GangPlaced)}
        assert set(made_for) <= placed, f"room was made for {set(made_for) - placed}, who have not got it"
        c.run_all()
        evictions.append(len([e for e in c.log[before:] if isinstance(e, ev.GangPreempting)]))
    assert evictions[-QUIET:] == [0] * QUIET, evictions
    assert c.state.scratch.withheld == {}


def test_who_was_evicted_does_not_take_the_place_back_over_others() -> None:
    from gangline.core.policy.ledger import LEDGER_MS, Ledger

    c = Cluster("n1")
    for job in ("a", "b", "c"):
        c.submit(job)
    c.job("a").evicted_for, c.job("a").evicted_at_ms = "b", c.now
    c.job("b").evicted_for, c.job("b").evicted_at_ms = "c", c.now
    ledger = Ledger(c.state, c.now + 1_000)
    assert ledger.returns("a", "b")
    assert ledger.returns("a", "c")
    assert not ledger.returns("c", "a")
    assert not Ledger(c.state, c.now + LEDGER_MS).returns("a", "c")
