"""An event loop whose time passes only when nothing can be done now: hours of a simulated cluster in seconds, and each run like the last.

Tasks belong to a simulated process, which their children inherit. A process that dies is cut where each of its tasks is suspended at that
moment: nothing of it runs any more, no `finally` either.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


#: finished tasks are let go of when there are so many
_TASKS_KEPT = 2_000
#: how often a task is cancelled at the end
_CANCELS = 30


class Stalled(Exception):
    """Nothing can happen any more: every task waits for another."""


class Process:
    """What lives and dies together: the tasks of one scheduler, agent or client."""

    def __init__(self, name: str, on_death: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.dead = False
        #: steps of its tasks so far, and the one after which it dies by itself; 0: never
        self.steps = 0
        self.dies_at = 0
        #: no step before this moment of the loop's time
        self.paused_until = 0.0
        self._on_death = on_death
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.processes.append(self)

    def kill(self) -> None:
        """Cut all of its tasks where they are."""
        if not self.dead:
            self.dead = True
            self._on_death()

    def die_after(self, steps: int) -> None:
        """Be killed when its tasks have been suspended so many times more."""
        self.dies_at = self.steps + steps

    def pause(self, seconds: float) -> None:
        """Run no step for so long, and then go on: as SIGSTOP and SIGCONT."""
        self.paused_until = max(self.paused_until, asyncio.get_running_loop().time() + seconds)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of this process."""
        context = contextvars.copy_context()
        context.run(_process.set, self)
        return asyncio.get_running_loop().create_task(coroutine, context=context)


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class _Mortal(Coroutine[Any, Any, Any]):
    """A coroutine that goes on only while its process lives. What a dead one is sent or thrown is never received."""

    __slots__ = ("_coroutine", "_held", "_process", "_send")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], process: Process) -> None:
        self._coroutine = coroutine
        self._process = process
        self._send = coroutine.send
        #: what it was thrown while its process was paused
        self._held: tuple[Any, ...] = ()

    def send(self, value: Any) -> Any:
        process = self._process
        if process.dead:
            return _never()
        if process.paused_until and asyncio.get_running_loop().time() < process.paused_until:
            return _until(process.paused_until)
        if self._held:
            held, self._held = self._held, ()
            return self.throw(*held)
        process.steps += 1
        result = self._send(value)
        if process.steps == process.dies_at:
            process.kill()
        return result

    def throw(self, *error: Any) -> Any:
        if self._process.dead:
            return _never()
        if self._process.paused_until and asyncio.get_running_loop().time() < self._process.paused_until:
            self._held = error
            return _until(self._process.paused_until)
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


def _never() -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future._asyncio_future_blocking = True  # as `await` marks it
    return future


def _until(moment: float) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    future = _never()
    loop.call_at(moment, _wake, future)
    return future


def _wake(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)


class _Future(asyncio.Future[Any]):
    """Hashed by its number: the order of a set of futures is the same in every run."""

    def __hash__(self) -> int:
        return self._number

    _number = 0


class _Task(asyncio.Task[Any]):
    """As `_Future`."""

    def __hash__(self) -> int:
        return self._number

    _number = 0


def _nothing() -> None:
    return


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, lets the time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled
        if timeout > 0:
            self.now += timeout
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """`time` begins at 0. Work for other threads is done at once, in this one."""

    def __init__(self) -> None:
        self._sim = _Selector()
        self._numbered = 0
        self.processes: list[Process] = []
        # Nobody else may have one that is cut where it waits.
        self._mortals: list[asyncio.Task[Any]] = []
        super().__init__(self._sim)
        self.set_task_factory(self._make_task)

    def release(self) -> None:
        """Let the tasks of dead processes go on to their end: the run is over, and they are to be cancelled."""
        for process in self.processes:
            process.dead, process.dies_at, process.paused_until = False, 0, 0.0
            process._on_death = _nothing
        self.set_exception_handler(lambda loop, context: None)

    def finish(self) -> None:
        """End all tasks, and close. One that takes no notice of being cancelled is left where it is."""
        self.release()
        for _ in range(_CANCELS):
            left = asyncio.all_tasks(self)
            if not left:
                break
            for task in left:
                task.cancel()
            self.run_until_complete(asyncio.sleep(0.1))
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def time(self) -> float:
        """Return the simulated seconds since the loop was made."""
        return self._sim.now

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future that has a number."""
        self._numbered += 1
        future = _Future(loop=self)
        future._number = self._numbered
        return future

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        process = _process.get() if context is None else context.get(_process)
        if process is not None:
            coroutine = _Mortal(coroutine, process)
        self._numbered += 1
        # The first step of a task is scheduled with a bound method of it, and nothing hashes it before the number is set.
        task = _Task.__new__(_Task)
        task._number = self._numbered
        task.__init__(coroutine, loop=self, context=context)  # type: ignore[misc]
        if process is not None:
            self._mortals.append(task)
            if len(self._mortals) > _TASKS_KEPT:
                self._mortals = [t for t in self._mortals if not t.done()]
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Do it now."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the caller's
            done.set_exception(e)
        return done
