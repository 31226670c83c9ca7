"""An actor: throws darts at a square and reports how many hit the circle in it, a batch at a time, until the learner says stop."""

from __future__ import annotations

import json
import os
import random
import socket
import time

from gangline import rank

BATCH = int(os.environ.get("BATCH", "50000"))


def connect(address: str, port: int) -> socket.socket:
    """Return a connection to the learner, which may still be starting."""
    while True:
        try:
            return socket.create_connection((address, port))
        except OSError:
            time.sleep(0.1)  # the agent ends this rank with its gang, should the learner never come


def main() -> None:
    """Work until told to stop."""
    me = rank.context()
    darts = random.Random(f"{me.generation}/{me.role_rank}")
    print(f"{me.role} {me.role_rank} of {me.role_world_size} on {me.node}", flush=True)
    with connect(me.master_addr, me.master_port) as connection, connection.makefile("rw") as line:
        while True:
            hits = sum(darts.random() ** 2 + darts.random() ** 2 < 1 for _ in range(BATCH))
            line.write(json.dumps({"hits": hits, "tried": BATCH}) + "\n")
            line.flush()
            if line.readline().strip() != "go on":
                return


if __name__ == "__main__":
    main()
