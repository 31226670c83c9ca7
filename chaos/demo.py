"""`python -m gangline.chaos.demo`: a gang trains, and loses a rank, a node and the leading scheduler while it does.

One etcd, two schedulers and four agents with eight simulated GPUs each, all processes of their own. Sixteen ranks on two nodes train a small
network on a real data set and exchange gradients over sockets at every step. Everything that is said at the end is taken from the log, from
the schedulers' API and from what the job wrote; `verdict.py` has what must hold. Exit status 0 when it all does, else 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click
import msgspec

from gangline.chaos import containers, replaying, training, verdict
from gangline.chaos import faults as f
from gangline.chaos.checker import examine
from gangline.chaos.checker.report import TITLES
from gangline.chaos.checker.sources import gather
from gangline.chaos.injector import Injection, InjectionFailed, Injector
from gangline.chaos.local import OnLocalCluster
from gangline.chaos.lookout import Lookout, WaitedInVain
from gangline.chaos.screen import Screen
from gangline.chaos.targets import NoTarget
from gangline.chaos.timeline import Recovery, recovery, recovery_table, timeline
from gangline.chaos.verdict import Check, Facts
from gangline.core.client.api import ApiError, Unreachable, new_key
from gangline.core.client.localcluster import ClusterError, LocalCluster
from gangline.core.model.codec import BadFrame
from gangline.core.model.jobfile import parse_yaml, to_json
from gangline.core.model.problems import BadJob
from gangline.core.model.spec import Checkpoint
from gangline.core.store.api import StoreError
from gangline.nodeagent import nodefile

CLUSTER = "demo"
NODES, GPUS, SCHEDULERS = 4, 8, 2
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "digits"

#: the rank that is killed; not rank 0, which writes the metrics, and not at the edge of a node
VICTIM = 5
CHECKPOINT_EVERY = 20
STEP_TIME_MS = 50
#: a fault comes so many steps after a checkpoint: late enough that steps are lost, early enough that the next one is not being written
WINDOW = range(5, 13)


class Demo:
    """One run. `run` does it all; afterwards its fields hold what was seen."""

    def __init__(self, cluster: LocalCluster, screen: Screen, steps: int, backend: str, driver: str = "process") -> None:
        self.steps_wanted = steps
        self.driver = driver
        self.backend = backend
        self.screen = screen
        self.cluster = cluster
        self.injector = Injector(OnLocalCluster(cluster))
        self.checkpoints = cluster.state_dir / "checkpoints"
        self.see = Lookout(cluster, self.injector, screen, self.checkpoints)
        self.checks: list[Check] = []
        self.injections: list[Injection] = []
        self.recoveries: list[Recovery] = []
        self.accuracy: float | None = None
        self.replay: replaying.Replay | None = None
        #: what the checker says of each of S1 to S16: violated, checked, partly checked, not checked
        self.assertions: dict[str, str] = {}

    def run(self) -> None:
        """Do the whole of it. Raises WaitedInVain, ClusterError, NoTarget, InjectionFailed."""
        self.screen.say(f"starting one etcd, {SCHEDULERS} schedulers and {NODES} nodes with {GPUS} simulated GPUs each")
        self.cluster.start()
        names = self.cluster.processes
        self.screen.say(f"{len(names)} processes are up: {', '.join(names)}; {self.cluster.leader()} leads")
        self._submit()
        self._kill_rank()
        node_killed = self._kill_node()
        leader_killed = self._kill_leader()
        for injection in (node_killed, leader_killed):
            for what in self.injector.heal(injection):
                self.screen.say(f"healed: {what}")
        self._finish()
        self._replay()

    # ------------------------------------------------------------ the acts

    def _submit(self) -> None:
        answer = self.see.client.submit(_job(self.checkpoints, self.steps_wanted, self.backend, self.driver), new_key()).body
        self.see.job_id = answer["job"]
        self.screen.say(f"submitted {answer['name']} as {self.see.job_id}: 16 ranks on two nodes, {self.steps_wanted} steps")
        self.see.until(lambda: self.see.job.get("state") == "running" and bool(self.see.steps), 120.0, "the gang to train")
        self.screen.say(f"generation 1 trains on {' and '.join(self.see.job['nodes'])}")

    def _kill_rank(self) -> None:
        self._good_moment()
        before, injection = self._inject(f.KillRank(self.see.job_id, VICTIM))
        after = self._after_restart(before, 60.0)
        self._note(verdict.after_rank_kill(before, after, self.see.resume(after)))
        self._record(injection, before, after)

    def _kill_node(self) -> Injection:
        self._good_moment()
        # The node of rank 0, which writes checkpoints and metrics: nothing is spared.
        node = self.see.job["nodes"][0]
        before, injection = self._inject(f.KillNode(node))
        after = self._after_restart(before, 90.0)
        self._note(verdict.after_node_kill(node, before, after, self.see.resume(after)))
        self._record(injection, before, after)
        return injection

    def _kill_leader(self) -> Injection:
        self._good_moment()
        before, injection = self._inject(f.KillLeader())
        killed = injection.targets[0].component
        self.see.until(lambda: self.see.leader() not in ("", killed), 40.0, "the other scheduler to lead")
        reached = self.see.last_step() + CHECKPOINT_EVERY
        self.see.until(
            lambda: self.see.reported_since(before.epoch) and self.see.last_step() >= reached, 30.0, "the new leader to hear of a checkpoint"
        )
        to_s = time.time_ns() / 1e9
        after = self.see.facts()
        self._note(verdict.after_leader_kill(before, after, self.see.steps, injection.at_ms / 1000, to_s))
        self._record(injection, before, after)
        return injection

    def _finish(self) -> None:
        self.see.until(lambda: self.see.job.get("state") == "finished", 90.0, "the job to finish", may_end=True)
        rows: list[dict[str, Any]] = []

        def clean() -> bool:
            rows[:] = self.see.ask(self.see.client.nodes) or []
            return bool(rows) and all(row["state"] == "up" and row["gpus_free"] == row["gpus_total"] for row in rows)

        with contextlib.suppress(WaitedInVain):
            self.see.until(clean, 20.0, "the nodes to be free", may_end=True)
        self.see.ask_log()
        text = self.see.rank_0_log(self.see.job["generation"])
        found = re.search(r"done step=\d+ loss=\S+ accuracy=([0-9.]+)", text)
        self.accuracy = float(found[1]) if found else None
        free = ", ".join(f"{row['id']} {row['state']} {row['gpus_free']}/{row['gpus_total']}" for row in rows)
        self._note([
            *verdict.at_the_end(self.see.job, self.see.steps, self.steps_wanted, self.accuracy, expected_resumes=2),
            Check("all nodes are back, with all their GPUs free", clean(), free),
            self._told_the_job(),
            self._in_the_story(),
        ])  # fmt: skip

    def _replay(self) -> None:
        self.replay = found = replaying.compare(self.cluster.etcd, CLUSTER, self.cluster.urls, patience_s=20.0)
        job = found.state.jobs.get(self.see.job_id)
        charged = len(job.failures_ms) if job is not None else -1
        live = ", ".join(f"{url} index {index} {digest[:12]}" for url, (index, digest) in found.live.items())
        # What was still on its way when the nodes had become free is at rest by now.
        evidence = gather(str(self.cluster.state_dir))
        checked = examine(**evidence._asdict(), quiescent_after=time.time_ns() // 1_000_000)
        self.assertions = {a: checked.status(a) for a in TITLES}
        first = f": {checked.violations[0]}" if checked.violations else f", {checked.events} events in {checked.entries} entries"
        self._note([
            Check("the log and the agents' records keep S1 to S16", checked.ok, f"{len(checked.violations)} violations{first}"),
            Check("replaying the log gives the state of every scheduler, byte for byte", found.agreed and len(found.live) == SCHEDULERS,
                  f"replay: index {found.state.index} {found.digest[:12]}, {found.size_bytes} bytes; {live}"),
            Check("the job was charged with the killed rank alone", charged == 1, f"{charged} of its restarts count"),
        ])  # fmt: skip

    def _told_the_job(self) -> Check:
        """The job itself was told why it had to go on, and from where: rank 0 prints it."""
        found = training.resumes(self.see.steps)
        lines = [next((x for x in self.see.rank_0_log(r.generation).splitlines() if x.startswith("resumed ")), "nothing") for r in found]
        ok = len(found) == 2 and all(
            line.startswith(f"resumed from checkpoint step={r.checkpoint} ") and line.endswith(f" cause={cause}")
            for line, r, cause in zip(lines, found, ("rank_failed", "node_lost"), strict=True)
        )
        return Check("the job was told why, and went on from where it was told", ok, "; ".join(lines))

    def _in_the_story(self) -> Check:
        """The story of the job has everything that the log says of it."""
        story = self.see.ask(lambda: self.see.client.get(f"/v1/jobs/{self.see.job_id}/story").body) or {"entries": []}
        mine = {(e["index"], e["event"]) for e in self.see.entries if e["body"].get("job") == self.see.job_id}
        told = {(e["index"], e["event"]) for e in story["entries"]}
        lost = any(e["event"] == "node_lost" for e in story["entries"])
        seen = f"{len(told)} entries, {len(mine - told)} missing"
        return Check("the job's story tells all of it, and of the lost node", lost and mine <= told, seen)

    # ------------------------------------------------------------ steps of the acts

    def _good_moment(self) -> None:
        """Wait until this generation has written a checkpoint of its own and has done some steps after it."""
        began = next(s.step for s in self.see.steps if s.generation == self.see.steps[-1].generation)

        def ready() -> bool:
            last = self.see.last_step()
            saved = last // CHECKPOINT_EVERY * CHECKPOINT_EVERY
            return saved > began and last - saved in WINDOW and self.see.newest_checkpoint() == saved

        self.see.until(ready, 40.0, "a checkpoint and some steps", poll_s=0.01)

    def _inject(self, fault: f.Fault) -> tuple[Facts, Injection]:
        before = self.see.facts()
        injection = self.injector.inject(fault)
        hit = ", ".join(f"{t.what} (pid {t.process.pid})" for t in injection.targets[:2])
        more = f" and {len(injection.targets) - 2} more processes" if len(injection.targets) > 2 else ""
        self.screen.say(f"{fault}: {hit}{more}, at step {before.step}, checkpoint {before.checkpoint}", mark=">>>")
        self.injections.append(injection)
        self.see.look()
        return dataclasses.replace(before, step=self.see.last_step(), checkpoint=self.see.newest_checkpoint()), injection

    def _after_restart(self, before: Facts, patience_s: float) -> Facts:
        """Wait until a newer generation has done again what was lost, and a little more."""

        def caught_up() -> bool:
            generation = self.see.job.get("generation", 0)
            reached = max(s.step for s in self.see.steps if s.generation <= before.generation)
            return generation > before.generation and self.see.job["state"] == "running" and self.see.last_step_of(generation) > reached

        self.see.until(caught_up, patience_s, "the gang to train again")
        return self.see.facts()

    def _record(self, injection: Injection, before: Facts, after: Facts) -> None:
        self.see.ask_log()
        found = recovery(
            injection, self.see.job_id, (before.generation, before.nodes), (after.generation, after.nodes), self.see.entries, self.see.steps
        )
        self.recoveries.append(found)
        back = f"{found.training_s:.1f} s" if found.training_s is not None else "?"
        if after.generation == before.generation:
            self.screen.say(f"survived: {after.leader} leads {found.detected_s} s after the fault; the ranks did not notice")
        else:
            self.screen.say(f"survived: training again after {back}, {found.steps_repeated} steps repeated, on {' and '.join(after.nodes)}")

    def _note(self, checks: Sequence[Check]) -> None:
        self.checks += checks
        for check in checks:
            if not check.ok:
                self.screen.say(f"DIFFERS: {check.name}: {check.detail}", mark="!!!")

    # ------------------------------------------------------------ the report

    @property
    def ok(self) -> bool:
        """Everything was checked, and holds."""
        return self.replay is not None and all(c.ok for c in self.checks)

    def report(self) -> Iterator[str]:
        """Yield the report for people."""
        if self.see.entries:
            submitted = next((e for e in self.see.entries if e["event"] == "job_submitted"), self.see.entries[0])
            yield from ("", "What happened, from the log (seconds since the submission, index in the log):", "")
            yield from timeline(self.see.entries, self.injections, submitted["at_ms"], self.see.job_id)
        if self.recoveries:
            yield from ("", "Recoveries (times after the fault):", "")
            yield from recovery_table(self.recoveries)
        if self.see.steps:
            yield from ("", "Loss over time (logarithmic). R rank killed, N node killed, L leader killed, ^ went on from a checkpoint:", "")
            yield from training.curve(self.see.steps, marks=[(i.at_ms / 1000, _MARKS[type(i.fault)]) for i in self.injections])
        yield ""
        for check in self.checks:
            yield f"{'ok  ' if check.ok else 'DIFFERS'} {check.name}: {check.detail}"

    def figures(self) -> dict[str, Any]:
        """Return what was seen as plain data, for --json."""
        losses = training.final(self.see.steps)
        last = max(losses, default=0)
        replay = self.replay
        return {
            "ok": self.ok,
            "elapsed_s": round(self.screen.elapsed_s, 1),
            "job": {k: self.see.job.get(k) for k in ("id", "name", "state", "outcome", "generation", "restarts", "nodes")},
            "training": {
                "steps": len(losses), "final_loss": losses.get(last), "accuracy": self.accuracy,
                "largest_difference": training.largest_difference(self.see.steps),
            },
            "injections": [i.to_json() for i in self.injections],
            "recoveries": [r.to_json() for r in self.recoveries],
            "replay": replay and {"index": replay.state.index, "digest": replay.digest, "bytes": replay.size_bytes, "schedulers": replay.live},
            "assertions": self.assertions,
            "checks": [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in self.checks],
        }  # fmt: skip


_MARKS: Mapping[type[f.Fault], str] = {f.KillRank: "R", f.KillNode: "N", f.KillLeader: "L"}


def _job(checkpoints: Path, steps: int, backend: str, driver: str) -> dict[str, Any]:
    """Return the job of the example, with this run's options."""
    spec = parse_yaml((EXAMPLE / "job.yaml").read_bytes(), "job.yaml")[0]
    command = (
        sys.executable, str(EXAMPLE / "train.py"), "--backend", backend, "--steps", str(steps),
        "--checkpoint-every", str(CHECKPOINT_EVERY), "--step-time-ms", str(STEP_TIME_MS),
    )  # fmt: skip
    spec = msgspec.structs.replace(spec, command=command, checkpoint=Checkpoint(path=str(checkpoints), interval_s=1.0))
    return to_json(spec if driver == "process" else containers.contained(spec, EXAMPLE.parents[1]))


# ---------------------------------------------------------------- the command


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--state-dir", default=".gangline/demo", type=click.Path(path_type=Path), help="Where all is kept; emptied first.")
@click.option("--steps", default=480, type=click.IntRange(300, 100_000), help="Steps of training; the job must last until the leader is killed.")
@click.option("--backend", default="auto", type=click.Choice(["auto", "gloo", "ring"]), help="How gradients are summed; gloo needs torch.")
@click.option("--driver", default="process", type=click.Choice(["process", "podman"]), help="Whether ranks are processes or containers.")
@click.option("--node-config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The nodes' file, see docs/nodes.md.")
@click.option("--keep", is_flag=True, help="Keep the state directory, with its logs, after a success too.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output.")
def main(state_dir: Path, steps: int, backend: str, driver: str, node_config: Path | None, keep: bool, as_json: bool) -> NoReturn:
    """Train on a small cluster while a rank, a node and the leading scheduler are killed, and check that nothing was lost."""
    screen = Screen(sys.stderr if as_json else sys.stdout)
    missing = [name for name in ("numpy", "sklearn") if importlib.util.find_spec(name) is None]
    if missing or not EXAMPLE.is_dir():
        needs = f"{' and '.join(missing)}: pip install 'gangline[examples]'" if missing else f"a source tree: there is no {EXAMPLE}"
        raise click.ClickException(f"the demo needs {needs}")
    try:
        rules = nodefile.load(node_config)
        if driver == "podman":
            containers.make_image(rules)
    except (containers.NoContainers, BadJob) as e:
        raise click.ClickException(f"no containers: {e}") from None
    options = {"config": str(node_config.resolve())} if node_config is not None else {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with _alone(state_dir):
            cluster = LocalCluster(_emptied(state_dir), NODES, GPUS, SCHEDULERS, cluster=CLUSTER, agent_options=options)
            demo = _run(cluster, screen, steps, backend, driver)
            if driver == "podman":
                containers.remove_left(rules, cluster.state_dir)
    except KeyboardInterrupt:
        screen.say(f"interrupted; all processes were ended, logs are in {state_dir}")
        sys.exit(130)
    if as_json:
        json.dump(demo.figures(), sys.stdout, indent=1)
        print()
    if demo.ok and not keep:
        shutil.rmtree(state_dir, ignore_errors=True)
    elif not demo.ok:
        screen.plain(f"The state directory, with the logs of all processes, is {state_dir}.")
    sys.exit(0 if demo.ok else 1)


def _run(cluster: LocalCluster, screen: Screen, steps: int, backend: str, driver: str) -> Demo:
    """Run the demo on the cluster, end the cluster whatever happens, and print the report."""
    demo = Demo(cluster, screen, steps, backend, driver)
    try:
        demo.run()
    except (WaitedInVain, ClusterError, NoTarget, InjectionFailed, ApiError, Unreachable, BadFrame, StoreError) as e:
        demo.checks.append(Check("the demo ran to its end", False, f"{type(e).__name__}: {e}"))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        cluster.stop()
        left = demo.injector.view()
        demo.checks.append(Check("nothing is left running", not left.ranks and not left.components, f"{len(left.ranks)} ranks left"))
    screen.plain(*demo.report())
    failed = [c for c in demo.checks if not c.ok]
    verdict_line = "everything held" if demo.ok else f"{len(failed)} of {len(demo.checks)} checks differ: {'; '.join(c.name for c in failed)}"
    screen.plain("", f"{verdict_line}, after {screen.elapsed_s:.0f} s")
    return demo


@contextlib.contextmanager
def _alone(state_dir: Path) -> Iterator[TextIO]:
    """Keep another demo from using the same directory meanwhile."""
    path = state_dir.with_name(state_dir.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise click.ClickException(f"another demo runs in {state_dir}; give this one its own --state-dir") from None
        yield file


def _emptied(state_dir: Path) -> Path:
    """End what an earlier run has left there, remove its files, and return the directory."""
    if state_dir.exists():
        ours = (state_dir / "cluster.json").exists() or not any(state_dir.iterdir())
        if not ours:
            raise click.ClickException(f"{state_dir} holds something else than a local cluster; give another --state-dir")
        LocalCluster(state_dir).stop()
        shutil.rmtree(state_dir)
    state_dir.mkdir(parents=True)
    return state_dir


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
