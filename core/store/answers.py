"""Which answers of the store a process may believe, and how long it asks again: the rules that every kind of store shares."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from gangline.core.store.api import Ambiguous, WentBack

T = TypeVar("T")

#: between two tries of a read, doubling
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5

#: A try gets this part of the time, so that one silent member does not use up all of it.
_PART_OF_ONE_TRY = 0.4


class OtherCluster(WentBack):
    """The answer is of another cluster, which asking again will not change."""


class HighWater:
    """The newest state of the store that this process has seen.

    A linearizable answer can never be older than what was seen before its request was sent. One that is comes from another
    cluster, from one restored from a backup, or from a member with a stale read; to act on it would undo what others were told.
    """

    def __init__(self) -> None:
        self.cluster_id = 0
        self.revision = 0
        self.raft_term = 0

    def mark(self) -> tuple[int, int]:
        """Return what the answer to a request sent now must not fall behind, for `check`."""
        return self.revision, self.raft_term

    def check(self, mark: tuple[int, int], cluster_id: int, revision: int, raft_term: int) -> None:
        """Take note of a linearizable answer. Raises WentBack when it is older than `mark` or of another cluster."""
        self.check_cluster(cluster_id)
        if revision < mark[0] or raft_term < mark[1]:
            raise WentBack(
                f"cluster {cluster_id:x} answered at revision {revision}, raft term {raft_term}, but revision {mark[0]}, raft "
                f"term {mark[1]} had been seen before it was asked: it was restored from a backup, or a member answers with old "
                "state; restart this process only when it is certain that the older state is the one to keep"
            )
        self.saw(revision, raft_term)

    def saw(self, revision: int, raft_term: int = 0) -> None:
        """Take note of a committed revision, learnt in any way."""
        self.revision = max(self.revision, revision)
        self.raft_term = max(self.raft_term, raft_term)

    def check_cluster(self, cluster_id: int) -> None:
        """Raise OtherCluster when `cluster_id` is not the one of all answers so far."""
        if self.cluster_id == 0:
            self.cluster_id = cluster_id
        elif cluster_id != self.cluster_id:
            raise OtherCluster(
                f"an endpoint answers for cluster {cluster_id:x}, but this process works with cluster {self.cluster_id:x}: "
                "check the endpoints and what their names resolve to"
            )


async def repeat_read(read: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
    """Return what `read(seconds for this try)` returns; after an Ambiguous or older answer try again, until `timeout_s` is over.

    Raises what the last try raised. One stale answer (etcd-io/etcd#20418) is thus not the end, a restored cluster is.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    one_try_s = timeout_s * _PART_OF_ONE_TRY
    try:
        return await read(one_try_s)
    except (Ambiguous, WentBack) as error:
        if not _worth_repeating(error):
            raise

    async def again() -> T:
        return await read(max(0.001, min(one_try_s, deadline - loop.time())))

    # The loop's clock, not tenacity's own: in a simulation the two differ.
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(_worth_repeating),
        wait=tenacity.wait_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
        stop=lambda state: loop.time() + state.upcoming_sleep >= deadline,
        sleep=asyncio.sleep,
        reraise=True,
    )
    await asyncio.sleep(_FIRST_PAUSE_S)
    return await retrying(again)


def _worth_repeating(error: BaseException) -> bool:
    return isinstance(error, Ambiguous | WentBack) and not isinstance(error, OtherCluster)
