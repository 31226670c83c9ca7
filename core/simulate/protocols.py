"""What all protocols of `gangline simulate` have in common: what is asked of one, what it answers, and the list of them.

A protocol is a module with

    POLICIES    name → one line of help; the first is what is run when none is named
    run(asked, tick)  → Result

To add one, write the module and name it in PROTOCOLS. `tick(done, total)` is called now and then with how much of the work is done, in any unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

#: protocol → (module, one line of help)
PROTOCOLS: dict[str, tuple[str, str]] = {
    "fgd": ("gangline.core.simulate.fgd", "tasks arrive one by one until 130 % of all GPUs are asked for; how many GPUs are given out?"),
    "jobs": ("gangline.core.simulate.jobs", "jobs that arrive, run and end: completion times, waits, utilisation, fairness"),
}

Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class Asked:
    """What a run is asked to do. `options` are those that only some protocols know, as they were given."""

    tasks: tuple[Path, ...]
    nodes: Path | None = None
    seed: int = 42
    policy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What came out: `figures` are the keys of --json, `lines` what a person reads, `report` an HTML page if one was asked for."""

    figures: dict[str, Any]
    lines: list[str]
    report: str = ""


class Unusable(ValueError):
    """The run cannot be made as it is asked for: an unknown policy, or a file missing. The text says what to do."""


class ProtocolModule(Protocol):
    """The module of a protocol."""

    POLICIES: Mapping[str, str]

    def run(self, asked: Asked, tick: Tick) -> Result:
        """Run it. Raises BadTrace, Unusable."""
        ...


def protocol(name: str) -> ProtocolModule:
    """Return the module of a protocol; raises KeyError."""
    return cast(ProtocolModule, import_module(PROTOCOLS[name][0]))
