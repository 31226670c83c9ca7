"""The checker: does a log, with what agents and clients have written down themselves, keep what a scheduler must keep? docs/chaos.md.

    entries of the log ──▶ examine ──▶ Report: for each of S1 to S16 what was checked on which evidence, and every violation
    agents' records    ──▶    │
    clients' history   ──▶    └── one walk over the entries; each module here has a group of assertions and tables of its own
    snapshots, nodes   ──▶

`walk.py` is where it begins. The assertions keep their own accounts of the events and take nothing from the fold that the schedulers use, except
those that are about the fold itself (folding.py, decisions.py, quiet.py): a mistake of the fold must not hide itself.
"""

from __future__ import annotations

from gangline.chaos.checker.evidence import Entry, NodeView, Operation, RankLife, entries_of
from gangline.chaos.checker.report import Cite, Report, Violation
from gangline.chaos.checker.walk import check, examine

__all__ = ["Cite", "Entry", "NodeView", "Operation", "RankLife", "Report", "Violation", "check", "entries_of", "examine"]
