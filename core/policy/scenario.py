"""Running a scenario with the production policy, and judging what came out.

A `single-pass` scenario is one session, judged at its end. A `cycle` is whole rounds: after each session, what was bound runs, what was evicted
waits again (a deleted job keeps leaving for ever), and reservations are forgotten. After `rounds_until` rounds the outcome is judged, and again
within each of `rounds_after` further sessions: it must be a fixed point.

Levels, each with all that those after it look at:

strict   states, nodes, what nodes have left, and everything else that is expected
policy   states, subgroups and domains; a node only where the cluster has no other
safety   nothing is given twice, no limit, quota, gang or preemptibility is broken, and nobody is evicted where nobody may be
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gangline.core.policy.audit import violations
from gangline.core.policy.gangs import HOLDING, Job, Rank, RankState
from gangline.core.policy.nodes import Node
from gangline.core.policy.report import Decisions
from gangline.core.policy.requests import ZERO, Vector, add
from gangline.core.policy.scenario_format import BadScenario, Facts, RankFact, Raw, build, check, first_facts, memory_of_rank, milli, quantity
from gangline.core.policy.session import run_session
from gangline.core.policy.world import World

Level = Literal["strict", "policy", "safety"]
LEVELS: tuple[Level, ...] = ("strict", "policy", "safety")

_NAMES = {
    RankState.PENDING: "pending",
    RankState.BINDING: "binding",
    RankState.RUNNING: "running",
    RankState.RELEASING: "releasing",
    RankState.STUCK: "stuck-releasing",
    RankState.EVICTED: "releasing",
    RankState.SUCCEEDED: "succeeded",
    RankState.FAILED: "failed",
    RankState.WITHDRAWN: "pending",
}


@dataclass
class Verdict:
    """What was wrong, by level: everything in `safety` is wrong at all levels, and so on."""

    id: str
    safety: list[str] = field(default_factory=list)
    policy: list[str] = field(default_factory=list)
    strict: list[str] = field(default_factory=list)

    def why(self, level: Level) -> list[str]:
        """Return what is wrong at a level; empty if the scenario passes."""
        found = list(self.safety)
        if level in ("policy", "strict"):
            found += self.policy
        if level == "strict":
            found += self.strict
        return list(dict.fromkeys(found))


def judge(raw: object) -> Verdict:
    """Run a parsed scenario and judge it. Raises BadScenario if it cannot be run."""
    scenario = check(raw)
    try:
        return _judge(scenario)
    except BadScenario:
        raise
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadScenario(f"scenario {scenario['id']}: cannot be run, {type(error).__name__}: {error}") from error


def _judge(scenario: Raw) -> Verdict:
    verdict = Verdict(str(scenario["id"]))
    first = facts = first_facts(scenario)
    until, after = scenario.get("rounds_until", 1), scenario.get("rounds_after", 0)
    for number in range(1, until + after + 1):
        world = build(scenario, facts, first)
        decisions = run_session(world, scenario["actions"])
        where = f"round {number}: " if until + after > 1 else ""
        verdict.safety += [where + v for v in violations(world, decisions)]
        bounds = scenario.get("call_bounds") or {}
        if bounds.get("max_evictions") == 0 and decisions.evictions:
            names = ", ".join(e.rank.name for e in decisions.evictions)
            verdict.safety.append(f"{where}nobody may be evicted, but {names} is")
        if number > until or scenario["kind"] == "single-pass":
            _compare(scenario, _Outcome.in_session(world, decisions), verdict, where)
        facts = _next_round(scenario, world, facts)
        if number == until and scenario["kind"] == "cycle":
            _compare(scenario, _Outcome.after_round(world, decisions, facts), verdict, where)
    return verdict


def _next_round(scenario: Raw, world: World, facts: Facts) -> Facts:
    deleted = {j["name"] for j in scenario["jobs"] if j.get("deleted_in_test")}
    out = Facts(started_s_ago=dict(facts.started_s_ago))
    for name, job in world.jobs.items():
        out.ranks[name] = [_next_fact(rank, name in deleted) for rank in job.ranks]
        if any(f.state == "running" for f in out.ranks[name]) and not any(f.node for f in facts.ranks[name]):
            out.started_s_ago[name] = 0.0
    return out


def _next_fact(rank: Rank, deleted: bool) -> RankFact:
    place = rank.place
    if rank.state in (RankState.BINDING, RankState.RUNNING) and place is not None:
        return RankFact("running", place.node.name, place.devices, place.zones)
    if rank.state is RankState.STUCK and place is not None:
        return RankFact("stuck-releasing", place.node.name, place.devices, place.zones)
    if rank.state in (RankState.RELEASING, RankState.EVICTED) and deleted and place is not None:
        return RankFact("releasing", place.node.name, place.devices, place.zones)
    if rank.state in (RankState.SUCCEEDED, RankState.FAILED):
        return RankFact(_NAMES[rank.state], place.node.name if place is not None else "")
    return RankFact("pending")


# ---------------------------------------------------------------- comparing


@dataclass
class _Outcome:
    """What came out: by job and index the state and node of each rank."""

    world: World
    decisions: Decisions
    ranks: dict[str, list[tuple[str, str]]]
    started: dict[str, float | None]

    @classmethod
    def in_session(cls, world: World, decisions: Decisions) -> _Outcome:
        """Return what a session says before anything is carried out."""
        ranks = {}
        for name, job in world.jobs.items():
            ranks[name] = [_seen(r) for r in job.ranks]
        return cls(world, decisions, ranks, {n: j.started_s_ago for n, j in world.jobs.items()})

    @classmethod
    def after_round(cls, world: World, decisions: Decisions, facts: Facts) -> _Outcome:
        """Return what a round has led to."""
        return cls(world, decisions, {n: [(f.state, f.node) for f in some] for n, some in facts.ranks.items()}, facts.started_s_ago)


def _seen(rank: Rank) -> tuple[str, str]:
    if rank.reservation is not None:
        return "pipelined", rank.reservation.node.name
    return _NAMES[rank.state], rank.place.node.name if rank.place is not None else ""


def _compare(scenario: Raw, outcome: _Outcome, verdict: Verdict, where: str) -> None:
    expected = scenario["expected"]
    lone = len(scenario["nodes"]) == 1
    for name, want in expected.get("jobs", {}).items():
        for at in range(len(outcome.ranks[name])):
            _compare_rank(outcome, name, at, want, verdict, where, lone)
        _compare_job(scenario, outcome, name, want, verdict, where)
    for key, want in expected.get("ranks", {}).items():
        if want.get("unchecked_in_source"):
            continue
        name, _, number = key.rpartition("-")
        if name not in outcome.ranks:
            raise BadScenario(f"scenario {scenario['id']}: expects something of {key}, which is not there")
        _compare_rank(outcome, name, int(number), want, verdict, where, lone)
    for name, want in expected.get("nodes", {}).items():
        _compare_node(outcome.world, name, want, verdict, where)
    for name, groups in expected.get("subgroups", {}).items():
        for group, want in groups.items():
            _compare_subgroup(outcome, name, group, want, verdict, where)
    for name, want in expected.get("domain_sets", {}).items():
        _compare_domains(outcome, name, want, verdict, where)


def _compare_rank(outcome: _Outcome, name: str, at: int, want: Raw, verdict: Verdict, where: str, lone: bool) -> None:
    state, node = outcome.ranks[name][at]
    if state != want["state"]:
        verdict.policy.append(f"{where}{name}-{at} is {state}{f' on {node}' if node else ''}, expected {want['state']}")
    elif want.get("node") and node != want["node"]:
        (verdict.policy if lone else verdict.strict).append(f"{where}{name}-{at} is on {node or 'no node'}, expected {want['node']}")
    zones = want.get("numa_zones")
    rank = outcome.world.jobs[name].ranks[at]
    place = rank.reservation or rank.place
    if zones is not None and place is not None and [z for z, _ in place.zones] != zones:
        verdict.strict.append(f"{where}{name}-{at} uses zones {[z for z, _ in place.zones]}, expected {zones}")


def _compare_job(scenario: Raw, outcome: _Outcome, name: str, want: Raw, verdict: Verdict, where: str) -> None:
    job = outcome.world.jobs[name]
    raw = next(j for j in scenario["jobs"] if j["name"] == name)
    for said, asked, what in (
        (want.get("gpus"), _gpus_asked(job) if want.get("gpus") is not None else None, "GPUs"),
        (want.get("cpu_milli"), sum(r.request.cpu_milli for r in job.ranks), "CPU"),
        (want.get("memory_bytes"), memory_of_rank(raw) * len(job.ranks), "memory"),
    ):
        if said is not None and (milli(said) if what == "GPUs" else said) != asked:
            verdict.strict.append(f"{where}{name} asks for {asked} of {what}, expected {said}")
    if want.get("gpus_accepted") is not None and milli(want["gpus_accepted"]) != _charged(job)[0]:
        verdict.strict.append(f"{where}{name} is charged {_charged(job)[0]} thousandths of a GPU, expected {want['gpus_accepted']} GPUs")
    least = want.get("started_at_least_s_ago")
    if least is not None and (outcome.started.get(name) or 0) < least:
        verdict.policy.append(f"{where}{name} was started anew")
    if want.get("reports_fit_error") and outcome.decisions.refusal(job) is None:
        verdict.policy.append(f"{where}{name} waits without a reason")


def _gpus_asked(job: Job) -> int:
    return sum(r.request.count * r.request.milli for r in job.ranks if r.request.count)


def _charged(job: Job) -> Vector:
    total = ZERO
    for rank in job.ranks:
        total = add(total, rank.charged)
    return total


def _compare_node(world: World, name: str, want: Raw, verdict: Verdict, where: str) -> None:
    node = world.node_by_name[name]
    idle = sum(1 for d in range(node.gpus) if node.dev_idle[d] == node.full and d not in node.sharing)
    leaving = _leaving_devices(world, node)
    for what, has in (("idle_gpus", idle), ("releasing_gpus", leaving)):
        if want.get(what) is not None and want[what] != has:
            verdict.strict.append(f"{where}{name} has {what} {has}, expected {want[what]}")
    for zone, left in (want.get("numa_available") or {}).items():
        for resource, text in left.items():
            r = {"cpu": 1, "memory": 2}.get(resource, 0)
            if node.zones[int(zone)].later[r] != quantity(text, resource):
                verdict.strict.append(f"{where}{name} zone {zone} has {node.zones[int(zone)].later[r]} of {resource}, expected {text}")


def _leaving_devices(world: World, node: Node) -> int:
    """Return how many devices only leaving ranks hold, less those that are reserved whole, whether leaving or idle."""
    stays: set[int] = set()
    leaves: set[int] = set()
    reserved = 0
    for job in world.jobs.values():
        for rank in job.ranks:
            if rank.place is not None and rank.place.node is node and rank.state in HOLDING:
                (leaves if rank.state in (RankState.RELEASING, RankState.EVICTED) else stays).update(rank.place.devices)
            if rank.reservation is not None and rank.reservation.node is node:
                if rank.request.whole:
                    reserved += len(rank.reservation.devices)
                else:
                    stays.update(rank.reservation.devices)
    return len(leaves - stays) - reserved


def _places(outcome: _Outcome, name: str, group: str) -> list[str]:
    ranks = outcome.world.jobs[name].ranks
    return [outcome.ranks[name][r.index][1] for r in ranks if r.podset.name == group and outcome.ranks[name][r.index][1]]


def _domains(outcome: _Outcome, nodes: list[str], label: str) -> list[str]:
    return sorted({outcome.world.node_by_name[n].spec.labels.get(label, "") for n in nodes})


def _compare_subgroup(outcome: _Outcome, name: str, group: str, want: Raw, verdict: Verdict, where: str) -> None:
    nodes = _places(outcome, name, group)
    domains = _domains(outcome, nodes, want["label"])
    if len(nodes) != want.get("ranks", len(nodes)) or len(domains) != 1:
        verdict.policy.append(f"{where}{name}, subgroup {group}: {len(nodes)} ranks in {domains} of {want['label']}")
    elif want.get("domain") and domains != [want["domain"]]:
        verdict.strict.append(f"{where}{name}, subgroup {group} is in {domains[0]}, expected {want['domain']}")
    if want.get("nodes") and sorted(set(nodes)) != sorted(want["nodes"]):
        verdict.strict.append(f"{where}{name}, subgroup {group} is on {sorted(set(nodes))}, expected {want['nodes']}")


def _compare_domains(outcome: _Outcome, name: str, want: dict[str, Any], verdict: Verdict, where: str) -> None:
    found = [_domains(outcome, _places(outcome, name, g), want["label"]) for g in want["subgroups"]]
    if want.get("one_domain_each") and any(len(d) != 1 for d in found):
        verdict.policy.append(f"{where}{name}: subgroups lie in {found}, expected one domain each")
        return
    each = [d[0] for d in found if d]
    if want.get("all_different") and len(set(each)) != len(each):
        verdict.policy.append(f"{where}{name}: subgroups share a domain, {each}")
    if want.get("domains") and sorted(set(each)) != sorted(want["domains"]):
        verdict.strict.append(f"{where}{name}: subgroups lie in {each}, expected {want['domains']}")
