"""What faults hit, what a run's log is told as, and what the demo's checks see: pure functions on recorded data."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gangline.chaos import faults as f
from gangline.chaos import training, verdict
from gangline.chaos.injector import Injection
from gangline.chaos.targets import Component, Identity, NoTarget, RankProcess, Target, View, resolve
from gangline.chaos.timeline import recovery, recovery_table, timeline
from gangline.chaos.training import Resume, Step
from gangline.chaos.verdict import Facts

# ---------------------------------------------------------------- targets


def identity(pid: int) -> Identity:
    return Identity(pid, 10 * pid)


def rank(number: int, node: str = "n1", generation: int = 1, running: bool = True) -> RankProcess:
    pid = 1000 * generation + 10 * number
    return RankProcess("j1", number, generation, node, identity(pid), identity(pid + 1) if running else None)


VIEW = View(
    components={
        "e1": Component("e1", "etcd", identity(1)),
        "s1": Component("s1", "scheduler", identity(2)),
        "s2": Component("s2", "scheduler", identity(3)),
        "n1": Component("n1", "agent", identity(4)),
        "n2": Component("n2", "agent", identity(5)),
    },
    ranks=(rank(0), rank(1), rank(1, generation=2), rank(2, "n2"), rank(3, "n2", running=False)),
    leader="s2",
    # the agent of n1 has a fork server, whose children are the supervisors; rank 0 has started a data loader
    children={
        identity(4): (identity(40),),
        identity(40): (identity(1000), identity(1010), identity(2010)),
        identity(1000): (identity(1001),),
        identity(1001): (identity(77),),
        identity(1010): (identity(1011),),
        identity(2010): (identity(2011),),
    },
)


@pytest.mark.parametrize(
    ("fault", "pid", "component"),
    [
        (f.KillRank("j1", 0), 1001, ""),
        (f.KillRank("j1", 1), 2011, ""),  # the newest generation
        (f.FreezeRank("j1", 2), 1021, ""),
        (f.KillAgent("n1"), 4, "n1"),
        (f.KillScheduler("s1"), 2, "s1"),
        (f.KillLeader(), 3, "s2"),
        (f.FreezeLeader(), 3, "s2"),
        (f.KillEtcd("e1"), 1, "e1"),
        (f.FreezeEtcd("e1"), 1, "e1"),
        (f.FreezeProcess("n2"), 5, "n2"),
    ],
)
def test_a_fault_on_one_process_hits_it_and_nothing_else(fault: f.Fault, pid: int, component: str) -> None:
    (target,) = resolve(fault, VIEW)
    assert (target.process, target.component) == (identity(pid), component)


@pytest.mark.parametrize("fault", [f.KillNode("n1"), f.FreezeNode("n1")])
def test_a_fault_on_a_node_hits_all_of_it_the_agent_first(fault: f.Fault) -> None:
    targets = resolve(fault, VIEW)
    pids = [t.process.pid for t in targets]
    assert pids[:2] == [4, 40]
    assert sorted(pids) == [4, 40, 77, 1000, 1001, 1010, 1011, 2010, 2011]
    assert len(set(pids)) == len(pids)
    # supervisors before ranks: else they would see, and report, how the ranks ended
    assert max(pids.index(p) for p in (1000, 1010, 2010)) < min(pids.index(p) for p in (1001, 1011, 2011))
    assert [t.component for t in targets if t.component] == ["n1"]
    assert {t.what for t in targets} >= {"supervisor of rank 0 on n1", "rank 0 on n1", "started by rank 0 on n1"}


def test_a_node_whose_agent_is_gone_still_has_its_ranks() -> None:
    view = replace(VIEW, components={})
    assert sorted(t.process.pid for t in resolve(f.KillNode("n2"), view)) == [1020, 1021, 1030]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (f.KillRank("j1", 9), "rank 9 of job j1 is not running; ranks 0 to 2 are"),
        (f.KillRank("j1", 3), "rank 3 of job j1 is not running"),
        (f.KillRank("j2", 0), "none of its ranks is"),
        (f.KillAgent("s1"), "no agent s1 is running; running: n1, n2"),
        (f.KillScheduler("n1"), "no scheduler n1 is running; running: s1, s2"),
        (f.KillNode("n9"), "nothing runs on node n9; nodes: n1, n2"),
        (f.FreezeProcess("x"), "no process x is running; running: e1, s1, s2, n1, n2"),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(fault: f.Fault, words: str) -> None:
    with pytest.raises(NoTarget, match=words):
        resolve(fault, VIEW)


def test_without_a_leader_there_is_none_to_kill() -> None:
    with pytest.raises(NoTarget, match="no scheduler leads now"):
        resolve(f.KillLeader(), replace(VIEW, leader=""))


def test_faults_have_stable_names_and_are_plain_data() -> None:
    assert sorted(f.FAULTS) == sorted({cls.NAME for cls in f.FAULTS.values()})
    assert len(f.FAULTS) == 11
    assert f.KillRank("j1", 3).to_json() == {"fault": "kill-rank", "job": "j1", "rank": 3}
    assert f.FAULTS["kill-rank"](job="j1", rank=3) == f.KillRank("j1", 3)
    assert str(f.FreezeNode("n1")).startswith("freeze node n1")
    assert str(f.KillLeader()) == "kill -9 the leading scheduler"


# ---------------------------------------------------------------- training


def steps(*runs: tuple[int, int, int], began_s: float = 100.0) -> list[Step]:
    """Steps of generations, each as (generation, first, last), a tenth of a second apart."""
    found: list[Step] = []
    for generation, first, last in runs:
        for number in range(first, last + 1):
            found.append(Step(number, 2.0 / number, generation, began_s + len(found) / 10))
    return found


def test_metrics_are_read_and_an_unfinished_line_is_passed_over() -> None:
    lines = [{"step": 1, "loss": 2.5, "generation": 1, "time": 9.5}, {"step": 2, "loss": 2.0, "generation": 1, "time": 9.6}]
    text = json.dumps(lines[0]) + '\n{"step": 2, "lo\n' + json.dumps(lines[1]) + "\n[]\n"
    assert training.parse(text) == [Step(1, 2.5, 1, 9.5), Step(2, 2.0, 1, 9.6)]


def test_a_generation_goes_on_from_a_checkpoint_and_repeats_what_came_after_it() -> None:
    run = steps((1, 1, 25), (2, 21, 47), (4, 41, 60))
    assert training.resumes(run) == [Resume(2, 20, 25, 5, 102.5, 0.0), Resume(4, 40, 47, 7, 105.2, 0.0)]
    assert training.largest_difference(run) == 0.0
    assert list(training.final(run)) == list(range(1, 61))


def test_a_loss_that_is_not_what_it_was_is_seen() -> None:
    run = steps((1, 1, 25), (2, 21, 30))
    run[26] = replace(run[26], loss=run[26].loss * 1.01)
    assert training.largest_difference(run) == pytest.approx(0.0099, abs=1e-4)
    assert training.resumes(run)[0].difference == pytest.approx(0.0099, abs=1e-4)


def test_steps_that_were_skipped_are_not_taken_for_a_resume_without_loss() -> None:
    (resume,) = training.resumes(steps((1, 1, 25), (2, 28, 30)))
    assert (resume.checkpoint, resume.repeated) == (27, 0)


def test_the_longest_pause() -> None:
    run = steps((1, 1, 10))
    assert training.longest_pause_s(run, 100.0, 100.9) == pytest.approx(0.1)
    assert training.longest_pause_s(run, 100.0, 105.0) == pytest.approx(4.1)
    assert training.longest_pause_s([], 1.0, 3.0) == 2.0


def test_the_curve_has_its_marks_under_their_moments() -> None:
    lines = training.curve(steps((1, 1, 50), (2, 41, 90)), marks=[(105.0, "R")], width=40, height=6)
    assert len(lines) == 8
    assert lines[0].endswith("|*")
    assert lines[5].endswith("*")
    assert lines[-1][11:].find("R") == 20
    assert "^" in training.curve(steps((1, 1, 50), (2, 41, 90)))[-1]
    assert training.curve([]) == []


# ---------------------------------------------------------------- timeline


def entry(index: int, at_ms: int, event: str, message: str = "", **body: Any) -> dict[str, Any]:
    return {"index": index, "epoch": 1, "at_ms": at_ms, "event": event, "message": message or event, "body": body}


LOG = [
    entry(1, 1_000, "leader_elected", "s1 leads now", scheduler="s1"),
    entry(3, 2_000, "job_submitted", "j1: submitted", job="j1"),
    entry(5, 2_100, "ranks_started", job="j1", generation=1, node="n1", ranks=[1]),
    entry(5, 2_100, "ranks_started", job="j1", generation=1, node="n2", ranks=[2, 3]),
    entry(6, 2_200, "ranks_started", job="j1", generation=1, node="n1", ranks=[0]),
    entry(7, 9_000, "checkpoint_reported", job="j1", generation=1, step=20),
    entry(8, 10_300, "ranks_exited", job="j1", node="n1", exits=[[1, 1, -9]]),
    entry(8, 10_300, "gang_restarting", "j1: restarting in place", job="j1", generation=1),
    entry(9, 10_500, "node_prepared", job="j1", generation=2, node="n1"),
    entry(10, 11_000, "ranks_started", job="j1", generation=2, node="n1", ranks=[0, 1]),
    entry(11, 11_200, "ranks_started", job="j1", generation=2, node="n2", ranks=[2, 3]),
    entry(12, 30_000, "ranks_exited", job="j1", node="n1", exits=[[0, 2, 0]]),
    entry(13, 30_010, "ranks_exited", job="j1", node="n2", exits=[[2, 2, 0], [3, 2, 0]]),
]


def killed(fault: f.Fault, at_ms: int) -> Injection:
    return Injection(fault, (Target("rank 1 on n1", identity(1011)),), at_ms, 1.0)


def test_the_timeline_puts_faults_between_entries_and_says_once_what_many_said() -> None:
    lines = timeline(LOG, [killed(f.KillRank("j1", 1), 10_000)], 2_000, "j1")
    assert [line.split(None, 3)[2:] for line in lines] == [
        ["1", "s1 leads now"],
        ["3", "submitted"],
        ["5", "generation 1 started: ranks 0-1 on n1, ranks 2-3 on n2"],
        ["7", "checkpoint at step 20"],
        [">>>", "kill -9 rank 1 of j1"],
        ["8", "rank 1 on n1 ended by SIGKILL"],
        ["8", "restarting in place"],
        ["10", "generation 2 started: ranks 0-1 on n1, ranks 2-3 on n2"],
        ["12", "rank 0 on n1, ranks 2-3 on n2 exited with 0"],
    ]
    assert lines[0].startswith("   -1.00 s")
    assert lines[4].startswith("    8.00 s")


def test_a_recovery_is_measured_from_the_fault() -> None:
    run = [*steps((1, 1, 25), began_s=7.4), *steps((2, 21, 40), began_s=12.5)]
    found = recovery(killed(f.KillRank("j1", 1), 10_000), "j1", (1, ("n1", "n2")), (2, ("n1", "n2")), LOG, run)
    assert (found.detected_s, found.decided_s, found.running_s, found.training_s, found.steps_repeated) == (0.3, 0.3, 1.2, 2.5, 5)
    head, row = recovery_table([found])
    assert head.split()[:2] == ["fault", "detected"]
    assert "1 -> 2" in row
    assert "n1 n2" in row


def test_a_change_of_the_leader_is_no_restart() -> None:
    log = [*LOG, entry(20, 26_000, "leader_elected", "s2 leads now", scheduler="s2")]
    found = recovery(killed(f.KillLeader(), 20_000), "j1", (2, ("n1",)), (2, ("n1",)), log, steps((2, 1, 90), began_s=19.95))
    assert (found.detected_s, found.running_s, found.steps_repeated) == (6.0, None, 0)
    assert "never stopped" in recovery_table([found])[1]


# ---------------------------------------------------------------- verdict


def facts(**changes: Any) -> Facts:
    base = Facts(
        generation=1, nodes=("n1", "n2"), devices={0: ("n1", (0,)), 1: ("n2", (0,))}, processes={0: identity(10), 1: identity(11)},
        cause="", failure_class="", leader="s1", epoch=5, step=25, checkpoint=20,
    )  # fmt: skip
    return replace(base, **changes)


RESTARTED = facts(generation=2, processes={0: identity(20), 1: identity(21)}, cause="rank_failed", failure_class="application")
MOVED = replace(
    RESTARTED, generation=3, nodes=("n2", "n3"), devices={0: ("n2", (0,)), 1: ("n3", (0,))}, cause="node_lost", failure_class="infrastructure"
)


def differing(checks: list[verdict.Check]) -> list[str]:
    return [c.name for c in checks if not c.ok]


def test_a_restart_in_place_that_is_right() -> None:
    assert not differing(verdict.after_rank_kill(facts(), RESTARTED, Resume(2, 20, 25, 5, 1.0, 0.0)))


@pytest.mark.parametrize(
    ("after", "resume", "wrong"),
    [
        (replace(RESTARTED, generation=3), Resume(3, 20, 25, 5, 1.0, 0.0), "one generation more"),
        (replace(RESTARTED, cause="hang"), Resume(2, 20, 25, 5, 1.0, 0.0), "the cause is rank_failed"),
        (replace(RESTARTED, devices=MOVED.devices), Resume(2, 20, 25, 5, 1.0, 0.0), "restarted in place"),
        (replace(RESTARTED, processes={0: identity(10), 1: identity(21)}), Resume(2, 20, 25, 5, 1.0, 0.0), "every rank is a new process"),
        (RESTARTED, Resume(2, 0, 25, 25, 1.0, 0.0), "went on from the newest checkpoint"),
        (RESTARTED, None, "went on from the newest checkpoint"),
        (RESTARTED, Resume(2, 20, 25, 5, 1.0, 1e-3), "the same loss"),
    ],
)
def test_a_restart_in_place_that_is_wrong(after: Facts, resume: Resume | None, wrong: str) -> None:
    (found,) = differing(verdict.after_rank_kill(facts(), after, resume))
    assert wrong in found


def test_a_move_off_a_dead_node() -> None:
    resume = Resume(3, 20, 25, 5, 1.0, 0.0)
    assert not differing(verdict.after_node_kill("n1", facts(), MOVED, resume))
    assert len(differing(verdict.after_node_kill("n2", facts(), MOVED, resume))) == 1
    assert len(differing(verdict.after_node_kill("n1", facts(), replace(MOVED, failure_class="application"), resume))) == 1
    half = replace(MOVED, processes={0: identity(20)})
    assert len(differing(verdict.after_node_kill("n1", facts(), half, resume))) == 2


def test_a_change_of_the_leader_that_ranks_do_not_notice() -> None:
    run = steps((1, 1, 90))
    after = facts(leader="s2", epoch=9, step=90)
    assert not differing(verdict.after_leader_kill(facts(), after, run, 101.0, 108.0))
    assert differing(verdict.after_leader_kill(facts(), after, run, 101.0, 120.0)) == ["leader kill: training went on"]
    restarted = replace(after, generation=2, processes=RESTARTED.processes)
    assert len(differing(verdict.after_leader_kill(facts(), restarted, run, 101.0, 108.0))) == 2
    assert len(differing(verdict.after_leader_kill(facts(), facts(), run, 101.0, 108.0))) == 2


def test_the_end_is_as_if_nothing_had_happened() -> None:
    run = steps((1, 1, 25), (2, 21, 47), (4, 41, 60))
    job = {"outcome": "succeeded", "reason": ""}
    assert not differing(verdict.at_the_end(job, run, 60, 0.91, 2))
    assert differing(verdict.at_the_end(job, run[:-1], 60, 0.91, 2)) == ["every step was done"]
    assert differing(verdict.at_the_end({"outcome": "failed"}, run, 60, None, 2)) == ["the job has succeeded", "the model has learned"]
    assert differing(verdict.at_the_end(job, [], 60, 0.91, 2)) == ["every step was done", "one continuation for each restart"]
