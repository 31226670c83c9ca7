"""Arrays: the notation, sets of positions, and the life of an array as events are folded and decided."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policycluster import Cluster

from gangline.core.model import events as ev
from gangline.core.model import foldlife
from gangline.core.model.arrays import (
    MAX_ELEMENTS,
    add_position,
    array_text,
    has_position,
    indices_from,
    indices_text,
    parse_array,
    position_of,
    size,
    split_element,
    to_come,
)
from gangline.core.model.fold import IllegalTransition
from gangline.core.model.naming import as_job, find_id
from gangline.core.model.narrate import JobStory
from gangline.core.model.spec import ArraySpec, Dependency, Restart
from gangline.core.model.state import Runs
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.admission import WINDOW

NO_RESTART = Restart(on_rank_failure="never")


@pytest.mark.parametrize(
    ("text", "indices", "back"),
    [
        ("0-3", [0, 1, 2, 3], "0-3"), ("5", [5], "5"), ("0-9:4%2", [0, 4, 8], "0-8:4%2"), ("7,1-2", [1, 2, 7], "1-2,7"),
        (" 1 , 3 - 5 % 3", [1, 3, 4, 5], "1,3-5%3"), ("4-4:9", [4], "4"),
    ],
)  # fmt: skip
def test_the_notation(text: str, indices: list[int], back: str) -> None:
    spec = parse_array(text)
    assert list(indices_from(spec, 0)) == indices
    assert size(spec) == len(indices)
    assert array_text(spec) == back
    assert parse_array(back) == spec
    for position, index in enumerate(indices):
        assert position_of(spec, index) == position
        assert next(indices_from(spec, position)) == index


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0-3%", "0-3%0", "0-3,2", "0-9:0", "1,1", "-3", "0-", "0-3%99999999", "0-1000000", "9999999999", "0-3%2%2", "1.5"]
)
def test_what_is_no_notation(text: str) -> None:
    with pytest.raises(ValueError, match=r"[a-z]"):
        parse_array(text)


def test_the_largest_array() -> None:
    assert size(parse_array(f"0-{MAX_ELEMENTS - 1}")) == MAX_ELEMENTS


@settings(max_examples=200, deadline=None)
@given(positions=st.lists(st.integers(0, 40), unique=True))
def test_a_set_of_positions_is_a_set(positions: list[int]) -> None:
    runs: Runs = []
    for count, position in enumerate(positions, 1):
        add_position(runs, position)
        known = set(positions[:count])
        assert [p for p in range(42) if has_position(runs, p)] == sorted(known)
        assert all(b + 1 < c for (_, b), (c, _) in itertools.pairwise(runs)), "runs are as few as they can be"


def test_indices_for_people() -> None:
    assert indices_text(ArraySpec(((0, 20, 5),)), [(1, 3)]) == "5-15:5"
    assert indices_text(ArraySpec(((0, 9, 1),)), [(0, 9)]) == "0-9"
    assert indices_text(ArraySpec(((0, 9, 1),)), [(1, 1), (4, 6)], most=1) == "1 and 1 more ranges"


def test_ids_of_elements() -> None:
    assert split_element("jabc.17") == ("jabc", 17)
    assert split_element("train.v2") is None
    assert split_element(".3") is None
    assert split_element("jabc") is None


# ---------------------------------------------------------------- the life of an array


def submit(c: Cluster, job: str, array: str, **more: Any) -> None:
    c.submit(job, array=parse_array(array), **more)


def finish(c: Cluster, job: str, code: int = 0) -> None:
    c.run(job)
    c.end(job, code)
    c.cycle()


def live(c: Cluster, job: str) -> list[str]:
    return list(c.job(job).elements.live)


def test_an_array_is_one_event_and_keeps_to_its_limit() -> None:
    c = Cluster("n1", gpus=8)
    submit(c, "a", "0-9%3")
    assert [type(e).NAME for e in c.log[-1:]] == ["job_submitted"]
    c.cycle()
    assert live(c, "a") == ["a.0", "a.1", "a.2"]
    assert [c.job(j).state for j in live(c, "a")] == ["placed"] * 3
    ended = 0
    while c.job("a").state != "finished":
        assert len(live(c, "a")) <= 3
        finish(c, live(c, "a")[0])
        ended += 1
        assert c.state.arrays == ({"a": None} if ended < 10 else {})
    assert ended == 10
    assert (c.job("a").outcome, c.job("a").message) == ("succeeded", "all 10 elements succeeded")
    assert c.state.queue == []


def test_failed_elements_are_named_and_do_not_stop_the_others() -> None:
    c = Cluster("n1", gpus=8)
    submit(c, "a", "0-8:2", restart=NO_RESTART)
    c.cycle()
    for job in live(c, "a"):
        finish(c, job, code=7 if job in ("a.2", "a.4", "a.8") else 0)
    a = c.job("a")
    assert (a.outcome, a.cause, a.message, a.exit_code) == ("failed", "elements_failed", "3 of 5 elements failed: 2-4:2, 8", 7)
    story = JobStory("a")
    told = [type(e).NAME for e in c.log if story.tells(e)]
    assert told.count("gang_finished") == 4, "its own end, and those of the elements that failed"
    element = JobStory("a.2")
    assert [type(e).NAME for e in c.log if element.tells(e)][:2] == ["elements_queued", "gang_placed"]


def test_a_large_array_costs_what_runs_of_it() -> None:
    c = Cluster("n1", gpus=2)
    submit(c, "a", "0-99999")
    before = len(dump_state(c.state))
    c.cycle()
    assert len(c.state.jobs) == 1 + WINDOW
    assert to_come(c.job("a")) == 100_000 - WINDOW
    assert before < 3_000
    for _ in range(3):
        finish(c, next(j for j in live(c, "a") if c.job(j).active))
    assert len([e for e in c.log if isinstance(e, ev.ElementsQueued)]) == 1, "the next ones come when half of these are placed"


def test_the_next_elements_come_when_half_of_the_window_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.core.policy.admission.WINDOW", 4)
    c = Cluster("n1", gpus=2)
    submit(c, "a", "0-9")
    c.cycle()
    queued = [e.indices for e in c.log if isinstance(e, ev.ElementsQueued)]
    assert queued == [(0, 1, 2, 3), (4, 5)]
    assert c.job("a").elements.queued == 4


def test_elements_stand_in_the_queue_where_their_array_does() -> None:
    c = Cluster("n1", gpus=1)
    submit(c, "a", "0-11%2")
    c.submit("b")
    c.cycle()
    order = []
    while len(order) < 13:
        running = next(j for j in c.state.running)
        order.append(running)
        finish(c, running)
    assert order == [*(f"a.{i}" for i in range(12)), "b"]


def test_an_array_is_stopped_with_all_that_is_to_come() -> None:
    c = Cluster("n1", gpus=2)
    submit(c, "a", "0-9%3")
    c.submit("b", depends_on=(Dependency("a.7", "after_not_ok"),))
    c.cycle()
    c.add(ev.JobStopRequested(job="a", by="ann", reason="enough"))
    c.cycle()
    assert {c.job(f"a.{i}").outcome for i in range(3)} == {"cancelled"}
    assert (c.job("a").outcome, c.job("a").cause, c.job("a").message) == ("cancelled", "stopped", "stopped by ann: enough")
    assert not c.job("b").waits_for, "an element that never was is cancelled with its array"
    assert as_job(c.state, "a.7").outcome == "cancelled"


def test_one_element_is_given_up_before_its_turn() -> None:
    c = Cluster("n1", gpus=8)
    submit(c, "a", "0-3%1")
    c.cycle()
    c.add(ev.JobStopRequested(job="a.1"), ev.JobStopRequested(job="a.3"))
    with pytest.raises(IllegalTransition):
        c.add(ev.JobStopRequested(job="a.1"))
    assert to_come(c.job("a")) == 1
    finish(c, "a.0")
    assert live(c, "a") == ["a.2"]
    finish(c, "a.2")
    assert (c.job("a").outcome, c.job("a").message) == ("cancelled", "2 of 4 elements were cancelled: 1, 3")


def test_elements_are_found_by_id_and_by_name() -> None:
    c = Cluster("n1", gpus=1)
    submit(c, "jx", "0-4%1", name="sweep")
    c.cycle()
    assert find_id(c.state, "sweep.3") == "jx.3"
    assert find_id(c.state, "jx.5") is None
    waiting = as_job(c.state, "jx.3")
    assert (waiting.state, waiting.deferral.code) == ("queued", "array_turn")
    finish(c, "jx.0")
    state = load_state(dump_state(c.state))
    del state.jobs["jx.0"]
    assert as_job(state, "jx.0").outcome == "succeeded", "the array knows how an element ended that is forgotten"


def test_elements_that_ended_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foldlife, "ELEMENTS_KEPT", 2)
    c = Cluster("n1", gpus=1)
    c.submit("z")
    submit(c, "a", "0-5%1")
    c.cycle()
    finish(c, "z")
    for i in range(6):
        finish(c, f"a.{i}")
    assert list(c.state.jobs) == ["z", "a", "a.4", "a.5"], "an array does not push out what others have ended"


def test_a_holder_of_an_array_holds_what_is_queued_and_what_is_to_come() -> None:
    c = Cluster("n1", gpus=1)
    submit(c, "a", "0-4%2")
    c.cycle()
    c.add(ev.JobHeld(job="a", by="ann", reason="data"))
    c.cycle()
    assert c.job("a.0").state == "placed"
    assert c.job("a.1").deferral.message == "its array is held by ann: data"
    finish(c, "a.0")
    assert live(c, "a") == ["a.1"]
    assert (c.job("a").deferral.code, c.job("a.1").state) == ("held", "queued")
    c.add(ev.JobReleased(job="a"))
    c.cycle()
    assert c.job("a.1").state == "placed"
    assert live(c, "a") == ["a.1", "a.2"]


def test_random_lives_of_arrays() -> None:
    """Whatever happens to its elements: counts agree, limits hold, a reloaded state is the same, and the array ends."""
    for seed in range(20):
        rng = random.Random(seed)
        c = Cluster("n1", "n2", gpus=3)
        total, limit = rng.randint(1, 30), rng.randint(0, 5)
        submit(c, "a", f"0-{total - 1}" + (f"%{limit}" if limit else ""), restart=NO_RESTART)
        for _ in range(400):
            c.cycle()
            a = c.job("a")
            if a.state == "finished":
                break
            elements = a.elements
            assert not limit or len(elements.live) <= limit
            assert elements.queued == sum(c.job(j).state == "queued" for j in elements.live)
            loaded = load_state(dump_state(c.state))
            loaded.scratch = c.state.scratch
            assert loaded == c.state
            action = rng.random()
            active = [j for j in elements.live if c.job(j).active]
            if action < 0.1:
                c.add(ev.JobStopRequested(job=rng.choice([*elements.live, *active])))
            elif action < 0.2 and elements.opened < total:
                left = [i for i in range(elements.opened, total) if not has_position(elements.cancelled, i)]
                if left:
                    c.add(ev.JobStopRequested(job=f"a.{rng.choice(left)}"))
            elif active:
                finish(c, rng.choice(active), rng.choice([0, 0, 1]))
        a = c.job("a")
        assert a.state == "finished"
        runs = [*a.elements.succeeded, *a.elements.failed, *a.elements.cancelled]
        assert sum(last - first + 1 for first, last in runs) == total
        expected = "failed" if a.elements.failed else "cancelled" if a.elements.cancelled else "succeeded"
        assert a.outcome == expected


def test_the_next_elements_must_be_the_next() -> None:
    c = Cluster("n1", gpus=1)
    submit(c, "a", "0-4%1")
    c.submit("b")
    before = dump_state(c.state)
    for job, indices in (("a", (1,)), ("a", (0, 2)), ("a", ()), ("a", (0, 1, 2, 3, 4, 5)), ("b", (0,)), ("x", (0,))):
        with pytest.raises(IllegalTransition):
            c.add(ev.ElementsQueued(job=job, indices=indices))
        assert dump_state(msgspec.structs.replace(c.state)) == before
