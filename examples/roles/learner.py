"""The learner: adds up what the actors have found, in steps of one batch from each, and tells them when to stop.

It is rank 0, so MASTER_ADDR and MASTER_PORT are its own. After a restart of the gang it goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from gangline import rank

STEPS = int(os.environ.get("STEPS", "100"))
#: says "I was asked to leave and am not done", as a shell does for a process that SIGTERM ended
EXIT_ASKED_TO_LEAVE = 143
EXIT_PEER_LOST = 3


def main() -> int:
    """Serve the actors for STEPS steps."""
    me = rank.context()
    rank.should_stop()  # from here on SIGTERM asks, and does not kill
    actors = me.world_size - me.role_world_size
    saved = rank.latest_checkpoint()
    step, hits, tried = json.loads(saved.path.read_text()) if saved else (0, 0, 0)
    with socket.create_server(("", me.master_port)) as server:
        lines = [server.accept()[0].makefile("rw") for _ in range(actors)]
    print(f"{me.role} of generation {me.generation}: {actors} actors, going on from step {step}", flush=True)
    while True:
        for line in lines:
            text = line.readline()
            if not text:
                return EXIT_PEER_LOST  # the actor that died is the news; the gang is restarted
            found = json.loads(text)
            hits, tried = hits + found["hits"], tried + found["tried"]
        step += 1
        rank.progress(step)
        with rank.checkpoint(step, keep=2) as path:
            path.write_text(json.dumps((step, hits, tried)))
        asked, over = rank.should_stop(), step >= STEPS
        for line in lines:
            line.write("stop\n" if over or asked else "go on\n")
            line.flush()
        print(f"step {step}: pi is about {4 * hits / tried:.5f}", flush=True)
        if over:
            return 0
        if asked:
            rank.acknowledge()
            return EXIT_ASKED_TO_LEAVE


if __name__ == "__main__":
    sys.exit(main())
