"""gRPC, kept out of everything else: channels to an etcd cluster, their calls and streams, and what their errors mean.

The error table is measured on etcd 3.4 and 3.5, not read off the documentation: one fault comes with several codes (a request that
is too large with INVALID_ARGUMENT or RESOURCE_EXHAUSTED) and one code for several faults (RESOURCE_EXHAUSTED also for NOSPACE, where
the write may have been applied), so that the text decides. Whatever is not known to have changed nothing is Ambiguous.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from gangline.core.store.api import (
    Ambiguous,
    Compacted,
    Corrupt,
    Definite,
    LeaseNotFound,
    OutOfSpace,
    StoreError,
    TooLarge,
    Unauthenticated,
)
from gangline.core.store.endpoints import Destination, Endpoints
from gangline.core.store.etcd_stubs import stub

_RECEIVE_BYTES_MAX = 64 << 20

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.lb_policy_name", "round_robin"),
    # A member that is frozen, not dead, still acknowledges packets. Only an unanswered ping tells, and only ping_timeout makes
    # an unanswered ping count at once: with the keepalive options alone it takes a minute longer. etcd allows one ping in 5 s.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    # etcd ends connections that ping while no call is open.
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", _RECEIVE_BYTES_MAX),
    # gRPC must not repeat a write.
    ("grpc.enable_retries", 0),
    # Channels of one process share connections otherwise, but lease traffic must have its own.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

#: after a lost connection, how often the names and files are looked at for changes
_LOOK_UP_PAUSE_S = 1.0
#: for calls that still run on a channel that was replaced
_GRACE_S = 10.0

_Code = grpc.StatusCode


class Channel:
    """Connections to all members of a cluster, spread over by round robin.

    When a call finds no connection, names and certificate files are looked up again, and a new channel replaces this one's if
    they have changed.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._destination = Destination("")
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[str, SimpleNamespace] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        """Make the channel. It connects with the first call. Raises Ambiguous when names or files cannot be read."""
        if self._channel is None:
            try:
                await self._renew()
            except OSError as error:
                raise Ambiguous(f"connect to etcd at {self._endpoints}: {error}") from error

    async def close(self) -> None:
        """End all calls, which raise Ambiguous, and all connections."""
        self._closed = True
        if self._refreshing:
            self._refreshing.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def unary(self, service: str, method: str, request: Any, timeout_s: float, what: str) -> Any:
        """Send a request exactly once and return the answer. `what` begins the messages of the StoreErrors that it raises."""
        call = self._method(service, method, what)(request, timeout=timeout_s)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, what) from None
        except asyncio.CancelledError:
            # gRPC uses the same exception when the channel is closed under a call; then nobody has cancelled this task.
            if _cancelled_by_caller():
                raise
            raise Ambiguous(f"{what}: the connection to {self._endpoints} was closed while waiting for the answer") from None

    def stream(self, service: str, method: str, what: str) -> BidirectionalStream:
        """Start a stream on one of the connections."""
        return BidirectionalStream(self._method(service, method, what)(), what, self._translate)

    def _method(self, service: str, method: str, what: str) -> Any:
        if self._closed or self._channel is None:
            raise Definite(f"{what}: this store is closed")
        methods = self._stubs.get(service)
        if methods is None:
            methods = self._stubs[service] = stub(self._channel, service)
        return getattr(methods, method)

    def _translate(self, error: grpc.aio.AioRpcError, what: str) -> StoreError:
        if error.code() is _Code.UNAVAILABLE and not self._closed and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refresh())
        return translate(error.code(), error.details() or "", f"{what} at {self._endpoints}")

    async def _refresh(self) -> None:
        # A file that is just being written or a name server that is down: the next lost connection looks again.
        try:
            await self._renew()
        except OSError:
            pass
        finally:
            await asyncio.sleep(_LOOK_UP_PAUSE_S)

    async def _renew(self) -> None:
        """Replace the channel if names or files have changed."""
        destination = await self._endpoints.look_up()
        if destination == self._destination:
            return
        old, self._channel = self._channel, _build(destination)
        self._destination = destination
        self._stubs = {}
        if old is not None:
            await old.close(_GRACE_S)


class BidirectionalStream:
    """A stream of requests and answers. All errors are StoreErrors; the end of the stream is Ambiguous."""

    def __init__(self, call: Any, what: str, translate: Callable[[grpc.aio.AioRpcError, str], StoreError]) -> None:
        self._call = call
        self._what = what
        self._translate = translate

    async def send(self, request: Any) -> None:
        """Send one request; only one `send` may run at a time."""
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, self._what) from None
        except asyncio.InvalidStateError:
            raise Ambiguous(f"{self._what}: the stream has ended") from None
        except asyncio.CancelledError:
            if _cancelled_by_caller():
                raise
            raise Ambiguous(f"{self._what}: the stream was closed") from None

    async def receive(self) -> Any:
        """Return the next answer."""
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, self._what) from None
        except asyncio.CancelledError:
            if _cancelled_by_caller():
                raise
            raise Ambiguous(f"{self._what}: the stream was closed") from None
        if answer is grpc.aio.EOF:
            raise Ambiguous(f"{self._what}: the server ended the stream")
        return answer

    def close(self) -> None:
        """End the stream; a pending `receive` raises Ambiguous."""
        self._call.cancel()


def _build(destination: Destination) -> grpc.aio.Channel:
    options = list(_OPTIONS)
    if not destination.ca:
        return grpc.aio.insecure_channel(destination.target, options=options)
    options.append(("grpc.ssl_target_name_override", destination.server_name))
    credentials = grpc.ssl_channel_credentials(destination.ca, destination.key, destination.cert)
    return grpc.aio.secure_channel(destination.target, credentials, options=options)


def _cancelled_by_caller() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def translate(code: grpc.StatusCode, text: str, what: str) -> StoreError:
    """Return the error of the Store that a gRPC status stands for."""
    seen = f"{what}: {code.name}: {text}"
    if "corrupt cluster" in text or "alarm:CORRUPT" in text or code is _Code.DATA_LOSS:
        return Corrupt(f"{seen}; stop writing, compare the members' data and restore from a backup")
    match code:
        case _Code.INVALID_ARGUMENT:
            return _invalid(text, seen)
        case _Code.RESOURCE_EXHAUSTED:
            return _exhausted(text, seen)
        case _Code.UNAUTHENTICATED:
            return Unauthenticated(f"{seen}; check the client certificate and the cluster's users")
        case _Code.PERMISSION_DENIED:
            return Definite(f"{seen}; grant the user of this certificate a role for these keys")
        case _Code.OUT_OF_RANGE if "compacted" in text:
            return Compacted(f"{seen}; list again and go on from the list's revision", 0)
        case _Code.NOT_FOUND if "lease not found" in text:
            return LeaseNotFound(f"{seen}; it has expired or was revoked, ask for a new one")
        case _Code.OUT_OF_RANGE | _Code.NOT_FOUND | _Code.FAILED_PRECONDITION | _Code.UNIMPLEMENTED | _Code.ALREADY_EXISTS:
            return Definite(seen)
        case _:
            return Ambiguous(seen)


def _invalid(text: str, seen: str) -> StoreError:
    if "too large" in text:
        return TooLarge(f"{seen}; the cluster's limit is --max-request-bytes, 1.5 MiB by default")
    if "too many operations" in text:
        return TooLarge(f"{seen}; the cluster's limit is --max-txn-ops, 128 by default")
    if "auth" in text or "user name is empty" in text:
        return Unauthenticated(f"{seen}; check the client certificate and the cluster's users")
    return Definite(seen)


def _exhausted(text: str, seen: str) -> StoreError:
    if "space exceeded" in text:
        return OutOfSpace(f"{seen}; compact, defragment one member after the other, then run: etcdctl alarm disarm")
    if "message larger than max" in text:
        return TooLarge(f"{seen}; the cluster's limit is --max-request-bytes, 1.5 MiB by default, and ours {_RECEIVE_BYTES_MAX} bytes")
    return Ambiguous(seen)
