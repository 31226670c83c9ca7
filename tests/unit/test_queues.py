"""Queues as declared configuration: the tree, differences, the cluster file, and what the fold and the leader make of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.model import clusterfile
from gangline.core.model import events as ev
from gangline.core.model.clusterfile import change_words, diff_words, parse_json, parse_yaml, queue_words, to_words, to_yaml
from gangline.core.model.fold import IllegalTransition, apply
from gangline.core.model.jobfile import parse_yaml as read_jobs
from gangline.core.model.narrate import sentence
from gangline.core.model.problems import BadJob
from gangline.core.model.queues import (
    MAX_LEVELS,
    Amounts,
    Change,
    Declaration,
    QueueSpec,
    QueueTree,
    Weights,
    diff,
    in_order,
    patched,
    warnings,
)
from gangline.core.model.spec import JobSpec, TopologyRequest
from gangline.core.model.state import State
from gangline.core.model.statecodec import BadSnapshot, dump_state, load_state
from gangline.core.model.topologies import Topology, changes
from gangline.leader.commands import Accepted, DeclareQueues, Refused, Submit, admit

ROOT = Path(__file__).parents[2]

FILE = """\
queues:
  research:
    quota:
      gpus: 64
      cpus: 512.5
      memory: 2TiB
      models: {H100: {gpus: 32}, a100: {gpus: 32}}
    limit: {gpus: 96}
    over_quota_weight: {gpus: 2, models: {H100: {gpus: 3.5}}}
    priority: 120
    reclaim_min_runtime: 10m
    usage_half_life: 7d
    queues:
      nlp: {quota: {gpus: 32.5}, preempt_min_runtime: 0, user_fairness: true}
      vision: {state: hold}
  batch:
topologies:
  default: [zone, rack, example.org/nvlink]
  flat: [rack]
"""

TOPOLOGIES = (Topology("default", ("zone", "rack", "example.org/nvlink")), Topology("flat", ("rack",)))
DECLARED = (
    QueueSpec(
        "research",
        quota=Amounts(64_000, 512_500, 2 << 20, {"A100": 32_000, "H100": 32_000}),
        limit=Amounts(96_000),
        over_quota_weight=Weights(gpus=2.0, models={"H100": 3.5}),
        priority=120,
        reclaim_min_runtime_s=600.0,
        usage_half_life_s=604_800.0,
    ),
    QueueSpec("research/nlp", quota=Amounts(32_500), preempt_min_runtime_s=0.0, user_fairness=True),
    QueueSpec("research/vision", state="hold"),
    QueueSpec("batch"),
)


def tree(*paths: str, **states: Any) -> QueueTree:
    return QueueTree(Declaration(tuple(QueueSpec(path, state=states.get(path.replace("/", "_"), "open")) for path in paths), index=5))


# ---------------------------------------------------------------- the cluster file


def test_a_file_becomes_its_declaration() -> None:
    declared = Declaration(DECLARED, topologies=TOPOLOGIES)
    assert parse_yaml(FILE) == declared
    assert parse_json(to_words(declared)) == declared
    assert parse_yaml(to_yaml(declared)) == declared


def test_the_order_of_a_queue_is_its_own_or_that_of_the_nearest_above() -> None:
    declared = parse_yaml("queues: {top: {order: least_attained, queues: {a: {}, b: {order: priority}}}, other: {}}")
    assert parse_yaml(to_yaml(declared)) == declared
    found = QueueTree(declared)
    assert [found.order(path) for path in ("top/a", "top/b", "other")] == ["least_attained", "priority", "priority"]
    with pytest.raises(BadJob, match="shortest_remaining"):
        parse_yaml("queues: {top: {order: shortest}}")


BAD = """\
queues:
  research:
    quota: {gpu: 64, cpus: many, memory: 64, models: {H100: 32, A100: {}, "B/1": {gpus: 1}}}
    limit: {gpus: -1, memory: 2TB}
    over_quota_weight: 2
    priority: high
    usage_half_life: 1s
    state: drained
    queue: {nlp: {}}
  Batch: {}
  a/b: {}
  slow: {user_fairness: no, reclaim_min_runtime: soon}
nodes: {}
"""


def test_all_problems_of_a_file_at_once_each_with_its_place() -> None:
    with pytest.raises(BadJob) as refused:
        parse_yaml(BAD, "cluster.yaml")
    found = {p.pointer: (p.line, p.column, p.code, p.nearest) for p in refused.value.problems}
    assert found == {
        "/queues/research/quota/gpu": (3, 13, "GL-1101", "gpus"),
        "/queues/research/quota/cpus": (3, 28, "GL-1102", ""),
        "/queues/research/quota/memory": (3, 42, "GL-1105", "64GiB"),
        "/queues/research/quota/models/H100": (3, 61, "GL-1102", ""),
        "/queues/research/quota/models/A100": (3, 71, "GL-1103", ""),
        "/queues/research/quota/models/B~11": (3, 75, "GL-1105", ""),
        "/queues/research/limit/gpus": (4, 19, "GL-1104", ""),
        "/queues/research/limit/memory": (4, 31, "GL-1105", "2TiB"),
        "/queues/research/over_quota_weight": (5, 24, "GL-1102", ""),
        "/queues/research/priority": (6, 15, "GL-1102", ""),
        "/queues/research/usage_half_life": (7, 22, "GL-1104", ""),
        "/queues/research/state": (8, 12, "GL-1106", "drain"),
        "/queues/research/queue": (9, 5, "GL-1101", "queues"),
        "/queues/Batch": (10, 3, "GL-1105", ""),
        "/queues/a~1b": (11, 3, "GL-1105", ""),
        "/queues/slow/user_fairness": (12, 25, "GL-1102", ""),
        "/queues/slow/reclaim_min_runtime": (12, 50, "GL-1105", ""),
        "/nodes": (13, 1, "GL-1101", ""),
    }
    assert '"gpu" is not a field of `queues.research.quota`. Did you mean gpus? [GL-1101]' in str(refused.value)
    assert '"nodes" is not a field of a cluster file' in str(refused.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "GL-1001"),
        ("- a\n", "GL-1006"),
        ("{}\n", "GL-1103"),
        ("queues:\n", "GL-1103"),
        ("queues: {}\n", "GL-1103"),
        ("queues: [a]\n", "GL-1102"),
        ("queues: {a: {}}\n---\nqueues: {b: {}}\n", "GL-1110"),
        ("topologies: {default: [rack]}\n", "GL-1103"),
        ("queues: {a: {}}\ntopologies: [rack]\n", "GL-1102"),
        ("queues: {a: {}}\ntopologies: {default: rack}\n", "GL-1102"),
        ("queues: {a: {}}\ntopologies: {default: []}\n", "GL-1103"),
        ("queues: {a: {}}\ntopologies: {default: ['']}\n", "GL-1103"),
        ("queues: {a: {}}\ntopologies: {default: [rack, rack]}\n", "GL-1108"),
        ("queues: {a: {}}\ntopologies: {default: [rack, hostname]}\n", "GL-1108"),
        ("queues: {a: {}}\ntopologies: {default: [rack, 'no label']}\n", "GL-1105"),
        ("queues: {a: {}}\ntopologies: {Default: [rack]}\n", "GL-1105"),
        ("queues: {a: {}}\ntopologies: {default: [" + ", ".join(f"l{i}" for i in range(17)) + "]}\n", "GL-1110"),
        ("queues: {a: {}}\ntopologies: {" + ", ".join(f"t{i}: [rack]" for i in range(65)) + "}\n", "GL-1110"),
        ("queues: {a: {}, a: {}}\n", "GL-1005"),
        ("queues: {a: &x {}, b: *x}\n", "GL-1003"),
        ("queues: {a: {quota: {models: {h100: {gpus: 1}, H100: {gpus: 1}}}}}\n", "GL-1108"),
        ("queues: {a: {quota: {gpus: 0.001}}}\n", "GL-1104"),
        ("queues: {" + ", ".join(f"q{i}: {{}}" for i in range(2_001)) + "}\n", "GL-1110"),
        ("x" * (1 << 20) + "x", "GL-1002"),
    ],
)
def test_files_that_are_refused(text: str, code: str) -> None:
    with pytest.raises(BadJob) as refused:
        parse_yaml(text)
    assert code in [p.code for p in refused.value.problems]


def nested(levels: int) -> dict[str, Any]:
    queue: dict[str, Any] = {"quota": {"models": {"H100": {"gpus": 1}}}}
    for i in range(levels - 1, 0, -1):
        queue = {"queues": {f"q{i}": queue}}
    return {"queues": {"q0": queue}}


def test_queues_are_as_deep_as_the_path_of_a_job_may_be() -> None:
    import yaml

    deepest = parse_yaml(yaml.safe_dump(nested(MAX_LEVELS)))
    assert deepest.queues[-1].path == "/".join(f"q{i}" for i in range(MAX_LEVELS))
    assert parse_json(nested(MAX_LEVELS)) == deepest
    for parse in (parse_json, lambda words: parse_yaml(yaml.safe_dump(words))):
        with pytest.raises(BadJob) as refused:
            parse(nested(MAX_LEVELS + 1))
        assert refused.value.problems[0].code == "GL-1004"


def test_fields_of_the_manual_are_those_of_the_program() -> None:
    text = (ROOT / "docs" / "queues.md").read_text()
    table = set(re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE))
    nested_fields = {"quota": clusterfile._AMOUNTS, "limit": clusterfile._AMOUNTS, "over_quota_weight": clusterfile._WEIGHTS}
    assert table == {"queues"} | {f for f in clusterfile._QUEUE if f not in nested_fields} | {
        f"{field}.{inner}" for field, fields in nested_fields.items() for inner in fields
    }


def test_files_of_the_manual_can_be_declared() -> None:
    text = (ROOT / "docs" / "queues.md").read_text()
    files = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert files
    for file in files:
        assert warnings(parse_yaml(file).queues) == []


def test_examples_of_the_manual_of_topologies_are_read() -> None:
    cluster, job = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "topology.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [topology.name for topology in parse_yaml(cluster).topologies] == ["default", "storage"]
    assert read_jobs(job)[0].topology == TopologyRequest("block", "rack")


# ---------------------------------------------------------------- laws

names = st.sampled_from(["a", "b", "c", "team-1"])
milli = st.none() | st.integers(0, 1_000).map(lambda n: n * 10)
mib = st.none() | st.integers(0, 1 << 30)
models = st.dictionaries(st.sampled_from(["A100", "H100", "H100 NVL", "B.200"]), st.integers(0, 999).map(lambda n: n * 10), max_size=3)
seconds = st.none() | st.integers(0, 1_000).map(float) | st.floats(0, 1_000)
weights = st.floats(0, 100)


def by_name(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in sorted(found)}


amounts = st.builds(Amounts, milli, milli, mib, models.map(by_name))
weight_sets = st.builds(Weights, weights, weights, weights, st.dictionaries(st.sampled_from(["A100", "H100"]), weights).map(by_name))
half_lives = st.none() | st.just(0.0) | st.floats(60.0, 10_000.0)


@st.composite
def declarations(draw: st.DrawFn) -> tuple[QueueSpec, ...]:
    paths: dict[str, None] = {}
    for parts in draw(st.lists(st.lists(names, min_size=1, max_size=3), min_size=1, max_size=6)):
        for end in range(1, len(parts) + 1):
            paths["/".join(parts[:end])] = None
    return in_order(
        QueueSpec(
            path, draw(amounts), draw(amounts), draw(weight_sets), draw(st.integers(0, 999)), draw(seconds), draw(seconds), draw(half_lives),
            draw(st.booleans()), draw(st.sampled_from(["open", "hold", "drain"])),
        )
        for path in paths
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(old=declarations(), new=declarations())
def test_a_difference_leads_from_one_declaration_to_the_other(old: tuple[QueueSpec, ...], new: tuple[QueueSpec, ...]) -> None:
    found = diff(old, new)
    assert patched(old, found) == new
    assert bool(found) == (old != new)
    for change in found.changed:
        assert change.old != change.new
        field, before, after = change_words(change)
        assert before != after, field


@settings(max_examples=100, deadline=None)
@given(queues=declarations())
def test_what_is_written_out_is_read_back(queues: tuple[QueueSpec, ...]) -> None:
    assert not diff(queues, queues)
    declared = Declaration(queues)
    assert parse_json(to_words(declared)) == parse_yaml(to_yaml(declared)) == declared
    assert QueueTree(declared).declared
    warnings(queues)


def test_order_counts_and_is_only_told_when_it_has_changed() -> None:
    a, b, c = (QueueSpec(path) for path in "abc")
    assert diff((a, b), (a, b, c)).order == ()
    assert diff((a, b), (b, a)).order == ("b", "a")
    assert diff((), (a, QueueSpec("a/x"), b)).order == ()
    assert diff((a, b), (a, QueueSpec("a/x"), b)).order == ()


def test_a_difference_in_words() -> None:
    new = list(DECLARED)
    new[0] = QueueSpec("research", Amounts(None, 512_500, 3 << 20, {"H100": 33_000}), over_quota_weight=Weights(gpus=0.5), state="drain")
    topologies = changes(TOPOLOGIES, (Topology("flat", ("row", "rack")), Topology("new", ("x",))))
    found = diff_words(diff(DECLARED, (*new[:2], QueueSpec("new", quota=Amounts(memory_mib=0)))), topologies)
    assert found["topologies"] == [
        {"topology": "default", "old": ["zone", "rack", "example.org/nvlink"], "new": None},
        {"topology": "flat", "old": ["rack"], "new": ["row", "rack"]},
        {"topology": "new", "old": None, "new": ["x"]},
    ]
    assert changes(TOPOLOGIES, TOPOLOGIES[::-1]) == []
    assert found["removed"] == ["research/vision", "batch"]
    assert found["added"] == [{"queue": "new", "fields": {"quota": {"memory": "0MiB"}}}]
    assert [(c["field"], c["old"], c["new"]) for c in found["changed"]] == [
        ("quota.gpus", 64, None),
        ("quota.memory", "2TiB", "3TiB"),
        ("quota.models.A100.gpus", 32, None),
        ("quota.models.H100.gpus", 32, 33),
        ("limit.gpus", 96, None),
        ("over_quota_weight.gpus", 2, 0.5),
        ("over_quota_weight.models.H100.gpus", 3.5, None),
        ("priority", 120, 100),
        ("reclaim_min_runtime", "10m", None),
        ("usage_half_life", "7d", None),
        ("state", "open", "drain"),
    ]
    assert queue_words(QueueSpec("a")) == {}


# ---------------------------------------------------------------- the tree


def test_before_anything_is_declared() -> None:
    none = QueueTree()
    assert (none.declared, none.index, list(none.leaves()), none.leaf_of("research")) == (False, 0, ["default"], "default")
    assert none.refusal("whatever/it/is") is None
    assert none.starts("whatever")


def test_a_tree_is_asked() -> None:
    found = tree("a", "a/x", "a/x/1", "a/y", "b", a_x="hold", a_y="drain")
    assert (found.children(), found.children("a"), found.children("b"), list(found.leaves())) == (
        ("a", "b"), ("a/x", "a/y"), (), ["a/x/1", "a/y", "b"],
    )  # fmt: skip
    assert [spec.path for spec in found.lineage("a/x/1")] == ["a/x/1", "a/x", "a"]
    assert [found.refusal(queue) for queue in ("a/x/1", "a/y", "a", "c", "default")] == [None, "drains", "parent", "unknown", "unknown"]
    assert [found.starts(queue) for queue in ("a/x/1", "a/y", "b")] == [False, True, True]
    assert (found.specs["a/x/1"].name, found.specs["a/x/1"].parent, found.index) == ("1", "a/x", 5)
    assert found == tree("a", "a/x", "a/x/1", "a/y", "b", a_x="hold", a_y="drain") != tree("a")


def test_half_life_comes_from_above() -> None:
    queues = (QueueSpec("a", usage_half_life_s=60.0), QueueSpec("a/x"), QueueSpec("a/y", usage_half_life_s=0.0), QueueSpec("b"))
    found = QueueTree(Declaration(queues))
    assert [found.usage_half_life_s(path) for path in ("a", "a/x", "a/y", "b")] == [60.0, 60.0, 0.0, 0.0]


@pytest.mark.parametrize("paths", [("a", "a"), ("a/x",), ("a/x", "a"), ("a", "b", "a/x"), ("",), ("a", "")])
def test_what_is_no_tree_is_refused(paths: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="not a tree"):
        tree(*paths)
    with pytest.raises(IllegalTransition):
        folded(ev.QueuesDeclared(queues=tuple(QueueSpec(path) for path in paths)))


@pytest.mark.parametrize(
    ("queues", "said"),
    [
        ("{a: {quota: {gpus: 4}, limit: {gpus: 2}}}", "a: its quota of 4 GPUs is more than its limit of 2 GPUs"),
        ("{a: {quota: {models: {H100: {gpus: 4}}}, limit: {models: {H100: {gpus: 2}}}}}", "quota of 4 H100 is more than its limit of 2 H100"),
        ("{a: {quota: {gpus: 1, models: {H100: {gpus: 4}}}}}", "a: its quotas by model are 4 GPUs together, more than its quota of 1 GPUs"),
        (
            "{a: {quota: {memory: 1TiB}, queues: {x: {quota: {memory: 1TiB}}, y: {quota: {memory: 512GiB}}}}}",
            "a: the quotas of its queues are 1536GiB together, more than its own 1TiB",
        ),
        ("{a: {quota: {cpus: 4}, queues: {x: {}}}}", "a/x: no quota of CPUs means unlimited, and a above has 4 CPUs"),
        ("{a: {quota: {gpus: 4}}, b: {}}", "b: no quota of GPUs means unlimited, so nothing is ever reclaimed there"),
        (
            "{a: {quota: {models: {H100: {gpus: 1}}}, queues: {x: {quota: {models: {H100: {gpus: 1.5}}}}}}}",
            "a: the quotas of its queues are 1.5 H100 together, more than its own 1 H100",
        ),
    ],
)
def test_what_is_probably_not_meant(queues: str, said: str) -> None:
    found = warnings(parse_yaml(f"queues: {queues}").queues)
    assert len(found) == 1
    assert said in found[0]


# ---------------------------------------------------------------- fold and admit


def folded(*events: ev.LogEvent, state: State | None = None) -> State:
    """Return a state with these events in one entry each."""
    state = state or State()
    for event in events:
        index = state.index + 1
        apply(state, event, index, state.epoch, index * 1_000)
        state.index = index
    return state


def submitted(job: str, queue: str) -> ev.JobSubmitted:
    return ev.JobSubmitted(job=job, spec=JobSpec(command=("true",), queue=queue))


def declared(*paths: str, **states: Any) -> ev.QueuesDeclared:
    return ev.QueuesDeclared(queues=tree(*paths, **states).declaration.queues, by="ann", reason="why not")


def test_the_fold_keeps_the_last_declaration_and_wakes_the_queue() -> None:
    state = folded(declared("default", "b"), submitted("j1", "b"))
    version, state.scratch.queue_dirty = state.capacity_version, False
    folded(ev.QueuesDeclared(queues=(*DECLARED[:3], QueueSpec("b")), by="bob"), state=state)
    assert state.queues.declaration == Declaration((*DECLARED[:3], QueueSpec("b")), index=3, at_ms=3_000, by="bob")
    assert (state.capacity_version, state.scratch.queue_dirty) == (version + 1, True)
    loaded = load_state(dump_state(state))
    assert (loaded.queues, dump_state(loaded)) == (state.queues, dump_state(state))


def test_a_snapshot_with_queues_that_are_no_tree_is_refused() -> None:
    data = dump_state(folded(declared("aaaa", "bbbb")))
    with pytest.raises(BadSnapshot):
        load_state(data.replace(b"bbbb", b"aaaa"))


@pytest.mark.parametrize(
    "event", [submitted("j2", "c"), submitted("j2", "a"), submitted("j2", "b"), declared("a", "a/x"), ev.QueuesDeclared(queues=())]
)
def test_what_cannot_be_folded(event: ev.LogEvent) -> None:
    state = folded(declared("a", "a/x", "a/y", "b", b="drain"), submitted("j1", "a/y"))
    before = dump_state(state)
    with pytest.raises(IllegalTransition):
        folded(event, state=state)
    assert dump_state(state) == before


def refusal(state: State, command: Submit | DeclareQueues) -> tuple[int, str, str]:
    with pytest.raises(Refused) as refused:
        admit(state, command)
    return refused.value.status, refused.value.code, refused.value.message


def submit(queue: str) -> Submit:
    return Submit("j9", JobSpec(command=("true",), queue=queue))


def declare(*paths: str, base: int = 1, **states: Any) -> DeclareQueues:
    return DeclareQueues(tree(*paths, **states).declaration.queues, base, by="bob", reason="r")


def test_jobs_are_admitted_into_leaves_that_take_jobs() -> None:
    assert isinstance(admit(State(), submit("anything")), ev.JobSubmitted)
    state = folded(declared("a", "a/x", "a/y", "b", b="drain", a_y="hold"))
    assert isinstance(admit(state, submit("a/x")), ev.JobSubmitted)
    assert isinstance(admit(state, submit("a/y")), ev.JobSubmitted)
    assert refusal(state, submit("a/z"))[:2] == (404, "no_such_queue")
    assert refusal(state, submit("a"))[:2] == (404, "no_such_queue")
    assert refusal(state, submit("b")) == (409, "queue_drains", "queue b drains: it takes no more jobs")


def test_declarations_are_admitted_from_the_present_one() -> None:
    state = folded(declared("a", "b"))
    event = admit(state, declare("b"))
    assert event == ev.QueuesDeclared(queues=(QueueSpec("b"),), by="bob", reason="r")
    assert admit(state, declare("a", "b", base=0)) == Accepted(1, "queues", replayed=True)
    assert refusal(state, declare("b", base=0))[:2] == (412, "queues_changed")
    assert refusal(state, DeclareQueues((), 1))[:2] == (422, "bad_queues")
    assert refusal(state, DeclareQueues((QueueSpec("a/b"),), 1))[:2] == (422, "bad_queues")
    huge = tuple(QueueSpec(f"{'q' * 60}{i}", quota=Amounts(models={f"MODEL-{n}": n * 1_000 for n in range(60)})) for i in range(2_000))
    assert refusal(state, DeclareQueues(huge, 1))[:2] == (413, "too_large")


def test_topologies_are_declared_with_the_queues() -> None:
    state = folded(declared("default"))
    with_topologies = DeclareQueues((QueueSpec("default"),), 1, by="bob", topologies=TOPOLOGIES)
    event = admit(state, with_topologies)
    assert event == ev.QueuesDeclared(queues=(QueueSpec("default"),), topologies=TOPOLOGIES, by="bob")
    folded(event, state=state)
    assert state.queues.declaration.topologies == TOPOLOGIES
    assert load_state(dump_state(state)).queues == state.queues
    assert admit(state, with_topologies) == Accepted(2, "queues", replayed=True)
    assert isinstance(admit(state, DeclareQueues((QueueSpec("default"),), 2)), ev.QueuesDeclared)
    assert "topology flat (rack)" in sentence(event)


@pytest.mark.parametrize("levels", [("rack", "rack"), ("rack", "hostname"), ("",)])
def test_topologies_that_make_no_sense_are_refused(levels: tuple[str, ...]) -> None:
    bad = (Topology("default", levels),)
    assert refusal(State(), DeclareQueues((QueueSpec("default"),), 0, topologies=bad))[:2] == (422, "bad_queues")
    with pytest.raises(IllegalTransition):
        folded(ev.QueuesDeclared(queues=(QueueSpec("default"),), topologies=bad))
    twice = (Topology("default", ("rack",)), Topology("default", ("zone",)))
    assert refusal(State(), DeclareQueues((QueueSpec("default"),), 0, topologies=twice))[:2] == (422, "bad_queues")


def near(**asked: str) -> Submit:
    return Submit("j9", JobSpec(command=("true",), topology=TopologyRequest(**asked)))


def test_jobs_ask_for_levels_that_are_declared() -> None:
    assert isinstance(admit(State(), near(required="whatever")), ev.JobSubmitted)
    state = folded(ev.QueuesDeclared(queues=(QueueSpec("default"),), topologies=TOPOLOGIES))
    assert isinstance(admit(state, near(required="zone", preferred="hostname")), ev.JobSubmitted)
    assert isinstance(admit(state, near(preferred="rack", name="flat")), ev.JobSubmitted)
    assert refusal(state, near(required="racks")) == (404, "no_such_topology", "topology default has no level racks; did you mean rack?")
    assert "there are rack, hostname" in refusal(state, near(preferred="zone", name="flat"))[2]
    assert refusal(state, near(required="rack", name="flut"))[2] == "there is no topology flut; did you mean flat?"


def test_queues_with_live_jobs_stay_leaves() -> None:
    state = folded(submitted("j1", "x"), submitted("j2", "x"), submitted("j3", "default"))
    status, code, message = refusal(state, declare("a", "default", base=0))
    assert (status, code) == (409, "queue_in_use")
    assert message == "queue x is missing and has 2 live jobs: keep it as it is with `state: drain` until they have ended, or stop them"
    assert "1 more queues" in refusal(state, declare("a", base=0))[2]
    assert "would have queues below it" in refusal(state, declare("x", "x/y", "default", base=0))[2]
    assert isinstance(admit(state, declare("x", "default", base=0, x="drain")), ev.QueuesDeclared)
    over = folded(*(ev.GangFinished(job=j, outcome="cancelled", cause="stopped", message="") for j in ("j1", "j2")), state=state)
    assert isinstance(admit(over, declare("default", base=0)), ev.QueuesDeclared)


def test_a_change_knows_models_with_dots_in_their_names() -> None:
    old, new = QueueSpec("a", quota=Amounts(models={"B.200": 1_000})), QueueSpec("a", quota=Amounts(models={"B.200": 2_000}))
    found = diff((old,), (new,))
    assert found.changed == (Change("a", "quota.models.B.200", 1_000, 2_000),)
    assert patched((old,), found) == (new,)
