"""What an agent does about the difference between what should run on its node and what does. Pure: no clock, no I/O, no randomness.

Rules, in the order in which they are applied to each gang:

1.  A gang that is not desired is stopped; when nothing of it is left it is forgotten.
2.  A generation lower than one that was acted on is refused.
3.  A live rank that is not wanted in its very generation is stopped. Nothing newer is prepared until it is gone.
4.  A stop notice is delivered once; a gang that is still there when its grace is over is stopped. No rank starts under a notice.
5.  A rank without progress for too long is killed.
6.  A generation is prepared once, when no other live rank holds its devices, or the parts of them that it gets. Devices that this node does
    not have, that are broken, or of which desired ranks would together get more than there is, fail it.
7.  In phase "run", a prepared gang's ranks are started, each at most once in its generation. What has ended stays ended.

The shell applies what is returned and calls again; with nothing changed, nothing is returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import msgspec

from gangline.core.model.documents import Desired, DesiredGang, DesiredRank
from gangline.core.model.gpufacts import MIG_LAYOUTS
from gangline.core.model.gpushares import GpuShare, GpuUse, uses_of
from gangline.nodeagent.local import Local, LocalGang, LocalRank


class Stop(msgspec.Struct, frozen=True):
    """End these ranks, given as (rank, generation). `gently`: with the job's signal and grace, else by SIGKILL at once."""

    job: str
    ranks: tuple[tuple[int, int], ...]
    cause: str
    message: str
    gently: bool = True


class Notify(msgspec.Struct, frozen=True):
    """Deliver the gang's stop notice: write the event, send the job's signal."""

    gang: DesiredGang


class Prepare(msgspec.Struct, frozen=True):
    """Check and reserve everything for this generation. `continued`: ranks of it run already, so the meeting point stays as it is."""

    gang: DesiredGang
    continued: bool


class FailPrepare(msgspec.Struct, frozen=True):
    """Report that this generation cannot be prepared here."""

    gang: DesiredGang
    message: str


class Start(msgspec.Struct, frozen=True):
    """Start these ranks of a prepared gang."""

    gang: DesiredGang
    ranks: tuple[DesiredRank, ...]


class Forget(msgspec.Struct, frozen=True):
    """Nothing of this gang runs and nobody wants it: drop its records and its port."""

    job: str


class Refuse(msgspec.Struct, frozen=True):
    """The document asks for something older than what was done already; it is not done, and told to people."""

    job: str
    message: str


Action = Stop | Notify | Prepare | FailPrepare | Start | Forget | Refuse


def refusal(desired: Desired, *, node: str, epoch: int, index: int) -> str:
    """Return why a desired document must not be acted on, "" when it may be. `epoch` and `index` are the highest seen."""
    if desired.node != node:
        return f"the document is for node {desired.node!r}, this is {node!r}"
    if desired.epoch < epoch:
        return f"epoch {desired.epoch} is that of a deposed leader, {epoch} was seen already"
    if desired.index < index:
        return f"index {desired.index} is older than {index}, which was seen already"
    return ""


def reconcile(desired: Desired, local: Local, now: float) -> list[Action]:
    """Return what to do next. `now` is a monotonic second on the clock of `progress_at` and `notified_at`."""
    wanted = {gang.job: gang for gang in desired.gangs}
    claims = functools.cache(lambda: _claims(desired, local))  # only a start asks for it
    actions: list[Action] = []
    for job, have in sorted(local.gangs.items()):
        if job not in wanted:
            actions += _undesired(have)
    for gang in desired.gangs:
        have_ = local.gangs.get(gang.job) or LocalGang(gang.job, gang.generation)
        actions += _gang(gang, have_, local, claims, now)
    return actions


def next_look(desired: Desired, local: Local) -> float:
    """Return the monotonic second at which time alone can make `reconcile` return something new; infinity when it cannot."""
    moments = [float("inf")]
    for gang in desired.gangs:
        have = local.gangs.get(gang.job)
        if have is None:
            continue
        if have.notice is not None and any(r.state != "stopping" for r in have.live):
            moments.append(have.notified_at + have.notice.grace_s)
        if have.hang_timeout_s > 0:
            moments += [r.progress_at + have.hang_timeout_s for r in have.live if r.state == "running"]
    return min(moments)


def unwanted(gang: DesiredGang | None, have: LocalGang) -> tuple[LocalRank, ...]:
    """Return the live ranks that must go: of another generation than wanted, or not wanted at all."""
    live = have.live
    if not live or gang is None:
        return live
    keep = {(r.rank, r.generation) for r in gang.ranks}
    return tuple(r for r in live if r.key not in keep)


def _undesired(have: LocalGang) -> Iterator[Action]:
    if not have.live:
        yield Forget(have.job)
    else:
        yield from _stop(have, have.live, "the scheduler does not want it here any more")


def _gang(gang: DesiredGang, have: LocalGang, local: Local, claims: Callable[[], dict[str, str]], now: float) -> Iterator[Action]:
    if gang.generation < have.generation:
        yield Refuse(gang.job, f"generation {gang.generation} is older than {have.generation}, which was acted on already")
        return
    if gang.job not in local.gangs and gang.generation <= local.retired.get(gang.job, -1):
        yield Refuse(gang.job, f"generation {gang.generation} has ended here and was forgotten; only a newer one is started")
        return
    old = unwanted(gang, have)
    yield from _stop(have, old, f"generation {gang.generation} takes its place")
    if gang.generation == have.generation and have.phase != "new":
        yield from _notice(gang, have, now)
    yield from _hangs(have, now)
    if gang.generation > have.generation or have.phase == "new":
        yield from _prepare(gang, have, local, claims, bool(old))
    elif have.phase == "prepared" and gang.phase == "run" and gang.notice is None and not old:
        yield from _start(gang, have, local, claims)


def _stop(have: LocalGang, ranks: tuple[LocalRank, ...], message: str) -> Iterator[Action]:
    keys = tuple(r.key for r in ranks if r.state != "stopping")
    if keys:
        yield Stop(have.job, keys, "stopped", message)


def _notice(gang: DesiredGang, have: LocalGang, now: float) -> Iterator[Action]:
    if gang.notice is not None and gang.notice != have.notice:
        yield Notify(gang)
    elif _over(gang, have, now):
        yield from _stop(have, have.live, "the grace of its stop notice is over")


def _over(gang: DesiredGang, have: LocalGang, now: float) -> bool:
    """Whether the delivered notice has run out; a withdrawn one never does."""
    return have.notice is not None and gang.notice == have.notice and now >= have.notified_at + have.notice.grace_s


def _hangs(have: LocalGang, now: float) -> Iterator[Action]:
    limit = have.hang_timeout_s
    hung = tuple(r.key for r in have.live if limit > 0 and r.state == "running" and now >= r.progress_at + limit)
    if hung:
        yield Stop(have.job, hung, "hang", f"no progress reported for {limit:g} s", gently=False)


def _prepare(gang: DesiredGang, have: LocalGang, local: Local, claims: Callable[[], dict[str, str]], waiting: bool) -> Iterator[Action]:
    reason = _impossible(gang, local, claims())
    if reason:
        yield FailPrepare(gang, reason)
        return
    new = _not_started(gang, have)
    if not waiting and not _held(new, local):
        yield Prepare(gang, continued=any(r.key in {(w.rank, w.generation) for w in gang.ranks} for r in have.live))


def _start(gang: DesiredGang, have: LocalGang, local: Local, claims: Callable[[], dict[str, str]]) -> Iterator[Action]:
    new = _not_started(gang, have)
    reason = _impossible(gang, local, claims()) if new else ""
    if reason:
        yield FailPrepare(gang, reason)  # the devices have changed since they were prepared
    elif new and not _held(new, local):
        yield Start(gang, new)


def _not_started(gang: DesiredGang, have: LocalGang) -> tuple[DesiredRank, ...]:
    known = {r.key for r in have.ranks}
    return tuple(r for r in gang.ranks if (r.rank, r.generation) not in known)


def _held(ranks: tuple[DesiredRank, ...], local: Local) -> bool:
    """Whether a live rank of any gang is still on a device that these ranks are to get, or on the part of it."""
    if not any(r.gpus for r in ranks):
        return False
    live = _Taken(local)
    for gang in local.gangs.values():
        for r in gang.live:
            live.add("", r.gpus, r.share)
    return any(live.problem(r.gpus, r.share) for r in ranks)


class _Taken:
    """What some ranks have of the devices of this node."""

    def __init__(self, local: Local) -> None:
        self._memory_mib = {index: gpu.memory_mib for index, gpu in local.facts.items()}
        #: who has a device whole, and who was first to have a part of it
        self._whole: dict[int, str] = {}
        self._first: dict[int, str] = {}
        self._uses: dict[int, GpuUse] = {}

    def add(self, who: str, gpus: tuple[int, ...], share: GpuShare | None) -> None:
        """A rank has these."""
        if share is None:
            self._whole.update(dict.fromkeys(gpus, who))
        for use in uses_of(gpus, share):
            there = self._uses.get(use.gpu)
            self._uses[use.gpu] = use if there is None else there.plus(use)
            self._first.setdefault(use.gpu, who)

    def problem(self, gpus: tuple[int, ...], share: GpuShare | None) -> str:
        """Return why another rank cannot have these, "" when it can."""
        for g in gpus:
            if g in self._whole or (share is None and g in self._first):
                return f"device {g}, and so is {self._whole.get(g, self._first.get(g, ''))}"
        for use in uses_of(gpus, share):
            there = self._uses.get(use.gpu)
            problem = "" if there is None else there.plus(use).problem(self._memory_mib.get(use.gpu, 0))
            if problem:
                return f"a part of device {use.gpu} beside {self._first[use.gpu]}: it {problem}"
        return ""


def _claims(desired: Desired, local: Local) -> dict[str, str]:
    """Return which ranks are given what others that come before them in the document have, and how."""
    taken = _Taken(local)
    conflicts: dict[str, str] = {}
    for gang in desired.gangs:
        for r in gang.ranks:
            me = _claimant(gang, r)
            problem = taken.problem(r.gpus, r.share)
            if problem:
                conflicts[me] = problem
            else:
                taken.add(me, r.gpus, r.share)
    return conflicts


def _claimant(gang: DesiredGang, rank: DesiredRank) -> str:
    return f"rank {rank.rank} of {gang.job}"


def _impossible(gang: DesiredGang, local: Local, claims: dict[str, str]) -> str:
    for r in gang.ranks:
        me = _claimant(gang, r)
        for g in r.gpus:
            if g not in local.gpus:
                return f"{me} is given device {g}, this node has {len(local.gpus)}"
            if not local.gpus[g]:
                return f"{me} is given device {g}, which is not healthy"
        if me in claims:
            return f"{me} is given {claims[me]}"
        if len(set(r.gpus)) != len(r.gpus):
            return f"{me} is given a device twice"
        for one in r.share.mig if r.share is not None else ():
            layout = MIG_LAYOUTS.get(local.facts[one.gpu].mig) if one.gpu in local.facts else None
            profile = layout.profile(one.profile) if layout is not None else None
            if profile is None or one.start not in profile.starts or one.size != profile.size:
                return f"{me} is given a MIG instance {one.profile} at {one.start} of device {one.gpu}, which cannot have it"
    return ""
