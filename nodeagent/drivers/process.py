"""Ranks as processes of the node: under the job's user, in control groups where something is limited, with mounts of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gangline.core.model.documents import DesiredRank
from gangline.core.model.spec import JobSpec
from gangline.nodeagent import boxed
from gangline.nodeagent.adoption import RankStatus
from gangline.nodeagent.cgroups import Limits
from gangline.nodeagent.drivers.driver import Ready, Site, look_at_storage, rank_name
from gangline.nodeagent.isolation import Box, Refused, groups_of, limits_of
from gangline.nodeagent.launcher import Launch

#: as large as a limit can be: where the group of a rank is asked for, whatever its limits are
_SOME = Limits(memory_mib=1, pids=1, cpu_share_milli=1, denied=((0, 0),))


class ProcessDriver:
    """See driver.Driver."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def prepare(self, job: str, generation: int, spec: JobSpec, say: Callable[[str], None]) -> Ready:
        """Find the user and try the storage out."""
        if spec.mounts and os.geteuid() != 0:
            raise Refused("this node cannot mount anything for processes: its agent does not run as root")
        return await look_at_storage(job, generation, spec, self._site.rules)

    def box(self, launch: Launch, spec: JobSpec, rank: DesiredRank, ready: Ready) -> Launch:
        """Put a box around it, where there is something to put in."""
        site = self._site
        denied = site.closed(rank) if site.rules.ranks.devices else ()
        limits = msgspec.structs.replace(limits_of(spec, rank, site.rules), denied=denied)
        name = rank_name(launch.job, launch.generation, launch.rank)
        groups = groups_of(site.layout, site.base, name, limits, site.rules)
        rlimits = _rlimits(site)
        if not (groups or rlimits or ready.user or ready.mounts):
            return launch
        user = ready.user
        box = Box(
            groups=groups, user=user, owner=(user.uid, user.gid) if user is not None else None, rlimits=rlimits, mounts=ready.mounts,
            memory_mib=limits.memory_mib,
        )  # fmt: skip
        return msgspec.structs.replace(launch, box=box)

    def inside(self, status: RankStatus, spec: JobSpec, ready: Ready, command: Sequence[str]) -> list[str]:
        """Run it by `joinrank.py`."""
        groups = [path for path in self._group_paths(status) if os.path.isdir(path)]
        request = {
            "pid": status.pid, "start": status.pid_start, "groups": groups, "user": msgspec.to_builtins(ready.user),
            "mounts": bool(ready.mounts), "rlimits": _rlimits(self._site), "command": list(command),
        }  # fmt: skip
        return [sys.executable, "-I", "-S", "-c", _BOOT, str(Path(boxed.__file__).parent), msgspec.json.encode(request).decode()]

    async def bury(self, status: RankStatus) -> None:
        """Empty and remove its control groups."""
        groups = [{"path": path, "base": os.path.dirname(path)} for path in self._group_paths(status) if os.path.isdir(path)]
        if groups:
            await asyncio.to_thread(boxed.remove_groups, {"groups": groups})

    def _group_paths(self, status: RankStatus) -> list[str]:
        name = rank_name(status.job, status.generation, status.rank)
        return [group.path for group in self._site.layout.of_rank(self._site.base, name, _SOME)]


def _rlimits(site: Site) -> tuple[tuple[int, int, int], ...]:
    return tuple((which, most, most) for which, most in site.rules.ranks.rlimits)


_BOOT = """
import sys
for name, path in (("gangline", []), ("gangline.nodeagent", [sys.argv[1]])):
    sys.modules[name] = module = type(sys)(name)
    module.__path__ = path
from gangline.nodeagent.joinrank import main
main(sys.argv[2])
"""
