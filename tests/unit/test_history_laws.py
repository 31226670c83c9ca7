"""Laws of the fold over random legal histories and over every event that it refuses on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.model.codec import decode_frame
from gangline.core.model.fold import IllegalTransition, apply
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.store.recover import replay

History = Callable[[int, int], Any]
SEEDS = st.integers(0, 10**9)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, frames=st.integers(1, 200))
def test_replay_is_what_was_live(history: History, seed: int, frames: int) -> None:
    scribe = history(seed, frames)
    assert dump_state(replay(scribe.frames)) == dump_state(scribe.state)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, frames=st.integers(1, 200))
def test_a_dumped_state_loads_as_itself(history: History, seed: int, frames: int) -> None:
    state = history(seed, frames).state
    loaded = load_state(dump_state(state))
    loaded.scratch = state.scratch
    assert loaded == state
    assert dump_state(loaded) == dump_state(state)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, frames=st.integers(1, 120))
def test_what_is_free_is_what_nobody_holds(history: History, seed: int, frames: int) -> None:
    state = history(seed, frames).state
    for node in state.nodes.values():
        reg, held = node.registration, node.holdings.values()
        devices = [g for h in held for g in h.gpus]
        assert len(devices) == len(set(devices)), f"a device of {node.id} is held twice"
        assert node.free_gpus == tuple(g.index for g in reg.gpus if g.healthy and g.index not in devices)
        assert node.free_cpus_milli == reg.cpus_milli - sum(h.cpus_milli for h in held)
        assert node.free_memory_mib == reg.memory_mib - sum(h.memory_mib for h in held)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, frames=st.integers(1, 120))
def test_the_indexes_over_jobs_agree_with_the_jobs(history: History, seed: int, frames: int) -> None:
    state = history(seed, frames).state
    assert {job for *_, job in state.queue} == {j.id for j in state.jobs.values() if j.state == "queued"}
    assert state.queue == sorted(state.queue)
    assert set(state.running) == {j.id for j in state.jobs.values() if j.active}
    assert set(state.finished) == {j.id for j in state.jobs.values() if j.state == "finished"}


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, frames=st.integers(5, 40))
def test_a_refused_event_changes_nothing(history: History, seed: int, frames: int) -> None:
    """Every event of one history is offered to another at random places; most are refused, and none of those leaves a trace."""
    rng = random.Random(seed)
    strange = [e for i, f in enumerate(history(seed + 1, frames).frames, 1) for e in decode_frame(f, i, None).events]
    state = replay(history(seed, frames).frames)
    for event in rng.sample(strange, min(30, len(strange))):
        before = dump_state(state)
        trial: State = load_state(before)
        try:
            apply(trial, event, trial.index + 1, trial.epoch, trial.at_ms)
        except IllegalTransition:
            assert dump_state(trial) == before
