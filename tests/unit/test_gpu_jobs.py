"""Parts of GPUs from the job to the document of the agent: the real decision, fold and projection, without any I/O."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import test_policy

from gangline.core.model import events as ev
from gangline.core.model.documents import DesiredRank, Gpu, Registration
from gangline.core.model.fold import IllegalTransition
from gangline.core.model.gpufacts import MEMORY_MIB, MIG_LAYOUTS
from gangline.core.model.gpushares import GpuShare, MigSlice
from gangline.core.model.narrate import sentence
from gangline.core.model.project import project
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Gang, JobSpec, Resources
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.capacity import impossible
from gangline.core.policy.estimate import start_of
from gangline.core.policy.mirror import Mirror
from gangline.leader.gpurows import InstanceRow, PartedGpuRow, ShareRow
from gangline.leader.queuerows import queue_rows
from gangline.leader.rows import job_row, node_row, whole_job
from gangline.leader.whyrows import why_row


def join(c: Any, node: str, gpus: int = 2, model: str = "H100", links: int = 1, sick: tuple[int, ...] = ()) -> None:
    """A node whose GPUs hang in groups of `links`."""
    mig = model if model in MIG_LAYOUTS else ""
    devices = tuple(Gpu(i, f"{node}-{i}", model, MEMORY_MIB[model], i not in sick, mig, (i // links,)) for i in range(gpus))
    c.add(ev.NodeJoined(registration=Registration(node, f"id-{node}", "b", node, "", devices, 64_000, 512_000)))


def cluster(*models: str, gpus: int = 2, links: int = 1) -> Any:
    c = test_policy.Cluster()
    for number, model in enumerate(models, 1):
        join(c, f"n{number}", gpus, model, links)
    return c


def asks(**what: Any) -> Resources:
    return Resources(cpus_milli=100, **what)


def got(c: Any, job: str) -> list[tuple[str, tuple[int, ...], GpuShare | None]]:
    """Node, GPUs and share of each rank, as the agents are told."""
    ranks: list[tuple[str, DesiredRank]] = []
    for node in c.job(job).parts:
        ranks += [(node, r) for gang in project(c.state, node).gangs if gang.job == job for r in gang.ranks]
    return [(node, r.gpus, r.share) for node, r in sorted(ranks, key=lambda found: found[1].rank)]


def test_halves_share_a_gpu_and_the_next_one_is_left_whole() -> None:
    c = cluster("H100")
    for job in ("a", "b", "w", "late"):
        c.submit(job, resources=asks(gpus=1) if job == "w" else asks(gpu_share_milli=500))
    c.cycle()
    assert got(c, "a") == got(c, "b") == [("n1", (0,), GpuShare(500))]
    assert got(c, "w") == [("n1", (1,), None)]
    assert c.job("late").state == "queued"
    assert c.state.nodes["n1"].free_gpus == ()
    c.run("a")
    c.add(ev.GangFinished(job="a", outcome="cancelled", cause="stopped", message=""))
    c.add(ev.PartReleased(job="a", node="n1"))
    c.cycle()
    assert got(c, "late") == [("n1", (0,), GpuShare(500))]


def test_memory_is_a_part_of_the_gpu_that_it_is_on() -> None:
    c = cluster("A100-40GB", "H100", gpus=1)
    c.submit("x", resources=asks(gpu_memory_mib=20_480, gpu_models=("H100",)))
    c.submit("y", resources=asks(gpu_memory_mib=20_480, gpu_models=("A100-40GB",)))
    c.submit("z", resources=asks(gpu_memory_mib=41_000, gpu_models=("A100-40GB",)))
    c.cycle()
    assert got(c, "x") == [("n2", (0,), GpuShare(260, 20_480))]
    assert got(c, "y") == [("n1", (0,), GpuShare(500, 20_480))]
    assert c.job("z").state == "queued"


def test_three_thirds_of_the_memory_fit_although_each_is_charged_more() -> None:
    c = cluster("A100-40GB", gpus=1)
    for job in ("a", "b", "c"):
        c.submit(job, resources=asks(gpu_memory_mib=13_653))
    c.cycle()
    assert [got(c, job)[0][2] for job in ("a", "b", "c")] == [GpuShare(340, 13_653)] * 3


def test_the_worked_example_of_instances() -> None:
    """docs/gpus.md."""
    c = cluster("H100")
    where = []
    for number, profile in enumerate(("1g.10gb", "3g.40gb", "2g.20gb", "1g.10gb")):
        c.submit(f"j{number}", resources=asks(mig=profile, mig_count=1))
        c.cycle()
        ((_, _, share),) = got(c, f"j{number}")
        where += [(one.profile, one.gpu, one.start) for one in share.mig]
    assert where == [("1g.10gb", 0, 6), ("3g.40gb", 0, 0), ("2g.20gb", 0, 4), ("1g.10gb", 1, 6)]
    c.submit("whole", resources=asks(gpus=1))
    c.submit("seven", resources=asks(mig="7g.80gb", mig_count=1))
    c.cycle()
    assert c.job("whole").state == c.job("seven").state == "queued"
    assert c.job("seven").deferral.code == "not_enough_mig"


def test_a_gang_of_instances() -> None:
    c = cluster("H100", "H100")
    c.submit("x", ranks=4, gang=Gang(4, 4, 2), resources=asks(mig="3g.40gb", mig_count=2))
    c.cycle()
    pair = [GpuShare(0, 0, (MigSlice(g, 0, 4, "3g.40gb"), MigSlice(g, 4, 4, "3g.40gb"))) for g in (0, 1)]
    assert got(c, "x") == [(n, (g,), pair[g]) for n in ("n1", "n2") for g in (0, 1)]


def test_ranks_of_a_node_may_share_a_gpu() -> None:
    c = cluster("H100", "H100")
    c.submit("x", ranks=8, gang=Gang(8, 8, 4), resources=asks(gpu_share_milli=250))
    c.cycle()
    assert got(c, "x") == [(n, (0,), GpuShare(250)) for n in ("n1", "n2") for _ in range(4)]


def test_neighbouring_ranks_get_neighbouring_gpus() -> None:
    c = cluster("H100", gpus=8, links=2)
    c.submit("one", resources=asks(gpus=1))
    c.submit("gang", ranks=3, resources=asks(gpus=2))
    c.cycle()
    assert [gpus for _, gpus, _ in got(c, "gang")] == [(2, 3), (4, 5), (6, 7)]
    c.submit("other", resources=asks(gpus=1))
    c.cycle()
    assert got(c, "other")[0][1] == (1,)


def test_queues_are_charged_for_parts() -> None:
    c = cluster("H100", gpus=4)
    quota = Amounts(gpus_milli=1_000)
    c.add(ev.QueuesDeclared(queues=(QueueSpec("q", limit=quota), QueueSpec("r", limit=Amounts(gpus_milli=3_000)))))
    for job in ("a", "b", "c"):
        c.submit(job, queue="q", resources=asks(gpu_share_milli=400))
    c.submit("m", queue="r", resources=asks(mig="3g.40gb", mig_count=1))
    c.submit("n", queue="r", resources=asks(mig="1g.10gb", mig_count=1))
    c.cycle()
    assert [c.job(j).state for j in ("a", "b", "c", "m", "n")] == ["placed", "placed", "queued", "placed", "queued"]
    assert c.job("c").deferral.code == c.job("n").deferral.code == "over_limit"


def test_the_first_model_that_has_room_is_taken() -> None:
    c = cluster("H100", "H200")
    models = ("H200", "H100")
    for job in ("a", "b", "c"):
        c.submit(job, ranks=2, resources=asks(gpus=1, gpu_models=models))
        c.cycle()
    assert [got(c, job)[0][0] for job in ("a", "b")] == ["n2", "n1"]
    assert c.job("c").state == "queued"
    c.submit("small", resources=asks(mig="1g.10gb", mig_count=1, gpu_models=("H100", "A100")))
    c.cycle()
    assert c.job("small").state == "queued"


# ---------------------------------------------------------------- what people are told


def test_rows_of_parts() -> None:
    c = cluster("H100", gpus=3)
    for job, res in {"a": asks(gpu_share_milli=300), "b": asks(gpu_memory_mib=20_480), "m": asks(mig="3g.40gb", mig_count=1)}.items():
        c.submit(job, resources=res)
    c.submit("waits", ranks=2, resources=asks(gpus=2))
    c.submit("more", resources=asks(gpu_share_milli=10), queue="other")
    c.cycle()
    assert [job_row(c.job(j)).gpus for j in ("a", "b", "m", "waits")] == [0.3, 0.26, 3, 4]
    (rank,) = whole_job(c.job("m")).placement[0].ranks
    assert rank.share == ShareRow(None, None, [InstanceRow(1, "3g.40gb", 4)])
    node = node_row(c.state.nodes["n1"])
    assert (node.gpus_total, node.gpus_free) == (3, 1)
    assert node.gpus_parted == [PartedGpuRow(0, 0.43, []), PartedGpuRow(1, None, [InstanceRow(1, "3g.40gb", 4)])]
    rows = {row.id: row for row in queue_rows(c.state, c.now)}
    assert (rows["default"].allocated.gpus, rows["default"].allocated.models, rows["default"].pending.gpus) == (3.56, {"H100": 3.56}, 4)
    assert rows["other"].allocated.gpus == 0.01
    why = why_row(c.state, c.job("waits"), c.now, None, [])
    assert why.holders is not None
    assert why.holders.gpus == 3.57


def test_the_placement_says_how_gpus_are_partitioned() -> None:
    c = cluster("H100")
    c.submit("m", resources=asks(mig="3g.40gb", mig_count=1))
    (placed,) = (e for e in c.cycle() if isinstance(e, ev.GangPlaced))
    assert sentence(placed).startswith("m: placed on n1 (rank 0 with 3g.40gb at slice 4 of GPU 0) as generation 1")


def test_what_can_never_be_is_said() -> None:
    c = cluster("H100", "A100-40GB", gpus=2)
    asked = {
        "": asks(mig="1g.10gb", mig_count=14), "15 MIG instances of 1g.10gb each": asks(mig="1g.10gb", mig_count=15),
        "60GiB of a GPU each of model A100-40GB": asks(gpu_memory_mib=60 * 1024, gpu_models=("A100-40GB",)),
    }  # fmt: skip
    for said, resources in asked.items():
        never = impossible(c.state, JobSpec(("x",), gang=Gang(1, 1), resources=resources))
        assert (said in never) if said else not never
    assert not impossible(c.state, JobSpec(("x",), gang=Gang(12, 12), resources=asks(gpu_share_milli=330)))
    assert impossible(c.state, JobSpec(("x",), gang=Gang(13, 13), resources=asks(gpu_share_milli=330)))


def test_a_start_is_estimated_for_parts() -> None:
    c = cluster("H100", gpus=1)
    c.submit("first", resources=asks(gpu_share_milli=600), time_limit_s=60.0)
    c.submit("second", resources=asks(gpu_share_milli=300), time_limit_s=600.0)
    c.submit("third", resources=asks(gpu_share_milli=700), time_limit_s=60.0)
    c.submit("mig", resources=asks(mig="7g.80gb", mig_count=1))
    c.cycle()
    assert [start_of(c.state, c.job(j), c.now).at_ms for j in ("third", "mig")] == [c.now + 60_000, c.now + 600_000]


# ---------------------------------------------------------------- what the fold refuses


@pytest.mark.parametrize(
    ("resources", "gpus", "share"),
    [
        (asks(gpu_share_milli=500), (0,), None),
        (asks(gpu_share_milli=500), (0,), GpuShare(600)),
        (asks(gpu_share_milli=500), (0, 1), GpuShare(500)),
        (asks(gpu_share_milli=500), (1,), GpuShare(500)),  # the other has 600 of it
        (asks(gpu_share_milli=500), (2,), GpuShare(500)),  # partitioned
        (asks(gpu_share_milli=500), (3,), GpuShare(500)),  # not healthy
        (asks(gpus=1), (0,), GpuShare(1000)),
        (asks(gpus=1), (1,), None),
        (asks(gpu_memory_mib=1_024), (0,), GpuShare(500)),
        (asks(mig="1g.10gb", mig_count=1), (2,), GpuShare(0, 0, (MigSlice(2, 0, 1, "1g.10gb"),))),  # overlaps
        (asks(mig="1g.10gb", mig_count=1), (1,), GpuShare(0, 0, (MigSlice(1, 0, 1, "1g.10gb"),))),
        (asks(mig="1g.10gb", mig_count=2), (2,), GpuShare(0, 0, (MigSlice(2, 4, 1, "1g.10gb"),))),
        (asks(mig="1g.10gb", mig_count=1), (0,), GpuShare(0, 0, (MigSlice(2, 4, 1, "1g.10gb"),))),
    ],
)
def test_what_cannot_be_given_is_no_event(resources: Resources, gpus: tuple[int, ...], share: GpuShare | None) -> None:
    c = test_policy.Cluster()
    join(c, "n1", gpus=4, sick=(3,))
    place(c, "six", asks(gpu_share_milli=600), (1,), GpuShare(600))
    place(c, "four", asks(mig="4g.40gb", mig_count=1), (2,), GpuShare(0, 0, (MigSlice(2, 0, 4, "4g.40gb"),)))
    with pytest.raises(IllegalTransition):
        place(c, "x", resources, gpus, share)
    node = c.state.nodes["n1"]
    assert (node.free_gpus, sorted(node.parted), list(node.holdings)) == ((0,), [1, 2], ["six", "four"])


def place(c: Any, job: str, resources: Resources, gpus: tuple[int, ...], share: GpuShare | None) -> None:
    c.submit(job, resources=resources)
    c.add(ev.GangPlaced(job=job, generation=1, parts=(ev.PlacedPart("n1", (ev.PlacedRank(0, gpus, share),)),)))


# ---------------------------------------------------------------- random stories


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_gpus_are_used_in_one_way_and_the_mirror_keeps_in_step(seed: int) -> None:
    rng = random.Random(seed)
    c = cluster("H100", "H100", "A100-40GB", gpus=3)
    for number in range(60):
        c.now += rng.randrange(1, 20_000)
        live = [j for j in c.state.jobs.values() if j.state != "finished"]
        match rng.randrange(7):
            case 0 | 1 | 2:
                layout = MIG_LAYOUTS[rng.choice(("H100", "A100-40GB"))]
                devices = rng.choice([
                    asks(gpus=rng.randrange(1, 3)), asks(gpu_share_milli=rng.randrange(1, 100) * 10),
                    asks(gpu_memory_mib=rng.randrange(1, 50_000)),
                    asks(mig=rng.choice(layout.profiles).name, mig_count=rng.randrange(1, 3)),
                ])  # fmt: skip
                devices = msgspec.structs.replace(
                    devices, gpu_model_mix=rng.random() < 0.3, gpu_models=rng.choice(((), (), ("H100",), ("A100-40GB", "H100"))),
                )  # fmt: skip
                ranks, least, unit = rng.choice(((1, 1, 0), (2, 2, 0), (3, 1, 0), (4, 2, 2), (6, 3, 0)))
                c.submit(f"j{number}", gang=Gang(ranks, least, unit), resources=devices, priority=rng.choice((10, 50, 90)))
            case 3 if live:
                job = rng.choice(live)
                c.add(ev.GangFinished(job=job.id, outcome="cancelled", cause="stopped", message=""))
            case 4:
                for node in c.state.nodes.values():
                    for job_id, holding in list(node.holdings.items()):
                        if holding.leaving_since:
                            c.add(ev.PartReleased(job=job_id, node=node.id))
            case 5 if live:
                _go_on(c, rng.choice(live))
            case _:
                node = rng.choice(list(c.state.nodes.values()))
                sick = {rng.randrange(3)} if rng.random() < 0.3 else set()
                gpus = tuple(msgspec.structs.replace(g, healthy=g.index not in sick) for g in node.registration.gpus)
                c.add(ev.NodeJoined(registration=msgspec.structs.replace(node.registration, gpus=gpus)))
        c.cycle()
        _check(c)
    again = load_state(dump_state(c.state))
    assert {n.id: (n.free_gpus, n.parted) for n in again.nodes.values()} == {n.id: (n.free_gpus, n.parted) for n in c.state.nodes.values()}


def _go_on(c: Any, job: Any) -> None:
    """Take a placed gang one step towards running."""
    if job.state in ("placed", "preparing") and len(job.parts) > 1 and not job.released:
        for node in [n for n, part in job.parts.items() if not part.prepared]:
            c.add(ev.NodePrepared(job=job.id, generation=job.generation, node=node, address=node, port=1))
    elif job.state in ("placed", "preparing") and not job.lingering:
        for node, part in list(job.parts.items()):
            c.add(ev.RanksStarted(job=job.id, generation=job.generation, node=node, ranks=tuple(part.ranks)))


def _check(c: Any) -> None:
    for job in c.state.jobs.values():
        res = job.spec.resources
        models = {c.state.nodes[n].registration.gpus[0].model for n in job.parts}
        assert len(models) <= 1 or res.gpu_model_mix
        assert models <= set(res.gpu_models or models)
    for node in c.state.nodes.values():
        memory = {g.index: g.memory_mib for g in node.registration.gpus}
        whole = [g for h in node.holdings.values() for g in h.gpus]
        assert len(set(whole)) == len(whole)
        assert not set(whole) & set(node.parted)
        for gpu, use in node.parted.items():
            assert use.problem(memory[gpu]) == ""
            profiles = [MIG_LAYOUTS[g.mig].profile(one.profile) for g in node.registration.gpus if g.index == gpu for one in use.mig]
            assert all(p is not None for p in profiles)
            assert sum(p.compute for p in profiles if p is not None) <= 7
    kept = c.state.scratch.mirror
    if isinstance(kept, Mirror):
        kept.sync(c.state, c.now)
        fresh = Mirror()
        moved = c.state.scratch.everything_moved
        c.state.scratch.everything_moved = True
        fresh.sync(c.state, c.now)
        c.state.scratch.everything_moved = moved
        assert [_room(n) for n in kept.world.nodes] == [_room(n) for n in fresh.world.nodes]


def _room(n: Any) -> tuple[object, ...]:
    slots = [{d: sorted(s) for d, s in some.items()} for some in (n.slots_idle, n.slots_later)]
    return (n.name, n.now_mask, n.later_mask, n.later_milli, n.dev_idle, n.dev_later, n.sharing, slots)
