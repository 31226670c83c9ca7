"""The state as a what-if world, kept in step with it: what the passes decide on.

Building the world anew for each cycle would cost as much as the cluster is large. So one world is kept beside the state, as a cache of it, and
what an event has changed is taken out and put in again before the next session. The world is never ahead of the state: what a session decides is
taken back, and comes in again through the events that it becomes.

    state                                         world
    a node that is up                             a node; one that takes no new ranks has no place for any
    a queued gang                                 a job whose ranks wait
    a placed gang                                 a job whose ranks run where they are
    a gang that was asked to leave                a job whose ranks are leaving
    a gang that changes its size                  a job whose ranks run where they will be
    an elastic gang that may grow                 besides, ranks that wait, for the pass that comes last (grow.py)
    what is held beyond the present placement     a job of its own without a claim to anything, whose ranks are leaving

The topologies of the world are those declared beside the queues; before any is declared, the well-known levels whose labels all of its nodes
carry (core/model/topologies.py). Whatever a job asks of them, the ranks of each role are on GPUs of one model, unless it allows several.

The roles of a job (core/model/roles.py) are the podsets of its tree in the world, and their groups are its sets. With `ranks_per_node`, all
ranks of a role on a node are one *unit*: they are placed together, and the world counts them as one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.events import PlacedPart, PlacedRank
from gangline.core.model.gpufacts import MIG_LAYOUTS, MigLayout
from gangline.core.model.gpushares import GpuUse, uses_of
from gangline.core.model.queues import QueueTree
from gangline.core.model.roles import Group, Leaf, leaf_of_ranks, leaves, of_ranks, recorded, tree
from gangline.core.model.roles import placed as placed_sizes
from gangline.core.model.spec import TopologyRequest
from gangline.core.model.state import Job as StateJob
from gangline.core.model.state import Node as StateNode
from gangline.core.model.state import State
from gangline.core.model.topologies import NODE_LEVEL, WELL_KNOWN, levels_by_name
from gangline.core.model.usage import usage_of, usage_of_users
from gangline.core.policy import ageing, service
from gangline.core.policy.admission import gate
from gangline.core.policy.declared import queue_specs
from gangline.core.policy.gangs import ACTIVE, Constraint, Job, Member, Podset, PodsetGroup, Rank, RankState
from gangline.core.policy.handout import Given, placed_devices
from gangline.core.policy.migplan import most
from gangline.core.policy.models import left_of
from gangline.core.policy.nodes import NodeSpec, Place
from gangline.core.policy.placing import Placer
from gangline.core.policy.refusals import MODEL_LEVEL as _MODEL_LABEL
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.requests import GPU, Affinity, Request
from gangline.core.policy.resize import may_grow
from gangline.core.policy.sizes import Placement, is_elastic, present
from gangline.core.policy.world import Options, World

_K = TypeVar("_K")
_MIB = 1 << 20
#: pods are not counted here; a node that takes no new ranks is short of so many
_PODS = 1 << 20
_CLOSED = 1 << 30
#: more GPUs than there can be
_NEVER = 1 << 30
#: topology whose domains are the GPU models, in clusters that have several; no declared one can have this name
_MODELS = "gangline/gpu-models"


#: how a session decides in production
PRODUCTION = Options(evict_for_surplus=False, no_thrash=True)


class _Ranks(NamedTuple):
    """Units of one podset, each with its state and place."""

    podset: Podset
    request: Request
    places: list[tuple[RankState, Place | None]]


#: ranks of one leaf that are placed together, and their node
_Unit = tuple[str, Sequence[PlacedRank]]


class Mirror:
    """One world beside one state. `sync` before each session, `take_back` after it."""

    def __init__(self, options: Options = PRODUCTION) -> None:
        self.world = World(options)
        self.placer = Placer(self.world)
        self._tree: QueueTree | None = None
        #: GPU indices of a node by position of the device in the world
        self._gpus: dict[str, tuple[int, ...]] = {}
        #: what of a node was taken into the world
        self._nodes: dict[str, StateNode] = {}
        self._specs: dict[str, NodeSpec] = {}
        self._registrations: dict[str, Registration] = {}
        self._closed: dict[str, None] = {}
        #: names in the world that stand for a job of the state
        self._names: dict[str, list[str]] = {}
        #: log time of the last look: how long jobs have waited is as of then
        self._now_ms = 0
        #: queued jobs that do not take part, and why
        self.barred: dict[str, Refusal] = {}
        #: those of them that have not been told
        self.barred_untold: dict[str, None] = {}
        #: jobs whose request names the nodes that will do: to be looked at again when the nodes change
        self._choosy: dict[str, None] = {}
        #: waiting gangs with ranks that take one of several GPU models, and those that these may have now, by leaf
        self._undecided: dict[str, dict[int, tuple[str, ...]]] = {}
        #: placed gangs that have ranks waiting, to grow
        self._growing: dict[str, None] = {}
        #: the units of placed gangs that may change their size, by index of the rank in the world
        self._units_of: dict[str, dict[int, _Unit]] = {}
        #: placed gangs that may be protected still, and for how long any gang is
        self._young: dict[str, Job] = {}
        self._protection_s = 0.0
        #: heap of (log time, job): when the standing of one that runs changes
        self._standings: list[tuple[int, str]] = []
        #: how many nodes in the world carry each of the well-known labels
        self._carried = dict.fromkeys(WELL_KNOWN, 0)
        #: nodes in the world by the model and by the number of their GPUs, for those that have any
        self._by_model: dict[str, int] = {}
        self._by_size: dict[int, int] = {}
        #: names of the nodes with one of some models, and free GPUs by model: found when they are asked for
        self._of_models: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._free: tuple[tuple[int, int], dict[str, int]] | None = None
        #: memory of a GPU by model, and the version of the world's nodes that it is of
        self._memory: tuple[int, dict[str, int]] | None = None

    # ---------------------------------------------------------------- keeping in step

    def sync(self, state: State, now_ms: int) -> None:
        """Take in what has changed since the last time (`Scratch.moved`, `Scratch.moved_nodes`)."""
        scratch = state.scratch
        self._now_ms = now_ms
        self._grow_older(state, now_ms)
        if self._tree is not state.queues or scratch.everything_moved:
            self._rebuild(state, now_ms)
        else:
            for job in self._growing:
                if job not in scratch.moved and not may_grow(state.jobs[job], now_ms):
                    scratch.moved[job] = None
            self._stand_otherwise(state, now_ms)
            if scratch.moved or scratch.moved_nodes:
                self._update(state, now_ms)
        self._decide_again(state, now_ms)
        for path in state.queues.half_lives_ms:
            queue = self.world.queues[path]
            queue.usage = usage_of(state.usage, state.queues, path, now_ms)
            if queue.user_fairness:
                queue.user_usage = usage_of_users(state.usage, state.queues, path, now_ms)
        scratch.moved.clear()
        scratch.moved_nodes.clear()
        scratch.everything_moved = False

    def _grow_older(self, state: State, now_ms: int) -> None:
        """Gangs that have not run for long are protected from reclaim or preemption; those that have need no more looking at."""
        for job_id, engine in list(self._young.items()):
            since = state.jobs[job_id].running_since_ms if job_id in state.jobs else 0
            engine.started_s_ago = (now_ms - since) / 1000 if since else 0.0
            if engine.started_s_ago > self._protection_s:
                del self._young[job_id]

    def _stand_otherwise(self, state: State, now_ms: int) -> None:
        """Gangs that have run for long enough since stand elsewhere in the order of their queue (service.py)."""
        while self._standings and self._standings[0][0] <= now_ms:
            job = state.jobs.get(heappop(self._standings)[1])
            if job is not None and job.running_since_ms:
                state.scratch.moved[job.id] = None

    def take_back(self) -> None:
        """Undo what a session has decided."""
        self.world.rollback(0)

    def _rebuild(self, state: State, now_ms: int) -> None:
        self.__init__(self.world.options)  # type: ignore[misc]
        self._now_ms = now_ms
        self._tree = state.queues
        specs = queue_specs(state.queues)
        self.world.add_queues(specs)
        for spec in specs:
            self._protection_s = max(self._protection_s, spec.reclaim_min_runtime_s or 0.0, spec.preempt_min_runtime_s or 0.0)
        up = {n.id: n for n in state.nodes.values() if n.status == "up"}
        self._describe(up.values())
        self.world.add_nodes(self._specs[n] for n in up)
        for name, node in up.items():
            self._nodes[name] = node
            self._set_closed(name, not node.schedulable or node.spare)
            self._count_labels(name, 1)
        self._set_topologies()
        for job in state.jobs.values():
            self._add(state, job, now_ms)

    def _update(self, state: State, now_ms: int) -> None:
        moved = dict(state.scratch.moved)
        changed = [n for n in state.scratch.moved_nodes if self._differs(state, n)]
        if changed:
            for node in changed:
                moved.update(dict.fromkeys(state.nodes[node].holdings if node in state.nodes else ()))
            moved.update(self._choosy)
        for job in moved:
            self._remove(job)
        largest = max(self._by_size, default=0)
        # How large nodes are decides what units ask for (_could_share).
        if changed and (not self._change_nodes(state, changed) or max(self._by_size, default=0) != largest):
            self._rebuild(state, now_ms)
            return
        for name in state.scratch.moved_nodes:
            if name in self._nodes:
                self._set_closed(name, not state.nodes[name].schedulable or state.nodes[name].spare)
        for job_id in moved:
            if job_id in state.jobs:
                self._add(state, state.jobs[job_id], now_ms)

    def _decide_again(self, state: State, now_ms: int) -> None:
        """Which model a gang that takes several gets depends on what is free, and on what its queue holds, now."""
        for job_id, models in list(self._undecided.items()):
            job = state.jobs[job_id]
            if any(self._models(job, leaf) != models[leaf.index] for leaf in self._wavering(job)):
                self._remove(job_id)
                self._add(state, job, now_ms)

    # ---------------------------------------------------------------- nodes

    def _describe(self, nodes: Iterable[StateNode]) -> None:
        nodes = list(nodes)
        for node in nodes:
            self._registrations[node.id] = node.registration
            usable = tuple(g for g in node.registration.gpus if g.healthy)
            self._gpus[node.id] = tuple(g.index for g in usable)
            links = tuple(g.links for g in usable)
            self._specs[node.id] = NodeSpec(
                node.id, gpus=len(usable), gpu_memory_mib=min((g.memory_mib for g in usable), default=0), cpu_milli=node.registration.cpus_milli,
                memory_bytes=node.registration.memory_mib * _MIB, max_pods=_PODS, mig_layout=_layout(usable),
                gpu_model=_model(node),
                links=links if len(set(links)) > 1 and len({len(path) for path in links}) == 1 else (),
                labels={**node.registration.labels, NODE_LEVEL: node.id, _MODEL_LABEL: _model(node)},
            )  # fmt: skip

    def _count_labels(self, name: str, by: int) -> None:
        spec = self.world.node_by_name[name].spec
        for level in WELL_KNOWN:
            if level in spec.labels:
                self._carried[level] += by
        if spec.gpus:
            _count(self._by_model, spec.labels[_MODEL_LABEL], by)
            _count(self._by_size, spec.gpus, by)
        self._of_models.clear()

    def _set_topologies(self) -> None:
        declared = self._tree.declaration.topologies if self._tree is not None else ()
        carried = [level for level, count in self._carried.items() if count == len(self._nodes)]
        self.world.topologies.clear()
        self.world.topologies.update(levels_by_name(declared, carried))
        self.world.topologies[_MODELS] = (_MODEL_LABEL,)

    def _differs(self, state: State, name: str) -> bool:
        node, known = state.nodes.get(name), self._specs.get(name)
        if node is None or node.status != "up":
            return name in self._nodes
        if name not in self._nodes or known is None:
            return True
        if self._registrations[name] is node.registration:
            return False
        before = self._gpus[name]
        self._describe([node])
        return self._specs[name] != known or self._gpus[name] != before

    def _change_nodes(self, state: State, names: list[str]) -> bool:
        """Exchange nodes; False when something is still on one of them that nobody reported as moved."""
        for name in names:
            if name in self._nodes:
                self._set_closed(name, False)
                self._count_labels(name, -1)
                try:
                    self.world.remove_node(name)
                except ValueError:
                    return False
                del self._nodes[name]
            node = state.nodes.get(name)
            if node is not None and node.status == "up":
                self._describe([node])
                self.world.add_node(self._specs[name])
                self._nodes[name] = node
                self._count_labels(name, 1)
        self._set_topologies()
        return True

    def _set_closed(self, name: str, closed: bool) -> None:
        """A node that takes no new ranks is far short of room for pods."""
        if closed == (name in self._closed):
            return
        node = self.world.node_by_name[name]
        by = -_CLOSED if closed else _CLOSED
        node.pods_idle += by
        node.pods_later += by
        self.world.stir(node)
        if closed:
            self._closed[name] = None
        else:
            del self._closed[name]

    # ---------------------------------------------------------------- jobs

    def _remove(self, job_id: str) -> None:
        for name in self._names.pop(job_id, ()):
            self.world.remove_job(name)
        self.barred.pop(job_id, None)
        self.barred_untold.pop(job_id, None)
        self._choosy.pop(job_id, None)
        self._undecided.pop(job_id, None)
        self._growing.pop(job_id, None)
        self._units_of.pop(job_id, None)
        self._young.pop(job_id, None)

    def _add(self, state: State, job: StateJob, now_ms: int) -> None:
        where = present(job)
        placed = job.active and all(p.node in self._nodes for p in where.parts)
        if placed:
            self._add_placed(state, job, where, now_ms)
        elif job.state == "queued" and not job.stop and job.not_before_ms <= now_ms:
            barred = self._barred(state, job, now_ms)
            if barred is None:
                self._add_waiting(state, job, now_ms)
            else:
                self.barred[job.id] = barred
                self.barred_untold[job.id] = None
        self._add_remains(state, job, where if placed else Placement((), ()))

    def _barred(self, state: State, job: StateJob, now_ms: int) -> Refusal | None:
        """Why a gang does not even take part, whatever is free."""
        if job.id in state.scratch.poison:
            return Refusal("policy_error", state.scratch.poison[job.id])
        if (closed := gate(state, job, now_ms)) is not None:
            return closed
        if not state.queues.starts(job.spec.queue):
            return Refusal("queue_held", f"queue {job.spec.queue} is on hold: it takes jobs and starts none")
        away = [n for n in job.held_nodes if state.nodes[n].status == "lost"]
        if away:
            message = f"its ranks may still run on {', '.join(away)}, which cannot be reached, and it says on_disconnect: keep"
            return Refusal("ranks_may_run", message)
        for leaf in leaves(job.spec):
            models = leaf.resources.gpu_models
            if models and not any(_model(n) in models for n in self._nodes.values()):
                self._choosy[job.id] = None
                return Refusal("no_such_model", f"no node that is up has a GPU of model {' or '.join(models)}")
        return None

    def _add_waiting(self, state: State, job: StateJob, now_ms: int) -> None:
        ranks: list[_Ranks] = []

        def podset(leaf: Leaf) -> Podset:
            gang = leaf.gang
            found = Podset(leaf.path, -(-gang.min_ranks // leaf.unit), unit=leaf.unit)
            ranks.append(_Ranks(found, self._request(job, leaf, now_ms), [(RankState.PENDING, None)] * (gang.ranks // leaf.unit)))
            return found

        self._introduce(state, job, job.id, self._set(job, tree(job.spec), podset), ranks)

    def _add_placed(self, state: State, job: StateJob, where: Placement, now_ms: int) -> None:
        rank_state = RankState.RELEASING if job.state == "preempting" else RankState.RUNNING
        held = self._units(job, where)
        elastic = is_elastic(job.spec) and job.state != "preempting"
        grows = elastic and may_grow(job, now_ms) and state.queues.starts(job.spec.queue) and job.id not in state.scratch.poison
        ranks: list[_Ranks] = []

        def podset(leaf: Leaf) -> Podset:
            # Of a gang of one size all ranks are needed: one that loses some does not go on with the others, it is placed anew.
            units, gang = held.get(leaf.index, []), leaf.gang
            found = Podset(leaf.path, -(-gang.min_ranks // leaf.unit) if elastic else len(units), unit=leaf.unit)
            request = self._request(job, leaf, now_ms, anywhere=True, apart=grows)
            ranks.append(_Ranks(found, request, [(rank_state, self._place_of(node, some)) for node, some in units]))
            if grows:
                more: list[tuple[RankState, Place | None]] = [(RankState.PENDING, None)] * (gang.ranks // leaf.unit - len(units))
                ranks.append(_Ranks(found, self._request(job, leaf, now_ms, like=[node for node, _ in units]), more))
            return found

        engine = self._introduce(state, job, job.id, self._set(job, tree(job.spec), podset, whole=not elastic), ranks)
        engine.grows = elastic
        if elastic:
            units = (unit for leaf in leaves(job.spec) for unit in held.get(leaf.index, ()))
            self._units_of[job.id] = dict(zip((r.index for r in engine.ranks if r.state is RankState.RUNNING), units, strict=True))
        if grows:
            self._growing[job.id] = None
        changes_ms = service.next_change_ms(job, state.queues.order(state.queues.leaf_of(job.spec.queue)), now_ms)
        if changes_ms is not None:
            heappush(self._standings, (changes_ms, job.id))
        engine.started_s_ago = (now_ms - job.running_since_ms) / 1000 if job.running_since_ms else 0.0
        if engine.started_s_ago <= self._protection_s:
            self._young[job.id] = engine

    def _units(self, job: StateJob, where: Placement) -> dict[int, list[_Unit]]:
        """Return by leaf the node and the ranks of each unit; of an elastic gang last what is to go first."""
        leaf_of = leaf_of_ranks(placed_sizes(job.spec, where.role_sizes, where.ranks))
        every = leaves(job.spec)
        found: dict[int, list[_Unit]] = {}
        for part in where.parts:
            by_leaf: dict[int, list[PlacedRank]] = {}
            for rank in part.ranks:
                by_leaf.setdefault(leaf_of[rank.rank], []).append(rank)
            for at, some in by_leaf.items():
                unit = every[at].unit
                for first in range(0, len(some), unit):
                    found.setdefault(at, []).append((part.node, some[first : first + unit]))
        return {at: self._last_to_go_first(job, units) for at, units in found.items()} if is_elastic(job.spec) else found

    def _last_to_go_first(self, job: StateJob, units: list[_Unit]) -> list[_Unit]:
        """Return units so that giving up the last ones costs least.

        Those are the ones that the gang has not begun to use, then those on the nodes with the fewest of its ranks, in the domains with the
        fewest: so whole nodes and whole domains come free.
        """
        used = {(node, g) for node, part in job.parts.items() for r in part.ranks.values() for g in r.gpus}
        pending = job.pending_nodes
        ways = {node: self._way_to(node, job.spec.topology.name) for node, _ in units}
        counts = Counter(ways[node][: depth + 1] for node, _ in units for depth in range(len(ways[node])))
        order = {node: [(-counts[way[: depth + 1]], label) for depth, label in enumerate(way)] for node, way in ways.items()}

        def key(unit: _Unit) -> tuple[bool, list[tuple[int, str]]]:
            node, ranks = unit
            return node in pending or any((node, g) not in used for r in ranks for g in r.gpus), order[node]

        return sorted(units, key=key)

    def _add_remains(self, state: State, job: StateJob, where: Placement) -> None:
        """What the gang holds beyond its present placement, or its next one: older generations that are still dying, ranks that are to go."""
        leaf_of = leaf_of_ranks(placed_sizes(job.spec, where.role_sizes, where.ranks)) if where.parts else []
        parts = {p.node: p.ranks for p in where.parts}
        for node_id in job.held_nodes:
            if node_id not in self._nodes:
                continue
            holding = state.nodes[node_id].holdings[job.id]
            ranks = parts.get(node_id, ())
            used = {g for r in ranks if r.share is None for g in r.gpus}
            own_cpus, own_memory = of_ranks(job.spec, [leaf_of[r.rank] for r in ranks])
            gpus = [g for g in holding.gpus if g not in used and g in self._gpus[node_id]]
            cpus, memory = holding.cpus_milli - own_cpus, holding.memory_mib - own_memory
            # What is there beyond a placement goes before that starts. Nobody can tell when a gang that is kept on a lost node goes.
            going = holding.leaving_since or (parts and job.state in ("placed", "preparing", "resizing"))
            kind = RankState.RELEASING if going else RankState.STUCK
            podset = Podset("ranks", 0)
            there: list[_Ranks] = []
            if gpus or cpus > 0 or memory > 0:
                request = Request(count=len(gpus), milli=GPU, cpu_milli=max(0, cpus), memory_bytes=max(0, memory) * _MIB)
                there.append(_Ranks(podset, self.world.intern(request), [(kind, self._place(node_id, gpus))]))
            for request, place in self._shares_left(node_id, holding.shares, ranks):
                there.append(_Ranks(podset, self.world.intern(request), [(kind, place)]))
            if there:
                self._introduce(state, job, f"{job.id}@{node_id}", PodsetGroup("", None, [podset]), there)

    def _shares_left(self, node_id: str, held: tuple[GpuUse, ...], ranks: Collection[PlacedRank]) -> Iterator[tuple[Request, Place]]:
        """Return what is held of shared and partitioned GPUs beyond what some ranks have of them, each as a request in its place."""
        own: dict[int, GpuUse] = {}
        for use in (use for r in ranks for use in uses_of(r.gpus, r.share)):
            own[use.gpu] = own[use.gpu].plus(use) if use.gpu in own else use
        positions, node = self._positions(node_id), self.world.node_by_name[node_id]
        for use in held:
            at, mine = positions.get(use.gpu), own.get(use.gpu, GpuUse(use.gpu))
            if at is None:
                continue
            if use.milli > mine.milli:
                milli = use.milli - mine.milli
                yield Request(count=1, milli=milli), Place(node, (at,), milli)
            if use.memory_mib > mine.memory_mib:
                request = Request(count=1, milli=0, memory_mib=use.memory_mib - mine.memory_mib)
                yield request, Place(node, (at,), request.milli_on(node.spec.gpu_memory_mib))
            for one in use.mig if node.spec.mig_layout is not None else ():
                if one not in mine.mig:
                    yield Request(mig=((one.profile, 1),)), Place(node, (at,), 0, (), ((at, one.start, one.profile),))

    def _introduce(self, state: State, job: StateJob, name: str, root: PodsetGroup, ranks: list[_Ranks]) -> Job:
        spec = job.spec
        engine = Job(
            name, self.world.queues[state.queues.leaf_of(spec.queue)], priority=service.priority(state, job, self._now_ms),
            preemptible=spec.preemptible, order=job.order, root=root,
        )  # fmt: skip
        engine.user = job.user
        engine.boost = ageing.points(state, job, self._now_ms) * service.scale(state, job)
        places: dict[int, tuple[RankState, Place | None]] = {}
        for some in ranks:
            for state_and_place in some.places:
                index = len(engine.ranks)
                rank = Rank(engine, index, f"{name}-{index:06d}", some.request, None)
                rank.podset = some.podset
                engine.ranks.append(rank)
                some.podset.ranks.append(rank)
                if state_and_place[0] is not RankState.PENDING:
                    places[index] = state_and_place
        self.world.add_job(engine, places)
        self._names.setdefault(job.id, []).append(name)
        return engine

    def _set(self, job: StateJob, group: Group, podset: Callable[[Leaf], Podset], whole: bool = False, asked: bool = False) -> PodsetGroup:
        """Return the tree below a group. `whole`: all that is there is needed. `asked`: a set around it has a wish of its own."""
        asked = asked or bool(group.topology)
        members: list[Member] = []
        for member in group.members:
            if isinstance(member, Group):
                members.append(self._set(job, member, podset, whole, asked))
            else:
                leaf = podset(member)
                leaf.constraint, model = _constraint(member.topology), self._one_model(job, member, asked)
                if leaf.constraint is None:
                    leaf.constraint = model
                elif model is not None:
                    members.append(PodsetGroup(leaf.name, None, [leaf], model))
                    continue
                members.append(leaf)
        needed = None if whole or group.needed == len(members) else group.needed
        return PodsetGroup(group.path, needed, members, _constraint(group.topology))

    def _one_model(self, job: StateJob, leaf: Leaf, asked: bool) -> Constraint | None:
        """Ranks are kept on one GPU model where the cluster has several, since the slowest device sets the pace of all.

        Where several are allowed (`gpu_model_mix`), one is a preference, if nothing else is asked for.
        """
        res = leaf.resources
        if len(self._by_model) < 2 or not res.wants_gpus or leaf.gang.ranks == 1 or job.state != "queued" or len(res.gpu_models) == 1:
            return None
        if not res.gpu_model_mix:
            return Constraint(_MODELS, _MODEL_LABEL, "")
        return None if asked or leaf.topology else Constraint(_MODELS, "", _MODEL_LABEL)

    def _request(
        self, job: StateJob, leaf: Leaf, now_ms: int, anywhere: bool = False, apart: bool = True, like: Sequence[str] = ()
    ) -> Request:
        """What one unit asks for. `anywhere`: it is where it is. `like`: nodes of its gang, of whose GPU models it is to be."""
        res, unit = leaf.resources, leaf.unit
        nodes = None if anywhere else self._allowed(job, leaf, now_ms, like)
        if nodes is not None:
            self._choosy[job.id] = None
        affinity = None
        if unit > 1 and apart and self._could_share(unit, res.gpus):
            affinity = Affinity((("gangline/gang", f"{job.id}/{leaf.index}"),), repel="hostname")
        request = Request(
            count=unit if res.shares_gpu else unit * res.gpus, milli=res.gpu_share_milli or (0 if res.gpu_memory_mib else GPU),
            memory_mib=res.gpu_memory_mib, stacked=res.shares_gpu and unit > 1, mig=((res.mig, unit * res.mig_count),) if res.mig else (),
            cpu_milli=unit * res.cpus_milli, memory_bytes=unit * res.memory_mib * _MIB, nodes=nodes, affinity=affinity,
        )  # fmt: skip
        return self.world.intern(request)

    def _could_share(self, unit: int, gpus: int) -> bool:
        """Whether some node could take two units of a gang, which are to be on different nodes."""
        return not gpus or max(self._by_size, default=0) >= 2 * unit * gpus

    def _allowed(self, job: StateJob, leaf: Leaf, now_ms: int, like: Sequence[str]) -> tuple[str, ...] | None:
        res = leaf.resources
        if like and res.wants_gpus and len(self._by_model) > 1:
            models = res.gpu_models if res.gpu_model_mix else tuple(sorted({_model(self._nodes[n]) for n in like}))
        elif like:
            models = ()
        else:
            models = self._models(job, leaf)
        if len(res.gpu_models) > 1 and models and not like:
            self._undecided.setdefault(job.id, {})[leaf.index] = models
        avoid = {n for n, until in job.avoid.items() if until > now_ms}
        if not models and not avoid:
            return None
        nodes = self._nodes_of(models)
        return tuple(n for n in nodes if n not in avoid) if avoid else nodes

    def _nodes_of(self, models: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the nodes with one of these models, of all nodes for no model."""
        if models not in self._of_models:
            self._of_models[models] = tuple(sorted(n for n, node in self._nodes.items() if not models or _model(node) in models))
        return self._of_models[models]

    def _wavering(self, job: StateJob) -> list[Leaf]:
        """Return the leaves of a job that take one of several models."""
        return [leaf for leaf in leaves(job.spec) if leaf.index in self._undecided[job.id]]

    def _models(self, job: StateJob, leaf: Leaf) -> tuple[str, ...]:
        """The first model of the list of which enough is free, and allowed, for all of the ranks; all of them while there is none."""
        models = leaf.resources.gpu_models
        if len(models) < 2:
            return models
        free = self._free_by_model()
        some = (model for model in models if free.get(model, 0) >= self._devices_for(leaf, model) and self._allows(job, leaf, model))
        return next(((model,) for model in some), models)

    def _allows(self, job: StateJob, leaf: Leaf, model: str) -> bool:
        """Whether the queue of a job may have all ranks of a leaf on one model now."""
        queue = self.world.queues[self._tree.leaf_of(job.spec.queue) if self._tree is not None else job.spec.queue]
        if model not in queue.models:
            return True
        each = leaf.resources.charged_milli(self._smallest_memory().get(model, 0))
        return left_of(queue, model, job.spec.preemptible) >= leaf.gang.ranks * each

    def _devices_for(self, leaf: Leaf, model: str) -> int:
        """Return how many free GPUs of a model hold all ranks of a leaf; GPUs that are shared or partitioned already are not counted on."""
        res, ranks = leaf.resources, leaf.gang.ranks
        if res.mig:
            layout = MIG_LAYOUTS.get(model)
            each = most(layout, (), res.mig) if layout is not None else 0
            return -(-ranks * res.mig_count // each) if each else _NEVER
        if res.shares_gpu:
            each = GPU // max(1, res.charged_milli(self._smallest_memory().get(model, 0)))
            return -(-ranks // each) if each else _NEVER
        return ranks * res.gpus

    def _smallest_memory(self) -> dict[str, int]:
        """Memory of the GPUs of each model, MiB, of the smallest where they differ."""
        if self._memory is None or self._memory[0] != self.world.node_version:
            found: dict[str, int] = {}
            for node in self.world.nodes:
                model, memory_mib = node.spec.labels[_MODEL_LABEL], node.spec.gpu_memory_mib
                found[model] = min(memory_mib, found.get(model, memory_mib))
            self._memory = (self.world.node_version, found)
        return self._memory[1]

    def _free_by_model(self) -> dict[str, int]:
        """Free GPUs on nodes that take new ranks; counted anew when something on a node has changed."""
        version = (self.world.node_version, self.world.room_version)
        if self._free is None or self._free[0] != version:
            free: dict[str, int] = {}
            for node in self.world.nodes:
                if node.pods_idle > 0:
                    _count(free, node.spec.labels[_MODEL_LABEL], node.now_mask.bit_count())
            self._free = (version, free)
        return self._free[1]

    def _positions(self, node_id: str) -> dict[int, int]:
        return {g: at for at, g in enumerate(self._gpus[node_id])}

    def _place(self, node_id: str, gpus: Iterable[int], milli: int = GPU) -> Place:
        positions = self._positions(node_id)
        devices = tuple(sorted(positions[g] for g in gpus if g in positions))
        return Place(self.world.node_by_name[node_id], devices, milli)

    def _place_of(self, node_id: str, ranks: Sequence[PlacedRank]) -> Place:
        """Return where ranks of one leaf are that make one unit."""
        share = ranks[0].share
        if share is None or not share.mig:
            return self._place(node_id, (g for r in ranks for g in r.gpus), GPU if share is None else share.milli)
        positions, node = self._positions(node_id), self.world.node_by_name[node_id]
        instances = (one for r in ranks if r.share is not None for one in r.share.mig)
        slots = tuple(sorted((positions[one.gpu], one.start, one.profile) for one in instances if one.gpu in positions))
        return Place(node, tuple(dict.fromkeys(slot[0] for slot in slots)), 0, (), slots if node.spec.mig_layout is not None else ())

    # ---------------------------------------------------------------- what a session's places mean

    def resized(self, job: StateJob, engine: Job) -> Placement:
        """Return the placement that a session leaves a gang with: units that stay, with the devices that they have, and new ones."""
        working = [r for r in engine.ranks if r.state in ACTIVE]
        known = self._units_of[job.id]
        stay = [(r.podset.name, known[r.index]) for r in working if r.index in known]
        return self.placement(job, [(r, r.place) for r in working if r.index not in known and r.place is not None], stay)

    def placement(
        self, job: StateJob, places: Iterable[tuple[Rank, Place]], stay: Iterable[tuple[str, _Unit]] = ()
    ) -> Placement:
        """Return the placement of a gang whose units got these places; `stay` are units that have theirs, with the paths of their leaves.

        The ranks of each role ascend through the domains of its topology, and through the nodes there (docs/topology.md).
        """
        by_path: dict[str, dict[str, list[Place]]] = {}
        for rank, place in places:
            by_path.setdefault(rank.podset.name, {}).setdefault(place.node.name, []).append(place)
        there: dict[str, dict[str, list[Given]]] = {}
        for path, (node_id, some) in stay:
            there.setdefault(path, {}).setdefault(node_id, []).extend((r.gpus, r.share) for r in some)
        parts: dict[str, list[PlacedRank]] = {}
        sizes: list[int] = []
        number = 0
        for leaf, topology in _with_topologies(tree(job.spec), job.spec.topology.name):
            by_node, staying = by_path.get(leaf.path, {}), there.get(leaf.path, {})
            before = number
            for node_id in sorted({**by_node, **staying}, key=lambda n: self._way_to(n, topology)):
                got = list(placed_devices(leaf, by_node[node_id], self._gpus[node_id])) if node_id in by_node else []
                if node_id in staying:
                    got = sorted([*staying[node_id], *got], key=lambda given: given[0])
                parts.setdefault(node_id, []).extend(PlacedRank(number + i, gpus, share) for i, (gpus, share) in enumerate(got))
                number += len(got)
            sizes.append(number - before)
        # The ranks of a node ascend, since the roles come in their order; and nodes come in the order of their first ranks.
        return Placement(tuple(PlacedPart(node, tuple(ranks)) for node, ranks in parts.items()), recorded(job.spec, tuple(sizes)))

    def _way_to(self, node_id: str, topology: str) -> tuple[str, ...]:
        """The domains around a node from the coarsest down, and the node itself: what is near each other sorts near each other."""
        labels = self._specs[node_id].labels
        levels = self.world.topologies.get(topology, (NODE_LEVEL,))
        return (*(labels.get(level, "") for level in levels), node_id)


def _with_topologies(group: Group, name: str) -> Iterator[tuple[Leaf, str]]:
    """Return the leaves in order, each with the name of the topology along which its ranks are numbered: its own or that around it."""
    name = group.topology.name if group.topology else name
    for member in group.members:
        if isinstance(member, Group):
            yield from _with_topologies(member, name)
        else:
            yield member, member.topology.name if member.topology else name


def _constraint(asked: TopologyRequest) -> Constraint | None:
    if not asked:
        return None
    return Constraint(asked.name, asked.required, asked.preferred, balanced=asked.balanced, spread=asked.spread, max_skew=asked.max_skew)


def _layout(gpus: tuple[Gpu, ...]) -> MigLayout | None:
    """Return into what the GPUs of a node can be partitioned: None unless it is the same for all of them."""
    names = {g.mig for g in gpus}
    return MIG_LAYOUTS.get(next(iter(names))) if len(names) == 1 else None


def _model(node: StateNode) -> str:
    return node.registration.gpus[0].model if node.registration.gpus else ""


def _count(counts: dict[_K, int], what: _K, by: int) -> None:
    """Add to a count; what is not there is not in it."""
    counts[what] = counts.get(what, 0) + by
    if not counts[what]:
        del counts[what]
