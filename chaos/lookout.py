"""What a run sees: the job by the schedulers' API, the log as it grows, the metrics that the job writes, and the processes on the nodes.

`until` is how a run waits: for a condition, with a deadline, showing meanwhile how things go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from gangline.chaos import training
from gangline.chaos.injector import Injector
from gangline.chaos.screen import Screen
from gangline.chaos.timeline import Entry
from gangline.chaos.verdict import Facts
from gangline.core.client.api import ApiError, Client, Unreachable
from gangline.core.client.localcluster import LocalCluster

_POLL_S = 0.05
_ASK_S = 0.3
#: no step for so long is said
_STILL_S = 1.0

#: of what the log says, what is printed as it goes
_SHOWN = frozenset({
    "leader_elected", "leader_resigned", "brake_set", "job_submitted", "gang_placed", "gangs_deferred", "gang_released", "gang_restarting",
    "gang_requeued", "gang_finished", "node_joined", "node_lost", "prepare_failed", "ranks_exited",
})  # fmt: skip


class WaitedInVain(Exception):
    """Something that had to happen did not; the message says what was waited for and what was seen."""


class Lookout:
    """Watches one cluster and one job on it. Its fields hold what was seen so far."""

    def __init__(self, cluster: LocalCluster, injector: Injector, screen: Screen, checkpoints: Path) -> None:
        """`checkpoints` is where the job writes, its metrics.jsonl too."""
        self.job_id = ""
        self.job: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self.steps: list[training.Step] = []
        self._cluster = cluster
        self._injector = injector
        self._screen = screen
        self._checkpoints = checkpoints
        self._metrics = _Tail(checkpoints / "metrics.jsonl")
        self._asked_at = 0.0

    @cached_property
    def client(self) -> Client:
        """The schedulers' API; the cluster must have been started."""
        return self._cluster.client()

    def facts(self) -> Facts:
        """Return what is true of the job now."""
        self.ask_job()
        job = self.job
        health = self.ask(lambda: self.client.get("/v1/health").body) or {}
        devices = {r["rank"]: (p["node"], tuple(r["gpus"])) for p in job["placement"] for r in p["ranks"]}
        ranks = self._injector.view().newest(self.job_id)
        last = job["last_restart"] or {}
        return Facts(
            generation=job["generation"], nodes=tuple(job["nodes"]), devices=devices,
            processes={n: r.process for n, r in ranks.items() if r.process is not None and r.generation == job["generation"]},
            cause=last.get("cause", ""), failure_class=last.get("failure_class", ""), leader=self.leader(),
            epoch=int(health.get("epoch", 0)), step=self.last_step(), checkpoint=self.newest_checkpoint(),
        )  # fmt: skip

    def resume(self, after: Facts) -> training.Resume | None:
        """Return how the generation of those facts went on, None when it has not done a step."""
        return next((r for r in training.resumes(self.steps) if r.generation == after.generation), None)

    # ------------------------------------------------------------ looking

    def until(self, condition: Callable[[], bool], patience_s: float, what: str, *, poll_s: float = _POLL_S, may_end: bool = False) -> None:
        """Wait for a condition, showing meanwhile how things go. Raises WaitedInVain, also when the job ends before unless it may."""
        deadline = time.monotonic() + patience_s
        while True:
            self.look()
            if condition():
                return
            over = self.job.get("state") == "finished" and not may_end
            if over or time.monotonic() > deadline:
                seen = f"the job is {self.job.get('state')} in generation {self.job.get('generation')}, {self.job.get('reason') or 'no reason'}"
                raise WaitedInVain(f"waited {patience_s:g} s for {what}; {seen}; last step {self.last_step()}")
            time.sleep(poll_s)

    def look(self) -> None:
        """Take in what is new, and show it."""
        self.steps += self._metrics.read()
        if self.steps:
            s = self.steps[-1]
            still = time.time_ns() / 1e9 - s.at_s > _STILL_S
            how = f"stands still, the job is {self.job.get('state')}" if still else f"loss {s.loss:.4f}  checkpoint {self.newest_checkpoint()}"
            self._screen.progress(f"step {s.step:4d}  {how}")
        if time.monotonic() - self._asked_at > _ASK_S:
            self._asked_at = time.monotonic()
            self.ask_log()
            if self.job_id:
                self.ask_job()

    def ask_job(self) -> None:
        """Take in the job as it is now."""
        self.job = self.ask(lambda: self.client.job(self.job_id).body) or self.job

    def ask_log(self) -> None:
        """Read on in the log, and show what is new."""
        following = self.entries[-1]["index"] + 1 if self.entries else 1
        answer = self.ask(lambda: self.client.request("GET", "/v1/events", {"from": following}, repeat=True, raw=True).body)
        for line in (answer or b"").splitlines():
            entry = json.loads(line)
            self.entries.append(entry)
            well = entry["event"] == "ranks_exited" and not any(x[2] for x in entry["body"]["exits"])
            if entry["event"] in _SHOWN and not well:
                self._screen.say(f"{entry['index']:>4}  {entry['message'].removeprefix(f'{self.job_id}: ')}", mark="log")

    def ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer, None while nobody can give one."""
        try:
            return question()
        except (ApiError, Unreachable):
            return None

    def leader(self) -> str:
        """Return the name of the leading scheduler, empty when none says that it leads."""
        return self._cluster.leader()

    def reported_since(self, epoch: int) -> bool:
        """Whether a later leader than that of `epoch` has taken in a checkpoint."""
        return any(e["event"] == "checkpoint_reported" and e["epoch"] > epoch for e in self.entries)

    def last_step_of(self, generation: int) -> int:
        """Return the last step of a generation."""
        return max((s.step for s in self.steps if s.generation == generation), default=0)

    def last_step(self) -> int:
        """Return the step that was finished last, which is lower than others after a restart."""
        return self.steps[-1].step if self.steps else 0

    def newest_checkpoint(self) -> int:
        """Return the step of the newest whole checkpoint on disk, 0 for none."""
        names = (path.name for path in self._checkpoints.glob("step-*"))
        return max((int(name[5:17]) for name in names), default=0)

    def rank_0_log(self, generation: int) -> str:
        """Return what rank 0 printed in a generation, through the API."""
        query = {"rank": 0, "generation": generation}
        answer = self.ask(lambda: self.client.logs(self.job_id, query).body)
        return (answer or b"").decode(errors="replace")


class _Tail:
    """The steps that a metrics file has got since it was last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[training.Step]:
        """Return new whole lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return training.parse(whole.decode(errors="replace"))
