"""What the checker looks at: entries of the log, and what agents, nodes and clients say of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from gangline.core.model.codec import BadFrame, Frame, decode_frame
from gangline.core.model.gpushares import GpuShare


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One frame of the log as it was found under its index."""

    index: int
    #: None when its bytes cannot be read; then `problem` says why
    frame: Frame | None
    problem: str = ""
    #: revision of the store that wrote it, 0 where nobody knows it any more (archives)
    revision: int = 0


def entries_of(raw: Iterable[tuple[int, bytes] | tuple[int, bytes, int]]) -> Iterator[Entry]:
    """Yield the entries of raw frames, given as (index, bytes) or (index, bytes, store revision). Never raises for what the bytes are."""
    for index, data, *revision in raw:
        try:
            yield Entry(index, decode_frame(data, index, None), "", *revision)
        except BadFrame as e:
            yield Entry(index, None, e.what, *revision)


class RankLife(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One life of one rank as its node has written it down.

    `started_s` and `ended_s` are seconds of one clock of the node that never jumps; lives with the same `clock` can be compared to the moment.
    `started_ms` and `ended_ms` are the node's wall clock. A life has begun at `started_s` at the earliest, and of one that is `ended` nothing
    was left at `ended_s`.
    """

    node: str
    job: str
    rank: int
    generation: int
    gpus: tuple[int, ...] = ()
    share: GpuShare | None = None
    clock: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0
    started_ms: int = 0
    ended_ms: int = 0
    #: seen: when its end is known. found: it was gone when somebody looked, and may have been for long. "": nobody has seen it end
    ended: Literal["", "seen", "found"] = ""
    #: it is killed by the dead man's switch when its node loses its lease (on_disconnect: stop)
    fenced: bool = True
    code: int = 0
    cause: str = ""
    #: the log entry that the agent acted on when it started it, and the epoch of the leader who wrote that; 0: not known
    index: int = 0
    epoch: int = 0

    @property
    def name(self) -> str:
        """What to call it."""
        return f"rank {self.rank} of {self.job}, generation {self.generation}, on {self.node}"


class LiveRank(NamedTuple):
    """A rank of which something runs."""

    job: str
    rank: int
    generation: int


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """What runs on a node, by looking at the node itself."""

    node: str
    #: wall clock at the look
    at_ms: int
    live: tuple[LiveRank, ...] = ()


class Operation(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request of a client and its answer.

    submit: `key` is its idempotency key. read: the client asked for `job` and passed `after`, the last index that it knew; the answer was of
    index `index`, and had the job or not.
    """

    op: Literal["submit", "read"]
    outcome: Literal["ok", "fail", "unknown"]
    key: str = ""
    job: str = ""
    index: int = 0
    after: int = 0
    found: bool = True
