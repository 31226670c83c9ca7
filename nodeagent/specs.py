"""The specs of jobs, read from the store: those that are asked for at the same moment in one request, since short jobs come in crowds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gangline.core.model.spec import JobSpec
from gangline.core.store.api import StoreError


class Specs:
    """Gathers questions until the event loop comes round, then asks."""

    def __init__(self, fetch: Callable[[Sequence[str]], Awaitable[Mapping[str, JobSpec | StoreError]]]) -> None:
        """`fetch` returns those that there are and errors for those that cannot be read, or raises StoreError."""
        self._fetch = fetch
        self._asked: dict[str, asyncio.Future[JobSpec | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, job: str) -> JobSpec | None:
        """Return the spec of a job, None when there is none. Raises StoreError."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._ask)
        answer = self._asked.get(job)
        if answer is None:
            answer = self._asked[job] = loop.create_future()
        # Whoever gives up does not take the answer from the others.
        return await asyncio.shield(answer)

    def _ask(self) -> None:
        asked, self._asked = self._asked, {}
        task = asyncio.get_running_loop().create_task(self._answer(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: dict[str, asyncio.Future[JobSpec | None]]) -> None:
        found: Mapping[str, JobSpec | StoreError]
        try:
            found = await self._fetch(list(asked))
        except StoreError as e:
            found = dict.fromkeys(asked, e)
        for job, answer in asked.items():
            spec = found.get(job)
            if answer.cancelled():
                continue
            if isinstance(spec, StoreError):
                answer.set_exception(spec)
                answer.exception()  # nobody may be waiting any more
            else:
                answer.set_result(spec)
