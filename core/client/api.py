"""The HTTP API from Python, on the standard library alone: `Client` speaks to any of several schedulers. docs/api.md.

A request goes to the endpoint that answered last. When that cannot be reached, or says that nobody leads, the next one is asked, and after a
round over all of them the client waits a little and begins again, for as long as its patience lasts. Reads, and writes that are the same when
they are said twice (an idempotency key, a stop, a word about a node), are repeated; nothing else is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

#: seconds without a byte after which a scheduler counts as gone and the next one is asked: one that is stopped still takes connections
ANSWER_TIMEOUT_S = 12.0
#: the same for a stream, on which nothing may happen for a while
STREAM_TIMEOUT_S = 40.0
CONNECT_TIMEOUT_S = 3.0
#: how long a standby may take to know of a write of this client
OWN_WRITES_WAIT = "5s"
#: how long "nobody leads" is waited out: longer than a leader's lease
LEADERLESS_PATIENCE_S = 30.0
#: how long nobody answering at all is waited out
UNREACHABLE_PATIENCE_S = 1.0
#: an answer larger than this is a mistake
MAX_ANSWER_BYTES = 64 << 20

_RETRY_STATUSES = frozenset({429, 502, 503, 504})

Query = Mapping[str, str | int | None]


class ApiError(Exception):
    """The scheduler said no. `problem` is its problem document (RFC 9457), made up where it sent none."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        self.status = status
        self.problem = problem
        self.code = str(problem.get("code") or "")
        super().__init__(str(problem.get("detail") or problem.get("title") or f"HTTP {status}"))


class Unreachable(Exception):
    """No scheduler answered; `tried` says for each address why."""

    def __init__(self, tried: list[tuple[str, str]]) -> None:
        self.tried = tried
        super().__init__("no scheduler answers: " + "; ".join(f"{url} ({why})" for url, why in tried))


class NotConfigured(Exception):
    """Nobody said where the schedulers are."""


class _Again(Exception):
    """This attempt failed, by `cause`, in a way that another one may not."""

    def __init__(self, cause: ApiError | Unreachable) -> None:
        super().__init__(cause)
        self.cause = cause


class Answer:
    """One answer: the decoded body, and the headers that say what it is true at."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: Mapping[str, str], body: Any) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def index(self) -> int:
        """Log index that the answer is true at, 0 when it does not say."""
        value = self.headers.get("gangline-index", "")
        return int(value) if value.isdecimal() else 0


class Client:
    """Speaks to the schedulers at `endpoints`. Not for use by several threads at once."""

    def __init__(self, endpoints: list[str], token: str = "", user: str = "", on_wait: Callable[[str], None] | None = None) -> None:
        """`on_wait` is told, in a sentence, whenever the client has to try again."""
        if not endpoints:
            raise NotConfigured("no scheduler is named")
        self.endpoints = [_checked(url) for url in endpoints]
        self._headers = {"Accept": "application/json", "User-Agent": "gangline"}
        if user:
            self._headers["Gangline-User"] = quote(user, safe="@.+_-")
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._on_wait = on_wait
        self._current = 0
        #: log index of the newest write of this client: what it reads afterwards is at least as new, whichever scheduler answers
        self._written = 0
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Drop the open connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ------------------------------------------------------------ the routes

    def submit(self, spec: Mapping[str, Any], key: str) -> Answer:
        """Submit one job; with a key, which makes it safe to be repeated."""
        return self.post("/v1/jobs", spec, key=key)

    def submit_batch(self, specs: list[Mapping[str, Any]], key: str) -> Answer:
        """Submit many jobs; each succeeds or fails on its own."""
        jobs = [{"spec": spec, "idempotency_key": f"{key}-{i}"} for i, spec in enumerate(specs)]
        return self.post("/v1/jobs:batch", {"jobs": jobs}, key=key)

    def jobs(self, limit: int, **query: str | None) -> tuple[list[dict[str, Any]], bool]:
        """Return up to `limit` rows, newest first, and whether there are more."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            body = self.get("/v1/jobs", {**query, "limit": min(500, limit - len(rows)), "cursor": cursor}).body
            rows += body["jobs"]
            cursor = body.get("cursor")
            if not cursor or len(rows) >= limit:
                return rows[:limit], bool(cursor) or len(rows) > limit

    def job(self, job: str, *, min_index: int = 0, wait_s: float = 0.0) -> Answer:
        """Return the whole job, by id, unique prefix or name; `min_index` holds the answer until then or for `wait_s`."""
        query: Query = {"min_index": min_index, "wait": f"{wait_s:g}s"} if min_index else {}
        return self.get(f"/v1/jobs/{segment(job)}", query)

    def stop(self, job: str, reason: str) -> Answer:
        """Stop a job."""
        return self.request("DELETE", f"/v1/jobs/{segment(job)}", {"reason": reason or None}, repeat=True)

    def hold(self, job: str, reason: str, *, requeue: bool = False) -> Answer:
        """Keep a job from being started."""
        body = {"reason": reason, "requeue": requeue}
        return self.request("POST", f"/v1/jobs/{segment(job)}:hold", body=body, repeat=True)

    def release(self, job: str, reason: str) -> Answer:
        """Let a job be started that was held; one that is not held may be released again."""
        return self.request("POST", f"/v1/jobs/{segment(job)}:release", body={"reason": reason}, repeat=True)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the rows of all nodes."""
        return rows_of(self.get("/v1/nodes").body, "nodes")

    def administer(self, node: str, action: str, reason: str, deadline_s: float = 0.0) -> Answer:
        """Say an operator's word about a node."""
        body = {"reason": reason, "deadline_s": deadline_s}
        return self.request("POST", f"/v1/nodes/{segment(node)}:{action}", body=body, repeat=True)

    def reservations(self) -> list[dict[str, Any]]:
        """Return the rows of all reservations."""
        return rows_of(self.get("/v1/reservations").body, "reservations")

    def reserve(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create a reservation."""
        answer: dict[str, Any] = self.request("POST", "/v1/reservations", body=body).body
        return answer

    def unreserve(self, name: str, reason: str) -> Answer:
        """Remove a reservation."""
        return self.request("DELETE", f"/v1/reservations/{segment(name)}", {"reason": reason or None})

    def queues(self) -> dict[str, Any]:
        """Return the queues: rows, the declaration in the cluster file's words, and its index."""
        body: dict[str, Any] = self.get("/v1/queues").body
        return body

    def declare_queues(self, document: Mapping[str, Any], base: int, *, dry_run: bool) -> dict[str, Any]:
        """Declare all queues anew, from the declaration of index `base`; what is declared already may be said again."""
        query, headers = {"dry_run": 1 if dry_run else None}, {"If-Match": f'"{base}"'}
        body: dict[str, Any] = self.request("PUT", "/v1/queues", query, body=document, headers=headers, repeat=True).body
        return body

    def logs(self, job: str, query: Query) -> Answer:
        """Return bytes of one rank's log. The body is bytes. Is not repeated: a node that cannot be reached may stay so."""
        return self.request("GET", f"/v1/jobs/{segment(job)}/logs", query, repeat=True, patient=False, raw=True)

    def execute(self, job: str, rank: int, command: list[str]) -> Iterator[bytes]:
        """Run a command in a rank; yield the bytes of its frames (core/model/execwire.py) as they come. Is not repeated."""
        body = {"rank": rank, "command": command}
        return self.stream(f"/v1/jobs/{segment(job)}/exec", body=body, accept="application/octet-stream")

    # ------------------------------------------------------------ requests

    def get(self, path: str, query: Query | None = None) -> Answer:
        """Read."""
        return self.request("GET", path, query, repeat=True)

    def post(self, path: str, body: Any, *, key: str = "") -> Answer:
        """Write; only with a key is it repeated when the outcome is unknown."""
        return self.request("POST", path, body=body, headers={"Idempotency-Key": key} if key else None, repeat=bool(key))

    def request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        repeat: bool = False,
        patient: bool = True,
        raw: bool = False,
    ) -> Answer:
        """Carry out one request, at one endpoint after the other; `patient`: round after round. Raises ApiError or Unreachable."""
        if method == "GET":
            query = self._own_writes(path, query)
        target, data = _target(path, query), None if body is None else json.dumps(body, allow_nan=False).encode()

        def attempt() -> Answer:
            answer = self._round(method, target, data, headers or {}, repeat, raw)
            if method != "GET":
                self._written = max(self._written, answer.index)
            return answer

        try:
            return attempt()
        except _Again as again:
            cause = again.cause
        if not patient:
            raise cause
        patience = LEADERLESS_PATIENCE_S if isinstance(cause, ApiError) else UNREACHABLE_PATIENCE_S
        if self._on_wait is not None:
            self._on_wait(str(cause))
        from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

        retrying = Retrying(
            wait=wait_random_exponential(multiplier=0.2, max=2.0),
            stop=stop_after_delay(patience),
            retry=retry_if_exception_type(_Again),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _Again as again:
            raise again.cause from None

    def stream(self, path: str, query: Query | None = None, *, body: Any = None, accept: str = "application/x-ndjson") -> Iterator[bytes]:
        """Yield an endless answer as it comes, in lines, or in pieces that are none when something is sent; ends when the connection does.

        Raises ApiError or Unreachable at the start.
        """
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body, allow_nan=False).encode())
        target, tried = _target(path, self._own_writes(path, query) if body is None else query), []
        for url in self._in_turn():
            try:
                connection = self._connect(url)
            except OSError as error:
                tried.append((url, _why(error)))
                continue
            connection.sock.settimeout(STREAM_TIMEOUT_S)
            try:
                self._send(connection, method, target, data, {"Accept": accept})
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                tried.append((url, _why(error)))
                connection.close()
                continue
            try:
                if answer.status != 200:
                    raise _error(answer.status, answer.read(1 << 20))
                with contextlib.suppress(OSError, http.client.HTTPException):
                    yield from iter(answer.readline if body is None else partial(answer.read1, 1 << 16), b"")
                return
            finally:
                connection.close()
        raise Unreachable(tried)

    # ------------------------------------------------------------ below

    def _own_writes(self, path: str, query: Query | None) -> Query | None:
        """Have a read wait until the scheduler that answers knows what this client has written."""
        if not self._written or path == "/v1/health":
            return query
        return {"min_index": self._written, "wait": OWN_WRITES_WAIT, **(query or {})}

    def _round(self, method: str, target: str, data: bytes | None, headers: Mapping[str, str], repeat: bool, raw: bool) -> Answer:
        """Ask each endpoint once, the one that answered last first."""
        tried: list[tuple[str, str]] = []
        refusal: ApiError | None = None
        for url in self._in_turn():
            try:
                answer = self._exchange(url, method, target, data, headers, repeat, raw)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                tried.append((url, _why(error)))
                if not repeat and not isinstance(error, ConnectionRefusedError):
                    raise Unreachable([(url, f"{_why(error)}; whether the request was carried out is unknown")]) from error
            except ApiError as error:
                if error.status not in _RETRY_STATUSES or not repeat:
                    raise
                refusal = error
            else:
                return answer
        raise _Again(refusal or Unreachable(tried))

    def _in_turn(self) -> Iterator[str]:
        first = self._current
        for i in range(len(self.endpoints)):
            at = (first + i) % len(self.endpoints)
            if at != self._current:
                self.close()
                self._current = at
            yield self.endpoints[at]

    def _exchange(self, url: str, method: str, target: str, data: bytes | None, headers: Mapping[str, str], repeat: bool, raw: bool) -> Answer:
        """Send one request to one endpoint. A kept connection that the other side has closed meanwhile is opened anew, once."""
        kept = self._connection
        connection = kept or self._connect(url)
        self._connection = connection
        try:
            self._send(connection, method, target, data, headers)
            answer = connection.getresponse()
        except (ConnectionError, http.client.BadStatusLine):
            if kept is None or not repeat:
                raise
            self.close()
            return self._exchange(url, method, target, data, headers, repeat, raw)
        body = answer.read(MAX_ANSWER_BYTES)
        if answer.will_close:
            self.close()
        if answer.status >= 300:
            raise _error(answer.status, body)
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, body if raw else json.loads(body or b"null"))

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = make(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S)
        connection.connect()
        connection.sock.settimeout(ANSWER_TIMEOUT_S)
        return connection

    def _send(self, connection: http.client.HTTPConnection, method: str, target: str, data: bytes | None, headers: Mapping[str, str]) -> None:
        merged = {**self._headers, **headers}
        if data is not None:
            merged["Content-Type"] = "application/json"
        connection.request(method, target, data, merged)


def segment(name: str) -> str:
    """Return a name as one segment of a path, whatever is in it."""
    return quote(name, safe="") or "%20"


def rows_of(body: Any, word: str) -> list[dict[str, Any]]:
    """Return the rows of a listing."""
    rows: list[dict[str, Any]] = body[word] if isinstance(body, dict) else body
    return rows


def new_key() -> str:
    """Return a fresh idempotency key."""
    return os.urandom(16).hex()


def _target(path: str, query: Query | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _checked(url: str) -> str:
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) and parts.path in ("", "/") and not parts.username
    except ValueError:
        good = False
    if not good:
        raise NotConfigured(f'"{url}" is not the address of a scheduler; one looks like http://scheduler-1:7480')
    return url.rstrip("/")


def _error(status: int, body: bytes) -> ApiError:
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"title": body[:200].decode("utf-8", "replace").strip() or http.client.responses.get(status, ""), "status": status}
    return ApiError(status, problem)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
