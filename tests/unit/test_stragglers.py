"""Row 74: a rank that is slower than its gang is reported, and replaced where the job wants that."""

from __future__ import annotations

import msgspec
import pytest
from policycluster import Cluster, of

from gangline.core.model import events as ev
from gangline.core.model.documents import Observed, ObservedGang
from gangline.core.model.spec import Gang, Health
from gangline.core.policy.stragglers import LASTS_MS, Paces, slow_ranks
from gangline.nodeagent import pace
from gangline.nodeagent.local import LocalRank
from gangline.nodeagent.report import two_digits


def test_one_slow_rank_among_equals_and_among_unequals() -> None:
    (found,) = slow_ranks({0: 100, 1: 101, 2: 99, 3: 100, 4: 150})
    assert (found.rank, found.pace_ms, found.median_ms) == (4, 150, 100)
    assert found.score > 5
    # Where ranks differ by nature, as stages of a pipeline do, the same is nothing special.
    assert slow_ranks({0: 60, 1: 90, 2: 120, 3: 150, 4: 150, 5: 100}) == []


def test_several_slow_ranks_do_not_hide_each_other() -> None:
    assert [s.rank for s in slow_ranks({**dict.fromkeys(range(5), 100), 5: 300, 6: 310})] == [5, 6]


@pytest.mark.parametrize(
    "paces", [{}, {0: 1, 1: 100}, {0: 100, 1: 100, 2: 900}, dict.fromkeys(range(8), 0), {**dict.fromkeys(range(8), 100), 8: 115}]
)
def test_too_few_or_too_near_is_no_straggler(paces: dict[int, int]) -> None:
    assert slow_ranks(paces) == []


def gang(c: Cluster, stragglers: str = "report") -> None:
    c.submit("train", gang=Gang(4, 4, 2), gpus=1, health=Health(stragglers=stragglers))  # type: ignore[arg-type]
    c.cycle()
    c.run("train")


def say(c: Cluster, paces: Paces, slow_ms: int) -> list[ev.LogEvent]:
    """Both nodes report; the last rank takes `slow_ms`."""
    out: list[ev.LogEvent] = []
    job = c.job("train")
    for node, part in job.parts.items():
        them = tuple((r, slow_ms if r == 3 else 100) for r in part.ranks)
        doc = Observed(node, "", "", 1, 0, 1, gangs=(ObservedGang("train", job.generation, "running", paces=them),))
        found = paces.take(c.state, doc, c.now)
        c.add(*found)
        out += found
    return out


def test_row_74_it_is_reported_once_when_it_has_lasted() -> None:
    c, paces = Cluster("a", "b", gpus=4), Paces()
    gang(c)
    assert say(c, paces, 300) == []
    c.at(LASTS_MS / 2000)
    say(c, paces, 100)  # it has recovered, so it begins anew
    c.at(LASTS_MS / 2000 + 1)
    assert say(c, paces, 300) == []
    c.at(LASTS_MS / 1000)
    (found,) = say(c, paces, 300)
    assert isinstance(found, ev.RankSlow)
    assert (found.rank, found.pace_ms, found.median_ms) == (3, 300, 100)
    c.at(LASTS_MS / 1000)
    assert say(c, paces, 300) == []
    assert c.states("train") == ["running"], "a report moves nobody"


def test_row_74_a_slow_rank_is_replaced_where_the_job_wants_that() -> None:
    c, paces = Cluster("a", "b", gpus=4), Paces()
    gang(c, "replace")
    c.join("s", 4, **{"gangline.io/spare": "1"})
    say(c, paces, 300)
    c.at(LASTS_MS / 1000)
    say(c, paces, 300)
    c.cycle()
    job = c.job("train")
    home = next(n for n, p in job.parts.items() if 3 in p.ranks)
    assert job.state == "resizing"
    c.at(31)
    assert [n for n, p in job.parts.items() if 3 in p.ranks] == ["s"]
    assert home not in job.parts
    assert job.restart is not None
    assert job.restart.cause == "straggler"
    assert job.slow == ()


def test_nobody_is_measured_who_does_not_want_it_and_another_generation_begins_anew() -> None:
    c, paces = Cluster("a", "b", gpus=4), Paces()
    gang(c, "ignore")
    say(c, paces, 300)
    c.at(2 * LASTS_MS / 1000)
    assert of(say(c, paces, 300), ev.RankSlow) == []


def test_the_pace_of_a_rank_is_its_own_work_where_it_says_so_else_the_time_between_steps() -> None:
    rank = LocalRank(0, 1, (), "running", progress_at=10.0)
    rank = msgspec.structs.replace(rank, **pace.after(rank, 0, None, 11.0))
    assert (rank.step, rank.pace_ms) == (0, 0.0), "start-up is no step"
    rank = msgspec.structs.replace(rank, **pace.after(rank, 10, None, 12.0))
    assert rank.pace_ms == 100.0
    rank = msgspec.structs.replace(rank, **pace.after(rank, 11, 200, 99.0))
    assert rank.pace_ms == 125.0
    rank = msgspec.structs.replace(rank, **pace.after(rank, 11, 900, 100.0))
    assert (rank.pace_ms, rank.progress_at) == (125.0, 100.0), "the same step again is none"


def test_paces_are_told_to_two_digits() -> None:
    assert [two_digits(x) for x in (0.4, 7.26, 123.4, 98_765)] == [0, 7, 120, 99_000]
