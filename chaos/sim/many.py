"""Play many seeds on all cores, and make what fails small."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator

import msgspec

from gangline.chaos.sim.planted import planted
from gangline.chaos.sim.play import Outcome, play
from gangline.chaos.sim.scenario import scenario_of
from gangline.core.telemetry import Telemetry, setup

#: a worker is replaced after so many seeds, so that nothing can pile up in it
_SEEDS_PER_WORKER = 200


class Order(msgspec.Struct, frozen=True):
    """One run that is wanted. `nodes` is 0 for as many as the mix says; `planted` names a mistake of planted.py, "" for none."""

    seed: int
    mix: str = "mixed"
    nodes: int = 0
    only: frozenset[str] | None = None
    planted: str = ""
    #: take all decisions again, S14 and S15
    decisions: bool = False

    def command(self) -> str:
        """Return the command that repeats it."""
        nodes = f" --nodes {self.nodes}" if self.nodes else ""
        planted = f" --planted {self.planted}" if self.planted else ""
        only = f" --only {','.join(sorted(self.only))}" if self.only is not None else ""
        decisions = " --decisions" if self.decisions else ""
        return f"gangline chaos sim --seeds 1 --start {self.seed} --mix {self.mix}{nodes}{planted}{decisions}{only}"


@functools.cache
def _telemetry() -> Telemetry:
    return setup("sim")


def carry_out(order: Order, level: str = "error", trace: bool = False) -> Outcome:
    """Play one run in this process."""
    scenario = scenario_of(order.mix, order.seed, order.nodes)
    mistake = functools.partial(planted, order.planted)
    return play(
        order.seed, scenario, _telemetry(), only=order.only, level=level, trace=trace, decisions=order.decisions, mistake=mistake
    )


def carry_out_all(orders: list[Order], processes: int = 0) -> Iterator[tuple[Order, Outcome]]:
    """Yield each run with what came of it, in their order, played in so many processes (0: one for each core)."""
    processes = min(processes or os.cpu_count() or 1, len(orders))
    if processes <= 1:
        yield from ((order, carry_out(order)) for order in orders)
        return
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=_SEEDS_PER_WORKER) as pool:
        yield from zip(orders, pool.imap(carry_out, orders), strict=True)


class Total:
    """What many runs came to."""

    def __init__(self) -> None:
        self.runs = 0
        self.failed: list[Order] = []
        self.violations = 0
        self.virtual_s = 0.0
        self._trace = hashlib.sha256()
        self._began = time.perf_counter()

    def add(self, order: Order, outcome: Outcome) -> None:
        """Count one."""
        self.runs += 1
        self.violations += len(outcome.violations)
        self.virtual_s += outcome.virtual_s
        self._trace.update(outcome.trace.encode())
        if outcome.violations:
            self.failed.append(order)

    def to_json(self) -> dict[str, object]:
        """Return it as plain data; `trace` is a digest of the traces of all runs."""
        took_s = time.perf_counter() - self._began
        return {
            "runs": self.runs, "violations": self.violations, "virtual_s": round(self.virtual_s, 1),
            "runs_per_s": round(self.runs / max(took_s, 1e-9), 2), "failed": [order.command() for order in self.failed],
            "trace": self._trace.hexdigest()[:32],
        }  # fmt: skip
