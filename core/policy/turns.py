"""The jobs of one leaf queue in their order, and, where its users take turns, the users in theirs.

Without turns: by job key (higher priority, standing, older, name). With turns (`user_fairness`), among jobs of one priority the user comes first
who has come least far, and of that user's jobs the first by job key:

    share(user) = max over resources of (held in this queue / what the cluster has + usage)

Usage is what the user has held on average in the past, as a part of what the cluster had (core/model/usage.py); it is zero where the past does
not count. Priority stays before the turns, so that no job is placed which a more important one of its queue would at once be entitled to push
out again. The place of a user is found anew when a job of that user was taken; the others keep theirs in the heap, so a turn costs the logarithm
of how many users wait.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from gangline.core.policy.queues import Queue
from gangline.core.policy.requests import ZERO, Vector, add
from gangline.core.policy.world import World

E = TypeVar("E")
#: place in a leaf, the smallest first; its first entry is that of the priority
Key = tuple[object, ...]


class Line(Generic[E]):
    """Entries of a leaf without turns."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, E]] = []

    def push(self, key: Key, number: int, _user: str, entry: E) -> None:
        """Add an entry; `number` decides between equal keys, and is never given twice."""
        heappush(self._heap, (key, number, entry))

    def first(self) -> E | None:
        """Return the first entry, None if there is none."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> E:
        """Take out the first entry, which must be there."""
        return heappop(self._heap)[2]

    def picked(self, _user: str, _vector: Vector) -> None:
        """A victim was picked: no matter here."""


class Turns(Line[E]):
    """Entries of a leaf whose users take turns. `reverse`: the user who has come furthest is first."""

    def __init__(self, world: World, queue: Queue, reverse: bool) -> None:
        super().__init__()
        self._world, self._queue, self._reverse = world, queue, reverse
        self._lines: dict[str, list[tuple[Key, int, E]]] = {}
        #: (priority, share, key and number of the first entry, user), of which only those in `_valid` count
        self._users: list[tuple[object, float, Key, int, int, str]] = []
        self._valid: dict[str, int] = {}
        self._stale: dict[str, None] = {}
        self._picked: dict[str, Vector] = {}
        self._count = 0

    def push(self, key: Key, number: int, user: str, entry: E) -> None:
        """Add an entry of a user."""
        heappush(self._lines.setdefault(user, []), (key, number, entry))
        self._stale[user] = None

    def first(self) -> E | None:
        """Return the first entry of the user whose turn it is."""
        user = self._turn()
        return None if user is None else self._lines[user][0][2]

    def pop(self) -> E:
        """Take out the first entry; its user's place is found anew when the next is asked for."""
        user = self._turn()
        assert user is not None, f"nothing waits in {self._queue.name}"
        self._stale[user] = None
        return heappop(self._lines[user])[2]

    def picked(self, user: str, vector: Vector) -> None:
        """A victim of this user was picked: the user has so much less."""
        self._picked[user] = add(self._picked.get(user, ZERO), vector)
        self._stale[user] = None

    def _turn(self) -> str | None:
        for user in self._stale:
            self._place(user)
        self._stale.clear()
        while self._users:
            number, user = self._users[0][4:]
            if self._valid.get(user) == number:
                return user
            heappop(self._users)
        return None

    def _place(self, user: str) -> None:
        self._valid.pop(user, None)
        line = self._lines.get(user)
        if line:
            key, number, _ = line[0]
            share = share_of_user(self._world, self._queue, user, self._picked.get(user, ZERO))
            self._count += 1
            self._valid[user] = self._count
            heappush(self._users, (key[0], -share if self._reverse else share, key, number, self._count, user))


def share_of_user(world: World, queue: Queue, user: str, less: Vector = ZERO) -> float:
    """Return how far a user has come in a leaf, as a part of the cluster."""
    held, usage, largest = queue.users.get(user, ZERO), queue.user_usage.get(user), 0.0
    for r in range(3):
        total = world.total[r]
        share = (held[r] - less[r]) / total if total else 0.0
        largest = max(largest, share + usage[r] if usage else share)
    return largest
