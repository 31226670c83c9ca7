"""What the process that asks the driver (`gpuprocess.py`) and the agent say to each other about GPUs. No I/O.

Messages are msgpack with their length before them: requests one way; answers, and what happens by itself, the other way. Figures that a GPU does
not have are None.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: bytes of the length of a message; a longer one than this is no message of ours
HEAD_BYTES = 4
MESSAGE_BYTES_MAX = 1 << 24


class GpuFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of a GPU stays as it is while the driver is loaded."""

    uuid: str
    #: as the driver spells it, "NVIDIA H100 80GB HBM3"
    name: str
    memory_mib: int
    #: of /dev/nvidiaN, -1: not known
    minor: int = -1
    pci: str = ""
    numa: int = -1
    #: MIG can partition it; it is in MIG mode now
    mig: bool = False
    mig_on: bool = False
    #: where it hangs: the positions of the groups of GPUs that it is in, see documents.Gpu.links
    links: tuple[int, ...] = ()
    #: NVLinks that are up
    nvlinks: int = 0
    #: one process at a time may use it, or none: a GPU in such a mode cannot be shared
    compute_mode: Literal["default", "exclusive", "prohibited"] = "default"


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The GPUs that the driver names, in its order, which may be another one after a reboot."""

    gpus: tuple[GpuFacts, ...]
    #: version of the driver
    driver: str = ""
    #: GPUs that it counts and cannot reach: it does not say which
    unreachable: int = 0


class GpuSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU at one moment."""

    uuid: str
    #: the driver cannot reach it any more; then there are no figures
    lost: bool = False
    #: percent of the last sampling period in which something ran, and in which memory was read or written
    busy: int | None = None
    memory_busy: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    #: since the driver was loaded
    energy_mj: int | None = None
    celsius: int | None = None
    memory_celsius: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    #: NVML's clocks event reasons, a set of bits
    reasons: int = 0
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    #: rows remapped for corrected errors, for uncorrected ones, one is pending, one has failed
    remapped: tuple[int, int, int, int] | None = None
    pcie_replays: int | None = None
    nvlinks: int = 0
    nvlink_errors: int | None = None
    #: NVML's recovery action
    needs: str = ""
    #: (pid, bytes of memory) of what computes on it
    processes: tuple[tuple[int, int], ...] = ()


class Samples(msgspec.Struct, frozen=True):
    """All GPUs at one moment."""

    gpus: tuple[GpuSample, ...]
    #: GPUs that the driver counts now
    count: int
    #: seconds since events were waited for last: more than a few, and that call hangs
    events_age_s: float
    #: processor time that reading took
    cpu_s: float


class Instance(msgspec.Struct, frozen=True):
    """One MIG instance as it is: its profile, the memory slices [start, start + size), and the UUID by which programs find it,
    "" for one without compute instance.
    """

    profile: str
    start: int
    size: int
    uuid: str
    #: the driver's number of it on its GPU
    gi: int = -1


class Instances(msgspec.Struct, frozen=True):
    """The instances of one GPU, by start."""

    there: tuple[Instance, ...]


class ReadFacts(msgspec.Struct, frozen=True, tag="facts"):
    """Answered by Facts."""


class ReadSamples(msgspec.Struct, frozen=True, tag="samples"):
    """Answered by Samples."""


class Partition(msgspec.Struct, frozen=True, tag="partition"):
    """Answered by Instances: unmake those at these starts, then make those of (profile, start); with neither, only look.

    `mig` says whether the GPU is to be in MIG mode: None leaves it as it is.
    """

    uuid: str
    unmake: tuple[int, ...] = ()
    make: tuple[tuple[str, int], ...] = ()
    mig: bool | None = None


Question = ReadFacts | ReadSamples | Partition


class Request(msgspec.Struct, frozen=True):
    """A question with its number."""

    id: int
    what: Question


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To the request of this number; `error` says why it could not be done, and then there is no result."""

    id: int
    error: str = ""
    facts: Facts | None = None
    samples: Samples | None = None
    instances: Instances | None = None


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """An event of the driver about one GPU: an Xid by its number, or "ecc" (an uncorrectable one), or "lost"; and when, by the wall clock."""

    uuid: str
    kind: Literal["xid", "ecc", "lost"]
    xid: int = 0
    at_ms: int = 0


class Hopeless(msgspec.Struct, frozen=True, tag="hopeless"):
    """There is no driver to ask: the process ends, and it is no use to start it again soon."""

    reason: str


Message = Answer | Happened | Hopeless

encode = msgspec.msgpack.encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def framed(message: Message | Request) -> bytes:
    """Return a message with its length before it."""
    body = encode(message)
    return len(body).to_bytes(HEAD_BYTES, "big") + body
