"""How much of a gang a node can hold: by plain arithmetic on what the log says, for answers to people. The passes decide on more than this.

What is counted here is an upper bound: where it says that a gang cannot run, it cannot, whoever leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gangline.core.model.documents import Gpu
from gangline.core.model.gpufacts import MIG_LAYOUTS
from gangline.core.model.gpushares import GPU
from gangline.core.model.queues import amount
from gangline.core.model.roles import Group, Leaf, amounts, least, leaves, tree
from gangline.core.model.spec import JobSpec, Resources, TopologyRequest
from gangline.core.model.state import Job, Node, State
from gangline.core.model.topologies import WELL_KNOWN, levels_by_name
from gangline.core.policy.migplan import most

#: ranks on a node that they ask nothing of
_NO_BOUND = 1 << 20
#: labels from the coarsest level down
Domain = tuple[str, ...]


def ends_ms(job: Job, now_ms: int) -> int | None:
    """Return when a placed gang ends at the latest, by its time limit or because it was asked to leave; None when nothing says so."""
    if job.state == "preempting" and job.notice is not None:
        return job.notice.deadline_ms
    if not job.spec.time_limit_s:
        return None
    return int((job.running_since_ms or now_ms) - job.ran_ms + job.spec.time_limit_s * 1000)


def healthy(node: Node) -> set[int]:
    """Return the indices of the GPUs of a node that are in order."""
    return {gpu.index for gpu in node.registration.gpus if gpu.healthy}


@dataclass
class Room:
    """What there is of one node, or is free there. `gpu`: what its GPUs are like."""

    gpu: Gpu | None
    gpus: int
    cpus_milli: int
    memory_mib: int
    #: thousandths, of GPUs that are shared already
    shared_milli: int = 0


def on_one_gpu(res: Resources, gpu: Gpu | None) -> int:
    """Return how many shares, amounts of memory or instances, each as one rank asks for it, one GPU has room for; 0 if none."""
    if res.mig:
        layout = MIG_LAYOUTS.get(gpu.mig) if gpu is not None else None
        return most(layout, (), res.mig) if layout is not None else 0
    milli = res.charged_milli(gpu.memory_mib if gpu is not None else 0)
    return GPU // milli if milli else 0


def _gpu_room(res: Resources, room: Room) -> int:
    if res.mig:
        return max(0, room.gpus) * on_one_gpu(res, room.gpu) // res.mig_count
    if res.shares_gpu:
        milli = res.charged_milli(room.gpu.memory_mib if room.gpu is not None else 0)
        return max(0, room.gpus) * on_one_gpu(res, room.gpu) + (max(0, room.shared_milli) // milli if milli else 0)
    return room.gpus // res.gpus if res.gpus else _NO_BOUND


def ranks_in(leaf: Leaf, room: Room) -> int:
    """Return how many ranks of a role have room in so much of one node; with ranks_per_node that many or none.

    What is left of GPUs that are partitioned already is not counted, and what is left of shared ones as if it were together.
    """
    res, unit = leaf.resources, leaf.gang.ranks_per_node
    bounds = [_NO_BOUND, _gpu_room(res, room)]
    bounds += [have // each for have, each in ((room.cpus_milli, res.cpus_milli), (room.memory_mib, res.memory_mib)) if each]
    ranks = max(0, min(bounds))
    return (unit if ranks >= unit else 0) if unit else ranks


def takes(leaf: Leaf, node: Node) -> bool:
    """Whether a node has GPUs of a model that the ranks of a role accept."""
    models = leaf.resources.gpu_models
    gpus = node.registration.gpus
    return not models or not leaf.resources.wants_gpus or bool(gpus and gpus[0].model in models)


def gpu_of(node: Node) -> Gpu | None:
    """Return what the GPUs of a node are like, None when it has none."""
    return next((gpu for gpu in node.registration.gpus if gpu.healthy), None)


def within(spec: JobSpec) -> list[TopologyRequest]:
    """Return for each leaf where its ranks have to be together: what it requires itself, else what the nearest group around it does."""
    found: list[TopologyRequest] = []

    def below(group: Group, around: TopologyRequest) -> None:
        around = group.topology if group.topology.required else around
        for member in group.members:
            if isinstance(member, Group):
                below(member, around)
            else:
                found.append(member.topology if member.topology.required else around)

    below(tree(spec), TopologyRequest())
    return found


def domain_of(state: State, asked: TopologyRequest, nodes: Iterable[Node]) -> dict[str, Domain]:
    """Return the domain of each node in which ranks have to be together: one for all where none is required. Nodes outside are left out."""
    up = list(nodes)
    carried = [level for level in WELL_KNOWN if all(level in node.registration.labels for node in up)]
    levels = levels_by_name(state.queues.declaration.topologies, carried).get(asked.name, ())
    if not asked.required or asked.required not in levels:
        return dict.fromkeys((node.id for node in up), ())
    levels = levels[: levels.index(asked.required) + 1]
    found: dict[str, Domain] = {}
    for node in up:
        labels = {**node.registration.labels, "hostname": node.id}
        if all(level in labels for level in levels):
            found[node.id] = tuple(labels[level] for level in levels)
    return found


def impossible(state: State, spec: JobSpec) -> str:
    """Return why a gang could not run on the nodes that are up even if they were empty, "" when it could as far as this can tell."""
    return _too_large_for_queue(state, spec) or _too_large_for_nodes(state, spec)


def _too_large_for_nodes(state: State, spec: JobSpec) -> str:
    up = [node for node in state.nodes.values() if node.status == "up"]
    if not up:
        return "no node is up"
    tried: set[object] = set()
    for leaf, need, asked in zip(leaves(spec), least(spec), within(spec), strict=True):
        like = (leaf.role, need, asked.name, asked.required)
        if like not in tried:
            tried.add(like)
            if why := _too_large(state, leaf, need, asked, up):
                return why
    return ""


def _too_large(state: State, leaf: Leaf, need: int, asked: TopologyRequest, up: list[Node]) -> str:
    domains = domain_of(state, asked, up)
    room: dict[Domain, int] = {}
    for node in up:
        if node.id in domains and takes(leaf, node):
            reg = node.registration
            fits = ranks_in(leaf, Room(gpu_of(node), len(healthy(node)), reg.cpus_milli, reg.memory_mib))
            room[domains[node.id]] = room.get(domains[node.id], 0) + fits
    best, res = max(room.values(), default=0), leaf.resources
    if best >= need:
        return ""
    where = f"one domain of {asked.required}" if asked.required else f"the {len(up)} nodes that are up"
    models = f" of model {' or '.join(res.gpu_models)}" if res.gpu_models and res.wants_gpus else ""
    of_role = f" of role {leaf.name}" if leaf.name else ""
    gpus = f"{need * res.gpus} GPUs" if res.gpus else f"{res.gpu_words} each" if res.wants_gpus else ""
    whole = f"{need} ranks{of_role} ({gpus}{models})" if gpus else f"{need} ranks{of_role}"
    return f"needs room for {whole}; {where} would have room for {best}, all of them empty"


def _too_large_for_queue(state: State, spec: JobSpec) -> str:
    queues = state.queues
    if not queues.declared or spec.queue not in queues.specs:
        return ""
    fewest = amounts(spec, least(spec))
    needs = {"GPUs": ("gpus_milli", fewest.gpus_milli), "CPUs": ("cpus_milli", fewest.cpus_milli), "memory": ("memory_mib", fewest.memory_mib)}
    for queue in queues.lineage(spec.queue):
        bounds = [("limit", queue.limit)] + ([] if spec.preemptible else [("quota for work that cannot be preempted", queue.quota)])
        for word, bound in bounds:
            for resource, (field, need) in needs.items():
                have = getattr(bound, field)
                if have is not None and need > have:
                    return f"needs {amount(resource, need)}; the {word} of queue {queue.path} is {amount(resource, have)}"
    return ""
