"""Writes that only the leader can make: every one of them compares the create revision of the election key with the writer's token.

The create revision of a key that was deleted never comes back. So once a fenced write was refused, no earlier copy of it that may still be
on its way can be applied any more either: a refusal settles all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import tenacity

from gangline.core.store.api import Ambiguous, Compare, Definite, Get, Op, Store, StoreError, TxnResult
from gangline.core.store.keys import Keys

#: between two tries of one write, doubling
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0

#: time for settling one write, all tries together: well below the time after which a leader stops deciding
SETTLE_S = 8.0


class Fenced(StoreError):
    """A leader's write was refused because the writer leads no longer, or because another's frame is in its place. Step down.

    `held` is the writer's token, `seen` the create revision of the election key when the write was refused (0: nobody leads).
    """

    def __init__(self, message: str, held: int, seen: int) -> None:
        super().__init__(message)
        self.held = held
        self.seen = seen


class Unsettled(Ambiguous):
    """Whether a leader's write was applied could not be learnt in time. Step down, and fold the log again before anything else."""


def guard(keys: Keys, token: int) -> Compare:
    """Return the comparison that fences a transaction by `token`."""
    return Compare(keys.leader, "create_revision", "==", token)


async def write_fenced(
    store: Store, keys: Keys, token: int, ops: Sequence[Op], what: str, *, settle_s: float = SETTLE_S,
    doubted: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Run `ops`, which must mean the same when they run twice, in a fenced transaction and return its revision.

    `what` names the write in messages. `doubted` is called when the answer of a try was lost: within the same term, that try may still be
    carried out after writes that come later than this one.
    Raises Fenced (nothing was changed, or an earlier copy of the same was), Unsettled, TooLarge, OutOfSpace (perhaps applied; the cluster
    refuses writes).
    """
    result = await send_until_answered(store, [guard(keys, token)], ops, [Get(keys.leader)], what, settle_s, doubted)
    if not result.succeeded:
        leader = result.gets[0]
        raise fenced(what, token, leader.create_revision if leader else 0)
    return result.revision


def fenced(what: str, held: int, seen: int) -> Fenced:
    """Return the error for a write that a newer election refused."""
    now = f"leader key now has create revision {seen}" if seen else "the leader key is gone"
    return Fenced(f"{what} refused: {now}, ours is {held}; stepping down", held, seen)


async def send_until_answered(
    store: Store, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op], what: str, settle_s: float,
    doubted: Callable[[], None] = lambda: None,
) -> TxnResult:  # fmt: skip
    """Send one transaction again and again, unchanged, until it is answered, at most for `settle_s` of the event loop's time.

    Raises Unsettled, OutOfSpace when that was the last answer, and the other StoreErrors when no earlier try could have been applied.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settle_s
    last: Ambiguous | None = None

    async def send() -> TxnResult:
        nonlocal last
        try:
            return await store.txn(compares, success, failure)
        except Ambiguous as e:
            if last is None:
                doubted()
            last = e
            raise

    # The loop's clock, not tenacity's own: in a simulation the two differ.
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(Ambiguous),
        wait=tenacity.wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
        stop=lambda state: loop.time() + state.upcoming_sleep >= deadline,
        sleep=asyncio.sleep,
        reraise=True,
    )
    try:
        async with asyncio.timeout_at(deadline):
            try:
                return await send()  # nearly always the only one, and retrying costs more than asking
            except Ambiguous:
                if loop.time() + FIRST_PAUSE_S >= deadline:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S)
            return await retrying(send)
    except TimeoutError:
        raise _unsettled(what, settle_s, last) from last
    except Ambiguous as e:
        if type(e) is not Ambiguous:
            raise  # OutOfSpace says more than "unsettled"
        raise _unsettled(what, settle_s, e) from e
    except Definite as e:
        if last is None:
            raise
        raise _unsettled(what, settle_s, e) from e


def _unsettled(what: str, settle_s: float, last: Exception | None) -> Unsettled:
    reason = last or "no answer"
    return Unsettled(f"{what}: not known to be written or not after {settle_s:.0f} s ({reason}); stepping down, the log tells after a new fold")
