"""What an agent does about the difference between what should run and what does: each rule, without any I/O."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.model.documents import Desired, DesiredGang, DesiredRank, RestartNotice, StopNotice
from gangline.nodeagent.local import Local, LocalGang, LocalRank
from gangline.nodeagent.reconcile import (
    Action,
    FailPrepare,
    Forget,
    Notify,
    Prepare,
    Refuse,
    Start,
    Stop,
    next_look,
    reconcile,
    refusal,
)
from gangline.nodeagent.report import observed_gang

GPUS = dict.fromkeys(range(8), True)
NOTICE = StopNotice("preempted", "make room", deadline_ms=1, grace_s=30.0)


def ranks(*numbers: int, generation: int = 1, gpus: bool = True) -> tuple[DesiredRank, ...]:
    return tuple(DesiredRank(r, i, (r,) if gpus else (), generation) for i, r in enumerate(numbers))


def gang(job: str = "a", generation: int = 1, phase: Any = "run", of: tuple[DesiredRank, ...] | None = None, **more: Any) -> DesiredGang:
    of = of if of is not None else ranks(0, 1, generation=generation)
    return DesiredGang(job, generation, phase, of, world_size=len(of), node_rank=0, nodes=1, **more)


def desired(*gangs: DesiredGang) -> Desired:
    return Desired("n1", index=10, epoch=3, gangs=gangs)


def local_rank(rank: int, state: Any = "running", generation: int = 1, gpus: tuple[int, ...] | None = None, at: float = 0.0) -> LocalRank:
    return LocalRank(rank, generation, (rank,) if gpus is None else gpus, state, progress_at=at)


def local(*gangs: LocalGang, gpus: dict[int, bool] = GPUS, retired: dict[str, int] | None = None) -> Local:
    return Local(gpus, {g.job: g for g in gangs}, retired or {})


def have(*of: LocalRank, job: str = "a", generation: int = 1, phase: Any = "prepared", **more: Any) -> LocalGang:
    return LocalGang(job, generation, phase, of, **more)


def kinds(actions: list[Action]) -> list[str]:
    return [type(a).__name__ for a in actions]


# ---------------------------------------------------------------- from nothing to running


def test_a_new_gang_is_prepared_and_not_started_before():
    assert reconcile(desired(gang()), local(), 0.0) == [Prepare(gang(), continued=False)]


def test_nothing_is_done_while_it_is_being_prepared():
    assert reconcile(desired(gang()), local(have(phase="preparing")), 0.0) == []


def test_a_prepared_gang_starts_when_it_is_released():
    assert reconcile(desired(gang(phase="prepare")), local(have()), 0.0) == []
    assert reconcile(desired(gang(phase="run")), local(have()), 0.0) == [Start(gang(), ranks(0, 1))]


def test_running_ranks_are_left_alone():
    assert reconcile(desired(gang()), local(have(local_rank(0), local_rank(1))), 0.0) == []


@pytest.mark.parametrize("state", ["starting", "running", "stopping", "exited"])
def test_a_rank_is_started_once_in_its_generation(state: str):
    (start,) = reconcile(desired(gang()), local(have(local_rank(0, state))), 0.0)
    assert isinstance(start, Start)
    assert [r.rank for r in start.ranks] == [1]


def test_a_failed_preparation_is_not_tried_again_in_the_same_generation():
    assert reconcile(desired(gang()), local(have(phase="prepare_failed")), 0.0) == []
    assert kinds(reconcile(desired(gang(generation=2)), local(have(phase="prepare_failed")), 0.0)) == ["Prepare"]


# ---------------------------------------------------------------- from running to nothing


def test_an_undesired_gang_is_stopped_and_then_forgotten():
    (stop,) = reconcile(desired(), local(have(local_rank(0), local_rank(1, "exited"))), 0.0)
    assert isinstance(stop, Stop)
    assert (stop.ranks, stop.cause, stop.gently) == (((0, 1),), "stopped", True)
    assert reconcile(desired(), local(have(local_rank(0, "stopping"))), 0.0) == []
    assert reconcile(desired(), local(have(local_rank(0, "exited"))), 0.0) == [Forget("a")]


def test_a_gang_that_was_only_prepared_is_forgotten_at_once():
    assert reconcile(desired(), local(have(phase="preparing")), 0.0) == [Forget("a")]


def test_a_forgotten_generation_never_starts_again():
    (refuse,) = reconcile(desired(gang(generation=3)), local(retired={"a": 3}), 0.0)
    assert isinstance(refuse, Refuse)
    assert kinds(reconcile(desired(gang(generation=4)), local(retired={"a": 3}), 0.0)) == ["Prepare"]


# ---------------------------------------------------------------- generations


def test_an_older_generation_is_stopped_before_the_newer_is_prepared():
    running = have(local_rank(0), local_rank(1))
    (stop,) = reconcile(desired(gang(generation=2)), local(running), 0.0)
    assert isinstance(stop, Stop)
    assert stop.ranks == ((0, 1), (1, 1))
    half = have(local_rank(0, "stopping"), local_rank(1, "exited"))
    assert reconcile(desired(gang(generation=2)), local(half), 0.0) == []
    gone = have(local_rank(0, "exited"), local_rank(1, "exited"))
    assert reconcile(desired(gang(generation=2)), local(gone), 0.0) == [Prepare(gang(generation=2), continued=False)]


def test_a_lower_generation_than_seen_is_refused_and_changes_nothing():
    (refuse,) = reconcile(desired(gang(generation=1)), local(have(local_rank(0, generation=2), generation=2)), 0.0)
    assert isinstance(refuse, Refuse)
    assert "1" in refuse.message
    assert "2" in refuse.message


def test_restart_of_one_rank_leaves_the_others_running():
    mixed = (DesiredRank(0, 0, (0,), 1), DesiredRank(1, 1, (1,), 2))
    new = gang(generation=2, of=mixed)
    before = have(local_rank(0), local_rank(1, "exited"))
    assert reconcile(desired(new), local(before), 0.0) == [Prepare(new, continued=True)]
    prepared = have(local_rank(0), local_rank(1, "exited"), generation=2)
    assert reconcile(desired(new), local(prepared), 0.0) == [Start(new, (mixed[1],))]


def test_restart_of_a_rank_that_still_runs_stops_that_one_only():
    new = gang(generation=2, of=(DesiredRank(0, 0, (0,), 1), DesiredRank(1, 1, (1,), 2)))
    (stop,) = reconcile(desired(new), local(have(local_rank(0), local_rank(1))), 0.0)
    assert isinstance(stop, Stop)
    assert stop.ranks == ((1, 1),)


def test_a_rank_that_was_never_given_to_this_node_is_stopped():
    (stop,) = reconcile(desired(gang()), local(have(local_rank(0), local_rank(1), local_rank(7))), 0.0)
    assert isinstance(stop, Stop)
    assert stop.ranks == ((7, 1),)


# ---------------------------------------------------------------- devices


def test_a_gang_waits_for_the_devices_of_one_that_leaves():
    new = gang("b", of=ranks(0, 1))
    leaving = have(local_rank(1, "stopping"))
    assert reconcile(desired(new), local(leaving), 0.0) == []
    gone = have(local_rank(1, "exited"))
    assert reconcile(desired(new), local(gone), 0.0) == [Forget("a"), Prepare(new, continued=False)]


@pytest.mark.parametrize(("gpus", "word"), [({0: True}, "this node has 1"), ({0: True, 1: False}, "not healthy")], ids=["absent", "unhealthy"])
def test_devices_that_cannot_be_used_fail_the_preparation(gpus: dict[int, bool], word: str):
    (fail,) = reconcile(desired(gang()), local(gpus=gpus), 0.0)
    assert isinstance(fail, FailPrepare)
    assert word in fail.message
    assert "device 1" in fail.message


def test_two_ranks_on_one_device_are_refused():
    twice = gang(of=(DesiredRank(0, 0, (3,), 1), DesiredRank(1, 1, (3,), 1)))
    assert kinds(reconcile(desired(twice), local(), 0.0)) == ["FailPrepare"]
    assert kinds(reconcile(desired(gang("a", of=ranks(0)), gang("b", of=ranks(0))), local(), 0.0)) == ["Prepare", "FailPrepare"]
    assert kinds(reconcile(desired(gang(of=(DesiredRank(0, 0, (3, 3), 1),))), local(), 0.0)) == ["FailPrepare"]


def test_ranks_without_devices_wait_for_nobody():
    new = gang("b", of=ranks(0, 1, gpus=False))
    assert kinds(reconcile(desired(new), local(have(local_rank(0, "stopping"))), 0.0)) == ["Prepare"]


# ---------------------------------------------------------------- notices and hangs


def test_a_notice_is_delivered_once_and_enforced_when_its_grace_is_over():
    asked = gang(notice=NOTICE)
    running = have(local_rank(0), local_rank(1))
    assert reconcile(desired(asked), local(running), 5.0) == [Notify(asked)]
    told = have(local_rank(0), local_rank(1), notice=NOTICE, notified_at=5.0)
    assert reconcile(desired(asked), local(told), 34.9) == []
    assert next_look(desired(asked), local(told)) == 35.0
    (stop,) = reconcile(desired(asked), local(told), 35.0)
    assert isinstance(stop, Stop)
    assert stop.ranks == ((0, 1), (1, 1))


def test_nothing_is_started_under_a_notice():
    told = have(local_rank(0, "exited"), notice=NOTICE, notified_at=5.0)
    assert reconcile(desired(gang(notice=NOTICE)), local(told), 6.0) == []
    assert kinds(reconcile(desired(gang()), local(told), 6.0)) == ["Start"]


def test_a_gang_that_is_not_known_yet_gets_no_notice():
    assert kinds(reconcile(desired(gang(notice=NOTICE)), local(), 0.0)) == ["Prepare"]


def test_a_hung_rank_is_killed_without_grace():
    quiet = have(local_rank(0, at=0.0), local_rank(1, at=8.0), hang_timeout_s=10.0)
    assert reconcile(desired(gang()), local(quiet), 9.9) == []
    assert next_look(desired(gang()), local(quiet)) == 10.0
    (stop,) = reconcile(desired(gang()), local(quiet), 10.0)
    assert isinstance(stop, Stop)
    assert (stop.ranks, stop.cause, stop.gently) == (((0, 1),), "hang", False)


def test_without_timers_there_is_nothing_to_wake_up_for():
    assert next_look(desired(gang()), local(have(local_rank(0)))) == float("inf")


# ---------------------------------------------------------------- documents that must not be acted on


@pytest.mark.parametrize(
    ("document", "word"),
    [
        (Desired("n1", index=10, epoch=2), "deposed"),
        (Desired("n1", index=9, epoch=3), "older"),
        (Desired("n1", index=9, epoch=4), "older"),
        (Desired("n2", index=11, epoch=3), "n2"),
    ],
)
def test_stale_and_foreign_documents_are_refused(document: Desired, word: str):
    assert word in refusal(document, node="n1", epoch=3, index=10)


def test_the_same_and_newer_documents_are_accepted():
    for index, epoch in ((10, 3), (11, 3), (10, 4)):
        assert refusal(Desired("n1", index=index, epoch=epoch), node="n1", epoch=3, index=10) == ""


# ---------------------------------------------------------------- what is reported


def test_phases_of_the_report():
    wanted = gang(generation=2)
    assert observed_gang(have(local_rank(0)), wanted).phase == "stopping"
    assert observed_gang(have(local_rank(0, "exited"), generation=2, phase="preparing"), wanted).phase == "preparing"
    assert observed_gang(have(generation=2), wanted).phase == "prepared"
    assert observed_gang(have(local_rank(0, generation=2), generation=2), wanted).phase == "running"
    assert observed_gang(have(generation=2, phase="prepare_failed"), wanted).phase == "prepare_failed"
    assert observed_gang(have(local_rank(0)), None).phase == "stopping"


def test_the_report_has_each_rank_once_and_prefers_what_lives():
    both = have(local_rank(0, "stopping", 1), local_rank(0, "exited", 2), local_rank(1, "exited", 1), local_rank(1, "exited", 2))
    report = observed_gang(both, None)
    assert [(r.rank, r.generation) for r in report.ranks] == [(0, 1), (1, 2)]


def test_a_notice_is_acknowledged_when_every_rank_has_or_is_gone():
    of = (local_rank(0), local_rank(1, "exited"))
    assert not observed_gang(have(*of, notice=NOTICE), gang()).acknowledged
    assert observed_gang(have(*of, notice=NOTICE, acknowledged=(0,)), gang()).acknowledged
    assert not observed_gang(have(*of), gang()).acknowledged


# ---------------------------------------------------------------- laws

JOBS = st.sampled_from(["a", "b"])
STATES = st.sampled_from(["starting", "running", "stopping", "exited"])
GPU_SETS = st.sets(st.integers(0, 4), max_size=2).map(lambda s: tuple(sorted(s)))


@st.composite
def desired_gangs(draw: st.DrawFn, job: str) -> DesiredGang:
    generation = draw(st.integers(1, 4))
    numbers = sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=4)))
    of = tuple(DesiredRank(r, i, draw(GPU_SETS), draw(st.integers(max(1, generation - 1), generation))) for i, r in enumerate(numbers))
    notice = draw(st.sampled_from([None, NOTICE]))
    restart = draw(st.sampled_from([None, RestartNotice("rank_failed", "", "application")]))
    return DesiredGang(job, generation, draw(st.sampled_from(["prepare", "run"])), of, len(of), 0, 1, restart=restart, notice=notice)


@st.composite
def local_gangs(draw: st.DrawFn, job: str) -> LocalGang:
    generation = draw(st.integers(1, 4))
    keys = sorted(draw(st.sets(st.tuples(st.integers(0, 4), st.integers(1, generation)), max_size=5)))
    of = tuple(LocalRank(r, g, draw(GPU_SETS), draw(STATES), progress_at=draw(st.floats(0, 50))) for r, g in keys)
    phase = draw(st.sampled_from(["new", "preparing", "prepared", "prepare_failed"]))
    told = draw(st.sampled_from([None, NOTICE]))
    return LocalGang(job, generation, phase, of, hang_timeout_s=draw(st.sampled_from([0.0, 5.0])), notice=told, notified_at=1.0)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Desired, Local, float]:
    wanted = [draw(desired_gangs(j)) for j in sorted(draw(st.sets(JOBS)))]
    there = [draw(local_gangs(j)) for j in sorted(draw(st.sets(JOBS)))]
    gpus = {i: draw(st.integers(0, 9)) > 0 for i in range(4)}
    return desired(*wanted), local(*there, gpus=gpus), draw(st.floats(0, 100))


def held(state: Local) -> list[int]:
    return [g for x in state.gangs.values() for r in x.live for g in r.gpus]


@given(worlds())
@settings(max_examples=400, deadline=None)
def test_law_every_action_is_legal(world: tuple[Desired, Local, float]):
    want, state, now = world
    busy = set(held(state))
    for action in reconcile(want, state, now):
        match action:
            case Start(g, new):
                there = state.gangs[g.job]
                assert g.phase == "run"
                assert there.phase == "prepared"
                assert there.generation == g.generation
                assert not {r.key for r in there.ranks} & {(r.rank, r.generation) for r in new}, "started twice"
                assert not busy & {x for r in new for x in r.gpus}, "a device with a live rank on it"
                assert not [r for r in there.live if r.key not in {(w.rank, w.generation) for w in g.ranks}], "old ranks are alive"
            case Prepare(g, _):
                assert g.job not in state.gangs or g.generation >= state.gangs[g.job].generation
                assert all(state.gpus[x] for r in g.ranks for x in r.gpus)
            case Stop(job, keys, _, _, _):
                live = {r.key: r for r in state.gangs[job].live}
                assert all(live[k].state != "stopping" for k in keys if action.gently)
            case Forget(job):
                assert not state.gangs[job].live
                assert job not in {g.job for g in want.gangs}
            case Notify(g):
                assert g.notice is not None
                assert g.notice != state.gangs[g.job].notice


def apply(action: Action, state: Local, now: float) -> Local:
    """What the shell does to the local state, if everything goes well at once."""
    gangs = dict(state.gangs)

    def change(job: str, **fields: Any) -> None:
        import msgspec

        gangs[job] = msgspec.structs.replace(gangs[job], **fields)

    match action:
        case Stop(job, keys, _, _, _):
            change(job, ranks=tuple(_with(r, "exited") if r.key in keys else r for r in gangs[job].ranks))
        case Notify(g):
            change(g.job, notice=g.notice, notified_at=now)
        case Prepare(g, _) | FailPrepare(g, _):
            old = gangs.get(g.job, LocalGang(g.job, g.generation))
            keep = tuple(r for r in old.ranks if r.live or r.key in {(w.rank, w.generation) for w in g.ranks})
            phase: Any = "prepared" if isinstance(action, Prepare) else "prepare_failed"
            gangs[g.job] = LocalGang(g.job, g.generation, phase, keep)
        case Start(g, new):
            started = tuple(LocalRank(r.rank, r.generation, r.gpus, "running", progress_at=now) for r in new)
            change(g.job, ranks=(*gangs[g.job].ranks, *started))
        case Forget(job):
            del gangs[job]
    return Local(state.gpus, gangs, state.retired)


def _with(rank: LocalRank, state: Any) -> LocalRank:
    import msgspec

    return msgspec.structs.replace(rank, state=state)


@given(worlds())
@settings(max_examples=400, deadline=None)
def test_law_it_comes_to_rest_and_no_device_ever_has_two_ranks(world: tuple[Desired, Local, float]):
    want, state, now = world
    shared = len(held(state)) != len(set(held(state)))
    for _ in range(12):
        # "stopping" and "preparing" end by themselves.
        gangs = {}
        for job, g in state.gangs.items():
            done = tuple(_with(r, "exited") if r.state == "stopping" else r for r in g.ranks)
            gangs[job] = LocalGang(
                job, g.generation, "prepared" if g.phase == "preparing" else g.phase, done, notice=g.notice, notified_at=g.notified_at
            )
        state = Local(state.gpus, gangs, state.retired)
        actions = [a for a in reconcile(want, state, now) if not isinstance(a, Refuse)]
        if not actions:
            break
        for action in actions:
            state = apply(action, state, now)
            assert shared or len(held(state)) == len(set(held(state))), f"two ranks on one device after {action}"
    else:
        raise AssertionError(f"no rest: {actions}")
    refused = {g.job for g in want.gangs if g.job in state.gangs and g.generation < state.gangs[g.job].generation}
    assert {j for j, g in state.gangs.items() if g.live} <= {g.job for g in want.gangs} | refused


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_law_order_of_what_is_there_does_not_matter(world: tuple[Desired, Local, float]):
    want, state, now = world
    mirrored = Local(state.gpus, dict(reversed(state.gangs.items())), state.retired)
    assert reconcile(want, mirrored, now) == reconcile(want, state, now)
