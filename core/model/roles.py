"""What ranks a job has: its roles, laid out. Everybody who counts, places, starts or shows ranks goes by this, a job without roles as well.

    spec ── tree ──▶ groups, and in them leaves: a role, or one replica of it. A job without roles is one group with one leaf
         ── leaves ─▶ the leaves in order: the ranks of the first are 0 to n - 1, those of the next follow, and so on

    roles: [{name: learner, ranks: 2},                         leaves           ranks of the job, if all are there
            {name: shard, replicas: 2, roles: [                learner          0, 1
                {name: server, ranks: 1},                      shard#0000/server   2
                {name: cache, ranks: 2}]}]                     shard#0000/cache    3, 4
                                                               shard#0001/server   5
                                                               shard#0001/cache    6, 7

Of an elastic job fewer ranks may be placed. Its *sizes* are the ranks of each leaf that are there, in the order of the leaves; a leaf of which
nothing is there has the size 0, and the ranks that are there are numbered without gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from gangline.core.model.gpushares import in_gpus
from gangline.core.model.spec import Gang, JobSpec, Resources, Role, TopologyRequest

#: leaves of one job, its replicas counted
MAX_LEAVES = 1_024
#: specs with roles whose trees are kept
_KEPT = 1_024

Sizes = tuple[int, ...]


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """Ranks of one role that are placed alike: the role, or one replica of it."""

    #: position among the leaves
    index: int
    #: position of the role among those of the job that have ranks; the same for all of its replicas
    role: int
    #: unique among the leaves; within a group, paths as texts sort in the order of the job file
    path: str
    #: of the role, "" in a job without roles
    name: str
    #: which replica, 0 when there is one; in nested groups, counted through
    replica: int
    gang: Gang
    resources: Resources
    command: tuple[str, ...]
    env: dict[str, str]
    #: of these ranks, besides that of the groups around them
    topology: TopologyRequest

    @property
    def unit(self) -> int:
        """Ranks that are placed together on one node."""
        return self.gang.ranks_per_node or 1


class Group(msgspec.Struct, frozen=True, gc=False):
    """Leaves and groups of which `needed` must be there."""

    path: str
    needed: int
    topology: TopologyRequest
    members: tuple[Group | Leaf, ...]


class Amounts(NamedTuple):
    """What some ranks hold."""

    ranks: int
    #: thousandths, as queues are charged; of memory requests only what is known, nothing before they are placed
    gpus_milli: int
    cpus_milli: int
    memory_mib: int

    @property
    def gpus(self) -> float:
        """The same in GPUs."""
        return in_gpus(self.gpus_milli)


_trees: dict[int, tuple[JobSpec, Group, tuple[Leaf, ...]]] = {}


def tree(spec: JobSpec) -> Group:
    """Return the groups and leaves of a job."""
    return _laid_out(spec)[0]


def leaves(spec: JobSpec) -> tuple[Leaf, ...]:
    """Return the leaves of a job, in the order of their ranks."""
    return _laid_out(spec)[1]


def _laid_out(spec: JobSpec) -> tuple[Group, tuple[Leaf, ...]]:
    if not spec.roles:
        leaf = Leaf(0, 0, "ranks", "", 0, spec.gang, spec.resources, spec.command, spec.env, TopologyRequest())
        return Group("", 1, spec.topology, (leaf,)), (leaf,)
    known = _trees.get(id(spec))
    if known is None or known[0] is not spec:
        if len(_trees) >= _KEPT:
            _trees.clear()
        layout = _Layout(spec)
        known = _trees[id(spec)] = (spec, layout.root, tuple(layout.leaves))
    return known[1], known[2]


class _Layout:
    """Lays the roles of a job out, replica by replica."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.leaves: list[Leaf] = []
        self._replicas: dict[str, int] = {}
        self._numbers = {role.name: at for at, role in enumerate(ranked(spec.roles))}
        members = tuple(self._role(role, "", at) for at, role in enumerate(spec.roles))
        self.root = Group("", len(members), spec.topology, members)

    def _role(self, role: Role, above: str, at: int) -> Group | Leaf:
        path = f"{above}{at:03d}-{role.name}"
        if role.replicas == 1:
            return self._one(role, path, role.topology)
        asked = role.topology
        of_each = msgspec.structs.replace(asked, balanced="", spread="", max_skew=0)
        of_all = msgspec.structs.replace(asked, required="", preferred="")
        members = tuple(self._one(role, f"{path}#{at:04d}", of_each) for at in range(role.replicas))
        return Group(path, role.min_replicas, of_all, members)

    def _one(self, role: Role, path: str, topology: TopologyRequest) -> Group | Leaf:
        if role.roles:
            members = tuple(self._role(inner, f"{path}/", at) for at, inner in enumerate(role.roles))
            return Group(path, len(members), topology, members)
        replica = self._replicas[role.name] = self._replicas.get(role.name, -1) + 1
        leaf = Leaf(
            len(self.leaves), self._numbers[role.name], path, role.name, replica, role.gang, role.resources, role.command or self._spec.command,
            {**self._spec.env, **role.env}, topology,
        )  # fmt: skip
        self.leaves.append(leaf)
        return leaf


def of_role(spec: JobSpec, role: int) -> Leaf:
    """Return what the ranks of a role run, by its position among the roles that have ranks. Raises LookupError if there is no such role."""
    found = next((leaf for leaf in leaves(spec) if leaf.role == role), None)
    if found is None:
        raise LookupError(f"the job has no role {role}")
    return found


def ranked(roles: Sequence[Role]) -> Iterator[Role]:
    """Return the roles that have ranks, groups taken apart, in order."""
    for role in roles:
        if role.roles:
            yield from ranked(role.roles)
        else:
            yield role


def topologies_asked(spec: JobSpec) -> Iterator[TopologyRequest]:
    """Return what the job and its roles, groups included, ask of topologies."""

    def below(roles: Sequence[Role]) -> Iterator[TopologyRequest]:
        for role in roles:
            yield role.topology
            yield from below(role.roles)

    yield spec.topology
    yield from below(spec.roles)


def leaf_count(roles: Sequence[Role], times: int = 1) -> int:
    """Return how many leaves there are, replicas counted, without laying them out."""
    return sum(leaf_count(role.roles, times * role.replicas) if role.roles else times * role.replicas for role in roles)


def rank_count(roles: Sequence[Role], times: int = 1) -> int:
    """Return how many ranks there are at most, replicas counted, without laying them out."""
    return sum(rank_count(r.roles, times * r.replicas) if r.roles else times * r.replicas * r.gang.ranks for r in roles)


# ---------------------------------------------------------------- sizes


def full(spec: JobSpec) -> Sizes:
    """Return the sizes of a job of which everything is there."""
    return tuple(leaf.gang.ranks for leaf in leaves(spec))


def least(spec: JobSpec) -> Sizes:
    """Return the smallest sizes that are worth starting."""
    sizes = [0] * len(leaves(spec))

    def take(member: Group | Leaf) -> None:
        if isinstance(member, Leaf):
            sizes[member.index] = member.gang.min_ranks
        else:
            for inner in member.members[: member.needed]:
                take(inner)

    take(tree(spec))
    return tuple(sizes)


def placed(spec: JobSpec, role_sizes: Sizes, ranks: int) -> Sizes:
    """Return the sizes of a placement as the log has it: `role_sizes` is empty where one leaf has all ranks, and where everything is there."""
    if role_sizes:
        return role_sizes
    return (ranks,) if len(leaves(spec)) == 1 else full(spec)


def recorded(spec: JobSpec, sizes: Sizes) -> Sizes:
    """Return sizes as the log has them, see `placed`."""
    return () if len(sizes) == 1 or sizes == full(spec) else sizes


def wrong_sizes(spec: JobSpec, sizes: Sizes) -> str:
    """Return why a job cannot run with these sizes, "" when it can."""
    every = leaves(spec)
    if len(sizes) != len(every):
        return f"{len(sizes)} sizes for {len(every)} roles"
    for leaf, size in zip(every, sizes, strict=True):
        gang = leaf.gang
        if size and not gang.min_ranks <= size <= gang.ranks:
            of = f" of {leaf.name}" if leaf.name else ""
            return f"{size} ranks{of}, but it runs with {gang.min_ranks} to {gang.ranks}"

    def there(member: Group | Leaf) -> bool:
        if isinstance(member, Leaf):
            return sizes[member.index] >= member.gang.min_ranks
        return sum(there(inner) for inner in member.members) >= member.needed

    return "" if there(tree(spec)) and any(sizes) else f"with the sizes {list(sizes)}, parts that it needs are missing"


def leaf_of_ranks(sizes: Sizes) -> list[int]:
    """Return the index of the leaf of each rank."""
    return [leaf for leaf, size in enumerate(sizes) for _ in range(size)]


def amounts(spec: JobSpec, sizes: Sizes) -> Amounts:
    """Return what a job of these sizes holds."""
    ranks = gpus = cpus = memory = 0
    for leaf, size in zip(leaves(spec), sizes, strict=True):
        res = leaf.resources
        ranks, gpus = ranks + size, gpus + size * res.charged_milli()
        cpus, memory = cpus + size * res.cpus_milli, memory + size * res.memory_mib
    return Amounts(ranks, gpus, cpus, memory)


def asked(spec: JobSpec) -> Amounts:
    """Return what a job holds when everything of it is there."""
    return amounts(spec, full(spec))


def of_ranks(spec: JobSpec, of: Collection[int]) -> tuple[int, int]:
    """Return (CPUs in thousandths, memory in MiB) of some ranks, of each of which the index of its leaf is given."""
    every = leaves(spec)
    if len(every) == 1:
        res = every[0].resources
        return len(of) * res.cpus_milli, len(of) * res.memory_mib
    return sum(every[i].resources.cpus_milli for i in of), sum(every[i].resources.memory_mib for i in of)
