"""What clients were told, written down by themselves: JSON lines, one when a request is made and one when it is answered.

    {"t":"invoke","id":7,"op":"submit","key":"k-7"}
    {"t":"ok","id":7,"job":"j12","index":345}              or "fail": it was refused, or "unknown": it may have been carried out

A request without an answer, since its client has died, is of unknown outcome.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from gangline.chaos.checker.evidence import Operation
from gangline.core.client.api import Answer, ApiError, Client, Unreachable

#: name of the file in the state directory of a cluster
NAME = "clients.history"


class _Line(msgspec.Struct, omit_defaults=True):
    t: Literal["invoke", "ok", "fail", "unknown"]
    id: str
    op: Literal["submit", "read"] = "submit"
    key: str = ""
    job: str = ""
    index: int = 0
    after: int = 0
    found: bool = True


class History:
    """Appends to a history. For several threads, and for several processes with different names."""

    def __init__(self, path: Path, name: str = "c") -> None:
        self._file = path.open("ab", buffering=0)
        self._numbers = itertools.count(1)
        self._name = name
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def submit(self, client: Client, spec: Mapping[str, Any], key: str) -> Answer:
        """Submit a job, and write down what came of it. Raises as the client does."""
        return self._asked("submit", key, "", 0, lambda: client.submit(spec, key))

    def read(self, client: Client, job: str, after: int, wait_s: float = 5.0) -> Answer:
        """Read a job as of entry `after` at least, and write down whether it was there. Raises as the client does."""
        return self._asked("read", "", job, after, lambda: client.job(job, min_index=after, wait_s=wait_s))

    def _asked(self, op: Literal["submit", "read"], key: str, job: str, after: int, ask: Callable[[], Answer]) -> Answer:
        with self._lock:
            number = f"{self._name}{next(self._numbers)}"
        self._write(_Line("invoke", number, op, key, job, after=after))
        try:
            answer = ask()
        except ApiError as e:
            missing = op == "read" and e.status == 404
            # What is refused for what it is was not carried out; all else may have been, by a try before the last.
            self._write(_Line("ok" if missing else "fail" if 400 <= e.status < 500 else "unknown", number, found=not missing))
            raise
        except Unreachable:
            self._write(_Line("unknown", number))
            raise
        told = answer.body.get("job", "") if op == "submit" else job
        self._write(_Line("ok", number, job=told, index=answer.index))
        return answer

    def _write(self, line: _Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        with self._lock:
            self._file.write(data)


def read_history(path: Path) -> Iterator[Operation]:
    """Yield the operations of a history, in the order in which they were invoked. Torn lines are passed over."""
    invoked: dict[str, _Line] = {}
    answered: dict[str, _Line] = {}
    with path.open("rb") as file:
        for data in file:
            with contextlib.suppress(msgspec.MsgspecError):
                line = msgspec.json.decode(data, type=_Line)
                (invoked if line.t == "invoke" else answered)[line.id] = line
    for number, asked in invoked.items():
        answer = answered.get(number)
        outcome: Literal["ok", "fail", "unknown"] = "unknown" if answer is None or answer.t == "invoke" else answer.t
        if answer is None:
            answer = asked
        missing = asked.op == "read" and not answer.found
        yield Operation(
            op=asked.op, outcome=outcome, key=asked.key, job=answer.job or asked.job, index=answer.index or (asked.after if missing else 0),
            after=asked.after, found=answer.found,
        )  # fmt: skip
