"""Snapshots of the folded state in the store, so that a restart folds only the end of the log. DESIGN section 2.

A snapshot is some chunks, each small enough for one request, and a manifest. The manifest is written last, after the chunks were read back
and compared, so a snapshot without one is the remains of a save that was cut short, or one that is going on. Every write is fenced, so two
schedulers never write one snapshot together.

    snapshot/<index>/000000 … 00000n   the state, zlib
    snapshot/<index>/manifest          how many chunks, how long, and the digest of the state: msgpack of `Manifest`
"""

from __future__ import annotations

import asyncio
import zlib

import msgspec

from gangline.core.model.codec import digest, pack, unpack
from gangline.core.store.api import Delete, KeyValue, Put, Store, StoreError, prefix_end
from gangline.core.store.fencing import write_fenced
from gangline.core.store.keys import Keys

#: version of the manifest and of the chunks' layout; the state in it has its own
FORMAT = 1

CHUNK_BYTES = 512 * 1024

#: speed counts more than size: a leader saves between two decisions
_ZLIB_LEVEL = 1

#: so much is compressed at a time before others in the event loop have their turn
_SLICE_BYTES = 1 << 20

_MANIFEST = "manifest"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a snapshot must be to be valid."""

    format: int
    #: the state is that after this log entry
    index: int
    chunks: int
    #: of all chunks together
    stored_bytes: int
    #: of the state
    state_bytes: int
    #: of the state, see codec.digest
    digest: bytes


class BadSave(StoreError):
    """A snapshot read back otherwise than it was written. The store is not to be trusted with truncating the log."""


class Snapshots:
    """The snapshots of one cluster."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        #: what `latest` passed over the last time, newest first: sentences for the operator
        self.skipped: list[str] = []

    async def save(self, state: bytes, index: int, token: int) -> None:
        """Write the state after log entry `index`, and return once it was read back and is valid. Saving the same again writes nothing.

        Raises Fenced, Unsettled, OutOfSpace, BadSave; what was written of it is then no snapshot and goes with the next `prune`.
        """
        if await self._has(state, index):
            return
        chunks = await _compress(state)
        manifest = Manifest(
            format=FORMAT, index=index, chunks=len(chunks), stored_bytes=sum(map(len, chunks)), state_bytes=len(state), digest=digest(state)
        )
        await self._delete(index, token)
        for number, chunk in enumerate(chunks):
            await self._put(index, number, chunk, token)
        read_back = (await self._store.range(self._keys.snapshot(index))).kvs
        if [kv.value for kv in read_back] != chunks:
            raise BadSave(f"snapshot {index}: {len(chunks)} chunks were written, the {len(read_back)} read back differ; do not truncate the log")
        await self._put(index, _MANIFEST, pack(manifest), token)
        if not await self._has(state, index):
            raise BadSave(f"snapshot {index}: its manifest read back is not the one written; do not truncate the log")

    async def latest(self, *, before: int | None = None) -> tuple[int, bytes] | None:
        """Return (index, state after that log entry) of the newest valid snapshot, of an index lower than `before`; None without one.

        Damaged and unfinished ones are passed over; `skipped` then says which and why.
        """
        self.skipped = []
        for index in sorted(await self._chunks_by_index(), reverse=True):
            if before is not None and index >= before:
                continue
            try:
                return index, await self._load(index)
            except ValueError as e:
                self.skipped.append(f"snapshot {index}: {e}; the one before is used")
        return None

    async def prune(self, keep: int = 2, *, token: int) -> int:
        """Delete all but the newest `keep` snapshots that are whole, and what is left of unfinished ones. Not while a `save` is under way.

        Returns the index of the oldest snapshot kept, 0 when there is none: log entries up to it can be truncated, and if a newer snapshot
        turns out to be damaged, that one and the rest of the log still give everything. Raises Fenced, Unsettled.
        """
        found = await self._chunks_by_index()
        whole = [index for index in sorted(found) if await self._is_whole(index, found[index])]
        kept = whole[-keep:]
        for index in sorted(found):
            if index not in kept:
                await self._delete(index, token)
        return kept[0] if kept else 0

    async def _has(self, state: bytes, index: int) -> bool:
        try:
            return await self._load(index) == state
        except ValueError:
            return False

    async def _load(self, index: int) -> bytes:
        """Return the state of one snapshot. Raises ValueError saying what is wrong with it."""
        kvs = (await self._store.range(self._keys.snapshot(index))).kvs
        if not kvs or kvs[-1].key != self._keys.snapshot_chunk(index, _MANIFEST):
            raise ValueError("has no manifest: its writing was cut short, or is still going on")
        manifest = _manifest(kvs.pop().value, index)
        if [kv.key for kv in kvs] != [self._keys.snapshot_chunk(index, n) for n in range(manifest.chunks)]:
            raise ValueError(f"has not exactly the {manifest.chunks} chunks of its manifest")
        return await _decompress(kvs, manifest)

    async def _is_whole(self, index: int, chunks: list[bytes]) -> bool:
        manifest = await self._store.get(self._keys.snapshot_chunk(index, _MANIFEST))
        try:
            return manifest is not None and len(chunks) == _manifest(manifest.value, index).chunks + 1
        except ValueError:
            return False

    async def _chunks_by_index(self) -> dict[int, list[bytes]]:
        """Return the chunk names, the manifest's included, by index. Keys that are not of a snapshot are not ours and are left alone."""
        found: dict[int, list[bytes]] = {}
        for kv in (await self._store.range(self._keys.snapshots, keys_only=True)).kvs:
            digits, slash, name = kv.key[len(self._keys.snapshots) :].partition(b"/")
            if slash and len(digits) == 16 and digits.isdigit():
                found.setdefault(int(digits), []).append(name)
        return found

    async def _put(self, index: int, chunk: int | str, value: bytes, token: int) -> None:
        put = Put(self._keys.snapshot_chunk(index, chunk), value)
        await write_fenced(self._store, self._keys, token, [put], f"write of snapshot {index} chunk {chunk}")

    async def _delete(self, index: int, token: int) -> None:
        prefix = self._keys.snapshot(index)
        await write_fenced(self._store, self._keys, token, [Delete(prefix, prefix_end(prefix))], f"deletion of snapshot {index}")


def _manifest(data: bytes, index: int) -> Manifest:
    manifest = unpack(data, Manifest)
    if manifest.format != FORMAT:
        raise ValueError(f"has format {manifest.format}, this process reads {FORMAT}")
    if manifest.index != index:
        raise ValueError(f"says that it is of index {manifest.index}")
    return manifest


async def _compress(state: bytes) -> list[bytes]:
    """Return zlib data in chunks of `CHUNK_BYTES`."""
    compressor = zlib.compressobj(_ZLIB_LEVEL)
    out = bytearray()
    for start in range(0, len(state), _SLICE_BYTES):
        out += compressor.compress(state[start : start + _SLICE_BYTES])
        await asyncio.sleep(0)
    out += compressor.flush()
    return [bytes(out[start : start + CHUNK_BYTES]) for start in range(0, len(out), CHUNK_BYTES)]


async def _decompress(kvs: list[KeyValue], manifest: Manifest) -> bytes:
    """Return the state. Never makes more than one byte beyond the size in the manifest. Raises ValueError."""
    if sum(len(kv.value) for kv in kvs) != manifest.stored_bytes:
        raise ValueError(f"its chunks have not {manifest.stored_bytes} bytes together: one is truncated")
    decompressor = zlib.decompressobj()
    out = bytearray()
    try:
        for kv in kvs:
            if len(out) > manifest.state_bytes:
                break
            out += decompressor.decompress(kv.value, manifest.state_bytes + 1 - len(out))
            await asyncio.sleep(0)
    except zlib.error as e:
        raise ValueError(f"its chunks are damaged: {e}") from e
    state = bytes(out)
    if len(state) != manifest.state_bytes or digest(state) != manifest.digest:
        raise ValueError("its digest is not that of its manifest: it is damaged")
    return state
