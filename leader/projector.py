"""From the state to what agents read: `nodes/<id>/desired` and `jobs/<id>`.

Documents are made right after a commit, so they say nothing that could still be taken back. A writer task sends them, newest first wins;
every write is fenced by the leader's token, so that a deposed leader cannot overwrite its successor's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import tenacity

from gangline.core.model.codec import pack, unpack
from gangline.core.model.documents import Desired
from gangline.core.model.project import project
from gangline.core.model.state import State
from gangline.core.store.api import Ambiguous, Delete, KeyValue, Op, Put, Store
from gangline.core.store.fencing import write_fenced
from gangline.core.store.keys import Keys

#: an operation whose answer is lost is carried out by then or never: twice the time that one may take
_LATE_S = 10.0
#: under the store's limits of 128 operations and 1.5 MiB
_TXN_OPS = 100
_TXN_BYTES = 900_000
#: a store that does not answer for so long ends the term
_GIVE_UP_S = 60.0
_AGAIN_S = 0.05


class Projector:
    """Keeps the projected keys equal to `project(state, node)`."""

    def __init__(self, store: Store, keys: Keys, token: int) -> None:
        self._store = store
        self._keys = keys
        self._token = token
        #: the newest document of each node, as written or about to be
        self._current: dict[str, Desired] = {}
        self._specs: set[str] = set()
        self._outbox: dict[bytes, Op] = {}
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def adopt(self, kvs: Iterable[KeyValue], specs: Iterable[KeyValue]) -> None:
        """Take over what the leaders before have written. A document that cannot be read is written anew."""
        for kv in kvs:
            named = self._keys.node_of(kv.key)
            if named is not None and named[1] == "desired":
                try:
                    self._current[named[0]] = unpack(kv.value, Desired)
                except ValueError:
                    continue
        self._specs = {kv.key[len(self._keys.jobs) :].decode("utf-8", "replace") for kv in specs}

    def update(self, state: State, nodes: Iterable[str]) -> int:
        """Bring `nodes` up to date with a committed state. Returns how many documents changed."""
        changed = 0
        specs: dict[bytes, Op] = {}
        docs: dict[bytes, Op] = {}
        for node in sorted(nodes):
            doc = project(state, node)
            old = self._current.get(node)
            if old is not None and _same(old, doc) and not self._awaited(state, node, old.index):
                continue
            changed += 1
            self._current[node] = doc
            docs[self._keys.desired(node)] = Put(self._keys.desired(node), pack(doc))
            for gang in doc.gangs:
                if gang.job not in self._specs:
                    self._specs.add(gang.job)
                    specs[self._keys.job(gang.job)] = Put(self._keys.job(gang.job), pack(state.jobs[gang.job].spec))
        self._enqueue(specs | docs)
        return changed

    def withdraw(self, jobs: Iterable[str]) -> None:
        """These jobs are over: their specs go, after the documents that no longer name them."""
        gone = [j for j in jobs if j in self._specs]
        self._specs.difference_update(gone)
        self._enqueue({self._keys.job(j): Delete(self._keys.job(j)) for j in gone})

    def withdraw_unknown(self, state: State) -> None:
        """Delete specs that leaders before left behind."""
        self.withdraw([j for j in sorted(self._specs) if j not in state.jobs or state.jobs[j].state == "finished"])

    async def run(self) -> None:
        """Write what is waiting, for ever. Raises Fenced when another leads."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                ops = self._take()
                await self._write(ops)
            self._empty.set()

    async def drained(self) -> None:
        """Return when everything that was waiting is written."""
        await self._empty.wait()

    def _awaited(self, state: State, node: str, written: int) -> bool:
        """An agent is to confirm that something is gone, and can do so only by having seen a document of that index."""
        holder = state.nodes.get(node)
        return holder is not None and holder.status == "up" and any(h.leaving_since > written for h in holder.holdings.values())

    def _enqueue(self, ops: dict[bytes, Op]) -> None:
        if not ops:
            return
        for key, op in ops.items():
            self._outbox.pop(key, None)
            self._outbox[key] = op
        self._empty.clear()
        self._wake.set()

    def _take(self) -> list[Op]:
        ops: list[Op] = []
        size = 0
        for key in list(self._outbox):
            op = self._outbox[key]
            size += len(op.value) if isinstance(op, Put) else 0
            if ops and (len(ops) >= _TXN_OPS or size > _TXN_BYTES):
                break
            ops.append(self._outbox.pop(key))
        return ops

    async def _write(self, ops: list[Op]) -> None:
        what = f"projection of {len(ops)} keys"
        try:
            await write_fenced(self._store, self._keys, self._token, ops, what, doubted=lambda: self._doubt(ops))
            return
        except Ambiguous:
            await asyncio.sleep(_AGAIN_S)
        # The documents are states: writing them again is harmless. A write whose answer is lost may still be carried out after others of this
        # term, which the fence does not tell apart: see `_confirm`.
        retry = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Ambiguous),
            wait=tenacity.wait_exponential(_AGAIN_S, max=2),
            stop=tenacity.stop_after_delay(_GIVE_UP_S),
            reraise=True,
        )
        await retry(write_fenced, self._store, self._keys, self._token, ops, what)


    def _doubt(self, ops: list[Op]) -> None:
        asyncio.get_running_loop().call_later(_LATE_S, self._confirm, ops)

    def _confirm(self, ops: list[Op]) -> None:
        """Nothing of a write whose answer was lost can be under way any more: write once more what should be there now."""
        again: dict[bytes, Op] = {}
        for op in ops:
            named = self._keys.node_of(op.key)
            if named is not None and named[0] in self._current:
                again[op.key] = Put(op.key, pack(self._current[named[0]]))
            elif named is None:
                kept = op.key[len(self._keys.jobs) :].decode("utf-8", "replace") in self._specs
                again[op.key] = op if kept else Delete(op.key)
        self._enqueue({key: op for key, op in again.items() if key not in self._outbox})


def _same(a: Desired, b: Desired) -> bool:
    return msgspec.structs.replace(a, index=0, epoch=0) == msgspec.structs.replace(b, index=0, epoch=0)
