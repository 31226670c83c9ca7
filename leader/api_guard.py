"""Who may speak to the API: the Host and Origin of a request, its token, and where a scheduler may listen. RELIABILITY section 4.1.

A page in somebody's browser can send requests to a scheduler on the same machine. It cannot choose the Host that its requests carry when it
found the address by DNS rebinding, and cannot hide its Origin when it changes something; so both are checked, whether there are tokens or not.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable
from urllib.parse import urlsplit

from aiohttp import web

from gangline.leader.api_http import Refusal

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
#: answered without a token: probes and scrapers have none
OPEN_PATHS = frozenset({"/v1/health", "/metrics"})
SHORTEST_TOKEN = 16
MAX_TOKEN_FILE = 1 << 20


class CannotListen(Exception):
    """The scheduler must not start like this; the message says why and what to do."""


def check_listen(host: str, token_file: str) -> None:
    """Refuse to serve anybody but this machine without tokens, and token files that do not work. Raises CannotListen."""
    if token_file:
        tokens = TokenFile(token_file)
        if not tokens.read():
            raise CannotListen(f"{token_file}: {tokens.fault or 'there is no token in it'}; make one: openssl rand -hex 32 > {token_file}")
        return
    if not is_loopback(host):
        raise CannotListen(
            f"refusing to listen on {host or 'every address'} without tokens: anybody who can reach it could run code on every node. "
            f"Give a token file (openssl rand -hex 32 > token; --token-file token) or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine and nobody else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class TokenFile:
    """The tokens that are good now: one a line, `#` begins a comment. Read again when the file changes; no file, no good token."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._tokens: tuple[bytes, ...] = ()
        #: why there are no tokens
        self.fault = ""

    def accepts(self, token: str) -> bool:
        """Return whether the token is good, in a time that does not depend on which part of it is wrong."""
        given = token.encode("utf-8", "surrogateescape")
        good = False
        for known in self.read():
            good |= hmac.compare_digest(given, known)
        return good

    def read(self) -> tuple[bytes, ...]:
        """Return the tokens of the file as it is now."""
        try:
            found = os.stat(self._path)
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen != self._seen:
                self._tokens, self.fault = self._load(found)
                self._seen = seen
        except OSError as e:
            self._seen, self._tokens, self.fault = (), (), (e.strerror or str(e)).lower()
        return self._tokens

    def _load(self, found: os.stat_result) -> tuple[tuple[bytes, ...], str]:
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_TOKEN_FILE:
            return (), "not a regular file of a sensible size"
        with open(self._path, "rb") as file:
            lines = [line.split(b"#")[0].strip() for line in file.read(MAX_TOKEN_FILE).splitlines()]
        tokens = tuple(line for line in lines if line)
        short = [t for t in tokens if len(t) < SHORTEST_TOKEN]
        if short:
            return tuple(t for t in tokens if t not in short), f"a token has at least {SHORTEST_TOKEN} characters; shorter ones are not accepted"
        return tokens, ""


class Guard:
    """Checks that come before any handler."""

    def __init__(self, host: str, allowed_hosts: Iterable[str], token_file: str) -> None:
        """`host` is where the scheduler listens, `allowed_hosts` other names for it: those of a proxy, whose pages may send writes."""
        self._proxies = {name.lower().strip("[]") for name in allowed_hosts}
        # Nobody is called by a wildcard, and a browser that asks 0.0.0.0 means to get around these checks.
        self._allowed = self._proxies | ({host.lower()} - {"", "0.0.0.0", "::"})
        self._tokens = TokenFile(token_file) if token_file else None
        #: Host headers seen and found good, so that the usual one costs a look-up; bounded
        self._good_hosts: set[str] = set()

    def check(self, request: web.Request) -> None:
        """Raise Refusal when the request may not be carried out."""
        headers = request.headers
        host: str = headers.get("Host", "")
        if host not in self._good_hosts:
            self._check_host(host)
        if self._tokens is not None and request.path not in OPEN_PATHS:
            self._check_token(headers.get("Authorization", ""))
        if request.method not in SAFE_METHODS:
            if "Origin" in headers or "Sec-Fetch-Site" in headers:
                self._check_origin(headers.get("Origin", ""), headers.get("Sec-Fetch-Site", ""), host)
            if "Content-Encoding" in headers:
                raise Refusal(415, "encoded_body", "send the body as it is: Content-Encoding is not accepted", headers={"Connection": "close"})

    def _check_host(self, header: str) -> None:
        name = host_of(header)
        if not name or (name not in self._allowed and not is_loopback(name)):
            detail = f"this scheduler does not answer for the host {header[:100]!r}; --allowed-host names others that it is known by"
            raise Refusal(421, "wrong_host", detail)
        if len(self._good_hosts) < 64:
            self._good_hosts.add(header)

    def _check_token(self, header: str) -> None:
        scheme, _, token = header.partition(" ")
        assert self._tokens is not None
        if scheme.lower() != "bearer" or not self._tokens.accepts(token.strip()):
            challenge = {"WWW-Authenticate": 'Bearer realm="gangline"'}
            raise Refusal(401, "unauthorized", "a good token is needed: Authorization: Bearer TOKEN", headers=challenge)

    def _check_origin(self, origin: str, site: str, host: str) -> None:
        netloc = origin.lower().partition("://")[2]
        good = netloc == host.lower() or host_of(netloc) in self._proxies if origin else site in ("", "same-origin", "none")
        if not good:
            raise Refusal(403, "cross_origin", "a page of another origin may not change anything here")


def host_of(netloc: str) -> str:
    """Return the host of `host:port`, lower case and without brackets, empty when it is none."""
    try:
        parts = urlsplit(f"//{netloc}")
        _ = parts.port  # raises when it is not a number
        return (parts.hostname or "").lower() if netloc.isascii() and "@" not in netloc else ""
    except ValueError:
        return ""
