"""Topologies: which nodes are near each other, as levels of their labels, coarsest first.

    default: [zone, block, rack, nvlink]

A *domain* of a level is the set of nodes with the same values of that label and of all coarser ones. The node itself is the finest level of
every topology, `hostname`. A node that lacks one of the labels is outside of the topology.

Before any topology is declared there is one, `default`, with those of the well-known levels whose labels every node carries that is up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

#: the topology of a job that names none
DEFAULT_TOPOLOGY: Final = "default"
#: level of the nodes themselves, the finest of every topology
NODE_LEVEL: Final = "hostname"
#: levels of the topology that there is before any is declared
WELL_KNOWN: Final = ("zone", "block", "rack", "nvlink")
MAX_TOPOLOGIES: Final = 64
#: levels that one topology declares
MAX_DEPTH: Final = 16


class Topology(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A declared topology: its name and its levels, coarsest first, without that of the nodes."""

    name: str
    levels: tuple[str, ...] = ()


class TopologyChange(msgspec.Struct, frozen=True, gc=False):
    """The levels of one topology before and after; None where there is no such topology."""

    name: str
    old: tuple[str, ...] | None
    new: tuple[str, ...] | None


def check(topologies: Iterable[Topology]) -> None:
    """Raises ValueError when a declaration does not make sense: the command that declares it may come from anywhere."""
    names: dict[str, None] = {}
    for topology in topologies:
        if not topology.name or topology.name in names:
            raise ValueError(f"topology {topology.name!r} is declared twice, or has no name")
        if not all(topology.levels) or len({*topology.levels, NODE_LEVEL}) <= len(topology.levels):
            raise ValueError(f"the levels of topology {topology.name} are not labels, each once and none of them {NODE_LEVEL}")
        names[topology.name] = None


def levels_by_name(topologies: Iterable[Topology], carried: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the levels of each topology, that of the nodes included. `carried` are the labels that every node has that is up."""
    declared = {topology.name: (*topology.levels, NODE_LEVEL) for topology in topologies}
    return declared or {DEFAULT_TOPOLOGY: (*(level for level in WELL_KNOWN if level in carried), NODE_LEVEL)}


def changes(old: Iterable[Topology], new: Iterable[Topology]) -> list[TopologyChange]:
    """Return what differs between two declarations, the order of the topologies aside: it means nothing."""
    before, after = ({topology.name: topology.levels for topology in each} for each in (old, new))
    names = dict.fromkeys([*before, *after])
    return [TopologyChange(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
