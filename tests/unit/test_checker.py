"""The checker sees what is broken. A good story has no violation; each test breaks one thing in it and looks for what is said of that."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from checkerlog import Story, good_story, raw
from click.testing import CliRunner

from gangline.chaos.checker import Entry, Operation, RankLife, Report, check, entries_of, examine
from gangline.chaos.checker import decisions as deciding
from gangline.chaos.checker.command import main as command
from gangline.chaos.checker.evidence import LiveRank
from gangline.chaos.checker.moved import SHIFT_MS
from gangline.chaos.checker.report import KEPT, TITLES
from gangline.core.model import events as ev
from gangline.core.model.gpushares import GpuShare
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Restart
from gangline.core.model.statecodec import load_state
from gangline.core.policy.decide import decide
from gangline.core.store.archive import Archive


@pytest.fixture
def story() -> Story:
    return good_story()


def report(story: Story, entries: list[Entry] | None = None, **changed: Any) -> Report:
    return examine(story.entries() if entries is None else entries, **{"quiescent_after": story.now, **story.evidence(), **changed})


def seen(found: Report, assertion: str, *words: str) -> list[int]:
    """There is such a violation; return the entries that it cites."""
    for violation in found.violations:
        if violation.assertion == assertion and all(word in violation.message for word in words):
            return [cite.index for cite in violation.entries]
    raise AssertionError(f"no violation of {assertion} with {words}:\n" + "\n".join(found.lines()))


def changed_lives(story: Story, life: RankLife, **fields: Any) -> list[RankLife]:
    return [msgspec.structs.replace(x, **fields) if x == life else x for x in story.evidence()["agent_records"]]


def life_of(story: Story, job: str, rank: int, generation: int) -> RankLife:
    return next(x for x in story.lives if (x.job, x.rank, x.generation) == (job, rank, generation))


def test_a_good_story_has_no_violation_and_everything_was_looked_at(story: Story) -> None:
    found = report(story)
    assert found.violations == []
    assert {a: found.status(a) for a in TITLES} == dict.fromkeys(TITLES, "checked")


def test_without_evidence_the_report_says_what_was_not_checked(story: Story) -> None:
    found = examine([msgspec.structs.replace(e, revision=0) for e in story.entries()], decisions=False)
    assert found.violations == []
    status = {a: found.status(a) for a in TITLES}
    assert [a for a in TITLES if status[a] == "not checked"] == ["S6", "S12", "S13", "S15", "S16"]
    assert [a for a in TITLES if status[a] == "partly checked"] == ["S2", "S3", "S4", "S7", "S11", "S14"]
    text = "\n".join(found.lines())
    assert "not checked: no records of agents" in text
    assert "not checked: when faults ended is not known" in text


# ---------------------------------------------------------------- S1, S2: the chain


def test_s1_a_missing_entry(story: Story) -> None:
    entries = [e for e in story.entries() if e.index != 9]
    assert seen(report(story, entries), "S1", "entries 9 are missing") == [8, 10]


def test_s1_an_entry_twice(story: Story) -> None:
    entries = story.entries()
    assert seen(report(story, [*entries[:9], *entries[8:]]), "S1", "entry 9 is there again") == [9, 9]


def test_s1_a_broken_chain(story: Story) -> None:
    before = story.entries()
    story.change(ev.JobSubmitted, trace_id="another history")
    at = story.find(ev.JobSubmitted)[0].index
    entries = [*before[: at - 1], story.entries()[at - 1], *before[at:]]
    assert seen(report(story, entries), "S1", "the chain of digests is broken") == [at, at + 1]


def test_s2_an_epoch_that_goes_back(story: Story) -> None:
    story.written[-1].epoch = story.written[0].epoch
    assert seen(report(story), "S2", "older than epoch") == [29, story.written[-1].index]


def test_s2_an_epoch_without_an_election(story: Story) -> None:
    story.written[-1].epoch += 100
    assert seen(report(story), "S2", "without an election")[-1] == story.written[-1].index


def test_s2_a_deposed_leader_writes(story: Story) -> None:
    """The entry before the election was appended when the next leader had been elected already: nothing had fenced it."""
    elected = story.find(ev.LeaderElected, 1)[0]
    before = story.written[elected.index - 2]
    before.revision = elected.epoch + 1
    elected.revision += 5
    for later in story.written[elected.index :]:
        later.revision += 5
    assert seen(report(story), "S2", "led already") == [before.index, elected.index]


# ---------------------------------------------------------------- S3: the fold


def test_s3_an_event_that_cannot_happen(story: Story) -> None:
    written, at, event = story.find(ev.GangReleased)
    written.events.insert(at, event)
    found = report(story)
    assert seen(found, "S3", "an event that cannot happen") == [written.index]
    assert "what needs the state" in "\n".join(found.lines())


def test_s3_an_entry_that_cannot_be_read(story: Story) -> None:
    frames = list(raw(story.written))
    frames[4] = (5, frames[4][1][:-3], frames[4][2])
    assert seen(report(story, list(entries_of(frames))), "S3", "entry 5 cannot be read") == [5]


def test_s3_a_snapshot_that_is_not_the_fold(story: Story) -> None:
    (index, data), = story.snapshots.items()
    state = load_state(data)
    state.jobs["r0-lab"].restarts += 1
    from gangline.core.model.statecodec import dump_state

    found = report(story, snapshots={index: dump_state(state)})
    assert seen(found, "S3", "/jobs/r0-lab/restarts") == [index]


def test_s3_a_replica_that_differs(story: Story) -> None:
    assert seen(report(story, replicas={"s2": (30, "ab" * 32)}), "S3", "replica s2 differs") == [30]


def test_a_log_whose_beginning_is_gone_is_checked_from_a_snapshot(story: Story) -> None:
    (index, data), = story.snapshots.items()
    later = [e for e in story.entries() if e.index > index]
    found = report(story, later, base=load_state(data), snapshots={})
    assert found.violations == []
    assert "log begins after them" in "\n".join(found.lines())


# ---------------------------------------------------------------- S4, S5: gangs


def test_s4_a_gpu_is_given_while_another_gang_has_it(story: Story) -> None:
    wide, lab = story.find(ev.GangPlaced, job="r0-wide"), story.find(ev.GangPlaced, job="r0-lab")
    taken = wide[2].parts[0].ranks[0].gpus
    parts = (ev.PlacedPart(wide[2].parts[0].node, (ev.PlacedRank(0, taken), *[ev.PlacedRank(n, (n,)) for n in (1, 2)])),)
    lab[0].events[lab[1]] = msgspec.structs.replace(lab[2], parts=parts)
    assert seen(report(story), "S4", "r0-lab", "r0-wide", "given whole")[-1] == lab[0].index


def test_s4_a_gpu_is_given_before_its_last_rank_has_ended(story: Story) -> None:
    """The gang that had it is over, and the node has not yet said that nothing of it is left: the mistake of a fold that frees too early."""
    finished = story.find(ev.GangFinished, job="r0-one")
    placed = story.find(ev.GangPlaced, job="r0-one")[2]
    spec = story.find(ev.JobSubmitted, job="r0-one")[2].spec
    finished[0].events += [ev.JobSubmitted(job="next", spec=spec), ev.GangPlaced(job="next", generation=1, parts=placed.parts)]
    assert seen(report(story), "S4", "next", "r0-one")[-1] == finished[0].index


def test_s4_a_gpu_that_two_nodes_have(story: Story) -> None:
    _, _, first = story.find(ev.NodeJoined)
    written, at, second = story.find(ev.NodeJoined, 1)
    registration = msgspec.structs.replace(second.registration, gpus=first.registration.gpus)
    written.events[at] = ev.NodeJoined(registration=registration)
    assert seen(report(story), "S4", "is on n1 and on n2 at once") == [3, 4]


def test_s4_two_gangs_ran_on_one_gpu(story: Story) -> None:
    one = life_of(story, "r0-one", 0, 1)
    other = msgspec.structs.replace(one, job="r0-lab", rank=2, started_s=one.started_s + 0.01)
    assert seen(report(story, agent_records=[*story.lives, other]), "S4", "began on GPU", "given whole")


def test_s4_shares_of_a_gpu_may_run_together_and_not_beyond_the_whole(story: Story) -> None:
    one = msgspec.structs.replace(life_of(story, "r0-one", 0, 1), share=GpuShare(500))
    for milli, fits in ((500, True), (501, False)):
        other = msgspec.structs.replace(one, job="x", share=GpuShare(milli), index=0)
        lives = [*(x for x in story.lives if x.job != "r0-one"), one, other]
        violations = [v for v in report(story, agent_records=lives).violations if v.assertion == "S4"]
        assert (violations == []) is fits


def test_s5_a_part_of_a_gang_is_placed(story: Story) -> None:
    written, at, placed = story.find(ev.GangPlaced, job="r0-wide")
    written.events[at] = msgspec.structs.replace(placed, parts=placed.parts[:1])
    found = report(story)
    assert seen(found, "S5", "a part of the gang r0-wide is placed") == [6, 6]


def test_s5_a_gang_starts_while_a_node_has_not_prepared(story: Story) -> None:
    at = story.drop(ev.NodePrepared, 0, job="r0-wide")
    assert seen(report(story), "S5", "starts while", "have not prepared") == [6, at + 1]


def test_s5_ranks_run_before_their_gang_is_released(story: Story) -> None:
    story.drop(ev.GangReleased, 0, job="r0-wide")
    assert seen(report(story), "S5", "before the gang was released") == [6, 9]


# ---------------------------------------------------------------- S6, S11, S13: lives


def test_s6_two_generations_of_a_rank_at_once(story: Story) -> None:
    first, second = life_of(story, "r0-wide", 1, 1), life_of(story, "r0-wide", 1, 2)
    assert first.clock == second.clock
    found = report(story, agent_records=changed_lives(story, first, ended_s=second.started_s + 0.5))
    assert seen(found, "S6", "rank 1 of r0-wide, generation 2") == [first.index, second.index]


def test_s6_a_rank_that_never_ended_beside_its_successor(story: Story) -> None:
    first = life_of(story, "r0-wide", 1, 1)
    assert seen(report(story, agent_records=changed_lives(story, first, ended="", ended_s=0.0, ended_ms=0)), "S6", "has not ended")


def test_s6_on_two_hosts_the_wall_clocks_decide_where_the_log_does_not(story: Story) -> None:
    lost = next(x for x in story.lives if x.cause == "fenced")
    after = next(x for x in story.lives if (x.job, x.rank) == (lost.job, lost.rank) and x.generation > lost.generation)
    assert lost.clock != after.clock
    overlapping = changed_lives(story, lost, ended_ms=after.started_ms + 60_000)
    assert seen(report(story, agent_records=overlapping), "S6", "by its wall clock") == [lost.index, after.index]
    a_little = changed_lives(story, lost, ended_ms=after.started_ms + 1_000)
    assert report(story, agent_records=a_little).violations == []


def test_s6_one_that_was_found_dead_says_nothing_of_when_it_died(story: Story) -> None:
    first, second = life_of(story, "r0-wide", 1, 1), life_of(story, "r0-wide", 1, 2)
    found = report(story, agent_records=changed_lives(story, first, ended="found", ended_s=second.started_s + 9.0))
    assert [v for v in found.violations if v.assertion == "S6"] == []
    assert found.status("S6") == "partly checked"


def test_s11_a_rank_that_lives_on_when_nobody_wants_it(story: Story) -> None:
    last = next(x for x in story.lives if x.job == "r0-one")
    found = report(story, agent_records=changed_lives(story, last, ended_ms=last.ended_ms + 200_000))
    assert seen(found, "S11", "was not wanted any more") == [story.find(ev.GangFinished, job="r0-one")[0].index]


def test_s11_what_runs_on_a_node_is_what_the_log_wants(story: Story) -> None:
    views = story.evidence()["nodes"]
    orphan = msgspec.structs.replace(views[0], at_ms=views[0].at_ms + 500_000, live=(LiveRank("r0-one", 0, 1),))
    assert seen(report(story, nodes=[orphan, *views[1:]]), "S11", "the log has not wanted it") == [
        story.find(ev.GangFinished, job="r0-one")[0].index
    ]


def test_s11_what_the_log_wants_runs(story: Story) -> None:
    story.submit("stays", ranks=2)
    story.start("stays")
    assert report(story).violations == []
    views = [msgspec.structs.replace(v, at_ms=v.at_ms + 500_000, live=()) for v in story.evidence()["nodes"]]
    placed = story.find(ev.GangPlaced, job="stays")[0].index
    assert seen(report(story, nodes=views), "S11", "rank 0 of stays", "nothing of it is there") == [placed]


def test_s11_a_node_that_does_not_let_go(story: Story) -> None:
    story.submit("stuck")
    story.start("stuck")
    story.cycle(ev.JobStopRequested(job="stuck", by="ann"))
    stopped = story.state.index
    story.cycle(ev.NodeAdministered(node="n3", action="cordon"), after_s=400.0)
    assert seen(report(story), "S11", "has not let go of it") == [stopped]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda life: {"index": life.index - 4}, "which does not want it"),
        (lambda life: {"index": 10_000}, "the log ends at"),
        (lambda life: {"epoch": life.epoch + 1}, "that entry is of epoch"),
        (lambda life: {"index": 7}, "before its gang was released"),
    ],
)
def test_s13_an_agent_acts_on_what_the_log_has_not_said(story: Story, change: Callable[[RankLife], dict[str, Any]], words: str) -> None:
    life = life_of(story, "r0-wide", 1, 1)
    assert life.index == 8
    assert seen(report(story, agent_records=changed_lives(story, life, **change(life))), "S13", words)


# ---------------------------------------------------------------- S7, S12: clients


def test_s7_an_acknowledged_submission_is_lost(story: Story) -> None:
    lost = Operation(op="submit", outcome="ok", key="k", job="lost", index=12)
    assert seen(report(story, client_history=[*story.operations, lost]), "S7", "accepted as job lost", "the log has none") == []


def test_s7_a_submission_has_become_two_jobs(story: Story) -> None:
    written, _, event = story.find(ev.JobSubmitted, job="r0-lab")
    written.events.append(msgspec.structs.replace(event, job="again"))
    assert seen(report(story), "S7", "'key-r0-lab' is in the log twice") == [written.index, written.index]


def test_s7_a_rejected_submission_is_in_the_log(story: Story) -> None:
    history = [msgspec.structs.replace(o, outcome="fail") if o.op == "submit" and o.job == "r0-lab" else o for o in story.operations]
    assert seen(report(story, client_history=history), "S7", "was rejected", "r0-lab") == [story.find(ev.JobSubmitted, job="r0-lab")[0].index]


def test_s7_what_nobody_knows_may_be_in_the_log_or_not(story: Story) -> None:
    history = [msgspec.structs.replace(o, outcome="unknown", job="") if o.op == "submit" else o for o in story.operations]
    history.append(Operation(op="submit", outcome="unknown", key="never"))
    assert report(story, client_history=history).violations == []


def test_s12_a_client_does_not_read_what_it_wrote(story: Story) -> None:
    at = story.find(ev.JobSubmitted, job="r0-one")[0].index
    older = Operation(op="read", outcome="ok", job="r0-one", after=at, index=at - 3)
    assert seen(report(story, client_history=[older]), "S12", "was answered as of entry") == [at, at - 3]
    missing = Operation(op="read", outcome="ok", job="r0-one", after=at, index=at + 1, found=False)
    assert seen(report(story, client_history=[missing]), "S12", "does not know it") == [at]


# ---------------------------------------------------------------- S8, S9, S10


@pytest.mark.parametrize("event", [ev.GangPlaced(job="r0-one", generation=2, parts=()), ev.GangFinished(
    job="r0-one", outcome="failed", cause="x", message=""), ev.GangsDeferred(jobs=("r0-one",), code="c", message="")])  # fmt: skip
def test_s8_something_follows_the_end_of_a_job(story: Story, event: ev.LogEvent) -> None:
    story.written[-1].events.append(event)
    found = report(story, decisions=False)
    assert seen(found, "S8", "has ended at entry") == [story.find(ev.GangFinished, job="r0-one")[0].index, story.written[-1].index]


def test_s9_a_queue_above_its_limit(story: Story) -> None:
    story.change(ev.QueuesDeclared, queues=(QueueSpec("default"), QueueSpec("lab", limit=Amounts(2_000))))
    found = report(story)
    assert seen(found, "S9", "above its limit of 2 GPUs") == [2, 11]


def test_s9_a_queue_above_its_quota_by_what_cannot_be_preempted(story: Story) -> None:
    story.change(ev.QueuesDeclared, queues=(QueueSpec("default"), QueueSpec("lab", quota=Amounts(500), limit=Amounts(4_000))))
    assert seen(report(story), "S9", "cannot be preempted", "above its quota of 0.5 GPUs")[-1] == 12


def test_s9_what_is_borrowed_is_noted(story: Story) -> None:
    (note,) = [n for n in report(story).notes if n.startswith("S9")]
    assert "lab has had up to 2 GPUs beyond its quota" in note


def test_s10_more_restarts_than_the_budget(story: Story) -> None:
    spec = story.find(ev.JobSubmitted, job="r0-wide")[2].spec
    story.change(ev.JobSubmitted, where={"job": "r0-wide"}, spec=msgspec.structs.replace(spec, restart=Restart(max_restarts=1)))
    restarts = [story.find(ev.GangRestarting, n)[0].index for n in range(2)]
    assert seen(report(story), "S10", "2 times within", "may be 1 times") == restarts


def test_s10_a_restart_without_its_delay(story: Story) -> None:
    at = story.change(ev.GangRestarting, 1, not_before_ms=0)
    assert seen(report(story), "S10", "must wait 20 s")[-1] == at


def test_s10_a_placement_before_the_end_of_its_delay(story: Story) -> None:
    placed = story.find(ev.GangPlaced, 2, job="r0-wide")[0]
    for written in story.written[placed.index - 1 :]:
        written.at_ms -= 15_000
    assert seen(report(story), "S10", "before the end of its delay") == [placed.index - 1, placed.index]


# ---------------------------------------------------------------- S14, S15, S16


def test_s14_log_time_goes_back(story: Story) -> None:
    story.written[10].at_ms -= 60_000
    assert seen(report(story), "S14", "log time goes back") == [11]


def test_s14_a_policy_that_looks_at_the_calendar(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: it places nothing after a certain day. With the clocks of the log it decides as the log says, with other clocks it does not."""
    last_day = story.now + SHIFT_MS // 2

    def calendar(state: Any, now_ms: int) -> list[ev.LogEvent]:
        return [e for e in decide(state, now_ms) if now_ms < last_day or not isinstance(e, ev.GangPlaced)]

    monkeypatch.setattr(deciding, "decide", calendar)
    found = report(story)
    assert seen(found, "S14", "with other clocks", "does not decide gang_placed") == [6]
    assert found.status("S15") == "checked"


def test_s15_a_decision_that_the_policy_does_not_take(story: Story) -> None:
    """One free GPU is as good as another, but the policy always takes the same."""
    story.submit("late")
    written, at, placed = story.find(ev.GangPlaced, job="late")
    (part,) = placed.parts
    other = ev.PlacedPart(part.node, (ev.PlacedRank(0, (part.ranks[0].gpus[0] + 1,)),))
    written.events[at] = msgspec.structs.replace(placed, parts=(other,))
    found = report(story, replicas=None, quiescent_after=None)
    assert {v.assertion for v in found.violations} == {"S15"}
    assert seen(found, "S15", "the policy decides gang_placed", "and the log has gang_placed") == [written.index]


def test_s15_a_decision_that_is_missing(story: Story) -> None:
    story.submit("small")
    at = story.drop(ev.GangPlaced, job="small")
    assert seen(report(story, replicas=None), "S15", "the log has no such decision") == [at]


def test_s16_a_gang_that_never_gets_on(story: Story) -> None:
    story.submit("stuck")
    at = story.state.index
    assert seen(report(story, quiescent_after=story.now + 60_000), "S16", "stuck is placed") == [at]


def test_s16_a_job_waits_and_could_run(story: Story) -> None:
    story.submit("small")
    at = story.drop(ev.GangPlaced, job="small")
    found = report(story, replicas=None, quiescent_after=story.now + 60_000)
    assert seen(found, "S16", "small is queued and could run on") == [at]


def test_s16_what_waits_for_room_is_at_rest(story: Story) -> None:
    story.submit("huge", ranks=64)
    assert report(story, quiescent_after=story.now + 60_000).violations == []


# ---------------------------------------------------------------- cost, and the report


def _calls(rounds: int) -> int:
    """Return how many functions of the checker are called for a story of so many rounds."""
    story = good_story(rounds)
    entries, evidence, calls = story.entries(), story.evidence(), 0
    evidence.pop("snapshots")

    def count(frame: FrameType, what: str, _: object) -> None:
        nonlocal calls
        calls += what == "call" and "chaos/checker" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        found = examine(entries, **evidence, decisions=False)
    finally:
        sys.setprofile(None)
    assert found.violations == []
    return calls


def test_the_work_grows_with_the_log_and_not_faster() -> None:
    few, many = _calls(5), _calls(20)
    assert many < 4.2 * few


def test_violations_beyond_a_number_are_counted() -> None:
    found = Report()
    for n in range(KEPT + 7):
        found.add("S4", f"number {n}")
    assert (len(found.violations), found.more) == (KEPT, {"S4": 7})
    assert found.to_json()["more_violations"] == {"S4": 7}
    assert list(found.lines())[-1].endswith(f"{KEPT + 7} violations")


def test_check_returns_the_violations(story: Story) -> None:
    assert check(story.entries()) == []
    story.written[10].at_ms -= 60_000
    assert Counter(v.assertion for v in check(story.entries()))["S14"] == 1


# ---------------------------------------------------------------- the command


def _file(story: Story, path: Path) -> Path:
    path.write_bytes(b"".join(struct.pack(">I", len(data)) + data for _, data, _ in raw(story.written)))
    return path


def test_the_command_on_a_file_of_frames(story: Story, tmp_path: Path) -> None:
    good = CliRunner().invoke(command, [str(_file(story, tmp_path / "log")), "--at-rest", "0"])
    assert (good.exit_code, good.output.splitlines()[-1]) == (0, f"entries 1 to {story.state.index}, 64 events: no violations")
    story.change(ev.GangRestarting, 1, not_before_ms=0)
    bad = CliRunner().invoke(command, [str(_file(story, tmp_path / "log")), "--json"])
    body = json.loads(bad.output)
    assert (bad.exit_code, body["ok"], body["assertions"]["S10"]["status"]) == (3, False, "violated")
    violation = next(v for v in body["violations"] if v["assertion"] == "S10")
    assert violation["entries"][-1]["event"] == "gang_restarting"


def test_the_command_on_archives_that_overlap(story: Story, tmp_path: Path) -> None:
    frames = [(index, data) for index, data, _ in raw(story.written)]
    Archive(tmp_path / "s1" / "archive").write(frames[:30])
    Archive(tmp_path / "s2" / "archive").write(frames[20:])
    both = CliRunner().invoke(command, [str(tmp_path)])
    assert (both.exit_code, both.output.splitlines()[-1]) == (0, f"entries 1 to {len(frames)}, 64 events: no violations")
    late = CliRunner().invoke(command, [str(tmp_path / "s2" / "archive")])
    assert late.exit_code == 2
    assert "begins at entry 21" in late.output


def test_the_command_on_archives_that_differ(story: Story, tmp_path: Path) -> None:
    Archive(tmp_path / "s1" / "archive").write([(index, data) for index, data, _ in raw(story.written)])
    story.change(ev.JobSubmitted, job="other")
    Archive(tmp_path / "s2" / "archive").write([(index, data) for index, data, _ in raw(story.written)][:6])
    found = CliRunner().invoke(command, [str(tmp_path), "--no-decisions"])
    assert found.exit_code == 3
    assert "VIOLATION S1 entry 6 is there again" in found.output


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\0\0\0\x09abc"])
def test_the_command_says_when_there_is_no_log(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    found = CliRunner().invoke(command, [str(tmp_path / "log")])
    assert found.exit_code == 2
    assert "Error:" in found.output
