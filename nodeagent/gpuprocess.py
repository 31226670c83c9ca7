"""`python -m gangline.nodeagent.gpuprocess`: asks the driver of the GPUs, so that one that hangs or crashes takes nothing with it.

It answers requests on its standard input, a socket, one after the other, and sends what the driver's event set tells as it comes. It knows
nothing of deadlines: the agent that has started it (`gpudriver.py`) kills it when an answer does not come. When the agent is gone, it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time

from gangline.nodeagent import kernel, nvmlmig
from gangline.nodeagent.gpudata import (
    HEAD_BYTES,
    MESSAGE_BYTES_MAX,
    Answer,
    Hopeless,
    Instances,
    Message,
    Partition,
    ReadFacts,
    ReadSamples,
    Request,
    decode_request,
    framed,
)
from gangline.nodeagent.nvml import Driver, Events, Gone, quietly_imported

nvml = quietly_imported()

#: how long one wait for events takes at most; with it the age of the last wait is known
_EVENTS_MS = 500
#: pause after the event set has failed, for example because a GPU is lost
_EVENTS_PAUSE_S = 1.0


class Server:
    """Answers on one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._waited_at = time.monotonic()

    def run(self) -> None:
        """Serve until the other side is gone."""
        try:
            self._driver = Driver()
        except (Gone, nvml.NVMLError) as e:
            self._send(Hopeless(f"NVML: {e}"))
            return
        threading.Thread(target=self._watch, name="events", daemon=True).start()
        while (request := self._receive()) is not None:
            self._send(self._answer(request))

    def _answer(self, request: Request) -> Answer:
        try:
            match request.what:
                case ReadFacts():
                    return Answer(request.id, facts=self._driver.facts())
                case ReadSamples():
                    return Answer(request.id, samples=self._driver.samples(time.monotonic() - self._waited_at))
                case Partition(uuid) as ask:
                    handle = self._driver.handles.get(uuid)
                    if handle is None:
                        return Answer(request.id, f"the driver knows no GPU {uuid}")
                    return Answer(request.id, instances=Instances(nvmlmig.partition(handle, ask)))
        except nvmlmig.Impossible as e:
            return Answer(request.id, str(e))
        except nvml.NVMLError as e:
            return Answer(request.id, f"NVML: {e}")

    def _watch(self) -> None:
        """Send what happens, for ever; the event set is made anew when it fails."""
        while True:
            with contextlib.suppress(nvml.NVMLError):
                events = Events(self._driver)
                while True:
                    happened = events.wait(_EVENTS_MS)
                    self._waited_at = time.monotonic()
                    if happened is None:
                        continue
                    self._send(happened)
                    if happened.kind == "lost":
                        break
            self._waited_at = time.monotonic()
            time.sleep(_EVENTS_PAUSE_S)

    def _send(self, message: Message) -> None:
        with self._sending:
            try:
                self._socket.sendall(framed(message))
            except OSError:
                os._exit(0)

    def _receive(self) -> Request | None:
        head = self._read(HEAD_BYTES)
        body = self._read(int.from_bytes(head, "big")) if len(head) == HEAD_BYTES else b""
        return decode_request(body) if body else None

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < min(size, MESSAGE_BYTES_MAX):
            part = self._socket.recv(size - len(data))
            if not part:
                return b""
            data += part
        return data


def main() -> None:
    """Serve on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent, which ends us
    kernel.die_with_parent(signal.SIGKILL)  # also while the driver hangs and nobody reads the socket
    kernel.set_name("gl-gpus")
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as sock:
        sock.setblocking(True)
        Server(sock).run()
    os._exit(0)  # not through the exit handlers of a library that may hang


if __name__ == "__main__":
    main()
