"""The health of nodes and of their GPUs: what is known of each, and what a report adds to that. Pure.

             strikes               a fault with an action, or three strikes
    healthy ─────────▶ suspect ────────────────────────────────────────▶ unhealthy     gangs are moved off it
       ▲   ◀─────────  (fades)                                              │ nothing is left on it
       │                                                                    ▼
       │ its test succeeds                       rested, or rebooted   quarantined ──▶ repair     somebody works on it
       └────────────────────── burn_in ◀────────────────────────────────────┴─────────────┘
                                  └── its test fails: quarantined again

From `unhealthy` on it is *withdrawn*: nobody new gets it. Which steps are made is decided in core/policy/health.py and written down as
`health_changed`; here are the facts, and how a report of an agent becomes symptoms (`symptoms`).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from gangline.core.model.documents import CheckReport, DriverReport, GpuReport
from gangline.core.model.xids import NAMES_ITS_ACTION, Xid, xid

HealthState = Literal["healthy", "suspect", "unhealthy", "quarantined", "repair", "burn_in"]
#: what has to be done before it can be used again, from the lightest to the heaviest; "": nothing, "wait": it mends itself
Action = Literal["", "wait", "reset_gpu", "reboot_node", "rma"]

#: states in which nobody new gets it
WITHDRAWN: Final = frozenset({"unhealthy", "quarantined", "repair", "burn_in"})
WEIGHT: Final[dict[Action, int]] = {"": 0, "wait": 1, "reset_gpu": 2, "reboot_node": 3, "rma": 4}

#: one strike, in the unit of `Symptom.weight`
STRIKE: Final = 1000
#: so many symptoms are kept of a device, and of a node; the oldest go first
SYMPTOMS_KEPT: Final = 16
#: so many moments at which it was withdrawn are kept: each lets it rest longer (hold-down)
WITHDRAWALS_KEPT: Final = 8
#: name under which a node as a whole is kept among its devices
NODE: Final = ""

#: more corrected memory errors than that between two reports are worth a note (they cost nothing but tell of a weak row)
ECC_CORRECTED_BURST: Final = 10_000
#: NVLink errors (replay, recovery, CRC) between two reports that are more than the noise of a healthy link
NVLINK_BURST: Final = 1_000

#: stands for the job of a symptom where several had the device
SOME_JOB: Final = "?"


class Symptom(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """One thing that was seen of a device or node."""

    #: xid-N, ecc, remap_pending, remap_failed, slowed, nvlink, nvlink_down, lost, missing, needs, driver, node_lost, check
    code: str
    #: thousandths of a strike, at the time when it was seen; they fade (core/policy/health.py)
    weight: int
    #: log time
    at_ms: int
    message: str
    #: what it calls for by itself, without regard to strikes
    action: Action = ""
    #: the job that it may come from: counted only when other jobs have the same
    job: str = ""
    #: what computes on the device is of no use, or cannot go on: its gang is not asked to checkpoint first
    fatal: bool = False


class Ailment(msgspec.Struct, omit_defaults=True, gc=False):
    """What is known of the health of one device, or of one node as a whole. One that never showed anything has none."""

    state: HealthState = "healthy"
    since_ms: int = 0
    #: the code of the symptom that decided, and the decision in words
    cause: str = ""
    message: str = ""
    action: Action = ""
    #: not before then to the next state by itself, log time; 0: not by itself
    until_ms: int = 0
    #: oldest first
    symptoms: list[Symptom] = []
    #: when it was withdrawn, oldest first
    withdrawn_ms: list[int] = []
    #: what was seen until then counts no longer: it was mended, or tested
    cleared_ms: int = 0
    #: boot of the host at which it was withdrawn: another one means that the host was rebooted since
    boot_id: str = ""
    #: job that tests it
    burn_in: str = ""
    #: who brought it into this state, "" for the rules
    by: str = ""

    @property
    def withdrawn(self) -> bool:
        """Whether nobody new gets it."""
        return self.state in WITHDRAWN

    @property
    def unfit(self) -> bool:
        """Whether gangs that have it are to leave it. One that is only waited for keeps what it has."""
        return self.state in WITHDRAWN and self.action != "wait"

    @property
    def fatal(self) -> bool:
        """Whether what computes there is lost already."""
        return self.state in WITHDRAWN and any(s.fatal for s in self.symptoms if s.at_ms > self.cleared_ms)


class Death(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """A gang ended because a rank died on a node: of each job and node the last one, with how many there were."""

    #: of an element its array: what all elements do is one cause
    job: str
    node: str
    #: of the rank that died first
    devices: tuple[str, ...]
    #: log time of the last one
    at_ms: int
    count: int = 1
    message: str = ""


#: deaths that are kept of the whole cluster, newest last
DEATHS_KEPT: Final = 1_000


def symptoms(old: GpuReport | None, new: GpuReport, jobs: tuple[str, ...], at_ms: int) -> list[Symptom]:
    """Return what a report of a GPU adds to the one before (None: there was none). `jobs` are those that have the GPU.

    What only counts is compared; after a reboot or a reset counters begin at 0 again, so a counter that has fallen counts from there.
    """
    before = old or GpuReport(uuid=new.uuid)
    found: list[Symptom] = []
    job = jobs[0] if len(jobs) == 1 else ""
    counted = {x.xid: x.count for x in before.xids}
    for x in new.xids:
        # A count that has fallen begins anew with a boot of the host.
        more = x.count - counted.get(x.xid, 0) if x.count >= counted.get(x.xid, 0) else x.count
        if more > 0 and (symptom := _of_xid(x.xid, more, job, at_ms)) is not None:
            found.append(symptom)
    if new.state != before.state and new.state == "lost":
        found.append(Symptom("lost", STRIKE, at_ms, "the driver cannot reach it any more", "reboot_node", fatal=True))
    if new.state != before.state and new.state == "missing":
        found.append(Symptom("missing", STRIKE, at_ms, "it was in this node, and the driver does not name it now", "rma", fatal=True))
    uncorrected = _more(before.ecc_uncorrected, new.ecc_uncorrected)
    if uncorrected:
        found.append(Symptom("ecc", STRIKE, at_ms, f"{uncorrected} uncorrectable memory errors"))
    corrected = _more(before.ecc_corrected, new.ecc_corrected)
    if corrected > ECC_CORRECTED_BURST:
        found.append(Symptom("ecc", STRIKE // 4, at_ms, f"{corrected:,} corrected memory errors since the last report"))
    if new.remap_failed and not before.remap_failed:
        found.append(Symptom("remap_failed", STRIKE, at_ms, "a row of its memory could not be remapped", "rma"))
    if new.remap_pending and not before.remap_pending:
        # The row is out of use already; only the next reset puts another in its place.
        found.append(Symptom("remap_pending", STRIKE // 2, at_ms, "a row of its memory is remapped at the next reset"))
    if slower := tuple(w for w in new.slowed if w not in before.slowed):
        weight = STRIKE // 2 if any(w != "sw_thermal" for w in slower) else STRIKE // 4
        found.append(Symptom("slowed", weight, at_ms, f"slowed down: {', '.join(slower)}"))
    if new.nvlinks_down > before.nvlinks_down:
        found.append(Symptom("nvlink_down", STRIKE, at_ms, f"{new.nvlinks_down} of its NVLinks are down", "reset_gpu"))
    if (errors := _more(before.nvlink_errors, new.nvlink_errors)) > NVLINK_BURST:
        found.append(Symptom("nvlink", STRIKE // 2, at_ms, f"{errors:,} NVLink errors since the last report"))
    if new.needs and new.needs != before.needs:
        found.append(Symptom("needs", STRIKE, at_ms, f"the driver says that it needs {new.needs.replace('_', ' ')}", action_of_words(new.needs)))
    return found


def driver_symptom(new: DriverReport, at_ms: int) -> Symptom:
    """Return what it means that the driver of a node's GPUs does not answer."""
    what = "does not answer" if new.state == "silent" else "has failed"
    return Symptom("driver", STRIKE // 2, at_ms, f"the driver of its GPUs {what}" + (f": {new.message}" if new.message else ""), "wait")


def check_symptom(new: CheckReport, at_ms: int) -> Symptom:
    """Return what it means that a check of the site is not well: a critical one holds the node until it is, a warning is half a strike."""
    weight = STRIKE // 2 if new.status == "warning" else 0
    said = f": {new.message}" if new.message else ""
    return Symptom("check", weight, at_ms, f"check {new.name} is {new.status}{said}", "wait" if new.status == "critical" else "")


def waits_for(driver: DriverReport | None, checks: tuple[CheckReport, ...]) -> str:
    """Return what is not well with a node that will be well again by itself, in words; "" for nothing: until then nobody new gets it."""
    if driver is not None and driver.state != "answers":
        return driver_symptom(driver, 0).message
    return next((check_symptom(check, 0).message for check in checks if check.status == "critical"), "")


def worth_noting(old: GpuReport | None, new: GpuReport) -> bool:
    """Whether a report says something that later ones are to be compared with: also that something is well again."""
    before = old or GpuReport(uuid=new.uuid)
    steady = ("state", "remap_pending", "remap_failed", "slowed", "nvlinks_down", "needs", "xids", "ecc_uncorrected", "remapped_uncorrected")
    if any(getattr(before, field) != getattr(new, field) for field in steady):
        return True
    return _more(before.ecc_corrected, new.ecc_corrected) > ECC_CORRECTED_BURST or _more(before.nvlink_errors, new.nvlink_errors) > NVLINK_BURST


def action_of_words(needs: str) -> Action:
    """Return the action that the driver names, by NVML's recovery actions: gpu_reset, node_reboot, drain_p2p, drain_and_reset."""
    if "reboot" in needs:
        return "reboot_node"
    return "reset_gpu" if "reset" in needs or "drain" in needs else ""


def _of_xid(number: int, count: int, job: str, at_ms: int) -> Symptom | None:
    row = xid(number)
    times = f", {count} times" if count > 1 else ""
    message = f"Xid {number} ({row.meaning}){times}"
    if number == NAMES_ITS_ACTION:
        return Symptom(f"xid-{number}", 0, at_ms, message)  # what it needs is in the report itself
    if row.action in ("reset_gpu", "reboot_node", "rma"):
        return Symptom(f"xid-{number}", STRIKE, at_ms, message, row.action, fatal=_is_fatal(number, row))
    if row.of_hardware:
        return Symptom(f"xid-{number}", STRIKE if row.action == "restart_app" else STRIKE // 5, at_ms, message)
    if row.action == "restart_app":
        return Symptom(f"xid-{number}", STRIKE, at_ms, message, job=job or SOME_JOB)
    return Symptom(f"xid-{number}", STRIKE // 5, at_ms, message) if "repeated" in row.escalation else None


def _is_fatal(number: int, row: Xid) -> bool:
    """Whether what computes there is lost: the GPU is gone, hangs, or its memory is wrong. Such a gang cannot save anything."""
    return row.scope == "node" or row.origin in ("hw", "hw_memory", "hw_or_firmware")


def _more(before: int, now: int) -> int:
    return now - before if now >= before else now


def note(ailment: Ailment, new: list[Symptom]) -> None:
    """Add symptoms to what is known."""
    ailment.symptoms = [*ailment.symptoms, *new][-SYMPTOMS_KEPT:]
