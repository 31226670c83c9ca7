"""The measure of fragmentation by hand, and the index that places by it against a look at every node."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.policy.fragmentation import CAPACITY, CPU, Kind, Measure, typical
from gangline.core.policy.fragmentindex import idle_of
from gangline.core.policy.gangs import Job, Podset, PodsetGroup, Rank
from gangline.core.policy.nodeindex import NodeIndex
from gangline.core.policy.nodes import NodeSpec, Place
from gangline.core.policy.queues import QueueSpec
from gangline.core.policy.requests import GPU, Request
from gangline.core.policy.scoring import best_place
from gangline.core.policy.world import Options, World

HALF, WHOLE, PAIR, CORES = Kind(4000, 1, 500), Kind(8000, 1, GPU), Kind(8000, 2, GPU), Kind(2000, 0, 0)
CHOOSY = Kind(1000, 1, GPU, frozenset({"A100"}))


def test_typical_kinds_are_the_most_frequent_ones() -> None:
    counts = {HALF: 60, WHOLE: 30, PAIR: 7, CORES: 3}
    assert typical(counts, 0.9) == {HALF: 60 / 90, WHOLE: 30 / 90}
    assert typical(counts, 0.91) == {HALF: 60 / 97, WHOLE: 30 / 97, PAIR: 7 / 97}
    assert typical({}) == {}


def test_fragments_by_hand() -> None:
    """What the paper defines, on a node with 300, 600 and 1000 thousandths idle."""
    idle = (300, 600, 1000)
    one = lambda kind, cpu=64_000, model="T4": Measure({kind: 1.0}).fragments(model, cpu, idle)  # noqa: E731
    assert one(HALF) == 300
    assert one(WHOLE) == 900
    assert one(PAIR) == 1900  # two whole GPUs are not there
    assert one(CORES) == 1900  # needs no GPU
    assert one(HALF, cpu=3999) == 1900  # not enough CPU
    assert one(CHOOSY) == 1900
    assert one(CHOOSY, model="A100") == 900
    mixed = Measure({HALF: 0.5, WHOLE: 0.25, CORES: 0.25})
    assert mixed.fragments("T4", 64_000, idle) == 0.5 * 300 + 0.25 * 900 + 0.25 * 1900


def test_worth_counts_places_for_more_than_the_next() -> None:
    measure = Measure({HALF: 1.0})
    # four halves by its GPUs, two by its CPU, each worth 1000 * sqrt(0.5)
    assert abs(measure.worth("T4", 64_000, (1000, 1000)) - CAPACITY * 4 * 1000 * 0.5**0.5) < 1e-9
    assert abs(measure.worth("T4", 11_999, (1000, 1000)) - CAPACITY * 2 * 1000 * 0.5**0.5) < 1e-9


def test_work_without_gpus_keeps_off_cpu_that_gpus_need() -> None:
    """Both nodes are empty; on the first each core is needed by its GPUs, on the second there is plenty."""
    world = cluster([NodeSpec("a", 2, 0, 8_000), NodeSpec("b", 2, 0, 64_000)], {HALF: 9, CORES: 1})
    found = best_place(world, rank(world, Request(cpu_milli=2000)), NodeIndex(world, world.nodes))
    assert found is not None
    assert found[0].node.name == "b"


def cluster(nodes: list[NodeSpec], counts: dict[Kind, int]) -> World:
    world = World(Options(quotas=False))
    world.measure = Measure(typical(counts))
    world.add_nodes(nodes)
    world.add_queue(QueueSpec("q"))
    return world


def rank(world: World, request: Request) -> Rank:
    podset = Podset("", 1)
    number = len(world.jobs)
    job = Job(f"j{number:04}", world.queues["q"], priority=0, preemptible=False, order=number, root=PodsetGroup("", None, [podset]))
    made = Rank(job, 0, job.name, world.intern(request), None)
    made.podset = podset
    podset.ranks.append(made)
    job.ranks.append(made)
    world.add_job(job)
    return made


REQUESTS = st.sampled_from(
    [
        Request(1, 500, cpu_milli=4000),
        Request(1, 300, cpu_milli=1000),
        Request(1, cpu_milli=8000),
        Request(2, cpu_milli=8000),
        Request(cpu_milli=3000),
        Request(2, 400, cpu_milli=2000),
        Request(1, cpu_milli=1000, nodes=("n1", "n3")),
    ]
)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([8_000, 24_000]), st.sampled_from([0, 80])), min_size=1, max_size=5),
    st.lists(st.tuples(REQUESTS, st.integers(0, 3)), max_size=40),
)
@settings(max_examples=150, deadline=None)
def test_the_index_finds_what_a_look_at_every_node_finds(nodes: list[tuple[int, int, int]], steps: list[tuple[Request, int]]) -> None:
    specs = [NodeSpec(f"n{at}", gpus, mib, cpu, 1 << 40, gpu_model="A100" if at % 2 else "T4") for at, (gpus, cpu, mib) in enumerate(nodes)]
    world = cluster(specs, {HALF: 5, WHOLE: 3, PAIR: 2, CORES: 2, CHOOSY: 1})
    index = NodeIndex(world, world.nodes)
    placed: list[Rank] = []
    for request, leave in steps:
        if leave == 0 and placed:
            world.leave(placed.pop(len(placed) // 2))
            world.commit()
        one = rank(world, request)
        found = best_place(world, one, index)
        best = by_hand(world, request)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert not found[1]
            assert abs(loss(world, found[0], one) - best) < 1e-9
            world.bind(one, found[0])
            assert all(0 <= each <= found[0].node.full for each in found[0].node.dev_idle)
            placed.append(one)


def by_hand(world: World, request: Request) -> float | None:
    """Return what is lost on the best node, tried without the index."""
    out = []
    for node in world.nodes:
        amount, room = node.share_of(request), [d for d, idle in enumerate(node.dev_later) if idle >= node.share_of(request)]
        fits = node.cpu_later >= request.cpu_milli and (request.nodes is None or node.name in request.nodes) and len(room) >= request.count
        if not fits:
            continue
        if request.count == 1 and request.milli < GPU:
            choices = [(d,) for d in room]
        elif request.count and request.milli < GPU:
            fullest = sorted(room, key=lambda d: (d not in node.sharing, node.dev_later[d], d))
            choices = [tuple(sorted(fullest[: request.count]))]
        else:
            choices = [tuple(room[: request.count])]
        assert amount <= node.full
        one = rank(world, request)
        out += [loss(world, Place(node, c, request.milli if request.count else 0), one) for c in choices]
        world.remove_job(one.job.name)
    return min(out, default=None)


def loss(world: World, place: Place, one: Rank) -> float:
    """Place it, see what the node is worth, and take it back."""
    node, measure = place.node, world.measure
    assert measure is not None
    before = measure.worth(node.model, node.cpu_later, idle_of(node))
    mark = world.checkpoint()
    world.bind(one, place)
    after = measure.worth(node.model, node.cpu_later, idle_of(node))
    cores = node.cpu_later / 1000
    world.rollback(mark)
    return before - after + CPU * cores
