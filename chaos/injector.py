"""Does faults to a cluster of processes on this machine, and undoes what can be undone.

`observe` reads what runs into a `View`, `targets.resolve` says what a fault hits, and the rest is signals. Before each signal the process is
recognised by its pid *and* its start time, and held by a descriptor meanwhile, so that no stranger that has got the pid is ever hit. Faults of
simulated GPUs are written down for the agent instead (gpufaults.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gangline.chaos import faults as f
from gangline.chaos import gpufaults as g
from gangline.chaos.targets import Component, Identity, NoTarget, RankProcess, Target, View, resolve
from gangline.nodeagent import rankfile
from gangline.nodeagent.adoption import RankStatus, open_process, stored_statuses

#: a killed process that is not gone after this time hangs in the kernel
GONE_S = 5.0
#: times that a node is looked at again for what was being started while it was hit
_ROUNDS = 5


class InjectionFailed(Exception):
    """The fault was tried and did not happen, or not wholly."""


class Cluster(Protocol):
    """What an injector must know of a cluster on this machine."""

    def components(self) -> Mapping[str, Component]:
        """Return the running processes of the cluster itself by name; an agent has the name of its node."""

    def node_folders(self) -> Mapping[str, Path]:
        """Return the state directory of each node's agent, running or not."""

    def leader(self) -> str:
        """Return the name of the leading scheduler, empty when nobody is known to lead."""

    def restart(self, name: str) -> None:
        """Start a process of the cluster again that has ended."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault that happened: what, to which processes, and when."""

    fault: f.Fault
    targets: tuple[Target, ...]
    #: wall clock, as the log and the ranks have it
    at_ms: int
    #: monotonic clock, for measuring from here
    at_s: float

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of what was hit."""
        return tuple(t.process.pid for t in self.targets)

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data."""
        hit = [{"what": t.what, "pid": t.process.pid, "start": t.process.start} for t in self.targets]
        return {**self.fault.to_json(), "at_ms": self.at_ms, "targets": hit}


class Injector:
    """Injects faults into one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def view(self) -> View:
        """Return what runs now."""
        return observe(self._cluster)

    def inject(self, fault: f.Fault) -> Injection:
        """Do it, and return when it has happened: killed processes are gone, frozen ones have been told.

        Raises NoTarget when the fault hits nothing, InjectionFailed when something it hits does not go.
        """
        at_ms, at_s = time.time_ns() // 1_000_000, time.monotonic()
        if isinstance(fault, g.GpuFault):
            return Injection(fault, (self._of_gpu(fault, g.put),), at_ms, at_s)
        hit: dict[Identity, Target] = {}
        for targets in self._rounds(fault):
            for target in targets:
                if target.process not in hit and _signal(target, fault.SIGNAL):
                    hit[target.process] = target
        if not hit:
            raise NoTarget(f"{fault}: it ended before it could be hit")
        if fault.SIGNAL == signal.SIGKILL:
            _await_end(list(hit.values()))
        return Injection(fault, tuple(hit.values()), at_ms, at_s)

    def heal(self, injection: Injection) -> list[str]:
        """Undo it as far as that is possible: frozen processes go on, those of the cluster that were killed start again.

        Returns what was done, in words. Killed ranks are the scheduler's to replace.
        """
        if isinstance(injection.fault, g.GpuFault):
            self._of_gpu(injection.fault, g.take_back)
            return [f"{injection.fault.whom()} is as it was"]
        done: list[str] = []
        for target in injection.targets:
            if injection.fault.SIGNAL == signal.SIGSTOP:
                if _signal(target, signal.SIGCONT):
                    done.append(f"{target.what} goes on")
            elif target.component:
                self._cluster.restart(target.component)
                done.append(f"{target.what} started again")
        return done

    def _of_gpu(self, fault: g.GpuFault, write: Callable[[g.GpuFault, Path], None]) -> Target:
        """Write a fault of a GPU down for the agent of its node, and return what it hits, with the agent's process where there is one."""
        folder = self._cluster.node_folders().get(fault.node)
        why = f"there is no node {fault.node}" if folder is None else g.problem(fault, folder)
        if why or folder is None:
            raise NoTarget(why)
        write(fault, folder)
        agent = self._cluster.components().get(fault.node)
        return Target(fault.whom(), agent.process if agent is not None else Identity(0, 0))

    def _rounds(self, fault: f.Fault) -> Iterator[tuple[Target, ...]]:
        """Yield what the fault hits; for a whole node again, until nothing new has been started there meanwhile."""
        targets = resolve(fault, self.view())
        yield targets
        if not isinstance(fault, f.KillNode | f.FreezeNode):
            return
        seen = {t.process for t in targets}
        for _ in range(_ROUNDS):
            with contextlib.suppress(NoTarget):
                targets = resolve(fault, self.view())
            if seen.issuperset(t.process for t in targets):
                return
            seen.update(t.process for t in targets)
            yield targets
        raise InjectionFailed(f"{fault}: more and more is being started there")


def observe(cluster: Cluster) -> View:
    """Return what of a cluster runs now, from its state files, the process table and its schedulers."""
    leader = cluster.leader()
    ranks = tuple(rank for node, folder in sorted(cluster.node_folders().items()) for rank in running_ranks(node, folder))
    table = process_table()
    components = {name: c for name, c in cluster.components().items() if alive(c.process)}
    return View(components, ranks, leader, _children(table))


def running_ranks(node: str, folder: Path) -> Iterator[RankProcess]:
    """Yield the ranks that have not ended by a node's status files and that, or whose supervisors, are alive."""
    boot_id = rankfile.boot_id()
    for status in stored_statuses(folder / "runs"):
        rank = _rank_process(node, status)
        # The supervisor of one that has ended may be that of another by now.
        if status.boot_id != boot_id or status.state == "exited":
            continue
        if alive(rank.supervisor) or (rank.process is not None and alive(rank.process)):
            yield rank


def alive(process: Identity) -> bool:
    """Whether this very process still runs; a zombie does not."""
    return process.start > 0 and rankfile.process_start(process.pid) == process.start


def process_table() -> dict[Identity, int]:
    """Return all processes of this machine that are no zombies, with the pids of their parents."""
    found: dict[Identity, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_bytes()
        except OSError:
            continue
        # The second field is the command in parentheses and may contain anything.
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] not in (b"Z", b"X"):
            found[Identity(int(name), int(fields[19]))] = int(fields[1])
    return found


def _rank_process(node: str, status: RankStatus) -> RankProcess:
    process = Identity(status.pid, status.pid_start)
    started = status.pid > 0 and status.state in ("running", "stopping", "starting") and alive(process)
    return RankProcess(
        job=status.job, rank=status.rank, generation=status.generation, node=node,
        supervisor=Identity(status.supervisor, status.supervisor_start), process=process if started else None,
    )  # fmt: skip


def _children(table: Mapping[Identity, int]) -> dict[Identity, tuple[Identity, ...]]:
    by_pid = {process.pid: process for process in table}
    children: dict[Identity, list[Identity]] = {}
    for process, parent in sorted(table.items()):
        if parent in by_pid:
            children.setdefault(by_pid[parent], []).append(process)
    return {parent: tuple(found) for parent, found in children.items()}


# ---------------------------------------------------------------- signals


def _signal(target: Target, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False when it has ended."""
    return _held(target.process, lambda pidfd: signal.pidfd_send_signal(pidfd, number))


def _held(process: Identity, act: Callable[[int], None]) -> bool:
    pidfd = open_process(process.pid, process.start)
    if pidfd < 0:
        return False
    try:
        act(pidfd)
    except ProcessLookupError:
        return False
    except PermissionError as e:
        raise InjectionFailed(f"process {process.pid} belongs to another user") from e
    finally:
        os.close(pidfd)
    return True


def _await_end(targets: list[Target]) -> None:
    """Wait until all are gone. Raises InjectionFailed."""
    deadline = time.monotonic() + GONE_S
    for target in targets:
        _held(target.process, lambda pidfd: _readable(pidfd, deadline))
    left = [f"{t.what} (pid {t.process.pid})" for t in targets if alive(t.process)]
    if left:
        raise InjectionFailed(f"still there {GONE_S:g} s after SIGKILL: {', '.join(left)}")


def _readable(pidfd: int, deadline: float) -> None:
    """Wait for the end of the process, which makes its descriptor readable, until the deadline at most."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
