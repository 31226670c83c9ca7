"""Play one seed: `play(seed, scenario)` gives what happened and what was violated."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from tenacity import wait

from gangline.chaos.checker import NodeView, RankLife, check, entries_of
from gangline.chaos.sim import invariants
from gangline.chaos.sim.adversary import FAULTS
from gangline.chaos.sim.loop import SimLoop
from gangline.chaos.sim.scenario import Plan, Scenario, plan
from gangline.chaos.sim.world import World
from gangline.core.model.codec import BadFrame, decode_frame
from gangline.core.model.fold import IllegalTransition, apply_frame
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state, state_digest
from gangline.core.store import candidate
from gangline.core.store.archive import Archive
from gangline.core.store.memory import MemoryStore
from gangline.core.store.recover import recover
from gangline.core.telemetry import Telemetry
from gangline.leader import batch, snapshotter
from gangline.nodeagent import liveness

#: lines of the schedulers that none of them may write, whatever happens
NEVER = ("illegal_event", "policy_error", "policy_does_not_settle")
#: violations that are told of one run
_TOLD = 20


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `trace` is a digest of every commit of the store, with its moment; `violations` begin with what they violate."""

    seed: int
    violations: list[str]
    virtual_s: float
    trace: str
    commits: int
    entries: int
    #: how many lives of ranks there were
    lives: int
    faults: int
    story: list[str]
    journal: str
    #: every commit as a line, where that was asked for
    lines: list[str] = []


def plan_of(seed: int, scenario: Scenario) -> Plan:
    """Return everything that a seed does."""
    return plan(seed, scenario, FAULTS)


def play(
    seed: int, scenario: Scenario, telemetry: Telemetry, *, only: frozenset[str] | None = None, level: str = "error", trace: bool = False,
    decisions: bool = False, mistake: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Outcome:  # fmt: skip
    """Play one seed, with nothing but the parts `only` of its plan. Never raises for what goes wrong in it: see `Outcome.violations`.

    `level` is that of the schedulers' logs. `mistake` is made while the cluster runs, and not when it is judged.
    `decisions`: all decisions are taken again (S14, S15), which takes twice as long as all the rest.
    """
    whole = plan_of(seed, scenario).only(only)
    violations: list[str] = []
    worlds: list[World] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-sim-")))
        loop = SimLoop()
        stack.callback(loop.finish)

        async def run() -> None:
            world = World(seed, scenario, whole, folder, telemetry, level)
            worlds.append(world)
            if trace:
                world.tracing = []
            with contextlib.ExitStack() as patches:
                for owner, name, value in _surroundings(world):
                    patches.enter_context(_replaced(owner, name, value))
                try:
                    with mistake():
                        await world.run()
                    violations.extend(await _judge(world, settled=True, decisions=decisions))
                except asyncio.CancelledError:
                    raise
                except Exception as e:  # noqa: BLE001 - whatever it is, it is what this run has found
                    violations.append(_words(e))
                    violations.extend(await _judge(world, settled=False, decisions=decisions))
                finally:
                    world.end()

        try:
            loop.run_until_complete(run())
        except Exception as e:  # noqa: BLE001 - as above
            violations.append(_words(e))
    world = worlds[0]
    runs = [r for n in world.nodes.values() for r in n.runs]
    for r in runs:
        world.trace.update(repr(r).encode())
    return Outcome(
        seed=seed, violations=violations[:_TOLD], virtual_s=round(world.ended_at, 3), trace=world.trace.hexdigest()[:32], commits=world.commits,
        entries=len(world.frames), lives=len(runs), faults=len(whole.faults), story=world.story, journal=world.journal.getvalue(),
        lines=world.tracing or [],
    )  # fmt: skip


def _words(e: Exception) -> str:
    if isinstance(e, invariants.Violation):
        return f"run: {e}"
    return f"run: {type(e).__name__}: {e}\n" + "".join(traceback.format_exception(e)[-6:])


def _surroundings(world: World) -> Iterator[tuple[Any, str, Any]]:
    """What the production code takes from its process and the machine, as this world has it: clocks, random numbers, which process it is."""
    nonces, pauses = world.rng("nonces"), world.rng("pauses")
    yield snapshotter, "EVERY_ENTRIES", 60
    yield snapshotter, "KEPT_ENTRIES", 15
    yield time, "monotonic", world.loop.time
    yield liveness, "boottime", world.loop.time
    yield batch, "secrets", SimpleNamespace(token_bytes=nonces.randbytes)
    yield wait, "random", random.Random(pauses.random())
    yield os, "fsync", lambda fd: None
    yield candidate, "this_process", lambda name: candidate.Candidate(name, "boot", 1, len(world.hosts) + 1, 0)
    yield candidate, "is_gone", lambda other, me: world.is_gone(other.pid)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    there = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, there)


# ---------------------------------------------------------------- what must be true


async def _judge(world: World, *, settled: bool, decisions: bool) -> list[str]:
    """Return what is violated in a world after its run; `settled`: it has come to rest."""
    world.ended_at = world.loop.time()
    found = [f"S1 frame {index} was overwritten" for index in world.overwritten]
    raw = [(index, *world.frames[index]) for index in sorted(world.frames)]
    leader = world.leader()
    states = {name: h.scheduler.state for name, h in world.schedulers.items() if name not in world.adversary.lasting}
    found += await _stored(world, settled)
    whole = settled and leader is not None
    end_ms = leader.now_ms() if leader is not None else 0
    for violation in check(
        entries_of(raw), _lives(world), world.history, _views(world, end_ms) if whole else None, end_ms if whole else None,
        snapshots=await _snapshots(world) if whole else None,
        replicas={name: (s.index, state_digest(s)) for name, s in states.items()} if whole else None,
        decisions=decisions,
    ):  # fmt: skip
        found.append(str(violation))
    found += _invariants(raw)
    for index, data, revision in raw:
        with contextlib.suppress(BadFrame):
            epoch = decode_frame(data, index, None).epoch
            if epoch != world.owners[index]:
                found.append(f"S2 entry {index} of epoch {epoch} was written at revision {revision}, when epoch {world.owners[index]} led")
    try:
        invariants.check_runs([r for n in world.nodes.values() for r in n.runs])
    except invariants.Violation as e:
        found.append(f"runs: {e}")
    found += [f"agent of {n.name}: {type(e).__name__}: {e}" for n in world.nodes.values() for e in n.failures]
    for line in world.journal.getvalue().splitlines():
        if any(f'"{word}"' in line for word in NEVER):
            found.append(f"journal: {line}")
    if settled:
        for key, job in world.submitted.items():
            held = [j.id for j in leader.state.jobs.values() if j.idempotency_key == key] if leader is not None else []
            if held != [job]:
                found.append(f"S7 {key} was acknowledged as {job}, the log has {held}")
    return found


def _lives(world: World) -> list[RankLife]:
    return [
        RankLife(
            node=r.node, job=r.job, rank=r.rank, generation=r.generation, gpus=r.gpus, share=r.share, clock="simulated", started_s=r.began,
            ended_s=r.ended, started_ms=1_000_000 + int(r.began * 1000), ended_ms=1_000_000 + int(r.ended * 1000) if r.ended else 0,
            ended="seen" if r.ended else "", fenced=r.fenced, code=r.code, index=r.index, epoch=r.epoch,
        )
        for n in world.nodes.values() for r in n.runs
    ]  # fmt: skip


def _views(world: World, at_ms: int) -> list[NodeView]:
    return [NodeView(node=n.name, at_ms=at_ms) for n in world.nodes.values() if not any(not r.ended for r in n.runs)]


async def _snapshots(world: World) -> dict[int, bytes]:
    found = await recover(MemoryStore(world.cluster, "checker"), world.keys)
    return {found.state.index: dump_state(found.state)}


async def _stored(world: World, settled: bool) -> list[str]:
    """Archives hold what was appended, and recovery gives the fold of it."""
    found = []
    for name in (f"s{i}" for i in range(world.scenario.schedulers)):
        archive = Archive(world.folder / name / "archive")
        for segment in archive.segments():
            for index, data in archive.read(segment.first, segment.last):
                if world.frames.get(index, (b"",))[0] != data:
                    found.append(f"S3 the archive of {name} differs from the log at {index}")
    return found


def _invariants(raw: list[tuple[int, bytes, int]]) -> list[str]:
    state = State()
    for index, data, _ in raw:
        try:
            apply_frame(state, decode_frame(data, index, state.digest))
            invariants.check_state(state)
        except invariants.Violation as e:
            return [f"state: {e}"]
        except (BadFrame, IllegalTransition) as e:
            return [f"S3 entry {index}: {e}"]
    return []
