"""What the throughput workloads are made of: all jobs of the published generators, their floor, and queues that a cluster file allows."""

from __future__ import annotations

from collections import Counter

import pytest

from gangline.benchmarks import kaiscale, workloads
from gangline.core.model import clusterfile
from gangline.core.model.jobfile import parse_json_spec
from gangline.core.model.roles import amounts, full


@pytest.mark.parametrize(("name", "floor_s"), [("baseline", 66.0), ("topology", 66.0), ("large_scale", 4.025)])
def test_the_jobs_are_those_of_the_generator(name: str, floor_s: float) -> None:
    facts = workloads.published(name)
    jobs = workloads.schedule(facts)
    assert len(jobs) == facts["published"]["workloads"]
    assert [at for at, _ in jobs] == sorted(at for at, _ in jobs)
    assert workloads.floor(facts) == pytest.approx(floor_s)
    per_queue = Counter(job["queue"] for _, job in jobs)
    assert set(per_queue.values()) == {sum(w["count"] for w in facts["workloads"])}
    kinds = {json: job for _, job in jobs if (json := str(sorted(job.items())).replace(job["queue"], ""))}
    asked = Counter[float]()
    for job in kinds.values():
        spec = parse_json_spec(job)
        asked[amounts(spec, full(spec)).cpus_milli / 1000] += 1
    assert set(asked) == {workloads.units(w) for w in facts["workloads"]}


@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_quotas_of_the_queues_are_less_than_the_nodes_have(name: str) -> None:
    facts = workloads.published(name)
    declared = clusterfile.parse_json({"queues": workloads.queues(facts)})
    leaves = [q for q in declared.queues if "/" in q.path]
    assert len(leaves) == facts["cohorts"] * facts["queues_per_cohort"]
    shape = workloads.shape(facts)
    assert shape.nodes * shape.cpus > len(leaves) * facts["nominal_quota"]


def test_every_published_scale_case_is_there() -> None:
    theirs = [case["case"] for case in workloads.published("kai_scale")["cases"]]
    assert [case.published for case in kaiscale.CASES] == theirs
    assert sum(size * 90 for size in kaiscale._BURST_SIZES) == 45_990
