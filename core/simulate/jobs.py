"""The protocol `jobs`: arrivals and durations, replayed through the policy of production in virtual time.

    --tasks     one or several traces; several are merged
    --cluster   NODESxGPUS, or several with a plus: 8x8, 2x4+6x8; where a trace names its size, one node of that size is the default
    --policy    POLICIES below; several with commas are run one after another and compared
    --durations unknown, asked (what users asked for, where the trace has it) or known
    --by-queue  queues of the trace are queues, with quotas in proportion to what their jobs ask for in all; --half-life: the past counts
    --failures  a preset of failures.py, or a number per 1,000 nodes and day; then --checkpoint and --write are seconds
    --overhead  seconds from a placement until the ranks work
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gangline.core.model.queues import Amounts, QueueOrder, QueueSpec, Weights
from gangline.core.model.units import format_duration
from gangline.core.simulate.failures import PRESETS, Failures, best_interval_s, expected_ettr
from gangline.core.simulate.formats.jobs import Trace, TraceJob, read
from gangline.core.simulate.measures import Measures, size_class
from gangline.core.simulate.protocols import Asked, Result, Tick, Unusable
from gangline.core.simulate.virtual import Setup, Virtual, shape

POLICIES: Mapping[str, str] = {
    "production": "as a cluster does it where nothing else is said: by age, four reservations, backfill",
    "fifo": "plain first come, first served: nobody passes anybody",
    "easy": "EASY backfill: one reservation (Lifka 1995)",
    "conservative": "conservative backfill: the first 64 that wait have a reservation",
    "shortest_remaining": "a queue with `order: shortest_remaining`, with durations known",
    "shortest_remaining_service": "a queue with `order: shortest_remaining_service`, with durations known",
    "least_attained": "a queue with `order: least_attained`",
}
#: several policies may be asked for, with commas
COMPARES = True
_ORDERS: dict[str, QueueOrder] = {
    "shortest_remaining": "shortest_remaining", "shortest_remaining_service": "shortest_remaining_service", "least_attained": "least_attained",
}  # fmt: skip
_RESERVATIONS = {"easy": 1, "conservative": 64}
_CLUSTER = re.compile(r"\d{1,6}x\d{1,4}(\+\d{1,6}x\d{1,4})*")
_MOST_NODES = 200_000
#: figures that are printed, and how
_SHOWN = (
    ("mean_jct_s", "mean completion"), ("p50_jct_s", "median"), ("p99_jct_s", "p99"), ("makespan_s", "makespan"), ("utilisation", "utilisation"),
    ("fairness", "fairness"), ("mean_slowdown", "slowdown"), ("preemptions", "preemptions"), ("cut_off", "cut off"),
)  # fmt: skip


def run(asked: Asked, tick: Tick) -> Result:
    """Run the policies that are asked for, one after another. Raises BadTrace, Unusable."""
    names = asked.policy.split(",") if asked.policy else [next(iter(POLICIES))]
    trace = merged([read(path) for path in asked.tasks])
    nodes = cluster_of(str(asked.options.get("cluster") or ""), trace)
    check_fits(trace, nodes)
    runs: list[tuple[str, Measures, dict[str, Any]]] = []
    for number, name in enumerate(names):
        measures = Measures(nodes)
        virtual = Virtual(setup_of(name, trace, nodes, {"seed": asked.seed, **asked.options}), measures)
        began = time.process_time()
        total = len(trace.jobs)
        virtual.run(trace.jobs, _ticker(tick, number * total, len(names) * total))
        figures = measures.figures() | {"not_ended": len(virtual.running), "cpu_s": round(time.process_time() - began, 3)}
        if virtual.setup.failures is not None:
            figures |= {"ettr_by_formula": ettr_by_formula(trace, virtual.setup), "checkpoint_s": virtual.setup.checkpoint_s}
        if asked.options.get("by_queue"):
            figures["quotas"] = {queue.path: (queue.quota.gpus_milli or 0) // 1000 for queue in virtual.setup.queues}
        runs.append((name, measures, figures))
    answer: dict[str, Any] = {
        "protocol": "jobs", "trace": [str(path) for path in asked.tasks], "gpus": sum(nodes), "nodes": len(nodes), "left_out": trace.left_out,
        "runs": {name: figures for name, _, figures in runs},
    }  # fmt: skip
    if len(runs) == 1:
        answer |= runs[0][2]
    page = ""
    if asked.options.get("report"):
        from gangline.core.simulate.report import page_of

        page = page_of(", ".join(path.name for path in asked.tasks), nodes, runs)
    return Result(answer, lines_of(trace, nodes, runs), page)


def _ticker(tick: Tick, before: int, total: int) -> Callable[[int], None]:
    return lambda done: tick(before + done, total)


def lines_of(trace: Trace, nodes: tuple[int, ...], runs: list[tuple[str, Measures, dict[str, Any]]]) -> list[str]:
    """Return what a person reads."""
    out = [f"{len(trace.jobs):,} jobs on {len(nodes):,} nodes with {sum(nodes):,} GPUs"]
    out += [f"left out: {count:,} ({why})" for why, count in sorted(trace.left_out.items())]
    width = max(len(name) for name, _, _ in runs)
    rows = [["", *(title for _, title in _SHOWN)]]
    rows += [[name, *(_cell(key, figures[key]) for key, _ in _SHOWN)] for name, _, figures in runs]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    out += ["  ".join(c.ljust(width) if not at else c.rjust(widths[at]) for at, c in enumerate(row)).rstrip() for row in rows]
    for name, _, figures in runs:
        formula = figures.get("ettr_by_formula", {})
        sizes = ", ".join(f"{size} GPUs {share:.3f} ({formula[size]:.3f})" for size, share in figures["ettr_by_size"].items() if size in formula)
        out += [f"{name}: useful share of time, by size, and by the formula: {sizes}"] if sizes else []
    stuck = [(name, figures["not_ended"]) for name, _, figures in runs if figures["not_ended"]]
    out += [f"{name}: {count} jobs have not ended: nothing was left that could happen" for name, count in stuck]
    return out


def _cell(key: str, value: float) -> str:
    if key.endswith("_s"):
        return format_duration(round(value))
    if key in ("utilisation", "fairness"):
        return f"{value:.3f}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


# ---------------------------------------------------------------- what is asked for


def merged(traces: list[Trace]) -> Trace:
    """Return several traces as one; jobs of the same name are told apart by a number."""
    if len(traces) == 1:
        return traces[0]
    out = Trace([], max(t.gpus for t in traces))
    for number, trace in enumerate(traces, 1):
        out.jobs += [replace(job, name=f"{number}:{job.name}") for job in trace.jobs]
        for why, count in trace.left_out.items():
            out.left_out[why] = out.left_out.get(why, 0) + count
    return out.settled()


def cluster_of(text: str, trace: Trace) -> tuple[int, ...]:
    """Return the numbers of GPUs on the nodes. Raises Unusable."""
    if not text:
        if not trace.gpus:
            raise Unusable("The trace does not say how large its cluster was: give it as --cluster NODESxGPUS, for example --cluster 8x8.")
        return (trace.gpus,)
    if not _CLUSTER.fullmatch(text):
        raise Unusable(f'--cluster is NODESxGPUS, or several with a plus, as 8x8 or 2x4+6x8, not "{text}".')
    parts = [part.split("x") for part in text.split("+")]
    nodes = tuple(int(gpus) for count, gpus in parts for _ in range(min(int(count), _MOST_NODES + 1)))
    if not sum(nodes) or len(nodes) > _MOST_NODES or min(nodes) < 1:
        raise Unusable(f"--cluster must have 1 to {_MOST_NODES:,} nodes, each with GPUs.")
    return nodes


def check_fits(trace: Trace, nodes: tuple[int, ...]) -> None:
    """Jobs that are larger than the cluster, or do not fit into it even when it is empty, would wait for ever. Raises Unusable."""
    largest = max(nodes)
    total = sum(nodes)
    for job in trace.jobs:
        ranks, each = shape(job.gpus, largest)
        if ranks > sum(gpus // each for gpus in nodes):
            what = f"{ranks} ranks of {each} GPUs" if ranks > 1 else f"{each} GPUs on one node"
            raise Unusable(f'Job "{job.name}" asks for {what}: more than {len(nodes)} nodes with {total:,} GPUs have. Give a larger --cluster.')


def setup_of(name: str, trace: Trace, nodes: tuple[int, ...], options: Mapping[str, Any]) -> Setup:
    """Return the setup of a policy. Raises Unusable."""
    order = _ORDERS.get(name)
    durations = str(options.get("durations") or "")
    if not durations:
        has_asked = any(job.asked_s for job in trace.jobs)
        durations = "known" if order in ("shortest_remaining", "shortest_remaining_service") or (name in _RESERVATIONS and not has_asked) else ""
        durations = durations or ("asked" if has_asked else "unknown")
    by_queue = bool(options.get("by_queue"))
    half_life_s = float(options.get("half_life_s") or 0.0)
    quantum_s = options.get("quantum_s")
    queues = queues_of(trace, sum(nodes), half_life_s) if by_queue else (QueueSpec("default"),)
    if order is not None:
        queues = tuple(_ordered(queue, order, quantum_s) for queue in queues)
    failures, interval_s, write_s = failing(trace, nodes, options)
    setup = Setup(
        nodes, queues, by_queue, durations=durations if failures is None else "unknown", overhead_s=float(options.get("overhead_s", 30.0)),
        failures=failures, checkpoint_s=interval_s, write_s=write_s,
    )  # fmt: skip
    if name == "fifo":
        return replace(setup, one_at_a_time=True, preemptible=by_queue)
    return replace(setup, reservations=_RESERVATIONS.get(name, setup.reservations))


def failing(trace: Trace, nodes: tuple[int, ...], options: Mapping[str, Any]) -> tuple[Failures | None, float, float]:
    """Return how nodes fail, the interval of checkpoints, and how long one takes; the best interval of the largest job if none is given."""
    word = str(options.get("failures") or "")
    if not word:
        return None, 0.0, 0.0
    try:
        rate = PRESETS[word] if word in PRESETS else float(word)
    except ValueError:
        raise Unusable(f'--failures is one of {", ".join(PRESETS)}, or a number per 1,000 nodes and day, not "{word}".') from None
    if not 0 < rate < 1e6:
        raise Unusable("--failures must be more than 0 and less than 1,000,000 per 1,000 nodes and day.")
    write_s = float(options.get("write_s") or 0.0)
    on = -(-max(job.gpus for job in trace.jobs) // max(nodes))
    interval_s = float(options.get("checkpoint_s") or 0.0) or best_interval_s(max(write_s, 1.0), mean_time_s(on, rate))
    return Failures(rate, int(options.get("seed") or 0)), interval_s, write_s


def mean_time_s(nodes: int, per_1000_node_days: float) -> float:
    """Return the mean time between failures of a job on so many nodes."""
    return 86_400_000.0 / (nodes * per_1000_node_days)


def ettr_by_formula(trace: Trace, setup: Setup) -> dict[str, float]:
    """Return by size class what the formula of failures.py says of the largest job there, with no time spent in the queue after a failure."""
    if setup.failures is None:
        return {}
    largest: dict[str, int] = {}
    for job in trace.jobs:
        largest[size_class(job.gpus)] = max(largest.get(size_class(job.gpus), 0), job.gpus)
    rate, per_node = setup.failures.per_1000_node_days, max(setup.nodes)
    return {
        size: expected_ettr(setup.checkpoint_s, setup.write_s, mean_time_s(-(-gpus // per_node), rate), setup.overhead_s)
        for size, gpus in largest.items()
    }  # fmt: skip


def _ordered(queue: QueueSpec, order: QueueOrder, quantum_s: float | None) -> QueueSpec:
    return QueueSpec(
        queue.path, quota=queue.quota, over_quota_weight=queue.over_quota_weight, usage_half_life_s=queue.usage_half_life_s, order=order,
        preempt_min_runtime_s=quantum_s,
    )  # fmt: skip


def queues_of(trace: Trace, gpus: int, half_life_s: float) -> tuple[QueueSpec, ...]:
    """Return the queues of a trace, with quotas that add up to the cluster, in proportion to the GPU time that their jobs ask for."""
    wants = demand(trace.jobs)
    total = sum(wants.values()) or 1.0
    quotas = {queue: int(gpus * want / total) for queue, want in wants.items()}
    for queue in sorted(wants, key=lambda q: quotas[q] - gpus * wants[q] / total)[: gpus - sum(quotas.values())]:
        quotas[queue] += 1  # what rounding left over goes to whoever lost most by it
    return tuple(
        QueueSpec(queue, quota=Amounts(gpus_milli=quotas[queue] * 1000), over_quota_weight=Weights(gpus=float(max(1, quotas[queue]))),
                  usage_half_life_s=half_life_s or None)
        for queue in sorted(wants)
    )  # fmt: skip


def demand(jobs: list[TraceJob]) -> dict[str, float]:
    """Return the GPU seconds that the jobs of each queue need in all."""
    wants: dict[str, float] = {}
    for job in jobs:
        queue = job.queue or "default"
        wants[queue] = wants.get(queue, 0.0) + job.gpus * job.duration_s
    return wants
