"""A bounded slice of the simulated cluster; `gangline chaos sim` plays many seeds."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from gangline.chaos.sim.invariants import Violation, check_runs
from gangline.chaos.sim.loop import Process, SimLoop
from gangline.chaos.sim.many import Order, carry_out, carry_out_all
from gangline.chaos.sim.node import Run
from gangline.chaos.sim.play import Outcome, plan_of
from gangline.chaos.sim.scenario import scenario_of
from gangline.chaos.sim.shrink import shrink
from gangline.core.model.gpushares import GpuShare, MigSlice

#: seeds that once found something, with what it was
FOUND = {"small": (6, 11), "cuts": (1,)}


@pytest.mark.timeout(900)  # half a minute of processor time, on a machine that may be busy
def test_faults_break_nothing_and_after_them_everything_ends() -> None:
    orders = [Order(seed, "mixed") for seed in range(18)] + [Order(seed, mix) for mix, seeds in FOUND.items() for seed in seeds]
    played = list(carry_out_all(orders))
    assert {order.command(): outcome.violations for order, outcome in played if outcome.violations} == {}
    assert all(outcome.lives and outcome.faults for _, outcome in played)


@pytest.mark.timeout(300)
def test_the_same_seed_is_the_same_run_byte_for_byte_whatever_the_hashes() -> None:
    def traces(hash_seed: str) -> str:
        code = "from gangline.chaos.sim.many import *\nfor s in (1, 4): print(carry_out(Order(s, 'small')).trace)"
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=250).stdout

    first, second = traces("1"), traces("2")
    assert first == second
    assert len(set(first.split())) == 2


@pytest.mark.timeout(300)
def test_the_command_counts_runs_and_prints_a_trace() -> None:
    command = [sys.executable, "-m", "gangline.chaos", "sim", "--seeds", "2", "--mix", "small", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout)
    assert (found["runs"], found["violations"], found["failed"]) == (2, 0, [])
    assert found["virtual_s"] > 100
    assert found["runs_per_s"] > 0
    assert len(found["trace"]) == 32


def test_a_process_that_is_cut_runs_nothing_more_and_no_finally() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            for i in range(10):
                seen.append(str(i))
                await asyncio.sleep(1)
        finally:
            seen.append("finally")

    async def run() -> None:
        cut, killed, paused = (Process(name) for name in ("cut", "killed", "paused"))
        cut.die_after(3)
        task = cut.spawn(work())
        await asyncio.sleep(5)
        assert seen == ["0", "1", "2"]
        task.cancel()
        await asyncio.sleep(1)
        assert not task.done()
        killed.spawn(work())
        await asyncio.sleep(0.5)
        killed.kill()
        await asyncio.sleep(5)
        assert seen == ["0", "1", "2", "0"]
        paused.spawn(work())
        await asyncio.sleep(0.5)
        paused.pause(4)
        await asyncio.sleep(3)
        assert seen[4:] == ["0"]
        await asyncio.sleep(1.1)
        assert seen[4:] == ["0", "1"]

    loop = SimLoop()
    loop.run_until_complete(run())
    loop.finish()
    assert seen.count("finally") == 3


def test_a_failing_seed_is_made_small() -> None:
    """Of a run that fails whenever two parts of its plan are there, these two are left."""
    order = Order(1, "small")
    whole = plan_of(1, scenario_of("small", 1)).ids()
    guilty = {whole[1], whole[-1]}

    def play(order: Order) -> Outcome:
        bad = order.only is None or guilty <= order.only
        return Outcome(
            seed=1, violations=["S4 two on one GPU"] if bad else [], virtual_s=1.0, trace="", commits=1, entries=1, lives=1, faults=1, story=[],
            journal="",
        )  # fmt: skip

    small, outcome = shrink(order, play(order), play=play)
    assert small.only == guilty
    assert outcome.violations
    assert small.command() == f"gangline chaos sim --seeds 1 --start 1 --mix small --only {','.join(sorted(guilty))}"
    assert carry_out(small).faults == 1


def test_the_checker_sees_two_at_once() -> None:
    one = Run("j", 0, 1, "n1", (0,), True, 1.0, 5.0)
    check_runs([one, Run("j", 0, 2, "n2", (0,), True, 5.0, 6.0)])
    with pytest.raises(Violation, match="at once"):
        check_runs([one, Run("j", 0, 2, "n2", (0,), True, 4.9, 6.0)])
    with pytest.raises(Violation, match="beyond what it has"):
        check_runs([one, Run("k", 0, 1, "n1", (0,), True, 4.9, 6.0)])


def test_the_checker_knows_parts_of_gpus() -> None:
    def run(job: str, share: GpuShare | None) -> Run:
        return Run(job, 0, 1, "n1", (0,), True, 1.0, 5.0, share=share)

    large, small = (GpuShare(0, 0, (MigSlice(0, start, size, profile),)) for start, size, profile in ((0, 4, "4g.40gb"), (4, 1, "1g.10gb")))
    check_runs([run("a", GpuShare(500)), run("b", GpuShare(500, 40_000))])
    check_runs([run("a", large), run("b", small)])
    inside = GpuShare(0, 0, (MigSlice(0, 3, 1, "1g.10gb"),))
    for a, b in ((GpuShare(500), GpuShare(501)), (GpuShare(500), small), (None, small), (large, inside)):
        with pytest.raises(Violation, match="beyond what it has"):
            check_runs([run("a", a), run("b", b)])
