"""Queues as they are declared (core/model/queues.py), as the passes know them (queues.py): in the units of vectors, None as unlimited."""

from __future__ import annotations

from gangline.core.model.queues import QueueSpec as DeclaredQueue
from gangline.core.model.queues import QueueTree
from gangline.core.policy.models import ModelSpec
from gangline.core.policy.queues import QueueSpec
from gangline.core.policy.requests import UNLIMITED

_MIB = 1 << 20
#: a gang is not reclaimed before it has run so long, where no queue says otherwise: what has just been placed is not taken back at once
MIN_RUNTIME_S = 60.0


def queue_specs(tree: QueueTree) -> list[QueueSpec]:
    """Return the queues of a declaration, or the implicit one, parents first."""
    order: dict[str, int] = {}
    out = []
    for spec in tree.specs.values():
        order[spec.parent] = order.get(spec.parent, -1) + 1
        out.append(_queue_spec(spec, order[spec.parent], tree))
    return out


def _quantum_s(spec: DeclaredQueue) -> float | None:
    """Who runs keeps its place for a while where the order by service would exchange it at once."""
    ordered = spec.order is not None and spec.order != "priority"
    return MIN_RUNTIME_S if spec.preempt_min_runtime_s is None and ordered else spec.preempt_min_runtime_s


def _models_spec(spec: DeclaredQueue) -> tuple[ModelSpec, ...]:
    quotas, limits, weights = spec.quota.models, spec.limit.models, spec.over_quota_weight.models
    named = sorted({*quotas, *limits, *weights})
    return tuple((model, quotas.get(model), limits.get(model, UNLIMITED), weights.get(model)) for model in named)


def _queue_spec(spec: DeclaredQueue, created: int, tree: QueueTree) -> QueueSpec:
    def vector(amounts: object) -> tuple[int, int, int]:
        gpus, cpus, memory = (getattr(amounts, f) for f in ("gpus_milli", "cpus_milli", "memory_mib"))
        return (
            UNLIMITED if gpus is None else gpus, UNLIMITED if cpus is None else cpus, UNLIMITED if memory is None else memory * _MIB,
        )  # fmt: skip

    weight = spec.over_quota_weight
    return QueueSpec(
        spec.path, spec.parent, quota=vector(spec.quota) if tree.declared else (UNLIMITED, UNLIMITED, UNLIMITED), limit=vector(spec.limit),
        weight=(weight.gpus, weight.cpus, weight.memory), priority=spec.priority, created=created,
        reclaim_min_runtime_s=MIN_RUNTIME_S if spec.reclaim_min_runtime_s is None and not spec.parent else spec.reclaim_min_runtime_s,
        preempt_min_runtime_s=_quantum_s(spec), user_fairness=spec.user_fairness, models=_models_spec(spec),
        by_service=tree.order(spec.path) != "priority",
    )  # fmt: skip
