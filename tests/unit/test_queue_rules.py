"""What queues declare is what the passes do: minimum runtimes, usage, users in turns, amounts by GPU model. On folded states."""

from __future__ import annotations

import random
from typing import Any

import pytest
import test_policy

from gangline.core.model import events as ev
from gangline.core.model.queues import Amounts, QueueSpec, Weights
from gangline.core.model.spec import Gang, JobSpec, Resources
from gangline.core.policy.fairshare import Claim, divide
from gangline.core.policy.mirror import Mirror
from gangline.core.policy.placing import Placer
from gangline.core.policy.queues import Queue
from gangline.core.policy.requests import GPU, UNLIMITED
from gangline.core.policy.schedule import schedule
from gangline.core.policy.shares import queues_with_shares

HOUR_MS = 3_600_000


class Cluster(test_policy.Cluster):
    """A cluster with queues; jobs have users."""

    def __init__(self, *queues: QueueSpec, **gpus: int) -> None:
        super().__init__()
        for name, count in (gpus or {"n1": 8}).items():
            self.join(name, count)
        self.add(ev.QueuesDeclared(queues=(*queues, QueueSpec("default"))))

    def ask(self, job: str, queue: str = "q", user: str = "", gpus: int = 1, ranks: int = 1, models: tuple[str, ...] = (), **more: Any) -> None:
        resources = Resources(gpus=gpus, cpus_milli=100, gpu_models=models)
        spec = JobSpec(("x",), queue=queue, gang=Gang(ranks, more.pop("least", ranks)), resources=resources, **more)
        self.add(ev.JobSubmitted(job=job, spec=spec, user=user))

    def placed(self) -> list[str]:
        return [j.id for j in self.state.jobs.values() if j.active]

    def order(self) -> list[str]:
        """Submitted jobs in the order in which the last cycle placed them."""
        return [e.job for e in self.log if isinstance(e, ev.GangPlaced)]

    def finish(self, *jobs: str) -> None:
        for job in jobs:
            self.add(ev.GangFinished(job=job, outcome="succeeded", cause="", message=""))
            for node in self.state.nodes.values():
                if job in node.holdings:
                    self.add(ev.PartReleased(job=job, node=node.id))

    def queue(self, path: str) -> Queue:
        mirror = self.state.scratch.mirror
        assert isinstance(mirror, Mirror)
        return mirror.world.queues[path]


# ---------------------------------------------------------------- preempt_min_runtime


def young_and_old(**queue: float | None) -> Cluster:
    c = Cluster(QueueSpec("top", preempt_min_runtime_s=queue.get("top")), QueueSpec("top/q", preempt_min_runtime_s=queue.get("own")))
    c.ask("low", "top/q", ranks=8, priority=10)
    c.cycle()
    c.run("low")
    c.now += 30_000
    c.ask("high", "top/q", ranks=8, priority=60)
    c.cycle()
    return c


@pytest.mark.parametrize(
    ("queue", "state"),
    [
        ({}, "preempting"), ({"own": 60.0}, "running"), ({"top": 60.0}, "running"), ({"top": 60.0, "own": 0.0}, "preempting"),
        ({"own": 30.0}, "preempting"),
    ],
)
def test_a_gang_is_not_preempted_before_it_has_run_so_long(queue: dict[str, float], state: str) -> None:
    assert young_and_old(**queue).job("low").state == state


def test_when_it_has_run_so_long_the_gang_that_waited_has_it_preempted() -> None:
    c = young_and_old(own=60.0)
    c.now += 29_999
    c.cycle()
    assert c.job("low").state == "running"
    c.now += 15_000
    c.cycle()
    assert c.job("low").state == "preempting"


def test_the_minimum_runtime_within_a_queue_is_not_that_between_queues() -> None:
    nothing = Amounts(gpus_milli=0)
    spec = QueueSpec("q", quota=nothing, preempt_min_runtime_s=3600.0, reclaim_min_runtime_s=0.0)
    c = Cluster(spec, QueueSpec("entitled", quota=Amounts(8_000)))
    c.ask("low", ranks=8, priority=10)
    c.cycle()
    c.run("low")
    c.now += 1_000
    c.ask("own", ranks=8, priority=60)
    c.cycle()
    assert c.job("low").state == "running"
    c.ask("other", "entitled", ranks=8, priority=10)
    c.cycle()
    assert c.job("low").state == "preempting"


# ---------------------------------------------------------------- usage


def claim(demand: int, weight: float = 1.0, used: float | None = None, quota: int = 0, age: int = 0) -> Claim:
    return Claim(quota * GPU, UNLIMITED, demand * GPU, weight, 100, age, used)


def shared(total: int, *claims: Claim) -> list[float]:
    divide(list(claims), total * GPU, GPU)
    return [c.share / GPU for c in claims]


@pytest.mark.parametrize(
    ("claims", "shares"),
    [
        # The worked example of docs/queues.md.
        ([claim(90, used=0.8), claim(90, used=0.2)], [18, 72]),
        ([claim(90, used=0.5), claim(90, used=0.5)], [45, 45]),
        ([claim(90, used=1.0), claim(90, used=0.0)], [0, 90]),
        ([claim(90, used=1.0), claim(30, used=0.0)], [60, 30]),
        # Quota first; and who wants no more than its part gets it.
        ([claim(90, used=1.0, quota=30), claim(90, used=0.0)], [30, 60]),
        ([claim(10, used=0.6), claim(90, used=0.0)], [10, 80]),
        # A queue whose past does not count has its plain weight.
        ([claim(90, used=1.0), claim(90), claim(90)], [0, 45, 45]),
        # More than everything was used: their parent had more then.
        ([claim(90, used=2.0), claim(90, used=2.0)], [45, 45]),
        ([claim(90, weight=0.0, used=0.0), claim(90, used=1.0)], [0, 90]),
    ],
)
def test_the_past_counts_in_what_is_over(claims: list[Claim], shares: list[float]) -> None:
    assert shared(90, *claims) == shares


def test_who_has_had_the_cluster_gives_way_to_who_has_not() -> None:
    nothing = Amounts(gpus_milli=0)
    half_lives = {"usage_half_life_s": 3600.0, "reclaim_min_runtime_s": 0.0}
    c = Cluster(QueueSpec("a", quota=nothing, **half_lives), QueueSpec("b", quota=nothing, **half_lives))
    for n in range(8):
        c.ask(f"a{n}", "a")
    c.cycle()
    for n in range(8):
        c.run(f"a{n}")
    c.now += HOUR_MS
    for n in range(8):
        c.ask(f"b{n}", "b")
    c.cycle()
    # Weights are 1/2 each and a has used all, b nothing: max(0, 1/2 + (1/2 - 1)) = 0 to max(0, 1/2 + 1/2) = 1.
    assert [c.queue(q).fair_share[0] for q in "ab"] == [0, 8_000]
    assert [j for j in c.state.jobs if c.job(j).state == "preempting"] == [f"a{n}" for n in range(8)]


def test_without_a_half_life_the_past_does_not_count() -> None:
    nothing = Amounts(gpus_milli=0)
    c = Cluster(QueueSpec("a", quota=nothing, reclaim_min_runtime_s=0.0), QueueSpec("b", quota=nothing))
    for n in range(8):
        c.ask(f"a{n}", "a")
    c.cycle()
    for n in range(8):
        c.run(f"a{n}")
    c.now += HOUR_MS
    for n in range(8):
        c.ask(f"b{n}", "b")
    c.cycle()
    assert [c.queue(q).fair_share[0] for q in "ab"] == [4_000, 4_000]


def test_in_a_small_part_of_the_tree_usage_counts_as_much() -> None:
    half_life = {"usage_half_life_s": 3600.0, "reclaim_min_runtime_s": 0.0}
    c = Cluster(
        QueueSpec("small", quota=Amounts(2_000), limit=Amounts(2_000), **half_life), QueueSpec("small/x", quota=Amounts(0)),
        QueueSpec("small/y", quota=Amounts(0)), n1=8,
    )  # fmt: skip
    c.ask("x1", "small/x")
    c.ask("x2", "small/x")
    c.cycle()
    c.run("x1")
    c.run("x2")
    c.now += HOUR_MS
    c.ask("y1", "small/y")
    c.ask("y2", "small/y")
    c.cycle()
    assert [c.queue(f"small/{q}").usage[0] for q in "xy"] == [pytest.approx(0.25), 0.0]  # type: ignore[index]
    assert [c.queue(f"small/{q}").fair_share[0] for q in "xy"] == [0, 2_000]


# ---------------------------------------------------------------- users in turns


def test_users_take_turns() -> None:
    c = Cluster(QueueSpec("q", user_fairness=True))
    for n in range(10):
        c.ask(f"a{n}", user="ann")
    for n in range(3):
        c.ask(f"b{n}", user="bob")
    c.ask("c0", user="cleo", gpus=2)
    c.cycle()
    assert sorted(c.placed()) == ["a0", "a1", "a2", "b0", "b1", "b2", "c0"]
    c.finish("a0", "a1")
    c.cycle()
    # ann holds one, bob three and cleo two: ann is next, and then again, for cleo has nothing that waits.
    assert sorted(c.placed()) == ["a2", "a3", "a4", "b0", "b1", "b2", "c0"]


def test_without_turns_it_is_first_come_first_served() -> None:
    c = Cluster(QueueSpec("q"))
    for n in range(10):
        c.ask(f"a{n}", user="ann")
    c.ask("b0", user="bob")
    c.cycle()
    assert sorted(c.placed()) == [f"a{n}" for n in range(8)]


def test_priority_comes_before_turns() -> None:
    c = Cluster(QueueSpec("q", user_fairness=True))
    for n in range(6):
        c.ask(f"b{n}", user="bob", priority=40)
    for n in range(7):
        c.ask(f"a{n}", user="ann", priority=60)
    c.cycle()
    assert sorted(c.placed()) == [*(f"a{n}" for n in range(7)), "b0"]
    assert c.cycle() == []


def test_what_a_user_has_used_counts() -> None:
    c = Cluster(QueueSpec("q", user_fairness=True, usage_half_life_s=3600.0))
    c.ask("old", user="ann", gpus=8)
    c.cycle()
    c.now += HOUR_MS
    c.finish("old")
    c.now += HOUR_MS
    for n in range(8):
        c.ask(f"a{n}", user="ann")
    for n in range(8):
        c.ask(f"b{n}", user="bob")
    c.cycle()
    # ann had a third of the cluster on average, 2⅔ GPUs: bob gets 3, and then they take turns.
    ann = sum(j.startswith("a") for j in c.placed())
    bob = sum(j.startswith("b") for j in c.placed())
    assert (ann, bob) == (3, 5)


def test_a_job_that_fits_nowhere_does_not_keep_others_of_its_user_or_queue_waiting() -> None:
    c = Cluster(QueueSpec("q", user_fairness=True))
    c.ask("big", user="ann", gpus=16)
    c.ask("bigger", user="bob", gpus=16)
    c.ask("a", user="ann")
    c.ask("b", user="bob")
    c.cycle()
    assert sorted(c.placed()) == ["a", "b"]
    assert c.job("bigger").deferral is not None


def test_victims_are_first_those_of_the_user_who_holds_most() -> None:
    c = Cluster(QueueSpec("q", user_fairness=True, quota=Amounts(0), reclaim_min_runtime_s=0.0), QueueSpec("other", quota=Amounts(4_000)))
    for n in range(2):
        c.ask(f"b{n}", user="bob")
    c.cycle()
    for n in range(6):
        c.ask(f"a{n}", user="ann")
    c.cycle()
    for job in c.placed():
        c.run(job)
    c.now += 1_000
    c.ask("x", "other", gpus=4)
    c.cycle()
    # Without turns the youngest go; here ann gives until both hold as much.
    assert [j for j in c.state.jobs if c.job(j).state == "preempting"] == ["a2", "a3", "a4", "a5"]


def test_many_users_and_jobs_cost_no_more_tries_than_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []
    place = Placer.place

    def counted(self: Placer, job: object, *args: object, **more: object) -> bool:
        tries.append(job.name)  # type: ignore[attr-defined]
        return place(self, job, *args, **more)  # type: ignore[arg-type]

    c = Cluster(QueueSpec("q", user_fairness=True))
    for n in range(300):
        c.ask(f"j{n}", user=f"u{n % 50}", gpus=3)
    monkeypatch.setattr(Placer, "place", counted)
    c.cycle()
    assert len(c.placed()) == 2
    assert len(tries) <= 4


# ---------------------------------------------------------------- amounts by GPU model


def mixed(*queues: QueueSpec) -> Cluster:
    """Two nodes of 8 H100 and two of 8 A100."""
    c = Cluster(*queues, n1=8, n2=8)
    c.join("n3", 8, "A100")
    c.join("n4", 8, "A100")
    return c


def gpus(milli: int, **models: int) -> Amounts:
    return Amounts(gpus_milli=milli * 1000, models={model: count * 1000 for model, count in models.items()})


def models_of(c: Cluster, *jobs: str) -> dict[str, int]:
    """GPUs that the jobs hold by model."""
    found: dict[str, int] = {}
    for job in jobs:
        for node, part in c.job(job).parts.items():
            model = c.state.nodes[node].registration.gpus[0].model
            found[model] = found.get(model, 0) + sum(len(r.gpus) for r in part.ranks.values())
    return found


def test_a_limit_of_a_model_is_never_exceeded_and_other_models_are_used_instead() -> None:
    c = mixed(QueueSpec("q", limit=Amounts(models={"H100": 4_000})))
    for n in range(4):
        c.ask(f"j{n}", gpus=3)
    c.ask("h", gpus=2, models=("H100",))
    c.ask("last", gpus=1, models=("H100",))
    c.cycle()
    assert models_of(c, *c.placed()) == {"H100": 4, "A100": 9}
    assert c.job("h").deferral is not None
    deferral = c.job("h").deferral
    assert (deferral.code, deferral.need, deferral.have) == ("over_limit", {"gpus": 2}, {"gpus": 1})
    assert deferral.message == "needs 2 GPUs, but queue q has 1 H100 left of its limit by GPU model"


def test_the_limit_holds_for_all_below() -> None:
    c = mixed(QueueSpec("top", limit=Amounts(models={"H100": 4_000})), QueueSpec("top/a"), QueueSpec("top/b"))
    c.ask("a", "top/a", gpus=3, models=("H100",))
    c.ask("b", "top/b", gpus=3, models=("H100",))
    c.cycle()
    assert c.placed() == ["a"]
    assert c.job("b").deferral.message == "needs 3 GPUs, but queue top has 1 H100 left of its limit by GPU model"
    c.finish("a")
    c.cycle()
    assert c.placed() == ["b"]


def test_a_gang_that_takes_several_models_gets_the_first_that_its_queue_may_use() -> None:
    c = mixed(QueueSpec("q", limit=Amounts(models={"H100": 8_000})))
    c.ask("one", gpus=4, models=("H100", "A100"))
    c.ask("two", gpus=1, ranks=6, models=("H100", "A100"))
    c.cycle()
    assert (models_of(c, "one"), models_of(c, "two")) == ({"H100": 4}, {"A100": 6})
    c.ask("three", gpus=1, ranks=12, models=("H100", "A100"))
    c.cycle()
    assert models_of(c, "three") == {}, "neither model has room for all of it"
    c.finish("one")
    c.finish("two")
    c.cycle()
    assert models_of(c, "three") == {"A100": 12}


def test_what_cannot_be_preempted_stays_within_the_quota_of_a_model() -> None:
    c = mixed(QueueSpec("q", quota=gpus(12, H100=4)))
    for n in range(4):
        c.ask(f"fixed{n}", gpus=2, models=("H100",), preemptible=False)
    c.ask("other", gpus=8, models=("A100",), preemptible=False)
    c.ask("free", gpus=4, models=("H100",))
    c.cycle()
    # The A100 is not named: only the quota of 12 GPUs bounds it.
    assert c.placed() == ["fixed0", "fixed1", "other", "free"]
    deferral = c.job("fixed2").deferral
    assert deferral is not None
    assert deferral.code == "over_quota"


def test_within_its_quota_of_a_model_a_queue_keeps_it() -> None:
    entitled = {"reclaim_min_runtime_s": 0.0}
    c = mixed(QueueSpec("a", quota=gpus(4, H100=8), **entitled), QueueSpec("b", quota=gpus(28), **entitled))
    c.ask("a1", "a", gpus=8, models=("H100",))
    c.ask("a2", "a", gpus=8, models=("A100",))
    c.cycle()
    for job in c.placed():
        c.run(job)
    c.now += 1_000
    for n in range(3):
        c.ask(f"b{n}", "b", gpus=8)
    c.cycle()
    # a is far above its quota of 4 GPUs, but within that of 8 H100: it gives the A100.
    assert [c.job(j).state for j in ("a1", "a2")] == ["running", "preempting"]


def test_a_queue_gets_its_quota_of_a_model_from_one_that_has_more_than_its_own() -> None:
    entitled = {"reclaim_min_runtime_s": 0.0}
    c = mixed(QueueSpec("a", quota=gpus(16, H100=8), **entitled), QueueSpec("b", quota=gpus(16, H100=8), **entitled))
    for n in range(4):
        c.ask(f"a{n}", "a", gpus=4, models=("H100",))
    c.cycle()
    for job in c.placed():
        c.run(job)
    c.now += 1_000
    c.ask("b", "b", gpus=8, models=("H100",))
    c.cycle()
    # a has its 16 GPUs, as many as its quota, but all of them are H100, of which 8 are of its quota.
    assert [j for j in c.state.jobs if c.job(j).state == "preempting"] == ["a2", "a3"]
    assert [c.queue(q).models["H100"].fair_share for q in "ab"] == [8_000, 8_000]


def test_the_weights_of_a_model_divide_what_is_over() -> None:
    nothing, weights = gpus(0), {"reclaim_min_runtime_s": 0.0}
    c = mixed(
        QueueSpec("a", quota=nothing, over_quota_weight=Weights(models={"H100": 3.0}), **weights), QueueSpec("b", quota=nothing, **weights)
    )
    for n in range(16):
        c.ask(f"a{n}", "a", models=("H100",))
        c.ask(f"b{n}", "b", models=("H100",))
    c.cycle()
    held = {q: sum(models_of(c, *(j for j in c.placed() if j.startswith(q))).values()) for q in "ab"}
    assert held == {"a": 12, "b": 4}
    assert [c.queue(q).models["H100"].fair_share for q in "ab"] == [12_000, 4_000]
    for job in c.placed():
        c.run(job)
    c.now += 100_000
    assert not any(isinstance(e, ev.GangPreempting) for e in c.cycle()), "nobody is above its share of the model"


@pytest.mark.parametrize("seed", range(20))
def test_the_shares_that_are_shown_are_those_of_the_passes(seed: int) -> None:
    rng = random.Random(seed)

    def some() -> Amounts:
        return Amounts(gpus_milli=rng.choice([None, 0, 4_000, 9_000]), models=rng.choice([{}, {"H100": 4_000}, {"A100": 3_000}]))

    paths = ["a", "a/x", "a/y", "b", "c"]
    half_lives, priorities = [None, 60.0], [100, 200]
    c = mixed(
        *(QueueSpec(p, quota=some(), limit=some(), usage_half_life_s=rng.choice(half_lives), priority=rng.choice(priorities)) for p in paths)
    )
    for n in range(30):
        models = rng.choice([(), ("H100",), ("A100",)])
        c.ask(f"j{n}", rng.choice(["a/x", "a/y", "b", "c"]), gpus=rng.choice([0, 1, 4, 7]), ranks=rng.choice([1, 2]), models=models)
        if n % 7 == 6:
            c.cycle()
            for job in c.placed():
                if c.job(job).state == "placed":
                    c.run(job)
            c.now += 30_000
    c.cycle()
    mirror = c.state.scratch.mirror
    assert isinstance(mirror, Mirror)
    c.state.scratch.queue_dirty = True
    schedule(c.state, c.now)
    shown = queues_with_shares(c.state, c.now)
    assert list(shown) == [*paths, "default"]
    for path, queue in mirror.world.queues.items():
        assert (shown[path].allocated, shown[path].fair_share) == (queue.allocated, queue.fair_share)
        for model, account in queue.models.items():
            assert shown[path].models[model].fair_share == account.fair_share


def test_models_cost_nothing_where_no_queue_names_one() -> None:
    c = mixed(QueueSpec("q"))
    c.ask("j", gpus=2)
    c.cycle()
    assert c.queue("q").models == {}


def test_the_worked_example_of_the_docs() -> None:
    """docs/queues.md, Amounts by GPU model."""
    c = Cluster(
        QueueSpec("nlp", quota=gpus(16, H100=8), limit=Amounts(models={"H100": 12_000}), reclaim_min_runtime_s=0.0),
        QueueSpec("vision", quota=gpus(16, H100=8), reclaim_min_runtime_s=0.0), n1=8, n2=8,
    )  # fmt: skip
    c.join("n3", 8, "A100")
    c.join("n4", 8, "A100")
    for n in range(4):
        c.ask(f"nlp{n}", "nlp", gpus=4, models=("H100", "A100"))
    c.cycle()
    assert models_of(c, *c.placed()) == {"H100": 12, "A100": 4}
    c.ask("fixed", "nlp", gpus=4, models=("H100",), preemptible=False)
    c.cycle()
    assert c.job("fixed").deferral.code == "over_limit"
    for job in c.placed():
        c.run(job)
    c.now += 1_000
    c.ask("v", "vision", gpus=8, models=("H100",))
    c.cycle()
    assert [j for j in c.state.jobs if c.job(j).state == "preempting"] == ["nlp2"]
    c.add(ev.GangRequeued(job="nlp2", generation=1, cause="reclaimed", failure_class="infrastructure", message=""))
    for node in c.state.nodes.values():
        if "nlp2" in node.holdings:
            c.add(ev.PartReleased(job="nlp2", node=node.id))
    c.cycle()
    assert (models_of(c, "v"), models_of(c, "nlp2")) == ({"H100": 8}, {"A100": 4})
    for job in ("v", "nlp2"):
        c.run(job)
    c.now += 1_000
    c.ask("w", "vision", gpus=4, models=("H100",))
    c.cycle()
    assert not any(c.job(j).state == "preempting" for j in c.state.jobs)
