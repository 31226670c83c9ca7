"""How health events change the state: the part of the fold that is about devices and nodes going bad (core/model/health.py)."""

from __future__ import annotations

import msgspec

from gangline.core.model import events as ev
from gangline.core.model.documents import Registration
from gangline.core.model.foldsteps import IllegalTransition
from gangline.core.model.health import DEATHS_KEPT, NODE, STRIKE, WITHDRAWALS_KEPT, WITHDRAWN, Ailment, Death, Symptom, note
from gangline.core.model.state import Job, Node, Rank, State

#: ends of ranks that say nothing of the device on which they came: we ended it, it never ran, its node was gone, it asked for too much
_NOT_OF_A_DEVICE = frozenset({"stopped", "fenced", "node_restart", "lost", "start_failed", "oom"})
#: ailments that are kept of one node, those of GPUs that it no longer has included
_AILMENTS_KEPT = 64


def as_used(reg: Registration, node: Node) -> Registration:
    """Return a registration in which GPUs that are withdrawn count as not healthy: what everything that places ranks reads."""
    if not node.health:
        return reg
    bad = {uuid for uuid, ailment in node.health.items() if ailment.withdrawn}
    if not any(gpu.healthy and gpu.uuid in bad for gpu in reg.gpus):
        return reg
    gpus = tuple(msgspec.structs.replace(gpu, healthy=False) if gpu.uuid in bad else gpu for gpu in reg.gpus)
    return msgspec.structs.replace(reg, gpus=gpus)


def as_reported(node: Node) -> Registration:
    """Return the registration as the agent has sent it."""
    reg = node.registration
    if not node.health:
        return reg
    gpus = tuple(msgspec.structs.replace(gpu, healthy=gpu.uuid not in node.broken) for gpu in reg.gpus)
    return reg if gpus == reg.gpus else msgspec.structs.replace(reg, gpus=gpus)


def _ailment(node: Node, device: str) -> Ailment:
    if not node.health:  # until now the registration was what the agent has sent
        node.broken = tuple(gpu.uuid for gpu in node.registration.gpus if not gpu.healthy)
    return node.health.setdefault(device, Ailment())


def joined(node: Node, reg: Registration) -> None:
    """Take in a registration."""
    node.broken = tuple(gpu.uuid for gpu in reg.gpus if not gpu.healthy)
    if len(node.health) > _AILMENTS_KEPT:
        there = {NODE, *(gpu.uuid for gpu in reg.gpus)}
        node.health = {uuid: ailment for uuid, ailment in node.health.items() if uuid in there}
    node.registration = as_used(reg, node)


def lost(node: Node, cause: str, at_ms: int) -> None:
    """Remember that a node was lost, unless an operator is at work on it."""
    if not (node.cordoned or node.draining):
        note(_ailment(node, NODE), [Symptom("node_lost", 0, at_ms, cause)])


def reported(state: State, node: Node, e: ev.HealthReported) -> None:
    """Take in what was seen of a device or a node."""
    if e.device != NODE and e.device not in {gpu.uuid for gpu in node.registration.gpus} and e.device not in node.reports and not e.report:
        raise IllegalTransition(e, f"{e.node} has no GPU {e.device}")
    if e.symptoms:
        note(_ailment(node, e.device), list(e.symptoms))
    if e.device == NODE:
        node.driver, node.checks = e.driver, e.checks
    elif e.report is None:
        node.reports.pop(e.device, None)
    else:
        node.reports[e.device] = e.report


def changed(state: State, node: Node, e: ev.HealthChanged, at_ms: int) -> None:
    """Take in a decision about a device or a node. The caller counts anew what is free."""
    if e.device != NODE and e.device not in {gpu.uuid for gpu in node.registration.gpus} and e.device not in node.health:
        raise IllegalTransition(e, f"{e.node} has no GPU {e.device}")
    ailment = _ailment(node, e.device)
    if ailment.state not in WITHDRAWN and e.state in WITHDRAWN:
        ailment.withdrawn_ms = [*ailment.withdrawn_ms, at_ms][-WITHDRAWALS_KEPT:]
        ailment.boot_id = node.registration.boot_id
    if e.state != ailment.state:
        ailment.since_ms = at_ms
    ailment.state, ailment.cause, ailment.message, ailment.action = e.state, e.cause, e.message, e.action
    ailment.until_ms, ailment.burn_in, ailment.by = e.until_ms, e.burn_in, e.by
    if e.clear:
        ailment.cleared_ms = at_ms
        if e.device == NODE:
            state.deaths = [d for d in state.deaths if d.node != e.node]
        else:
            state.deaths = [d for d in state.deaths if e.device not in d.devices]
    node.registration = as_used(as_reported(node), node)


def note_death(state: State, job: Job, at_ms: int) -> None:
    """Remember on which node and devices the rank was that died first and took its gang with it."""
    failed = [
        (rank.exited_at_ms, number, node, rank)
        for node, part in job.parts.items()
        for number, rank in part.ranks.items()
        if rank.exited and (rank.exit_code != 0 or rank.cause)
    ]
    if not failed:
        return
    _, number, node_id, rank = min(failed, key=lambda f: f[:2])
    node = state.nodes.get(node_id)
    if node is None or rank.cause in _NOT_OF_A_DEVICE or job.spec.burn_in:
        return
    who = job.array or job.id
    devices = tuple(gpu.uuid for gpu in node.registration.gpus if gpu.index in rank.gpus)
    old = next((d for d in state.deaths if d.job == who and d.node == node_id), None)
    if old is not None:
        state.deaths.remove(old)
        devices = devices if not old.devices else tuple(d for d in devices if d in old.devices) or devices
    message = f"rank {number} {rank.cause or (f'signal {-rank.exit_code}' if rank.exit_code < 0 else f'status {rank.exit_code}')}"
    state.deaths = [*state.deaths, Death(who, node_id, devices, at_ms, (old.count if old else 0) + 1, message)][-DEATHS_KEPT:]
    state.scratch.unwell[node_id] = None


def hardware_failed(node: Node, rank: Rank, within_ms: int) -> str:
    """Return what the hardware did under a rank about when it ended, "" if nothing is known: strikes that are nobody's doing count, not hints.

    `within_ms` before its end was reported, or after.
    """
    devices = [gpu.uuid for gpu in node.registration.gpus if gpu.index in rank.gpus]
    for uuid in (*devices, NODE):
        ailment = node.health.get(uuid)
        if ailment is None:
            continue
        for s in reversed(ailment.symptoms):
            if s.weight >= STRIKE and not s.job and s.at_ms > ailment.cleared_ms and abs(s.at_ms - rank.ended_ms) <= within_ms:
                return s.message
        if ailment.unfit:
            return ailment.message
    return ""
