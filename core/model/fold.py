"""`apply`: one event changes the state, or is refused because it cannot happen.

There is one handler for each event, named after it:

    foldjobs.py      submission, and every decision about a gang
    foldlife.py      what a job waits for before it may run: arrays, dependencies, hold, begin
    foldreports.py   what agents report; foldhealth.py: what that says of the health of devices and nodes
    foldcluster.py   who leads; what operators declare and do

and steps that they share: foldholdings.py (what gangs hold on nodes), foldlosses.py (failures, lost work, room made), foldsteps.py.

A handler first checks that the move is legal and raises IllegalTransition, and only then changes anything, so a refused event leaves the state
as it was. Handlers decide nothing: what should happen next is the policy's business.
"""

from __future__ import annotations

from gangline.core.model import events as ev
from gangline.core.model import foldcluster, foldjobs, foldlife, foldreports
from gangline.core.model.accounting import settle
from gangline.core.model.codec import Frame
from gangline.core.model.foldsteps import Handlers
from gangline.core.model.foldsteps import IllegalTransition as IllegalTransition
from gangline.core.model.state import State

#: one handler for each event
_HANDLERS: Handlers = {
    **foldcluster.HANDLERS,
    **foldjobs.HANDLERS,
    **foldreports.HANDLERS,
    **foldlife.HANDLERS,
}


def apply_frame(state: State, frame: Frame) -> None:
    """Fold a whole frame. Raises IllegalTransition."""
    for event in frame.events:
        apply(state, event, frame.index, frame.epoch, frame.at_ms)
    seal(state, frame.index, frame.digest)


def apply(state: State, event: ev.LogEvent, index: int, epoch: int, at_ms: int) -> None:
    """Fold one event of entry `index`. Raises IllegalTransition and then has changed nothing."""
    if epoch < state.epoch:
        raise IllegalTransition(event, f"epoch {epoch} at index {index} is older than epoch {state.epoch}")
    if epoch > state.epoch and type(event) is not ev.LeaderElected:
        raise IllegalTransition(event, f"epoch {epoch} at index {index} begins without leader_elected")
    if at_ms < state.at_ms:
        raise IllegalTransition(event, f"time {at_ms} at index {index} is before {state.at_ms}")
    _HANDLERS[type(event)](state, event, index, epoch, at_ms)
    if state.scratch.held:
        settle(state, at_ms)
    state.at_ms = at_ms


def seal(state: State, index: int, digest: bytes) -> None:
    """All events of entry `index` are folded; the next frame continues from `digest`."""
    state.index = index
    state.digest = digest
