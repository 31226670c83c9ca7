"""What the errors that NVIDIA's driver reports of a GPU (Xid) call for: one row for each number.

The rows are NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors) as leptonai/gpud had parsed it on 2025-10-29 (commit 4a8de33), with its
"immediate action" reduced to the five classes below. Numbers that are not here are taken for `UNKNOWN`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

#: what is to be done: nothing; start the job again; reset the GPU; reboot its host; have it repaired or exchanged
XidAction = Literal["ignore", "restart_app", "reset_gpu", "reboot_node", "rma"]
#: what it takes with it
XidScope = Literal["process", "gpu", "nvlink_domain", "node"]


class Xid(NamedTuple):
    """One row: `origin` is where such an error mostly comes from (app, driver, hw_memory, ...), `escalation` what to do when it comes again."""

    meaning: str
    action: XidAction
    scope: XidScope
    origin: str
    escalation: str = ""

    @property
    def of_hardware(self) -> bool:
        """Whether the hardware is its usual cause, rather than the job or the driver."""
        return self.origin.startswith("hw")


#: the text of this one names the action, which is told apart from it (documents.GpuReport.needs)
NAMES_ITS_ACTION: Final = 154

UNKNOWN: Final = Xid("not in the catalogue", "ignore", "gpu", "unknown")

XIDS: Final[dict[int, Xid]] = {
    8: Xid("engine idle timeout, work stopped", "restart_app", "process", "driver_or_app"),
    11: Xid("bad command stream sent to the GPU", "restart_app", "process", "app"),
    13: Xid(
        "compute/graphics engine fault, usually an illegal instruction or address in a kernel", "restart_app", "process", "app",
        "reset_gpu if it follows one GPU across jobs",
    ),
    25: Xid("illegal command stream", "restart_app", "process", "app"),
    31: Xid("page fault in GPU memory, usually a bad pointer", "restart_app", "process", "app", "reset_gpu if it follows one GPU across jobs"),
    32: Xid("corrupted command stream on the DMA path", "restart_app", "process", "app"),
    37: Xid("firmware method not implemented", "ignore", "gpu", "driver"),
    38: Xid("context-switch firmware watchdog fired", "ignore", "gpu", "driver", "reset_gpu if repeated"),
    39: Xid("copy engine 0 fault", "restart_app", "process", "app"),
    40: Xid("copy engine 1 fault", "restart_app", "process", "app"),
    41: Xid("copy engine 2 fault", "restart_app", "process", "app"),
    43: Xid(
        "channel reset after a user fault; GPU itself still healthy", "ignore", "process", "app", "restart_app (the faulted process is gone)",
    ),
    44: Xid("engine fault while switching contexts", "ignore", "gpu", "driver", "reset_gpu if repeated"),
    45: Xid(
        "driver cleaned up channels after another fault or a kill", "ignore", "process", "secondary",
        "follow the other Xid; alone: restart fabric manager",
    ),
    46: Xid("GPU timed out and stopped working", "reset_gpu", "gpu", "hw", "rma if repeated"),
    48: Xid("uncorrectable double-bit memory error", "reset_gpu", "gpu", "hw_memory", "rma if rows cannot be remapped or it recurs"),
    54: Xid("auxiliary power lead missing", "rma", "gpu", "hw_power", "hands-on service, then re-test"),
    60: Xid("video processor fault", "restart_app", "process", "app"),
    62: Xid("on-die micro-controller halted", "reset_gpu", "gpu", "hw", "rma if repeated"),
    63: Xid("memory row remapped (or page retired); takes effect at next reset", "ignore", "gpu", "hw_memory", "reset_gpu at the next drain"),
    64: Xid("row remap or page retirement failed", "reset_gpu", "gpu", "hw_memory", "rma if it recurs after reset"),
    66: Xid("driver touched a register it may not", "ignore", "gpu", "driver"),
    67: Xid("firmware rejected a driver access", "ignore", "gpu", "driver"),
    68: Xid("video decoder fault", "restart_app", "process", "app"),
    69: Xid("engine class error from a bad method", "restart_app", "process", "app"),
    70: Xid("copy engine 3 fault", "restart_app", "process", "app"),
    71: Xid("copy engine 4 fault", "restart_app", "process", "app"),
    72: Xid("copy engine 5 fault", "restart_app", "process", "app"),
    74: Xid(
        "NVLink error on Hopper and older", "reset_gpu", "nvlink_domain", "hw_fabric",
        "reboot_node, then rma of GPU, baseboard or switch if it stays",
    ),
    75: Xid("copy engine 6 fault", "restart_app", "process", "app"),
    76: Xid("copy engine 7 fault", "restart_app", "process", "app"),
    77: Xid("copy engine 8 fault", "restart_app", "process", "app"),
    78: Xid("vGPU could not start", "reboot_node", "node", "config", "fix host/guest software versions first"),
    79: Xid("GPU dropped off PCIe and cannot be reached", "reboot_node", "node", "hw", "rma if it happens again"),
    80: Xid("data sent to the GPU failed its checksum", "restart_app", "process", "app"),
    82: Xid("JPEG engine 0 fault", "restart_app", "process", "app"),
    83: Xid("video decoder 1 fault", "restart_app", "process", "app"),
    84: Xid("video decoder 2 fault", "restart_app", "process", "app"),
    85: Xid("copy engine 9 fault", "restart_app", "process", "app"),
    86: Xid("optical flow engine fault", "restart_app", "process", "app"),
    88: Xid("video decoder 3 fault", "restart_app", "process", "app"),
    89: Xid("video decoder 4 fault", "restart_app", "process", "app"),
    92: Xid("too many corrected single-bit errors", "ignore", "gpu", "hw_memory", "watch; rma if the rate keeps rising"),
    93: Xid("InfoROM write budget used up", "ignore", "gpu", "hw"),
    94: Xid("uncorrectable memory error contained to one process", "restart_app", "process", "hw_memory", "reset_gpu at the next drain"),
    95: Xid("uncorrectable memory error that may have touched others", "reset_gpu", "gpu", "hw_memory", "rma if repeated"),
    96: Xid("video decoder 5 fault", "restart_app", "process", "app"),
    97: Xid("video decoder 6 fault", "restart_app", "process", "app"),
    98: Xid("video decoder 7 fault", "restart_app", "process", "app"),
    99: Xid("JPEG engine 1 fault", "restart_app", "process", "app"),
    100: Xid("JPEG engine 2 fault", "restart_app", "process", "app"),
    101: Xid("JPEG engine 3 fault", "restart_app", "process", "app"),
    102: Xid("JPEG engine 4 fault", "restart_app", "process", "app"),
    103: Xid("JPEG engine 5 fault", "restart_app", "process", "app"),
    104: Xid("JPEG engine 6 fault", "restart_app", "process", "app"),
    105: Xid("JPEG engine 7 fault", "restart_app", "process", "app"),
    106: Xid("out-of-band test message", "ignore", "gpu", "info"),
    107: Xid("silent out-of-band test message", "ignore", "gpu", "info"),
    109: Xid(
        "context switch did not finish in time", "reset_gpu", "gpu", "driver_or_app", "restart_app may suffice when a single job causes it",
    ),
    110: Xid("security engine fault", "reset_gpu", "gpu", "driver"),
    119: Xid(
        "GPU system processor did not answer a driver call in time", "reset_gpu", "gpu", "hw_or_firmware", "reboot_node, then rma if repeated",
    ),
    120: Xid("GPU system processor reported an internal error", "reset_gpu", "gpu", "hw_or_firmware", "reboot_node, then rma if repeated"),
    121: Xid("chip-to-chip (Grace link) corrected error", "ignore", "gpu", "hw_fabric", "reset_gpu at the next drain"),
    126: Xid("copy engine 10 fault", "restart_app", "process", "app"),
    127: Xid("copy engine 11 fault", "restart_app", "process", "app"),
    128: Xid("copy engine 12 fault", "restart_app", "process", "app"),
    129: Xid("copy engine 13 fault", "restart_app", "process", "app"),
    130: Xid("copy engine 14 fault", "restart_app", "process", "app"),
    131: Xid("copy engine 15 fault", "restart_app", "process", "app"),
    132: Xid("copy engine 16 fault", "restart_app", "process", "app"),
    133: Xid("copy engine 17 fault", "restart_app", "process", "app"),
    134: Xid("copy engine 18 fault", "restart_app", "process", "app"),
    135: Xid("copy engine 19 fault", "restart_app", "process", "app"),
    136: Xid("link training failed", "reset_gpu", "nvlink_domain", "hw_fabric"),
    137: Xid("peer memory fault seen over NVLink", "ignore", "process", "app", "look at the peer GPU's own Xid"),
    139: Xid("optical flow engine fault", "restart_app", "process", "app"),
    140: Xid("unrecoverable ECC error", "reset_gpu", "gpu", "hw_memory", "rma if repeated"),
    141: Xid("CUDA fast-path error", "ignore", "process", "driver"),
    142: Xid("video encoder 3 fault", "restart_app", "process", "app"),
    143: Xid("GPU failed to initialise", "reset_gpu", "gpu", "hw", "rma if it stays"),
    144: Xid("NVLink 5 SAW unit error", "reset_gpu", "nvlink_domain", "hw_fabric", "per-sub-code flow; peers may be hit too"),
    145: Xid(
        "NVLink 5 RLW unit error", "reset_gpu", "nvlink_domain", "hw_fabric", "many sub-codes only need restart_app; see NVIDIA's sub-table",
    ),
    146: Xid("NVLink 5 TLW unit error", "reset_gpu", "nvlink_domain", "hw_fabric", "per-sub-code flow"),
    147: Xid("NVLink 5 TREX unit error", "reset_gpu", "nvlink_domain", "hw_fabric", "per-sub-code flow"),
    148: Xid("NVLink 5 low-power control error", "reset_gpu", "nvlink_domain", "hw_fabric", "per-sub-code flow"),
    149: Xid(
        "NVLink 5 link-layer error, often link down", "reset_gpu", "nvlink_domain", "hw_fabric",
        "check cable, tray and signal quality; rma of the link part",
    ),
    150: Xid("NVLink 5 MSE unit error", "reset_gpu", "nvlink_domain", "hw_fabric", "per-sub-code flow"),
    151: Xid("key rotation error in confidential mode", "reboot_node", "node", "driver", "restart of the VM suffices under virtualisation"),
    152: Xid("DLA memory-management error", "ignore", "gpu", "driver"),
    153: Xid("DLA timeout", "ignore", "gpu", "driver"),
    154: Xid(
        "driver announces which recovery the GPU now needs", "ignore", "gpu", "info",
        "the text names the action (none, GPU reset, node reboot, drain): obey it over this table",
    ),
    155: Xid("software-declared NVLink error", "reset_gpu", "nvlink_domain", "hw_fabric"),
    156: Xid("a hardware resource was retired; active after reset", "reset_gpu", "gpu", "hw", "can wait for a drain"),
    157: Xid("resource retirement failed", "ignore", "gpu", "hw", "rma"),
    158: Xid("fatal GPU timeout", "reset_gpu", "gpu", "hw", "rma if repeated"),
    159: Xid("coherent-interface non-data error", "restart_app", "process", "hw_fabric", "report if seen alone"),
    160: Xid("channel retired", "ignore", "gpu", "hw_memory"),
    161: Xid("channel retirement failed", "ignore", "gpu", "hw_memory", "rma if repeated"),
    162: Xid("power-smoothing circuit re-engaged", "ignore", "gpu", "info"),
    163: Xid("power-smoothing circuit disengaged", "ignore", "gpu", "info"),
    164: Xid("power-smoothing circuit near end of life", "ignore", "gpu", "hw_power", "plan rma"),
    165: Xid("power-smoothing circuit worn out", "ignore", "gpu", "hw_power", "plan rma"),
    166: Xid("encrypted traffic seen before the link was set up for it", "reset_gpu", "nvlink_domain", "driver"),
    167: Xid("fatal PCIe timeout", "reboot_node", "node", "hw", "rma if repeated"),
    168: Xid("GPU now has less usable memory", "reset_gpu", "gpu", "hw_memory", "rma; never schedule jobs sized for full memory"),
    169: Xid("security micro-controller halted", "reset_gpu", "gpu", "hw"),
    170: Xid("confidential-mode link interrupt", "reset_gpu", "nvlink_domain", "driver"),
    171: Xid("detail record for Xid 48: the fault was in DRAM", "reset_gpu", "gpu", "hw_memory", "as Xid 48"),
    172: Xid("detail record for Xid 48: the fault was in SRAM", "reset_gpu", "gpu", "hw_memory", "as Xid 48, rma sooner"),
}


def xid(number: int) -> Xid:
    """Return the row of a number."""
    return XIDS.get(number, UNKNOWN)
