"""Traces of jobs: what is read of each format, what is said of a bad one; and what the virtual cluster makes of them."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.client.commands.simulate import simulate
from gangline.core.model.queues import QueueSpec
from gangline.core.simulate import jobs as protocol
from gangline.core.simulate import svg
from gangline.core.simulate.failures import Failures, best_interval_s, expected_ettr
from gangline.core.simulate.formats.jobs import Trace, TraceJob, read
from gangline.core.simulate.measures import Line, Measures, percentile, size_class
from gangline.core.simulate.protocols import Asked, Unusable
from gangline.core.simulate.reading import BadTrace
from gangline.core.simulate.virtual import Setup, Virtual, shape

SWF = "; MaxProcs: 4\n"


def swf(job: int, submit: int, run: int, processors: int, asked: int = -1) -> str:
    return f"{job} {submit} -1 {run} {processors} -1 -1 -1 {asked} -1 1 7 1 1 2 -1 -1 -1\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def faults(path: Path) -> list[tuple[int | None, int | None, str, str]]:
    with pytest.raises(BadTrace) as caught:
        read(path)
    return [(p.line, p.column, p.code, p.message) for p in caught.value.problems]


def play(jobs: list[TraceJob], nodes: tuple[int, ...], **more: object) -> Measures:
    measures = Measures(nodes)
    virtual = Virtual(Setup(nodes, **({"overhead_s": 0.0} | more)), measures)  # type: ignore[arg-type]
    virtual.run(jobs)
    assert not virtual.running, "all jobs have ended"
    assert virtual.state.scratch.faults == {}
    return measures


# ---------------------------------------------------------------- formats


def test_tables_of_several_makers_become_the_same_jobs(tmp_path: Path) -> None:
    muri = written(tmp_path / "a.csv", "job_id,num_gpu,submit_s,duration_s,model\n1,4,10,20.5,bert\n0,8,0.0,5095.0,gpt2\n")
    tiresias = written(tmp_path / "b.csv", "job_id,num_gpu,submit_time,duration,interval\n1,4,10,20.5,3\n0,8,0,5095,2\n")
    expected = [TraceJob("0", 0.0, 5095.0, 8), TraceJob("1", 10.0, 20.5, 4)]
    assert read(muri).jobs == read(tiresias).jobs == expected, "in the order of submission"
    packed = tmp_path / "c.csv.gz"
    packed.write_bytes(gzip.compress(b"job_id,vc,num_gpu,submit_s,duration_s\n1,x,0,1,1\n2,y,1,1,0\n3,y,1,1,9\n"))
    trace = read(packed)
    assert trace.jobs == [TraceJob("3", 1.0, 9.0, 1, "y")]
    assert trace.left_out == {"no GPU": 1, "no duration": 1}


def test_swf_is_read_with_its_header_and_jobs_end_at_the_time_that_they_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "log.swf", SWF + swf(1, 0, 100, 2, 60) + swf(2, 5, 7, 4) + swf(3, 6, -1, 4) + swf(4, 6, 9, 0))
    trace = read(path)
    assert trace.gpus == 4
    assert trace.jobs == [TraceJob("1", 0.0, 60.0, 2, "q2", "u7", 60.0), TraceJob("2", 5.0, 7.0, 4, "q2", "u7")]
    assert trace.left_out == {"no run time": 1, "no processors": 1}


def test_slurm_accounting_is_read_without_steps(tmp_path: Path) -> None:
    head = "JobID|User|Partition|Submit|Elapsed|Timelimit|AllocTRES|State\n"
    rows = (
        "7|ann|gpu|2026-05-01T12:00:10|1-01:00:30|2-00:00:00|billing=8,cpu=64,gres/gpu=8,mem=1T,node=1|COMPLETED\n"
        "7.batch|||2026-05-01T12:00:10|1-01:00:30||cpu=64|COMPLETED\n"
        "8|bob|gpu|2026-05-01T12:00:00|05:00|UNLIMITED|gres/gpu:a100=2,gres/gpu:h100=1|FAILED\n"
        "9|bob|gpu|2026-05-01T12:00:00|00:00:00|UNLIMITED|gres/gpu=2|CANCELLED\n"
        "10|bob|cpu|2026-05-01T12:00:00|00:10:00|UNLIMITED|cpu=2|COMPLETED\n"
    )
    trace = read(written(tmp_path / "sacct.txt", head + rows))
    assert trace.jobs == [TraceJob("8", 0.0, 300.0, 3, "gpu", "bob"), TraceJob("7", 10.0, 90_030.0, 8, "gpu", "ann", 172_800.0)]
    assert trace.left_out == {"never ran": 1, "no GPU": 1}


def test_faults_of_each_format_have_line_and_column(tmp_path: Path) -> None:
    assert faults(written(tmp_path / "a.csv", "job_id,num_gpu,submit_s\n1,1,1\n")) == [
        (1, 1, "GL-1202", 'There is no column "duration_s"; needed are submit_s, duration_s, num_gpu.')
    ]
    assert faults(written(tmp_path / "b.csv", "job_id,num_gpu,submit_s,duration_s\n1,x,1,1\n1,1,-4,1\n")) == [
        (2, 3, "GL-1204", 'Column num_gpu: "x" must be a number.'),
        (3, 1, "GL-1204", 'Column job_id: "1" is there twice.'),
        (3, 5, "GL-1204", 'Column submit_s: "-4" must be from 0 to 3,155,760,000.0.'),
    ]
    assert faults(written(tmp_path / "c.swf", SWF + swf(1, 0, 1, 1) + "1 2 3\n" + swf(2, 0, 1, 1).replace("2 0", "2 zero"))) == [
        (3, 1, "GL-1203", "3 fields, where a line has 18."),
        (4, 3, "GL-1204", 'Field 2, submit time: "zero" must be a number from -1 to 3,155,760,000.'),
    ]
    assert faults(written(tmp_path / "d.txt", "JobID|Submit|ElapsedRaw|AllocTRES\n1|soon|1|gres/gpu=1\n2|2026-05-01T12:00:00|a day|\n")) == [
        (2, 3, "GL-1204", 'Column Submit: "soon" must be a time as 2026-05-01T12:00:00.'),
        (3, 23, "GL-1204", 'Column ElapsedRaw: "a day" must be a number, or a time as 1-02:03:04.'),
    ]
    assert faults(written(tmp_path / "e.swf", SWF))[0][2] == "GL-1203", "no job at all"
    assert faults(written(tmp_path / "x.frames", ""))[0][2] == "GL-1201"


HEADS = [b"", b"; x\n", b"a|b\n", b"submit_s,duration_s,num_gpu\n", b"JobID|Submit|ElapsedRaw\n"]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["t.csv", "t.swf", "t.csv.gz"]), st.sampled_from(HEADS))
def test_whatever_a_file_has_it_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, head: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(head + data)
    with contextlib.suppress(BadTrace):
        assert read(path).jobs


# ---------------------------------------------------------------- the virtual cluster


def test_jobs_that_find_room_run_as_long_as_they_do_and_others_wait() -> None:
    found = play([TraceJob("a", 0, 100, 4), TraceJob("b", 10, 50, 4), TraceJob("c", 20, 30, 4)], (8,))
    assert sorted(found.completion_s) == [50.0, 70.0, 100.0], "c waits for b, 40 s"
    figures = found.figures()
    assert figures["makespan_s"] == 100.0
    assert figures["utilisation"] == pytest.approx((4 * 100 + 4 * 50 + 4 * 30) / (8 * 90 + 8 * 10))


def test_gangs_over_several_nodes_start_when_all_have_prepared() -> None:
    found = play([TraceJob("a", 0, 100, 24)], (8, 8, 8, 8), overhead_s=40.0)
    assert list(found.completion_s) == [140.0]
    assert found.map()[0] == ("n00000", 8, [("a", 8)])
    assert shape(12, 8) == (3, 4)


def test_first_come_first_served_lets_nobody_pass_and_backfill_does() -> None:
    jobs = [TraceJob("a", 0, 1000, 6), TraceJob("wide", 1, 1000, 8), TraceJob("b", 2, 400, 2), TraceJob("late", 3, 980, 2)]
    plain = play(jobs, (8,), one_at_a_time=True)
    assert plain.last_s == 2980.0, "b runs after the wide one, although 2 GPUs are idle"
    easy = play(jobs, (8,), durations="known", reservations=1)
    assert sorted(easy.completion_s) == [400.0, 1000.0, 1999.0, 2977.0], "only b ends before the wide one can start"


def ordered(order: str) -> tuple[QueueSpec, ...]:
    return (QueueSpec("default", order=order, preempt_min_runtime_s=0.0),)  # type: ignore[arg-type]


def test_who_has_least_left_takes_the_place_of_who_has_more() -> None:
    jobs = [TraceJob("long", 0, 1000, 8), TraceJob("short", 100, 50, 8), TraceJob("longer", 120, 2000, 8)]
    found = play(jobs, (8,), queues=ordered("shortest_remaining"), durations="known")
    assert sorted(found.completion_s) == [50.0, 1050.0, 2930.0]
    assert found.evictions == {"preempted": 1}
    nearly = play([TraceJob("long", 0, 1000, 8), TraceJob("short", 980, 50, 8)], (8,), queues=ordered("shortest_remaining"), durations="known")
    assert nearly.evictions == {}, "20 s are left, less than 50"


def test_who_has_had_least_goes_first_though_nothing_is_known() -> None:
    jobs = [TraceJob("long", 0, 10_000, 8), TraceJob("new", 2_000, 100, 8)]
    found = play(jobs, (8,), queues=ordered("least_attained"))
    assert sorted(found.completion_s) == [100.0, 10_100.0]
    assert found.evictions == {"preempted": 1}
    early = play([TraceJob("long", 0, 4_000, 8), TraceJob("new", 100, 400, 8)], (8,), queues=ordered("least_attained"))
    assert sorted(early.completion_s) == pytest.approx([1_200.0, 4_400.0], abs=0.01), "alike until the first has had two GPU hours, in 900 s"


def test_who_has_run_too_short_keeps_its_place() -> None:
    queues = (QueueSpec("default", order="shortest_remaining", preempt_min_runtime_s=600.0),)
    found = play([TraceJob("long", 0, 1000, 8), TraceJob("short", 100, 50, 8)], (8,), queues=queues, durations="known")
    assert found.evictions == {"preempted": 1}
    assert sorted(found.completion_s)[0] > 500.0, "not before the first has run for 10 minutes"


def test_the_same_run_twice_is_the_same() -> None:
    jobs = [TraceJob(str(n), n * 7.0, 50 + 37 * n % 400, 1 << n % 5) for n in range(120)]
    first, second = (play(jobs, (8, 8), queues=ordered("least_attained"), overhead_s=5.0) for _ in range(2))
    assert list(first.completion_s) == list(second.completion_s)
    assert first.evictions == second.evictions


# ---------------------------------------------------------------- measures


def test_a_line_keeps_a_bounded_number_of_points_and_its_sum() -> None:
    line = Line(step_s=1.0)
    for second in range(5_000):
        line.set(float(second), second % 3)
    line.set(5_000.0, 0.0)
    assert line.total() == pytest.approx(sum(s % 3 for s in range(5_000)))
    assert len(line.sums) <= 1_300
    assert line.points()[0][1] == pytest.approx(1.0, abs=0.5)


def test_percentiles_and_classes() -> None:
    assert [percentile(range(1, 101), p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([], 50) == 0
    assert [size_class(n) for n in (1, 2, 8, 9, 513, 70_000)] == ["1", "2-4", "5-8", "9-16", "513-4096", "65537+"]


# ---------------------------------------------------------------- the protocol


def test_the_protocol_compares_policies_and_writes_a_page(tmp_path: Path) -> None:
    path = written(tmp_path / "t.swf", SWF + swf(1, 0, 1000, 3, 2000) + swf(2, 1, 1000, 4, 2000) + swf(3, 2, 400, 1, 500))
    page = tmp_path / "out.html"
    asked = ["--tasks", str(path), "--protocol", "jobs", "--policy", "fifo,easy", "--overhead", "0", "--json", "--report", str(page)]
    done = CliRunner().invoke(simulate, asked, standalone_mode=False)
    assert done.exception is None, done.output
    answer = json.loads(done.output)
    assert answer["gpus"] == 4
    assert answer["runs"]["fifo"]["makespan_s"] == 2400.0
    assert answer["runs"]["easy"]["makespan_s"] == 2000.0
    text = page.read_text()
    assert "fifo" in text
    assert "<svg" in text
    assert not re.search(r"https?://|<script|src=", text), "nothing is fetched"


def test_queues_of_a_trace_share_the_cluster_by_what_they_ask_for() -> None:
    trace = Trace([TraceJob("1", 0, 100, 3, "a"), TraceJob("2", 0, 100, 1, "b"), TraceJob("3", 0, 1, 1, "c")])
    quotas = {q.path: q.quota.gpus_milli for q in protocol.queues_of(trace, 8, 0.0)}
    assert sum(v or 0 for v in quotas.values()) == 8_000
    assert quotas == {"a": 6_000, "b": 2_000, "c": 0}


@pytest.mark.parametrize(("cluster", "says"), [("8by8", "NODESxGPUS"), ("", "does not say how large"), ("1x4", "more than 1 nodes")])
def test_what_cannot_be_run_is_said(tmp_path: Path, cluster: str, says: str) -> None:
    path = written(tmp_path / "t.csv", "job_id,num_gpu,submit_s,duration_s\n1,8,0,9\n")
    with pytest.raises(Unusable, match=says):
        protocol.run(Asked((path,), options={"cluster": cluster}), lambda _done, _total: None)


def test_axes_have_round_values() -> None:
    assert svg.ticks(10, 5) == [0, 2, 4, 6, 8, 10]
    assert svg.ticks(0.93, 4) == pytest.approx([0, 0.5])
    assert svg.number(12_345) == "12.3k"


# ---------------------------------------------------------------- failures


def test_useful_time_under_failures_is_what_the_formula_says() -> None:
    failures = Failures(300.0, seed=7)
    mean_s = protocol.mean_time_s(4, 300.0)
    jobs = [TraceJob(str(n), n * 5_000_000.0, 3_000_000.0, 32) for n in range(2)]
    found = play(jobs, (8,) * 24, failures=failures, checkpoint_s=3_600.0, write_s=60.0, overhead_s=60.0)
    assert sum(found.evictions.values()) > 30, "enough of them to compare"
    share = found.figures()["ettr_by_size"]["17-64"]
    # Silent corruption and hangs are noticed late, for which the formula has no word.
    assert share == pytest.approx(expected_ettr(3_600.0, 60.0, mean_s, 60.0), abs=0.05)
    assert {"node_lost", "rank_failed"} <= set(found.evictions)


def test_the_formula_has_the_figures_of_the_literature() -> None:
    mean_s = protocol.mean_time_s(2_048, 3.789)
    interval = best_interval_s(60.0, mean_s)
    assert (interval + 60.0) == pytest.approx(1_156, abs=2)
    assert expected_ettr(interval + 60.0, 60.0, mean_s, 300.0) == pytest.approx(0.881, abs=0.002)
