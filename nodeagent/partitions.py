"""How the GPUs of a node are partitioned: MIG instances are made before the ranks that get them start, and unmade when they are in the way.

The scheduler has decided where each instance is (core/policy/migplan.py), and the agent asks for it only when nothing alive holds what has to
change (reconcile.py), so nothing here ever touches a GPU in use. Instances that nobody needs stay until something else is to be there: the next
job often asks for the same.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from gangline.core.model.documents import DesiredRank, Gpu
from gangline.core.model.gpushares import MigSlice

_NAMESPACE = uuid.UUID("3c0f7e0a-6a43-4f0e-9d0b-5b5f2d1f6a77")


class Change(msgspec.Struct, frozen=True):
    """What was done to make room for some ranks."""

    made: tuple[MigSlice, ...] = ()
    unmade: tuple[MigSlice, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.made or self.unmade)


class Partitions(Protocol):
    """The instances of a node's GPUs."""

    async def arrange(self, ranks: Iterable[DesiredRank]) -> Change:
        """Make the instances that the ranks get, and take GPUs that they get in another way out of MIG mode. Raises OSError."""
        ...

    def uuid_of(self, one: MigSlice) -> str:
        """Return the UUID of an instance, "" when it is not there."""
        ...


class NoPartitions:
    """Of a node whose GPUs are not partitioned."""

    async def arrange(self, ranks: Iterable[DesiredRank]) -> Change:
        """Do nothing, where nothing is asked for."""
        if any(r.share is not None and r.share.mig for r in ranks):
            raise OSError("this node does not partition its GPUs")
        return Change()

    def uuid_of(self, one: MigSlice) -> str:
        """Return nothing: there are none."""
        return ""


def planned(there: Iterable[MigSlice], ranks: Iterable[DesiredRank]) -> Change:
    """Return what has to be made and unmade so that the ranks have their instances, and their other GPUs none. Pure."""
    wanted: dict[MigSlice, None] = {}
    otherwise: set[int] = set()
    for r in ranks:
        if r.share is not None and r.share.mig:
            wanted.update(dict.fromkeys(r.share.mig))
        else:
            otherwise.update(r.gpus)
    have = dict.fromkeys(there)
    unmade = tuple(one for one in have if one.gpu in otherwise or (one not in wanted and any(one.overlaps(new) for new in wanted)))
    return Change(tuple(one for one in wanted if one not in have), unmade)


class SimulatedPartitions:
    """Instances of simulated GPUs. A file remembers them, as a card would, whatever becomes of the agent."""

    def __init__(self, path: Path, gpus: Iterable[Gpu]) -> None:
        self._path = path
        self._gpus = {gpu.index: gpu.uuid for gpu in gpus}
        self._instances: dict[MigSlice, None] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._instances = dict.fromkeys(msgspec.json.decode(path.read_bytes(), type=list[MigSlice]))

    async def arrange(self, ranks: Iterable[DesiredRank]) -> Change:
        """Make and unmake; see Partitions."""
        change = planned(self._instances, ranks)
        if change:
            for one in change.unmade:
                del self._instances[one]
            self._instances.update(dict.fromkeys(change.made))
            temporary = self._path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode(list(self._instances)))
            temporary.replace(self._path)
        return change

    def uuid_of(self, one: MigSlice) -> str:
        """Return a UUID that is the same for the same place on the same GPU."""
        if one not in self._instances:
            return ""
        return f"MIG-{uuid.uuid5(_NAMESPACE, f'{self._gpus[one.gpu]}/{one.profile}/{one.start}')}"
