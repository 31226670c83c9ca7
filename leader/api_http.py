"""What every route needs: problem documents, answers, bounded bodies, strict query parameters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.web_exceptions import HTTPException

from gangline.core.model.nearest import nearest
from gangline.core.model.problems import BadJob, Problem, show_text
from gangline.core.model.strict_json import load_json

#: all of a request body; a single job is bounded by jobfile.MAX_BYTES
MAX_BODY = 4 << 20
#: longest that a read is held for `wait`
MAX_WAIT_S = 60.0

encode = msgspec.json.encode
T = TypeVar("T")

JSON = "application/json; charset=utf-8"
PROBLEM = "application/problem+json"

_WAIT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m)?")
_SCALE = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}
_PRINTABLE = re.compile(r"[\x20-\x7e]*")


class Refusal(Exception):
    """The request is answered with a problem document (RFC 9457)."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: list[Problem] | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: int = 0,
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.document = problem(status, code, detail, errors, **extra)
        self.headers = dict(headers or {})
        if retry_after_s:
            self.headers["Retry-After"] = str(retry_after_s)

    def response(self) -> web.Response:
        """Return it as an answer."""
        return web.Response(status=self.status, body=encode(self.document), headers={"Content-Type": PROBLEM, **self.headers})


def problem(status: int, code: str, detail: str, errors: list[Problem] | None = None, **extra: Any) -> dict[str, Any]:
    """Return a problem document."""
    try:
        title = HTTPStatus(status).phrase
    except ValueError:
        title = "Error"
    document: dict[str, Any] = {"type": f"urn:gangline:problem:{code}", "title": title, "status": status, "detail": detail, "code": code}
    if errors:
        document["errors"] = errors
    return document | extra


def bad_input(errors: list[Problem]) -> Refusal:
    """Return the refusal of a body or query with everything that is wrong with it."""
    first = errors[0]
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    where = f"{first.pointer}: " if first.pointer else ""
    status = 413 if first.code == "GL-1002" else 400
    return Refusal(status, "bad_input", f"{where}{first.message}{more}", errors=errors)


def from_aiohttp(e: HTTPException) -> Refusal:
    """Return the refusal that says what one of aiohttp's own does."""
    if isinstance(e, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(e.allowed_methods))
        return Refusal(405, "method_not_allowed", f"{e.method} is not possible here; {allowed} is", headers={"Allow": allowed})
    if e.status == 404:
        return Refusal(404, "no_such_route", "there is nothing at this path; docs/api.md lists what there is")
    if e.status == 413:
        return too_large(MAX_BODY)
    return Refusal(e.status, "http_error", e.reason)


def too_large(limit: int) -> Refusal:
    """Return the refusal of a body that is larger than `limit`."""
    return Refusal(413, "too_large", f"the body is larger than {limit:,} bytes", headers={"Connection": "close"})


async def read_body(request: web.Request, limit: int, timeout_s: float) -> bytes:
    """Return the whole body. Raises Refusal when it is larger than `limit` or does not arrive in time; holds at most `limit` bytes."""
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    content = request.content
    if content.is_eof():
        body = content.read_nowait(-1)
        if len(body) > limit:
            raise too_large(limit)
        return body
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while chunk := await content.readany():
                size += len(chunk)
                if size > limit:
                    raise too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        raise Refusal(408, "body_timeout", f"the body did not arrive within {timeout_s:g} s", headers={"Connection": "close"}) from None
    except web.RequestPayloadError as e:
        raise Refusal(400, "bad_body", f"the body cannot be read: {e}", headers={"Connection": "close"}) from None
    return b"".join(chunks)


def body_as(body: bytes, as_type: type[T]) -> T:
    """Return a small JSON body as a struct; an empty one is an empty object. Raises Refusal."""
    try:
        return msgspec.convert(load_json(body or b"{}", MAX_BODY), as_type)
    except BadJob as e:
        raise bad_input(e.problems) from None
    except msgspec.ValidationError as e:
        message, _, path = str(e).partition(" - at `$")
        raise bad_input([Problem(path.rstrip("`").replace(".", "/").replace("[", "/").replace("]", ""), message, "GL-1102")]) from None


class Params:
    """The query of a request, read strictly: an unknown, repeated or impossible parameter is refused, all of them at once."""

    def __init__(self, request: web.Request, *known: str) -> None:
        self._query = request.query
        self._problems: list[Problem] = []
        for name in dict.fromkeys(self._query):
            if name not in known:
                self._problems.append(Problem(f"?{show_text(name)}", "There is no such parameter here.", "GL-1101", nearest(name, known)))
            elif len(self._query.getall(name)) > 1:
                self._problems.append(Problem(f"?{name}", "Given more than once.", "GL-1005"))

    def check(self) -> None:
        """Raise Refusal for everything that was wrong."""
        if self._problems:
            raise bad_input(self._problems)

    def refuse(self, name: str, rule: str) -> None:
        """Note that a parameter cannot be as it is."""
        self._problems.append(Problem(f"?{name}", f'"{show_text(self._query.get(name, ""))}" is not {rule}.', "GL-1104"))

    def text(self, name: str, longest: int = 255) -> str:
        """Return a text, empty when it is not given."""
        value = self._query.get(name, "")
        if len(value) > longest or not value.isprintable():
            self.refuse(name, f"a text of at most {longest} printable characters")
        return value

    def number(self, name: str, least: int, most: int, default: int) -> int:
        """Return a whole number."""
        value = self._query.get(name)
        if value is None or value == "":
            return default
        if not value.isascii() or not value.removeprefix("-").isdigit() or len(value) > 18 or not least <= int(value) <= most:
            self.refuse(name, f"a whole number from {least:,} to {most:,}")
            return default
        return int(value)

    def flag(self, name: str) -> bool:
        """Return whether it is 1 or true."""
        value = self._query.get(name, "0")
        if value not in ("0", "1", "true", "false", ""):
            self.refuse(name, "0 or 1")
        return value in ("1", "true")

    def wait_s(self) -> float:
        """Return how long `wait` holds the answer: 30s, 500ms, 2m or plain seconds, 0 when it is not given, MAX_WAIT_S at most."""
        value = self._query.get("wait", "")
        if not value:
            return 0.0
        match = _WAIT.fullmatch(value)
        if match is None:
            self.refuse("wait", "a time like 30s")
            return 0.0
        return min(MAX_WAIT_S, float(match[1]) * _SCALE[match[2]])


def printable_header(request: web.Request, name: str, longest: int) -> str:
    """Return a header of printable ASCII, empty when it is not given. Raises Refusal."""
    value: str = request.headers.get(name, "")
    if len(value) > longest or not _PRINTABLE.fullmatch(value):
        raise Refusal(400, "bad_header", f"{name} has at most {longest} printable ASCII characters")
    return value
