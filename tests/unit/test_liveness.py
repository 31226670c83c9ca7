"""The lease and the fence, over a store that answers or does not."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any, cast

import pytest

from gangline.core.model.documents import Registration
from gangline.core.store.api import Ambiguous, Lease
from gangline.core.store.node import NodeStore
from gangline.core.telemetry import structured_logging
from gangline.nodeagent.fence import Fence
from gangline.nodeagent.kernel import boottime
from gangline.nodeagent.liveness import Liveness, Verdict

TTL_S = 2.0


class Store:
    """Implements what Liveness uses of a NodeStore; the lease itself lives on whatever happens."""

    def __init__(self) -> None:
        self.answers = True
        self.registered = 0

    async def register(self, registration: Registration, *, ttl_s: float, lease: int = 0) -> Lease:
        self.registered += 1
        return Lease(1, TTL_S)

    async def keepalive(self) -> float:
        if not self.answers:
            raise Ambiguous("no answer")
        return TTL_S


@pytest.mark.parametrize("verdict", ["no_answer", "somebody_may_decide"])
async def test_whoever_was_held_back_by_the_fence_is_told_that_it_stands_again(
    tmp_path: Path, verdict: Verdict, eventually: Any
) -> None:
    async def ask() -> Verdict:
        return verdict

    store, told = Store(), []
    fence = Fence(tmp_path, boot_id="b")
    liveness = Liveness(
        cast(NodeStore, store), lambda: Registration("n1", "i", "b", "n1", "", (), 1, 1), fence, ttl_s=TTL_S, ask=ask, registered=lambda: None,
        log=structured_logging("error", io.StringIO()),
    )  # fmt: skip
    liveness.on_unfenced = lambda: told.append(boottime())
    run = asyncio.create_task(liveness.run())
    try:
        await eventually(lambda: liveness.renewals >= 3)
        assert len(told) == 1, "once, by the first registration"
        store.answers = False
        await eventually(lambda: boottime() >= fence.deadline)
        store.answers = True
        await eventually(lambda: boottime() < fence.deadline)
        assert len(told) == 2
        assert store.registered == 1, "a lease that lives is not registered anew, so nothing else would tell"
    finally:
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
