"""S1, S2: the log is one chain of entries, written by one leader after the other. Needs entries alone; that only the owner of the election key
wrote is seen by the store revisions of the entries, where these are known: an epoch is the revision at which its election key was created."""

from __future__ import annotations

from gangline.chaos.checker.evidence import Entry
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev


class Order:
    """Follows the entries; `entry` is called for each, readable or not."""

    def __init__(self, report: Report, index: int, digest: bytes, epoch: int) -> None:
        """The entry before the first has this index, digest and epoch."""
        self._report = report
        self._index = index
        self._digest: bytes | None = digest
        self._epoch = epoch
        self._epoch_at = Cite(index)
        self._revision = 0
        self._at_ms = 0

    def entry(self, entry: Entry) -> bool:
        """Return whether the entry stands where it should, so that it can be folded."""
        report, index = self._report, entry.index
        report.checked["S1"] += 1
        if index <= self._index:
            report.add("S1", f"entry {index} is there again, after entry {self._index}", Cite(self._index), _cite(entry))
            return False
        if index > self._index + 1:
            missing = f"{self._index + 1}" if index == self._index + 2 else f"{self._index + 1} to {index - 1}"
            report.add("S1", f"entries {missing} are missing", Cite(self._index), _cite(entry))
            self._digest = None
        self._index = index
        frame = entry.frame
        if frame is None:
            self._digest = None
            return True
        if self._digest is not None and frame.previous != self._digest:
            report.add("S1", f"entry {index} does not continue entry {index - 1}: the chain of digests is broken", Cite(index - 1), _cite(entry))
        self._digest = frame.digest
        self._epochs(entry)
        return True

    def _epochs(self, entry: Entry) -> None:
        frame, report, here = entry.frame, self._report, _cite(entry)
        assert frame is not None
        report.checked["S2"] += 1
        begins = bool(frame.events) and isinstance(frame.events[0], ev.LeaderElected)
        if frame.epoch < self._epoch:
            report.add("S2", f"epoch {frame.epoch} of entry {entry.index} is older than epoch {self._epoch}", self._epoch_at, here)
        elif frame.epoch > self._epoch and not begins:
            report.add("S2", f"epoch {frame.epoch} begins at entry {entry.index} without an election", self._epoch_at, here)
        elif any(isinstance(e, ev.LeaderElected) for e in frame.events[(frame.epoch > self._epoch) :]):
            report.add("S2", f"epoch {frame.epoch} has two elections", self._epoch_at, here)
        if entry.revision:
            self._revisions(entry, here)
        else:
            report.gap("S2", "who owned the election key, no store revisions of these entries")
        report.checked["S14"] += 1
        if frame.at_ms < self._at_ms:
            report.add("S14", f"log time goes back at entry {entry.index}, from {self._at_ms} to {frame.at_ms}", here)
        self._at_ms = max(self._at_ms, frame.at_ms)
        if frame.epoch > self._epoch:
            self._epoch, self._epoch_at = frame.epoch, here

    def _revisions(self, entry: Entry, here: Cite) -> None:
        frame, report, revision = entry.frame, self._report, entry.revision
        assert frame is not None
        if revision <= frame.epoch:
            report.add("S2", f"entry {entry.index} was written at revision {revision}, before its epoch {frame.epoch} was elected", here)
        if revision <= self._revision:
            report.add("S2", f"entry {entry.index} was written at revision {revision}, after one of revision {self._revision}", here)
        # The key of the next leader was created when that of this one was gone: what is of an older epoch was written before.
        if frame.epoch > self._epoch and self._revision > frame.epoch:
            late = f"was written at revision {self._revision}, when epoch {frame.epoch} led already"
            report.add("S2", f"entry {entry.index - 1} of epoch {self._epoch} {late}", Cite(entry.index - 1), here)
        self._revision = max(self._revision, revision)


def _cite(entry: Entry) -> Cite:
    frame = entry.frame
    return Cite(entry.index, frame.at_ms, frame.events[0]) if frame is not None and frame.events else Cite(entry.index)
