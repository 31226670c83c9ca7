"""What goes wrong, and when it is put right: each fault is a method `fault_…`, played at its moment with random numbers of its own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from gangline.core.store.api import StoreError
from gangline.core.store.memory import MemoryStore
from gangline.leader.commands import Administer

if TYPE_CHECKING:
    from gangline.chaos.sim.node import SimNode
    from gangline.chaos.sim.world import World

_Action = Literal["drain", "undrain", "cordon", "uncordon", "confirm_dead"]

#: suspensions of a process within which it is cut, where it is cut "at any await"
_STEPS = 400


class Adversary:
    """Plays faults on a world. After `World.heal` nothing of them is left but what lasts for ever."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random()
        #: names of store clients, without the number of their life, that are never heard, or hear nothing, to the end
        self.lasting: dict[str, str] = {}

    def play(self, name: str, seed: str) -> None:
        """Do one fault."""
        self.rng = random.Random(seed)
        self.world.say(name)
        getattr(self, f"fault_{name}")()

    def begin_lasting(self, seed: str) -> None:
        """Cut one node or scheduler off in one direction for ever; with a single scheduler or two nodes that would be the end of everything."""
        rng = random.Random(seed)
        names = sorted(self.world.nodes)[3:] + (sorted(self.world.schedulers) if len(self.world.schedulers) > 1 else [])
        name, how = rng.choice(names), rng.choice(("mute", "deaf"))
        self.lasting[name] = how
        self.world.say(f"{name} is {how} for ever")
        self.reconnect()

    def reconnect(self) -> None:
        """Apply what lasts to those who live now."""
        faults = self.world.faults
        for name, how in self.lasting.items():
            host = self.world.schedulers.get(name)
            (faults.mute if how == "mute" else faults.deaf).add(host.store.name if host is not None else name)

    def _later(self, s: float, do: Callable[[], object]) -> None:
        self.world.later(s, do)

    def _node(self) -> SimNode:
        return self.world.nodes[self.rng.choice(sorted(self.world.nodes))]

    # ---------------------------------------------------------------- schedulers

    def fault_kill_leader(self) -> None:
        """The leader dies; its successor is another, or its own next life."""
        leader = self.world.leader()
        if leader is not None:
            self._kill(leader.name)

    def fault_kill_scheduler(self) -> None:
        """Any scheduler dies."""
        if self.world.schedulers:
            self._kill(self.rng.choice(sorted(self.world.schedulers)))

    def _kill(self, name: str) -> None:
        self.world.restart_in[name] = self.rng.choice((0.0, 1.0, 10.0))
        self.world.schedulers[name].process.kill()

    def fault_cut_scheduler_at_any_await(self) -> None:
        """A scheduler, mostly the leader, is cut at one of its next suspensions, with no `finally`."""
        leader = self.world.leader()
        if self.world.schedulers:
            name = leader.name if leader is not None and self.rng.random() < 0.7 else self.rng.choice(sorted(self.world.schedulers))
            self.world.restart_in[name] = self.rng.choice((0.0, 1.0, 10.0))
            self.world.schedulers[name].process.die_after(self.rng.randrange(1, _STEPS))

    def fault_pause_leader(self) -> None:
        """It runs no step for a while, and then goes on as if nothing had been."""
        leader = self.world.leader()
        if leader is not None:
            self.world.schedulers[leader.name].process.pause(self.rng.choice((1.0, 4.0, 9.0)))

    def fault_delete_election(self) -> None:
        """Somebody deletes the election key by hand."""
        async def delete() -> None:
            with contextlib.suppress(StoreError):
                await MemoryStore(self.world.cluster, "operator").delete(self.world.keys.leader)

        self.world.background(delete())

    # ---------------------------------------------------------------- nodes

    def fault_kill_agent(self) -> None:
        """An agent dies, its ranks go on."""
        node = self._node()
        self.world.say(f"agent {node.name}")
        self.world.restart_in[node.name] = self.rng.choice((0.01, 1.0, 8.0, 20.0))
        node.kill_agent()

    def fault_cut_agent_at_any_await(self) -> None:
        """An agent is cut at one of its next suspensions."""
        node = self._node()
        self.world.say(f"agent {node.name}")
        self.world.restart_in[node.name] = self.rng.choice((0.01, 1.0, 8.0))
        node.kill_agent_after(self.rng.randrange(1, _STEPS))

    def fault_crash_node(self) -> None:
        """A host dies with all that runs on it."""
        node = self._node()
        self.world.say(f"host {node.name}")
        self.world.restart_in[node.name] = self.rng.choice((0.1, 2.0, 8.0, 30.0))
        node.crash()

    def fault_reinstall_node(self) -> None:
        """A host dies and comes back empty, as another machine."""
        if self.rng.random() < 0.5:
            node = self._node()
            self.world.say(f"host {node.name} reinstalled")
            self.world.restart_in[node.name] = self.rng.choice((2.0, 8.0, 30.0))
            node.crash(reinstalled=True)

    def fault_break_gpu(self) -> None:
        """A GPU breaks, or is well again; or its driver reports an error, which may cost the GPU or be the job's own doing, or too much heat."""
        node = self._node()
        gpu = self.rng.choice(sorted(node.gpus))
        if self.rng.random() < 0.5:
            node.report_error(gpu, self.rng.choice((79, 48, 94, 74, 31, 13, 0)))
            return
        node.gpus = node.gpus | {gpu: not node.gpus[gpu]}
        node.wake()

    def fault_administer(self) -> None:
        """An operator drains or cordons a node, takes that back, or says that it is dead."""
        node = self._node()
        actions: tuple[_Action, ...] = ("drain", "undrain", "cordon", "uncordon", "confirm_dead")
        action = self.rng.choice(actions)
        if action == "confirm_dead" and any(not r.ended for r in node.runs):
            return  # that would be a lie
        self.world.say(f"{action} {node.name}")
        self.world.background(self.world.ask(Administer(node.name, action, deadline_s=self.rng.choice((0.0, 5.0)))))

    # ---------------------------------------------------------------- network

    def fault_cut_node(self) -> None:
        """A node is cut off from the store."""
        self._cut(self._node().name)

    def fault_cut_leader(self) -> None:
        """The leader is cut off from the store."""
        leader = self.world.leader()
        if leader is not None:
            self._cut(self.world.schedulers[leader.name].store.name)

    def _cut(self, name: str) -> None:
        """In both directions, or in one."""
        faults = self.world.faults
        how = self.rng.choice(("partitioned", "partitioned", "mute", "deaf"))
        cut: set[str] = getattr(faults, how)
        cut.add(name)
        self.world.say(f"{name} is {how}")
        self._later(self.rng.choice((0.5, 3.0, 8.0, 20.0)), lambda: self._mend(cut, name))

    def _mend(self, cut: set[str], name: str) -> None:
        cut.discard(name)
        self.reconnect()

    def fault_watches(self) -> None:
        """Watches are cut, fall silent, or the store elects."""
        cluster = self.world.cluster
        self.rng.choice((cluster.cut_watches, cluster.silence_watches, cluster.elect))()

    def fault_slow_watches(self) -> None:
        """Every watch message comes late."""
        self.world.faults.watch_late_s = self.rng.choice((0.2, 1.5))
        self._later(self.rng.choice((2.0, 8.0)), lambda: setattr(self.world.faults, "watch_late_s", 0.0))

    # ---------------------------------------------------------------- the store

    def fault_outage(self) -> None:
        """The store answers nobody."""
        self.world.faults.unavailable = True

        def over() -> None:
            self.world.faults.unavailable = False
            self.world.cluster.elect()

        self._later(self.rng.choice((0.3, 2.0, 12.0)), over)

    def fault_no_space(self) -> None:
        """The store has no space, and refuses writes."""
        self.world.faults.no_space = True
        self._later(self.rng.choice((1.0, 5.0)), lambda: setattr(self.world.faults, "no_space", False))

    def fault_compact(self) -> None:
        """The store forgets its history up to now."""
        mvcc = self.world.cluster.mvcc
        if mvcc.revision > mvcc.compacted:
            mvcc.compact(mvcc.revision)


FAULTS = [name.removeprefix("fault_") for name in vars(Adversary) if name.startswith("fault_")]
