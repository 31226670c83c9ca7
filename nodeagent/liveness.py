"""The node's lease, and with it the deadline at which its ranks must be gone.

The leader calls the node lost when the lease has ended. So ranks must have ended before, whoever is alive to end them: each renewal moves
the fence (`fence.py`) to the moment *before* its request + time to live - margin, and the supervisors do the rest.

When renewals fail, the schedulers are asked whether they reach the store. If every one of them says that it does not, nobody can be deciding
anything, and the fence is moved on by half a time to live with each such answer. A scheduler that gives no answer may be on the other side of
a partition, with the store, deciding: then this node must count itself as cut off, and the fence is left to fall.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import aiohttp
import msgspec
import tenacity

from gangline.core.model.documents import Registration
from gangline.core.store.api import LeaseNotFound, StoreError
from gangline.core.store.node import NameTaken, NodeStore, SchedulerAddress
from gangline.core.telemetry import Log
from gangline.nodeagent.fence import Fence
from gangline.nodeagent.kernel import boottime

Verdict = Literal["nobody_decides", "somebody_may_decide", "no_answer"]

_ANSWER_BYTES_MAX = 65_536


def margin(ttl_s: float) -> float:
    """Return how long before the end of the lease the ranks are killed: time for the kernel to do it."""
    return min(2.0, max(0.5, ttl_s / 8))


def patience(ttl_s: float) -> float:
    """Return how long one question may take. Renewal, question and pause together must fit into half a time to live, see `_failed`."""
    return max(0.25, ttl_s / 8)


async def ask_schedulers(schedulers: list[SchedulerAddress], timeout_s: float) -> Verdict:
    """Ask every scheduler whether it reaches the store. Only the clear "unreachable" of all of them counts as "nobody decides"."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        answers = await asyncio.gather(*(_ask(session, s.url) for s in schedulers))
    given = [a for a in answers if a is not None]
    if not given:
        return "no_answer"
    return "nobody_decides" if all(a == "unreachable" for a in answers) else "somebody_may_decide"


async def _ask(session: aiohttp.ClientSession, url: str) -> str | None:
    try:
        async with session.get(f"{url.rstrip('/')}/v1/health", allow_redirects=False) as response:
            body = msgspec.json.decode(await response.content.read(_ANSWER_BYTES_MAX))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    store = body.get("store") if isinstance(body, dict) else None
    return store if isinstance(store, str) else "not understood"


class Liveness:
    """Keeps the node registered, and the fence where it belongs."""

    def __init__(
        self, store: NodeStore, registration: Callable[[], Registration], fence: Fence, *, ttl_s: float,
        ask: Callable[[], Awaitable[Verdict]], registered: Callable[[], None], log: Log,
    ) -> None:  # fmt: skip
        """`registered` is called after each registration, the first one and those after a lost lease."""
        self._store = store
        self._registration = registration
        self._fence = fence
        self._ttl_s = ttl_s
        self._ask = ask
        self._registered = registered
        self._log = log
        #: what the last attempt came to, for the health page
        self.connected = False
        self.renewals = 0
        self.failures = 0
        #: called when the fence that had fallen stands again: what was held back may start
        self.on_unfenced: Callable[[], None] = lambda: None
        #: how often this agent has set out to register
        self.sessions = 0
        self._again = asyncio.Event()

    def register_again(self) -> None:
        """Somebody found the registration gone, or it has to say something new."""
        self._again.set()

    async def run(self) -> None:
        """Register and renew for ever. Raises NameTaken when the name has been another's for two times to live."""
        while True:
            await self._register()
            await self._renew()

    async def renew_once(self) -> None:
        """Renew now, so that ranks have a whole time to live to wait for the next agent. Failing is no error."""
        try:
            await self._renewal()
        except (StoreError, TimeoutError):
            return

    async def _register(self) -> None:
        taken_since: float | None = None
        self.sessions += 1
        while True:
            self._again.clear()
            try:
                await self._attempt(self._grant)
            except NameTaken as e:
                taken_since = taken_since or boottime()
                self._log.warning("name_taken", message=str(e))
                if self._fence.deadline == 0.0 and boottime() > taken_since + 2 * self._ttl_s:
                    raise
                await asyncio.sleep(self._ttl_s / 8)
                continue
            self._registered()
            return

    async def _renew(self) -> None:
        """Renew until the lease or the registration is gone."""
        while True:
            try:
                await asyncio.wait_for(self._again.wait(), self._ttl_s / 3)
                return
            except TimeoutError:
                pass
            try:
                await self._attempt(self._renewal)
            except LeaseNotFound as e:
                self._log.warning("lease_lost", message=str(e))
                return

    async def _attempt(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat `step` until the store answers, asking the schedulers after each failure. Raises LeaseNotFound and NameTaken."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((StoreError, TimeoutError))
            & tenacity.retry_if_not_exception_type((LeaseNotFound, NameTaken)),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=min(1.0, self._ttl_s / 16)),
            after=self._failed,
            reraise=True,
        )
        await retrying(step)
        if not self.connected:
            self._log.info("connected", message="the store answers, the lease is renewed")
        self.connected = True

    async def _failed(self, state: tenacity.RetryCallState) -> None:
        self.failures += 1
        error = state.outcome.exception() if state.outcome else None
        if self.connected or self.failures == 1:
            self._log.warning("store_unreachable", message=f"cannot renew the lease: {error or type(error).__name__}")
        self.connected = False
        asked_at = boottime()
        verdict = await self._ask()
        if verdict == "nobody_decides" and asked_at < self._fence.deadline:
            # Not after the deadline: then ranks have been killed, and nobody may start new ones.
            self._fence.extend(asked_at + self._ttl_s / 2)

    async def _grant(self) -> None:
        asked_at = boottime()
        lease = await asyncio.wait_for(self._store.register(self._registration(), ttl_s=self._ttl_s), max(2.0, self._ttl_s / 4))
        self._granted(asked_at, lease.ttl_s)

    async def _renewal(self) -> None:
        asked_at = boottime()
        self._granted(asked_at, await asyncio.wait_for(self._store.keepalive(), max(0.5, self._ttl_s / 8)))

    def _granted(self, asked_at: float, ttl_s: float) -> None:
        self.renewals += 1
        fallen = boottime() >= self._fence.deadline
        self._fence.extend(asked_at + ttl_s - margin(ttl_s))
        if fallen:
            self.on_unfenced()
