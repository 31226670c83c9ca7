"""An event loop whose time passes only when nothing can be done now: hours of a simulated cluster in seconds, and each run like the last."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any


class Stalled(Exception):
    """Nothing can happen any more: every task waits for another."""


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, lets the time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled
        self.now += max(0.0, timeout)
        return super().select(0)


class SimLoop(asyncio.SelectorEventLoop):
    """`time` begins at 0. Work for other threads is done at once, in this one."""

    def __init__(self) -> None:
        self._sim = _Selector()
        super().__init__(self._sim)

    def time(self) -> float:
        return self._sim.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the caller's
            done.set_exception(e)
        return done
