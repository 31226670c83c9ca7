"""What queues and users have used, as the log says it: resource-seconds of which those of a half-life ago count half.

An *account* has what is held now and what was used, ∫ held(s) · 2^(-(t - s)/h) ds up to a time t, h being the half-life. While `held` stays the
same, the integral has a closed form, so an account is only touched when something is placed or has gone, and is brought up to date when it is
read. Nothing here is linear in time, in jobs or in nodes:

    used(t + d) = used(t) · (1 - q) + held · h / ln 2 · q        q = 1 - 2^(-d/h)

For each half-life that some queue has, one account, its *clock*, does the same for all that the nodes had. The usage of a queue is its part of
that, from 0 to 1: light use of an idle cluster stays light, and a cluster that is young counts as one that is old (KAI's normalisation,
docs/time-based-fairshare of KAI-Scheduler; the half-life itself is Slurm's PriorityDecayHalfLife).

These are floats, and still the same on every machine: Python evaluates +, -, * and / each by itself, in IEEE 754 double precision, which fixes
every bit of the result, and `ldexp` by an integer only changes the exponent. `exp` and `**` would not do: their last bit is the C library's
choice. So schedulers that fold the same log have the same state digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ldexp
from typing import Final

import msgspec

from gangline.core.model.queues import QueueTree

#: thousandths of GPUs and of CPUs, MiB of memory
Held = tuple[int, int, int]
#: the same, times seconds
Used = tuple[float, float, float]
#: parts of what the nodes had, 0 to 1, by resource in that order
Parts = tuple[float, float, float]

NOTHING: Final[Held] = (0, 0, 0)
_UNUSED: Final[Used] = (0.0, 0.0, 0.0)
LN2: Final = 0.6931471805599453
#: a user who holds nothing is forgotten after so many half-lives: a billionth of what was used is left
_FORGOTTEN_AFTER = 30


class Account(msgspec.Struct, omit_defaults=True, gc=False):
    """What somebody holds, and what was used up to `at_ms` (log time)."""

    held: Held = NOTHING
    used: Used = _UNUSED
    at_ms: int = 0


class Usage(msgspec.Struct, omit_defaults=True, gc=False):
    """All accounts. Empty while no queue has a half-life."""

    #: by half-life in ms: what the nodes that are up have, and had
    clocks: dict[int, Account] = {}
    #: by path, parents as well; only queues with a half-life
    queues: dict[str, Account] = {}
    #: by leaf whose users take turns, and user
    users: dict[str, dict[str, Account]] = {}


def faded(elapsed_ms: int, half_life_ms: int) -> float:
    """Return 1 - 2^(-elapsed / half-life), exact to some units in the last place for short times too.

    The whole half-lives shift the exponent. For the fraction x: 1 - e^(-y) by its Taylor series, y = x · ln 2 / 8, which is then squared three
    times; as q of 1 - q that is q · (2 - q), where nothing cancels.
    """
    whole, rest = divmod(elapsed_ms, half_life_ms)
    y = rest / half_life_ms * LN2 / 8.0
    term, q = y, 0.0
    for n in range(2, 12):
        q += term
        term = -term * y / n
    for _ in range(3):
        q = q * (2.0 - q)
    return 1.0 - ldexp(1.0 - q, -whole) if whole else q


def used_by(account: Account, half_life_ms: int, now_ms: int) -> Used:
    """Return what was used up to `now_ms`, log time, which is not before the account's."""
    elapsed = now_ms - account.at_ms
    if elapsed <= 0:
        return account.used
    q = faded(elapsed, half_life_ms)
    left, gain = 1.0 - q, half_life_ms / 1000.0 / LN2 * q
    (a, b, c), (x, y, z) = account.used, account.held
    return (a * left + x * gain, b * left + y * gain, c * left + z * gain)


def _change(account: Account, half_life_ms: int, by: Held, now_ms: int) -> None:
    account.used = used_by(account, half_life_ms, now_ms)
    account.at_ms = max(account.at_ms, now_ms)
    a, b = account.held, by
    account.held = (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def parts_of(account: Account | None, clock: Account | None, half_life_ms: int, now_ms: int) -> Parts:
    """Return the usage of an account: its part of what the nodes had."""
    if account is None or clock is None:
        return (0.0, 0.0, 0.0)
    (a, b, c), (x, y, z) = used_by(account, half_life_ms, now_ms), used_by(clock, half_life_ms, now_ms)
    return (a / x if x else 0.0, b / y if y else 0.0, c / z if z else 0.0)


def usage_of(usage: Usage, tree: QueueTree, path: str, now_ms: int) -> Parts | None:
    """Return the usage of a queue with all below it; None where the past does not count."""
    half_life_ms = tree.half_lives_ms.get(path)
    if not half_life_ms:
        return None
    return parts_of(usage.queues.get(path), usage.clocks.get(half_life_ms), half_life_ms, now_ms)


def usage_of_users(usage: Usage, tree: QueueTree, path: str, now_ms: int) -> dict[str, Parts]:
    """Return the usage of the users of a leaf; empty where the past does not count, or users do not."""
    half_life_ms = tree.half_lives_ms.get(path)
    if not half_life_ms:
        return {}
    clock = usage.clocks.get(half_life_ms)
    return {user: parts_of(account, clock, half_life_ms, now_ms) for user, account in usage.users.get(path, {}).items()}


# ---------------------------------------------------------------- what changes it


def take_in(usage: Usage, tree: QueueTree, queue: str, user: str, by: Held, now_ms: int) -> None:
    """Somebody holds so much more, or less, from now on: it counts for the queue, those above, and the user where users take turns."""
    if by == NOTHING or queue not in tree.specs:
        return
    for spec in tree.lineage(queue):
        half_life_ms = tree.half_lives_ms.get(spec.path)
        if half_life_ms:
            _change(usage.queues.setdefault(spec.path, Account(at_ms=now_ms)), half_life_ms, by, now_ms)
    half_life_ms = tree.half_lives_ms.get(queue)
    if half_life_ms and tree.specs[queue].user_fairness:
        users = usage.users.setdefault(queue, {})
        if user not in users:
            _forget(users, now_ms - _FORGOTTEN_AFTER * half_life_ms)
            users[user] = Account(at_ms=now_ms)
        _change(users[user], half_life_ms, by, now_ms)


def _forget(users: dict[str, Account], before_ms: int) -> None:
    for user in [u for u, account in users.items() if account.held == NOTHING and account.at_ms < before_ms]:
        del users[user]


def change_capacity(usage: Usage, by: Held, now_ms: int) -> None:
    """The nodes that are up have so much more, or less, from now on."""
    if by != NOTHING:
        for half_life_ms, clock in usage.clocks.items():
            _change(clock, half_life_ms, by, now_ms)


def declared(
    old: Usage, before: QueueTree, tree: QueueTree, holders: Iterable[tuple[str, str, Held]], capacity: Held, now_ms: int
) -> Usage:
    """Return the accounts under another declaration. `holders` are (queue, user, what they hold), `capacity` is what the nodes that are up have.

    A queue whose half-life changes keeps its usage, as its part of what the nodes had. One that had none starts with nothing used.
    """
    new = Usage()
    for path, half_life_ms in tree.half_lives_ms.items():
        was = before.half_lives_ms.get(path)
        clock = old.clocks.get(was) if was else None
        if was is None or clock is None or path not in old.queues:
            continue
        if half_life_ms not in new.clocks:
            known = old.clocks.get(half_life_ms)
            scale = half_life_ms / was  # in the long run what is held always counts for h / ln 2
            used = used_by(known, half_life_ms, now_ms) if known is not None else _scaled(used_by(clock, was, now_ms), (scale, scale, scale))
            new.clocks[half_life_ms] = Account(capacity, used, now_ms)
        had = new.clocks[half_life_ms].used
        new.queues[path] = Account(NOTHING, _scaled(had, parts_of(old.queues[path], clock, was, now_ms)), now_ms)
        if tree.specs[path].user_fairness and path in old.users:
            users = {user: parts_of(account, clock, was, now_ms) for user, account in old.users[path].items()}
            new.users[path] = {user: Account(NOTHING, _scaled(had, parts), now_ms) for user, parts in users.items()}
    for half_life_ms in dict.fromkeys(tree.half_lives_ms.values()):
        new.clocks.setdefault(half_life_ms, Account(capacity, _UNUSED, now_ms))
    for queue, user, held in holders:
        take_in(new, tree, queue, user, held, now_ms)
    return new


def _scaled(used: Used, by: Parts) -> Used:
    return (used[0] * by[0], used[1] * by[1], used[2] * by[2])
