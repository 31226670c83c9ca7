"""What becomes of devices and nodes that show symptoms, and of the tests that they have to pass. Pure; the states are drawn in
core/model/health.py.

- What a symptom calls for by itself (an Xid whose row in the catalogue says reset, reboot or exchange; a failed remapping; a link that is
  down) withdraws the device at once. Everything else is *strikes*: they fade with a half-life of `HALF_LIFE_MS`, one makes a suspect,
  `STRIKES` withdraw.
- An error that a job can cause itself counts only for the second job that has it, and further ones: the same job may crash as often as it
  likes.
- What was withdrawn for strikes or by the history of its jobs rests, and is then tried again: 10 minutes at first, twice as long with each
  further time (hold-down), up to a day. What calls for an action waits for that: for a reboot of the host, or for somebody's word.
- A node that is lost again and again (`FLAPS` times within `FLAP_WINDOW_MS`) is quarantined until it has been up for a while, each time
  twice as long.
- Nothing comes back untested: a job of the lowest priority computes on it what is known (nodeagent/burnin.py), and only that makes it
  healthy.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from gangline.core.model import events as ev
from gangline.core.model.health import NODE, STRIKE, WEIGHT, WITHDRAWN, Action, Ailment, Symptom, waits_for
from gangline.core.model.spec import Gang, JobSpec, Preemption, Resources, Restart
from gangline.core.model.state import Node, State
from gangline.core.policy import blame

#: a strike counts half after so long
HALF_LIFE_MS = 24 * 3_600_000
#: strikes that withdraw a device or a node
STRIKES = 3
#: a suspect whose strikes have faded below this part of one is healthy again
WELL = 0.5

#: hold-down after the first withdrawal of a week, doubled with each further one, up to the longest
REST_MS = 600_000
REST_MAX_MS = 86_400_000
_REST_WINDOW_MS = 7 * 86_400_000

#: a node that was lost so often within the window is flapping; it has to be up for so long, doubled with each further loss, up to the longest
FLAPS = 3
FLAP_WINDOW_MS = 3_600_000
STABLE_MS = 60_000
STABLE_MAX_MS = 1_800_000

#: a test that has not ended by then has failed
BURN_IN_S = 900.0
#: a test that was not to be had (the node was lost, or full) is tried again after so long
_AGAIN_MS = 60_000


# ---------------------------------------------------------------- when


def wake(state: State, now_ms: int) -> None:
    """Look again at the nodes whose time has come."""
    timers = state.scratch.health_timers
    while timers and timers[0][0] <= now_ms:
        state.scratch.unwell[heappop(timers)[1]] = None


def attend_to_all(state: State) -> None:
    """Look at every node of which anything is known."""
    state.scratch.unwell = {node.id: None for node in state.nodes.values() if node.health}
    state.scratch.health_timers = []


def settle(state: State, now_ms: int) -> int | None:
    """All nodes have been looked at: note when each must be looked at again. Returns the log time of the next one."""
    timers = state.scratch.health_timers
    for name in state.scratch.unwell:
        node = state.nodes.get(name)
        due = min((at for at in _moments(node, now_ms) if at > now_ms), default=None) if node is not None else None
        if due is not None:
            heappush(timers, (due, name))
    state.scratch.unwell.clear()
    return timers[0][0] if timers else None


def _moments(node: Node, now_ms: int) -> Iterator[int]:
    for ailment in node.health.values():
        if ailment.until_ms:
            yield ailment.until_ms
        if ailment.state == "suspect":
            yield _faded_ms(ailment, now_ms)
        if ailment.state == "burn_in" and not ailment.burn_in:
            yield max(ailment.until_ms, now_ms + _AGAIN_MS)


# ---------------------------------------------------------------- what


def step(state: State, now_ms: int) -> list[ev.LogEvent]:
    """Return what the health of nodes calls for now, for those that were touched."""
    out: list[ev.LogEvent] = []
    for name in state.scratch.unwell:
        node = state.nodes.get(name)
        if node is not None:
            out += _of_node(state, node, now_ms)
    return out


def _of_node(state: State, node: Node, now_ms: int) -> Iterator[ev.LogEvent]:
    yield from _strays(state, node)
    lemon = blame.blame(state, node, now_ms)
    devices = [*node.health, *([lemon[0]] if lemon is not None and lemon[0] not in node.health else [])]
    for device in devices:
        ailment = node.health.get(device, Ailment())
        change = _next(state, node, device, ailment, lemon[1] if lemon is not None and lemon[0] == device else "", now_ms)
        if change is not None:
            yield from change


def _next(state: State, node: Node, device: str, ailment: Ailment, lemon: str, now_ms: int) -> list[ev.LogEvent] | None:
    found = verdict(ailment, lemon, now_ms)
    if found is None and device == NODE and (why := waits_for(node.driver, node.checks)):
        found = "waits", why, "wait"
    if ailment.state in ("healthy", "suspect"):
        if found is not None:
            cause, message, action = found
            return [_change(node, device, "unhealthy", cause, message, action, _rest(ailment, action, now_ms))]
        if device == NODE and (stable_ms := flapping(node, ailment, now_ms)):
            times = len(_losses(ailment, node.joined_at_ms))
            message = f"lost {times} times within an hour: no ranks before it has been up for {(stable_ms - node.joined_at_ms) // 1000} s"
            return [_change(node, device, "quarantined", "flapping", message, "wait", stable_ms)]
        score = strikes(ailment, now_ms)
        if ailment.state == "healthy" and score >= 1:
            worst = _worst(ailment, now_ms)
            return [_change(node, device, "suspect", worst.code, f"{worst.message}; {score:.1f} of {STRIKES} strikes", "", 0)]
        if ailment.state == "suspect" and score < WELL:
            return [_change(node, device, "healthy", "faded", "its strikes have faded", "", 0)]
        return None
    if found is not None and WEIGHT[found[2]] > WEIGHT[ailment.action] and ailment.state in ("unhealthy", "quarantined", "burn_in"):
        # Worse than what is known; a test of it is of no use before that is mended.
        to = "unhealthy" if ailment.state == "unhealthy" else "quarantined"
        return [_change(node, device, to, found[0], found[1], found[2], _rest(ailment, found[2], now_ms))]
    return _onwards(state, node, device, ailment, now_ms)


def _onwards(state: State, node: Node, device: str, ailment: Ailment, now_ms: int) -> list[ev.LogEvent] | None:
    """The next state of what is withdrawn."""
    if ailment.cause == "flapping":
        if node.status == "up" and (later := flapping(node, ailment, now_ms)) > ailment.until_ms:
            times = len(_losses(ailment, node.joined_at_ms))
            return [_change(node, device, "quarantined", "flapping", f"lost {times} times within an hour", "wait", later)]
        if node.status == "up" and now_ms >= ailment.until_ms:
            return [_change(node, device, "healthy", "stable", "it has been up for long enough", "", 0)]
        return None
    if ailment.cause == "waits" and ailment.action == "wait":
        well = not waits_for(node.driver, node.checks)
        return [_change(node, device, "healthy", "waits", "driver and checks are well again", "", 0)] if well else None
    if ailment.state == "unhealthy":
        if not held(node, device):
            message = f"{ailment.message}; nothing runs on it any more"
            return [_change(node, device, "quarantined", ailment.cause, message, ailment.action, ailment.until_ms)]
        return None
    rebooted = bool(ailment.boot_id) and node.registration.boot_id != ailment.boot_id
    if ailment.state in ("quarantined", "repair") and node.status == "up":
        if rebooted and ailment.action in ("reset_gpu", "reboot_node"):
            return [_change(node, device, "burn_in", ailment.cause, "its host was rebooted since", ailment.action, 0)]
        if ailment.state == "quarantined" and ailment.until_ms and now_ms >= ailment.until_ms:
            return [_change(node, device, "burn_in", ailment.cause, "it has rested, and is tested", ailment.action, 0)]
        return None
    if ailment.state != "burn_in":
        return None
    again = next((s for s in counted(ailment) if s.action not in ("", "wait") and s.at_ms > ailment.since_ms), None)
    if again is not None:
        message = f"again while it was tested: {again.message}"
        return [_change(node, device, "quarantined", again.code, message, again.action, _rest(ailment, again.action, now_ms))]
    return _burn_in(state, node, device, ailment, now_ms)


def _change(node: Node, device: str, to: str, cause: str, message: str, action: Action, until_ms: int, burn_in: str = "") -> ev.HealthChanged:
    return ev.HealthChanged(
        node=node.id, device=device, state=to, cause=cause, message=message, action=action, until_ms=until_ms, burn_in=burn_in,  # type: ignore[arg-type]
        clear=to == "healthy" and cause == "burn_in",
    )  # fmt: skip


# ---------------------------------------------------------------- judging


def counted(ailment: Ailment) -> list[Symptom]:
    """Return the symptoms that count: since it was last mended, and of what a job may have done itself all but the first job's."""
    since = [s for s in ailment.symptoms if s.at_ms > ailment.cleared_ms]
    first = next((s.job for s in since if s.job), "")
    seen: set[str] = {first}
    out = []
    for s in since:
        if s.job:
            if s.job in seen:
                continue
            seen.add(s.job)
        out.append(s)
    return out


def strikes(ailment: Ailment, now_ms: int) -> float:
    """Return the strikes that are left at `now_ms`: each halves in `HALF_LIFE_MS`."""
    return sum(_left(s, now_ms) for s in counted(ailment))


def _left(symptom: Symptom, now_ms: int) -> float:
    age_ms = max(0, now_ms - symptom.at_ms)
    return float(symptom.weight / STRIKE * 2.0 ** (-age_ms / HALF_LIFE_MS))


def verdict(ailment: Ailment, lemon: str, now_ms: int) -> tuple[str, str, Action] | None:
    """Return (cause, message, action) for which a device or node is to be withdrawn, None if nothing is so bad."""
    heaviest: Symptom | None = None
    for s in counted(ailment):
        if s.action not in ("", "wait") and (heaviest is None or WEIGHT[s.action] >= WEIGHT[heaviest.action]):
            heaviest = s
    if heaviest is not None:
        return heaviest.code, heaviest.message, heaviest.action
    if lemon:
        return "lemon", lemon, ""
    score = strikes(ailment, now_ms)
    if score >= STRIKES:
        worst = _worst(ailment, now_ms)
        return worst.code, f"{score:.1f} strikes, the last: {counted(ailment)[-1].message}", ""
    return None


def flapping(node: Node, ailment: Ailment, now_ms: int) -> int:
    """Return the log time until which a node that came back has to stay up before it gets ranks, 0 for one that may have them."""
    if node.status != "up":
        return 0
    losses = _losses(ailment, node.joined_at_ms)
    if len(losses) < FLAPS:
        return 0
    until = node.joined_at_ms + min(STABLE_MS << (len(losses) - FLAPS), STABLE_MAX_MS)
    return until if until > now_ms else 0


def _losses(ailment: Ailment, before_ms: int) -> list[int]:
    since = max(before_ms - FLAP_WINDOW_MS, ailment.cleared_ms)
    return [s.at_ms for s in ailment.symptoms if s.code == "node_lost" and since < s.at_ms <= before_ms]


def held(node: Node, device: str) -> bool:
    """Whether any gang has something of it."""
    if device == NODE:
        return bool(node.holdings)
    index = next((gpu.index for gpu in node.registration.gpus if gpu.uuid == device), -1)
    return any(index in h.gpus or any(use.gpu == index for use in h.shares) for h in node.holdings.values())


def _worst(ailment: Ailment, now_ms: int) -> Symptom:
    return max(counted(ailment), key=lambda s: (_left(s, now_ms), s.at_ms))


def _faded_ms(ailment: Ailment, now_ms: int) -> int:
    """Return about when the strikes of a suspect will have faded."""
    score, wait = strikes(ailment, now_ms), 0
    while score >= WELL and wait < 40:
        score, wait = score / 2**0.25, wait + 1
    return now_ms + max(1, wait) * HALF_LIFE_MS // 4


def _rest(ailment: Ailment, action: Action, now_ms: int) -> int:
    """Return until when it rests before it is tested. What calls for an action does not mend by rest: 0."""
    if action:
        return 0
    times = sum(at > now_ms - _REST_WINDOW_MS for at in ailment.withdrawn_ms)
    return now_ms + min(REST_MS << times, REST_MAX_MS)


# ---------------------------------------------------------------- tests


def _burn_in(state: State, node: Node, device: str, ailment: Ailment, now_ms: int) -> list[ev.LogEvent] | None:
    """Test what was mended, and read the result."""
    job = state.jobs.get(ailment.burn_in)
    if ailment.burn_in and (job is None or (job.state == "finished" and job.outcome == "cancelled")):
        message = "its test was called off, and is made again"
        return [_change(node, device, "burn_in", ailment.cause, message, ailment.action, now_ms + _AGAIN_MS)]
    if job is not None:
        if job.state != "finished":
            return None
        if job.outcome == "succeeded":
            return [_change(node, device, "healthy", "burn_in", f"it has passed its test {job.id}", "", 0)]
        return [_change(node, device, "quarantined", "burn_in", f"it has failed its test {job.id}: {job.message}", "rma", 0)]
    if now_ms < ailment.until_ms or node.status != "up" or node.draining:
        return None
    devices = tested(node, device)
    queue = _queue(state)
    if queue is None or (device != NODE and not devices):
        return None
    test = f"burnin{state.submitted + 1}"
    spec = burn_in_spec(node.id, device, len(devices), queue)
    rank = ev.PlacedRank(0, devices)
    return [
        ev.JobSubmitted(job=test, spec=spec, user="gangline"),
        ev.GangPlaced(job=test, generation=1, parts=(ev.PlacedPart(node.id, (rank,)),), reason=f"it tests {device or node.id}"),
        _change(node, device, "burn_in", ailment.cause, f"{test} tests it", ailment.action, 0, test),
    ]


def _queue(state: State) -> str | None:
    """Return a queue that takes jobs: every job is in one, also those that nobody waits for."""
    if not state.queues.declared:
        return "default"
    return next((leaf for leaf in state.queues.leaves() if state.queues.refusal(leaf) is None), None)


def tested(node: Node, device: str) -> tuple[int, ...]:
    """Return the GPUs that a test uses: the one that was withdrawn, or all of the node that nobody holds and no other fault has withdrawn."""
    taken = {g for h in node.holdings.values() for g in h.gpus} | set(node.parted)
    ill = {uuid for uuid, a in node.health.items() if uuid != device and a.withdrawn}
    wanted = (gpu for gpu in node.registration.gpus if device in (NODE, gpu.uuid) and gpu.uuid not in node.broken and gpu.uuid not in ill)
    return tuple(gpu.index for gpu in wanted if gpu.index not in taken)


def burn_in_spec(node: str, device: str, gpus: int, queue: str) -> JobSpec:
    """Return the job that tests a device or a node. The agent knows what to run for it (nodeagent/burnin.py)."""
    return JobSpec(
        command=("gangline-burn-in",), queue=queue, priority=0, gang=Gang(), resources=Resources(gpus=gpus, cpus_milli=0),
        time_limit_s=BURN_IN_S, restart=Restart(on_rank_failure="never"), preemption=Preemption(grace_s=1.0),
        burn_in=node, env={"GANGLINE_BURN_IN": device or node},
    )  # fmt: skip


def _strays(state: State, node: Node) -> Iterator[ev.LogEvent]:
    """Tests that lost their place are over: they are of no use anywhere else."""
    for ailment in node.health.values():
        job = state.jobs.get(ailment.burn_in)
        if job is not None and (job.state == "queued" or (ailment.state not in WITHDRAWN and job.active)):
            yield ev.GangFinished(job=job.id, outcome="cancelled", cause="preempted", message="its place was needed, or is gone")
