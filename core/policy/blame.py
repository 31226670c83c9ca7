"""Is it the node, the device, or the job? From the history of ranks that died and took their gangs with them. Pure.

*Lemon nodes* are found as in "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (Kokolis et al., arXiv 2410.21680,
section on lemon nodes): among other signals by the number of jobs that died on them. How many are too many is decided by a binomial test.
Let n jobs have died in the cluster within the window, k of them on this node, which has a share q of all GPUs. If nodes were alike, the
number on this node would be binomial, so

    p = P(X ≥ k) = Σ_{i=k..n} C(n, i) q^i (1 - q)^(n-i)

is how likely so many or more are by chance, and the node is blamed if p times the number of nodes is below `SIGNIFICANCE` (Bonferroni's
correction for looking at all of them: Dunn, "Multiple comparisons among means", JASA 56, 1961), and at least `MIN_JOBS` different jobs have
died there. The same test with the devices of the node in place of the nodes of the cluster tells whether one of its GPUs is to blame.

*One job that dies everywhere is to blame itself*: a job that has died on `JOB_NODES` nodes says nothing of any of them and is left out on
both sides. All elements of an array are one job, and a job that dies many times on one node counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import comb

from gangline.core.model.health import NODE, Death
from gangline.core.model.state import Node, State

WINDOW_MS = 7 * 86_400_000
MIN_JOBS = 3
SIGNIFICANCE = 0.01
JOB_NODES = 3


def tail(k: int, n: int, q: float) -> float:
    """Return P(X ≥ k) of a binomial variable with n trials of probability q."""
    if k <= 0:
        return 1.0
    q = min(1.0, max(0.0, q))
    return min(1.0, sum(comb(n, i) * q**i * (1 - q) ** (n - i) for i in range(k, n + 1)))


def recent(deaths: Collection[Death], now_ms: int) -> list[Death]:
    """Return the deaths within the window of jobs that are not to blame themselves."""
    window = [d for d in deaths if d.at_ms > now_ms - WINDOW_MS]
    nodes: dict[str, set[str]] = {}
    for d in window:
        nodes.setdefault(d.job, set()).add(d.node)
    return [d for d in window if len(nodes[d.job]) < JOB_NODES]


def blamed_jobs(deaths: Collection[Death], now_ms: int) -> dict[str, int]:
    """Return the jobs that die everywhere, with the number of nodes on which they have."""
    nodes: dict[str, set[str]] = {}
    for d in deaths:
        if d.at_ms > now_ms - WINDOW_MS:
            nodes.setdefault(d.job, set()).add(d.node)
    return {job: len(on) for job, on in nodes.items() if len(on) >= JOB_NODES}


def blame(state: State, node: Node, now_ms: int) -> tuple[str, str] | None:
    """Return (UUID of a GPU or "" for the node as a whole, evidence in words) if too many jobs have died on a node; None if not.

    Costs one pass over the deaths that are known (at most health.DEATHS_KEPT), and one over the nodes if enough jobs have died on this one.
    """
    cleared = {device: ailment.cleared_ms for device, ailment in node.health.items()}
    here = [d for d in state.deaths if d.node == node.id and d.at_ms > max(now_ms - WINDOW_MS, cleared.get(NODE, 0))]
    if len(here) < MIN_JOBS:
        return None
    good = recent(state.deaths, now_ms)
    here = [d for d in here if d in good]
    if len(here) < MIN_JOBS:
        return None
    gpus = sum(len(n.registration.gpus) for n in state.nodes.values()) or len(state.nodes)
    share = (len(node.registration.gpus) or 1) / gpus
    chance = tail(len(here), len({d.job for d in good}), share) * len(state.nodes)
    device = _one_device(node, here)
    if device is not None:
        uuid, on_it = device
        return uuid, f"{on_it} of the {len(here)} jobs that died on {node.id} in 7 days had this GPU ({_jobs(here)})"
    if chance >= SIGNIFICANCE or len(state.nodes) < 2:
        return None
    total = len({d.job for d in good})
    return NODE, f"{len(here)} of the {total} jobs that died in 7 days did so here ({_jobs(here)}), by chance with p = {chance:.1g}"


def _one_device(node: Node, here: list[Death]) -> tuple[str, int] | None:
    """Return the GPU that more of these jobs had than is likely, if they had not all the same many."""
    devices = [gpu.uuid for gpu in node.registration.gpus]
    narrow = [d for d in here if 0 < len(d.devices) < len(devices)]
    if not narrow:
        return None
    share = sum(len(d.devices) for d in narrow) / (len(narrow) * len(devices))
    for uuid in devices:
        on_it = sum(uuid in d.devices for d in narrow)
        if on_it >= MIN_JOBS and tail(on_it, len(narrow), share) * len(devices) < SIGNIFICANCE:
            return uuid, on_it
    return None


def _jobs(here: list[Death]) -> str:
    names = list(dict.fromkeys(d.job for d in here))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def evidence(state: State, node: Node) -> Iterator[Death]:
    """Return the deaths on a node, newest first."""
    return (d for d in reversed(state.deaths) if d.node == node.id)
