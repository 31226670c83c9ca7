"""How much of what a run has, and its plan: every fault and every job, each with random numbers of its own, so that any can be left out."""

from __future__ import annotations

import random

import msgspec


class Scenario(msgspec.Struct, frozen=True):
    """How much of what. Times are simulated seconds."""

    schedulers: int = 3
    nodes: int = 5
    jobs: int = 14
    #: faults and submissions come in this time
    duration_s: float = 120.0
    #: mean time between two faults
    pace_s: float = 3.0
    #: share of the store's answers to writes that are lost, of its watch messages that are bad, of reads that are old
    ambiguous: float = 0.05
    watch_trouble: float = 0.05
    stale: float = 0.02
    #: share of submissions that are arrays, wait for others, are held, or have a begin or a deadline
    conditional: float = 0.0
    #: jobs are in declared queues and of several users; now and then the queues are declared anew, with other amounts, and nodes are reserved
    queues: bool = False
    #: share of runs in which one node or scheduler is never heard again, or never hears again, faults being over or not
    lasting: float = 0.15
    #: names of faults (adversary.py); empty: all that there are
    faults: tuple[str, ...] = ()


MIXES: dict[str, Scenario] = {
    "small": Scenario(schedulers=2, nodes=3, jobs=5, duration_s=40.0, pace_s=2.5, conditional=0.2),
    "cuts": Scenario(
        schedulers=3, nodes=3, jobs=5, duration_s=40.0, pace_s=1.5,
        faults=("cut_node", "cut_node", "cut_leader", "pause_leader", "delete_election", "outage", "kill_agent", "cut_scheduler_at_any_await"),
    ),
    "tenants": Scenario(schedulers=2, nodes=3, jobs=6, duration_s=40.0, pace_s=4.0, queues=True),
    "plain": Scenario(),
    "queues": Scenario(jobs=20, queues=True),
    "arrays": Scenario(jobs=16, conditional=0.7),
    "wide": Scenario(schedulers=2, nodes=12, jobs=60, pace_s=12.0, ambiguous=0.01, watch_trouble=0.0),
}  # fmt: skip
#: "mixed" plays these in turn, seed by seed
TURNS = ("small", "tenants", "cuts", "plain", "small", "tenants", "cuts", "queues", "small", "arrays")


def scenario_of(mix: str, seed: int, nodes: int = 0) -> Scenario:
    """Return what a seed of a mix plays, with another number of nodes if one is given. Raises KeyError for a mix that is not known."""
    scenario = MIXES[TURNS[seed % len(TURNS)] if mix == "mixed" else mix]
    return msgspec.structs.replace(scenario, nodes=nodes) if nodes else scenario


class Planned(msgspec.Struct, frozen=True):
    """One fault: `name` is that of a method of `Adversary`, `id` what it is called in `--only`."""

    id: str
    at_s: float
    name: str


#: what happens all the time instead of at one moment, and can be left out as a whole: bad answers of the store; queues; reservations
STANDING = ("noise", "queues", "reservations", "lasting")


class Plan(msgspec.Struct, frozen=True):
    """Everything that a seed does, by id."""

    faults: tuple[Planned, ...]
    jobs: tuple[str, ...]
    standing: tuple[str, ...]

    def ids(self) -> list[str]:
        """Return the name of each part, the jobs last."""
        return [*self.standing, *(f.id for f in self.faults), *self.jobs]

    def only(self, ids: frozenset[str] | None) -> Plan:
        """Return the plan with nothing but these parts of it, None: all."""
        if ids is None:
            return self
        faults = tuple(f for f in self.faults if f.id in ids)
        return Plan(faults, tuple(j for j in self.jobs if j in ids), tuple(s for s in self.standing if s in ids))


def plan(seed: int, scenario: Scenario, faults: list[str]) -> Plan:
    """Return what a seed does, given the names of all faults that there are."""
    rng = random.Random(f"{seed}-plan")
    planned: list[Planned] = []
    at_s = rng.expovariate(1 / scenario.pace_s)
    while at_s < scenario.duration_s:
        planned.append(Planned(f"f{len(planned)}", at_s, rng.choice(scenario.faults or faults)))
        at_s += rng.expovariate(1 / scenario.pace_s)
    standing = [s for s in STANDING if s == "noise" or (scenario.queues and s in ("queues", "reservations"))]
    if rng.random() < scenario.lasting:
        standing.append("lasting")
    return Plan(tuple(planned), tuple(f"j{i}" for i in range(scenario.jobs)), tuple(standing))
