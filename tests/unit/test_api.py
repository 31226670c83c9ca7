"""The HTTP API over a loopback socket, in front of a scheduler that folds real events in memory. B-numbers are rows of RELIABILITY 4.2."""

import asyncio
import base64
import gzip
import io
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gangline.core import telemetry
from gangline.core.model import events as ev
from gangline.core.model.codec import Frame, decode_frame, encode_event, encode_frame
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.events import LogEvent, PlacedPart, PlacedRank, RankExit
from gangline.core.model.fold import apply, apply_frame, seal
from gangline.core.model.health import Symptom
from gangline.core.model.state import State
from gangline.leader import api_plan
from gangline.leader.api import ApiOptions, CannotListen, Listener, check_listen, serve
from gangline.leader.commands import Accepted, Command, Refused, admit
from gangline.leader.metrics import Metrics
from gangline.leader.service import Gone, NotLeader, Unavailable

SPEC = {"command": ["python", "train.py"], "gang": {"ranks": 2}, "resources": {"gpus": 1}}


class Log:
    """What all schedulers of one test share: committed frames."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        #: first frame that is still in the store
        self.first = 1
        #: readers that wait for more find that it is gone
        self.lost: Gone | None = None
        self.grew = asyncio.Condition()
        self.members: list[Scheduler] = []

    async def append(self, events: list[LogEvent], epoch: int) -> Frame:
        index = len(self.frames) + 1
        previous = self.frames[-1].digest if self.frames else bytes(32)
        data = encode_frame(index, epoch, 1000 * index, previous, os.urandom(8), [encode_event(e) for e in events])
        frame = decode_frame(data, index, previous)
        self.frames.append(frame)
        async with self.grew:
            self.grew.notify_all()
        return frame


class Scheduler:
    """A Service at the lowest level: commands are admitted and folded one frame a call, in memory."""

    def __init__(self, log: Log, name: str, role: Literal["starting", "standby", "leader"]) -> None:
        self.name, self.role, self.log = name, role, log
        self.leader_name = self.leader_url = ""
        self.store_ok, self.lag_s = True, 0.0
        self.state = State()
        self.folding = True
        #: raised instead of an answer
        self.broken: Exception | None = None
        #: commands wait for it before they are committed
        self.gate = asyncio.Event()
        self.gate.set()
        self.metrics: Metrics | None = None
        log.members.append(self)

    def now_ms(self) -> int:
        return self.state.at_ms

    async def view(self, min_index: int = 0, wait_s: float = 0.0) -> State:
        if self.role != "leader" and self.folding:
            for frame in self.log.frames[self.state.index :]:
                apply_frame(self.state, frame)
        if self.state.index < min_index:
            async with asyncio.timeout(wait_s), self.log.grew:
                await self.log.grew.wait_for(lambda: len(self.log.frames) >= min_index)
            return await self.view(min_index, wait_s)
        return self.state

    async def execute(self, commands: list[Command]) -> list[Accepted | Exception]:
        if self.role != "leader":
            raise NotLeader(self.leader_name, self.leader_url)
        if self.broken is not None:
            raise self.broken
        await self.gate.wait()
        index, results, events = self.state.index + 1, [], []
        for command in commands:
            try:
                done = admit(self.state, command)
            except Refused as e:
                results.append(e)
                continue
            if isinstance(done, LogEvent):
                apply(self.state, done, index, self.state.epoch, 1000 * index)
                events.append(done)
                done = Accepted(index, getattr(done, "job", "") or getattr(done, "node", ""))
            results.append(done)
        if events:
            frame = await self.log.append(events, self.state.epoch)
            seal(self.state, frame.index, frame.digest)
            if self.metrics is not None:
                self.metrics.on_frame(frame)
        return results

    async def write(self, *events: LogEvent, epoch: int = 1) -> Frame:
        """Append what a policy or an agent would."""
        frame = await self.log.append(list(events), epoch)
        apply_frame(self.state, frame)
        if self.metrics is not None:
            self.metrics.on_frame(frame)
        return frame

    async def entries(self, first: int, *, follow: bool = False) -> AsyncIterator[Frame]:
        if first < self.log.first:
            raise Gone(self.log.first)
        at = first - 1
        while True:
            for frame in self.log.frames[at:]:
                at = frame.index
                yield frame
            if not follow:
                return
            async with self.log.grew:
                await self.log.grew.wait_for(lambda at=at: len(self.log.frames) > at)
            if self.log.lost is not None:
                raise self.log.lost


class Api:
    """One scheduler with its API and a client."""

    def __init__(self, scheduler: Scheduler, listener: Listener, metrics: Metrics, said: io.StringIO) -> None:
        self.scheduler, self.listener, self.metrics, self.said = scheduler, listener, metrics, said
        self.url = listener.url
        self.address = (listener.url.split("//")[1].rsplit(":", 1)[0], int(listener.url.rsplit(":", 1)[1]))
        self.http = aiohttp.ClientSession(listener.url)

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Return status, decoded body and headers; `_` in a header's name is written as `-`."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.http.request(method, path, data=data, headers=named) as answer:
            text = await answer.read()
            decoded = json.loads(text) if "json" in answer.content_type and answer.content_type != "application/x-ndjson" else text
            if answer.status >= 400:
                assert answer.content_type == "application/problem+json"
                assert decoded["status"] == answer.status
                assert {"type", "title", "detail", "code"} <= decoded.keys()
            assert self.scheduler.log.members
            return answer.status, decoded, answer.headers

    async def raw(self, data: bytes, end: bool = False) -> bytes:
        """Return everything that the server says to these bytes."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(data)
        await writer.drain()
        if end:
            writer.write_eof()
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        return answer


Start = Callable[..., Awaitable[Api]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    opened: list[Api] = []

    async def begin(log: Log | None = None, name: str = "s1", role: Literal["starting", "standby", "leader"] = "leader", **options: Any) -> Api:
        scheduler = Scheduler(log or Log(), name, role)
        metrics = Metrics(telemetry.setup("scheduler"), lambda: scheduler.state)
        scheduler.metrics = metrics
        said = io.StringIO()
        listener = await serve(scheduler, ApiOptions(**{"port": 0, **options}), metrics, telemetry.structured_logging("info", said))
        api = Api(scheduler, listener, metrics, said)
        opened.append(api)
        if role == "leader":
            scheduler.leader_name, scheduler.leader_url = name, api.url
            await scheduler.write(ev.LeaderElected(scheduler=name))
        return api

    yield begin
    for api in reversed(opened):
        await api.http.close()
        await api.listener.close()
        assert "request_failed" not in api.said.getvalue(), api.said.getvalue()


@pytest.fixture
async def api(start: Start) -> Api:
    return await start()


def registration(node: str, agent_url: str = "") -> Registration:
    gpus = tuple(Gpu(i, f"{node}-{i}", "H100") for i in range(2))
    return Registration(node=node, identity=node, boot_id="b", address=node, agent_url=agent_url, gpus=gpus, cpus_milli=8000, memory_mib=8192)


async def running(api: Api, name: str = "", agent_url: str = "") -> str:
    """Submit a job of two ranks, with the node n1 for it, and have it run there."""
    s = api.scheduler
    if "n1" not in s.state.nodes:
        await s.write(ev.NodeJoined(registration=registration("n1", agent_url)))
    _, body, _ = await api("POST", "/v1/jobs", {**SPEC, "name": name} if name else SPEC)
    job = str(body["job"])
    await place(s, job, 1)
    return job


async def place(s: Scheduler, job: str, generation: int, node: str = "n1") -> None:
    parts = (PlacedPart(node, (PlacedRank(0, (0,)), PlacedRank(1, (1,)))),)
    await s.write(ev.GangPlaced(job=job, generation=generation, parts=parts))
    await s.write(ev.RanksStarted(job=job, generation=generation, node=node, ranks=(0, 1)))


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------- jobs


async def test_submit(api: Api) -> None:
    status, body, headers = await api("POST", "/v1/jobs", {**SPEC, "name": "llama"}, Gangline_User="ann%20%C3%A9")
    assert status == 201
    assert body == {"job": body["job"], "name": "llama", "state": "queued", "index": 2}
    assert len(body["job"]) == 8
    assert (headers["Gangline-Index"], headers["Gangline-Epoch"], headers["Gangline-Leader"]) == ("2", "1", "s1")
    job = api.scheduler.state.jobs[body["job"]]
    assert job.user == "ann é"
    assert job.spec.gang.ranks == 2
    assert job.body_digest == ""


async def test_all_problems_of_a_spec_at_once(api: Api) -> None:
    status, body, _ = await api("POST", "/v1/jobs", {"comand": ["x"], "gang": {"ranks": 0}, "priority": "high"})
    assert status == 400
    assert body["code"] == "bad_input"
    pointers = {e["pointer"] for e in body["errors"]}
    assert {"/comand", "/gang/ranks", "/priority"} <= pointers
    assert next(e for e in body["errors"] if e["pointer"] == "/comand")["nearest"] == "command"
    assert api.scheduler.state.index == 1


async def test_b18_a_name_twice(api: Api) -> None:
    assert (await api("POST", "/v1/jobs", {**SPEC, "name": "a"}))[0] == 201
    status, body, _ = await api("POST", "/v1/jobs", {**SPEC, "name": "a"})
    assert (status, body["code"]) == (409, "name_in_use")


async def test_idempotency_and_b42_the_key_with_another_body(api: Api) -> None:
    status, first, _ = await api("POST", "/v1/jobs", SPEC, Idempotency_Key="k1", Gangline_User="ann")
    assert status == 201
    again = json.dumps({k: SPEC[k] for k in reversed(SPEC)}, indent=4).encode()  # the same job, spelled differently
    status, body, headers = await api("POST", "/v1/jobs", again, Idempotency_Key="k1", Gangline_User="ann")
    assert (status, body, headers["Idempotent-Replayed"]) == (200, first, "true")
    for other, user in (({**SPEC, "priority": 1}, "ann"), (SPEC, "bob")):
        status, body, _ = await api("POST", "/v1/jobs", other, Idempotency_Key="k1", Gangline_User=user)
        assert (status, body["code"]) == (422, "idempotency_key_reused")
    assert len(api.scheduler.state.jobs) == 1


async def test_a_replay_tells_the_state_of_now(api: Api) -> None:
    _, first, _ = await api("POST", "/v1/jobs", SPEC, Idempotency_Key="k1")
    await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
    await place(api.scheduler, first["job"], 1)
    _, body, headers = await api("POST", "/v1/jobs", SPEC, Idempotency_Key="k1")
    assert (body["state"], body["index"], headers["Gangline-Index"]) == ("running", 2, "5")


async def test_b44_a_thousand_identical_posts_make_one_job(api: Api) -> None:
    data = json.dumps(SPEC).encode()
    answers = await asyncio.gather(*(api("POST", "/v1/jobs", data, Idempotency_Key="k") for _ in range(1000)))
    assert sorted({status for status, _, _ in answers}) == [200, 201]
    assert sum(status == 201 for status, _, _ in answers) == 1
    assert len({body["job"] for _, body, _ in answers}) == 1
    assert api.scheduler.state.submitted == 1


async def test_batch(api: Api) -> None:
    jobs = [{**SPEC, "name": "a"}, {"spec": {**SPEC, "name": "b"}, "idempotency_key": "k"}, {"comand": []}, {**SPEC, "name": "a"}]
    status, body, headers = await api("POST", "/v1/jobs:batch", {"jobs": jobs})
    assert status == 200
    a, b, bad, taken = body["results"]
    assert (a["name"], b["name"], a["index"], body["index"], headers["Gangline-Index"]) == ("a", "b", 2, 2, "2")
    assert bad["problem"]["status"] == 400
    assert bad["problem"]["errors"][0]["nearest"] == "command"
    assert (taken["problem"]["status"], taken["problem"]["code"]) == (409, "name_in_use")
    _, body, _ = await api("POST", "/v1/jobs:batch", {"jobs": [jobs[1]]})
    assert body["results"] == [{**b, "replayed": True}]


async def test_a_key_for_a_whole_batch(api: Api) -> None:
    first = await api("POST", "/v1/jobs:batch", {"jobs": [SPEC, SPEC]}, Idempotency_Key="k")
    second = await api("POST", "/v1/jobs:batch", {"jobs": [SPEC, SPEC]}, Idempotency_Key="k")
    assert [r["job"] for r in first[1]["results"]] == [r["job"] for r in second[1]["results"]]
    assert len(api.scheduler.state.jobs) == 2


@pytest.mark.parametrize(
    "body", [{}, {"jobs": []}, {"jobs": [SPEC] * 1001}, {"jobs": "x"}, {"jobs": [SPEC], "more": 1}, [], {"jobs": [SPEC, SPEC], "jobs:": 1}]
)
async def test_bad_batches(api: Api, body: Any) -> None:
    assert (await api("POST", "/v1/jobs:batch", body))[0] == 400
    assert api.scheduler.state.index == 1


KEYED = {"spec": SPEC, "idempotency_key": "k"}


@pytest.mark.parametrize("item", [1, None, {**KEYED, "idempotency_key": 1}, {**KEYED, "idempotency_key": "k" * 256}, {**KEYED, "x": 1}])
async def test_bad_jobs_in_a_good_batch(api: Api, item: Any) -> None:
    status, body, _ = await api("POST", "/v1/jobs:batch", {"jobs": [item, SPEC]})
    assert status == 200
    assert body["results"][0]["problem"]["status"] == 400
    assert "job" in body["results"][1]


async def test_a_batch_bounds_each_job(api: Api) -> None:
    big = {**SPEC, "env": {f"V{i}": "x" * 1000 for i in range(300)}}
    _, body, _ = await api("POST", "/v1/jobs:batch", {"jobs": [big, SPEC]})
    assert body["results"][0]["problem"]["status"] == 413
    assert "job" in body["results"][1]


async def test_show_by_id_name_and_prefix(api: Api) -> None:
    job = await running(api, "llama")
    for ref in (job, "llama", job[:6]):
        status, body, headers = await api("GET", f"/v1/jobs/{ref}")
        assert (status, body["id"], body["state"], headers["Gangline-Index"]) == (200, job, "running", "5")
    assert body["placement"] == [
        {"node": "n1", "ranks": [{"rank": r, "role": "", "gpus": [r], "state": "running", "exit_code": None, "share": None} for r in (0, 1)]}
    ]


async def test_a_name_means_the_newest_job_of_it(api: Api) -> None:
    old = await running(api, "llama")
    await api.scheduler.write(ev.GangFinished(job=old, outcome="failed", cause="rank_failed", message="m"))
    assert (await api("GET", "/v1/jobs/llama"))[1]["id"] == old
    _, new, _ = await api("POST", "/v1/jobs", {**SPEC, "name": "llama"})
    assert (await api("GET", "/v1/jobs/llama"))[1]["id"] == new["job"]


async def test_no_and_many_jobs(api: Api) -> None:
    for _ in range(2):
        await api("POST", "/v1/jobs", SPEC)
    status, body, _ = await api("GET", "/v1/jobs/j")
    assert (status, body["code"], len(body["candidates"])) == (409, "ambiguous", 2)
    assert (await api("GET", "/v1/jobs/nope"))[0] == 404
    assert (await api("GET", "/v1/jobs/%20"))[0] == 404


async def test_list_pages_have_no_gaps_and_no_doubles(api: Api) -> None:
    for i in range(7):
        await api("POST", "/v1/jobs", {**SPEC, "name": f"job{i}"})
    _, page, _ = await api("GET", "/v1/jobs?limit=3")
    names = [row["name"] for row in page["jobs"]]
    await api("POST", "/v1/jobs", {**SPEC, "name": "later"})
    while page["cursor"]:
        _, page, _ = await api("GET", f"/v1/jobs?limit=3&cursor={page['cursor']}")
        names += [row["name"] for row in page["jobs"]]
    assert names == [f"job{i}" for i in reversed(range(7))]


async def test_list_filters(api: Api) -> None:
    job = await running(api, "llama")
    await api("POST", "/v1/jobs", {**SPEC, "queue": "research", "name": "b"}, Gangline_User="ann")
    for query, names in (
        ("state=running", ["llama"]),
        ("state=queued,running", ["b", "llama"]),
        ("state=finished", []),
        ("queue=research", ["b"]),
        ("user=ann", ["b"]),
        ("name=llama", ["llama"]),
        ("queue=research&user=bob", []),
    ):
        _, body, _ = await api("GET", f"/v1/jobs?{query}")
        assert [row["name"] for row in body["jobs"]] == names, query
    assert body["cursor"] is None
    assert job in {row["id"] for row in (await api("GET", "/v1/jobs"))[1]["jobs"]}


@pytest.mark.parametrize(
    "query", ["limit=-1", "limit=0", "limit=1000000000", "limit=501", "limit=x", "limit=%D9%A1", "cursor=zz", "cursor=%C3%A9", "state=z"]
)
async def test_b49_bad_listings(api: Api, query: str) -> None:
    assert (await api("GET", f"/v1/jobs?{query}"))[0] == 400


async def test_b49_cursors_go_from_scheduler_to_scheduler_and_cannot_be_made_up(start: Start) -> None:
    log = Log()
    leader, standby = await start(log), await start(log, "s2", "standby")
    for name in ("a", "b"):
        await leader("POST", "/v1/jobs", {**SPEC, "name": name})
    cursor = (await leader("GET", "/v1/jobs?limit=1"))[1]["cursor"]
    assert [row["name"] for row in (await standby("GET", f"/v1/jobs?cursor={cursor}"))[1]["jobs"]] == ["a"]
    for bad in (cursor[:-2] + "AA", cursor[2:], cursor * 9, base64.urlsafe_b64encode(b"12345678" + b"3.2").decode().rstrip("=")):
        assert (await leader("GET", f"/v1/jobs?cursor={bad}"))[0] == 400


async def test_unknown_and_repeated_parameters_all_at_once(api: Api) -> None:
    status, body, _ = await api("GET", "/v1/jobs?stat=x&limit=1&limit=2")
    assert status == 400
    assert [(e["pointer"], e.get("nearest")) for e in body["errors"]] == [("?stat", "state"), ("?limit", None)]


async def test_b46_delete_twice_is_one_event(api: Api) -> None:
    job = await running(api, "llama")
    status, body, _ = await api("DELETE", f"/v1/jobs/{job}?reason=wrong+data", Gangline_User="ann")
    assert (status, body) == (202, {"job": job, "state": "running", "index": 6})
    assert (await api("DELETE", "/v1/jobs/llama"))[0] == 202
    assert api.scheduler.state.index == 6
    assert (api.scheduler.state.jobs[job].stop, api.scheduler.state.jobs[job].stop_by) == ("wrong data", "ann")
    await api.scheduler.write(ev.GangFinished(job=job, outcome="cancelled", cause="stopped", message="stopped"))
    status, body, _ = await api("DELETE", f"/v1/jobs/{job}")
    assert (status, body["state"], api.scheduler.state.index) == (200, "finished", 7)
    assert (await api("DELETE", "/v1/jobs/nope"))[0] == 404


async def test_min_index_holds_the_answer(api: Api) -> None:
    _, body, _ = await api("POST", "/v1/jobs", SPEC)
    held = asyncio.create_task(api("GET", f"/v1/jobs/{body['job']}?min_index=4&wait=20s"))
    await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
    await place(api.scheduler, body["job"], 1)
    status, body, headers = await held
    assert (status, body["state"]) == (200, "running")
    assert int(headers["Gangline-Index"]) >= 4
    status, body, headers = await api("GET", "/v1/jobs?min_index=99&wait=10ms")
    assert (status, body["code"], headers["Retry-After"]) == (503, "index_not_reached", "1")
    for query in ("min_index=-1", "min_index=1e3", "wait=soon", "wait=-1s"):
        assert (await api("GET", f"/v1/jobs?{query}"))[0] == 400


async def test_story(api: Api) -> None:
    job = await running(api, "llama")
    s = api.scheduler
    await api("POST", "/v1/jobs", SPEC)
    await s.write(ev.RanksExited(job=job, node="n1", exits=(RankExit(1, 1, -9),)))
    await s.write(ev.NodeLost(node="n1", cause="lease_expired", message="lease expired"))
    await s.write(
        ev.GangRequeued(job=job, generation=1, cause="node_lost", failure_class="infrastructure", message="node n1 lost", lost_nodes=("n1",))
    )
    await s.write(ev.GangFinished(job=job, outcome="failed", cause="node_lost", message="node n1 lost"))
    status, body, _ = await api("GET", "/v1/jobs/llama/story")
    assert status == 200
    assert body["job"] == job
    assert [(e["index"], e["event"]) for e in body["entries"]] == [
        (3, "job_submitted"), (4, "gang_placed"), (5, "ranks_started"), (7, "ranks_exited"), (8, "node_lost"), (9, "gang_requeued"),
        (10, "gang_finished"),
    ]  # fmt: skip
    assert [e["message"] for e in body["entries"]][1:5] == [
        "placed on n1 (ranks 0-1) as generation 1",
        "ranks 0-1 started on n1",
        "rank 1 ended by SIGKILL on n1",
        "node n1 lost: lease expired",
    ]
    assert body["entries"][0]["body"]["spec"]["command"] == ["python", "train.py"]
    assert body["entries"][0]["at_ms"] == 3000
    api.scheduler.log.first = 5
    status, body, _ = await api("GET", "/v1/jobs/llama/story")
    assert (status, body["first"]) == (410, 5)


async def test_why_shows_the_record_with_its_entry(api: Api) -> None:
    s = api.scheduler
    job = await running(api, "first")
    _, body, _ = await api("POST", "/v1/jobs", {**SPEC, "name": "waits"})
    frame = await s.write(
        ev.GangsDeferred(jobs=(body["job"],), code="not_enough_gpus", message="needs 2 GPUs", need={"gpus": 2}, have={"gpus": 0})
    )
    status, why, headers = await api("GET", "/v1/jobs/waits/why")
    assert (status, headers["Gangline-Index"]) == (200, str(frame.index))
    witness = {"code": "not_enough_gpus", "message": "needs 2 GPUs", "need": {"gpus": 2}, "have": {"gpus": 0}}
    assert why["witness"] == {**witness, "index": frame.index, "at_ms": frame.at_ms}
    assert why["order"] == {"queue": "default", "position": 1, "waiting": 1, "gpus_ahead": 0}
    assert [row["job"] for row in why["holders"]["largest"]] == [job]
    assert why["would_change"] == ["2 more GPUs"]
    _, why, _ = await api("GET", "/v1/jobs/first/why")
    assert (why["state"], why["witness"], [record["event"] for record in why["records"]]) == ("running", None, ["gang_placed"])
    await s.write(ev.GangFinished(job=job, outcome="failed", cause="rank_failed", message="rank 1 exited with 7"))
    _, why, _ = await api("GET", "/v1/jobs/first/why")
    assert (why["message"], why["records"][-1]["event"], why["records"][-1]["index"]) == (
        "failed: rank 1 exited with 7", "gang_finished", s.state.index,
    )  # fmt: skip
    s.log.first = s.state.index + 1
    _, why, _ = await api("GET", "/v1/jobs/waits/why")
    assert (why["witness"]["index"], why["witness"]["at_ms"]) == (frame.index, None)
    assert (await api("GET", "/v1/jobs/nobody/why"))[0] == 404


async def test_when_a_job_starts_and_ends(api: Api) -> None:
    job = await running(api, "first")
    await api("POST", "/v1/jobs", {**SPEC, "name": "waits"})
    _, when, _ = await api("GET", "/v1/jobs/first/when")
    assert (when["job"], when["of"], when["at_ms"]) == (job, "end", None)
    _, when, _ = await api("GET", "/v1/jobs/waits/when")
    assert (when["of"], when["at_ms"], when["gpus_without_limit"], when["order"]["position"]) == ("start", None, 2, 1)
    assert when["basis"].startswith("unknown: 2 GPUs are held by jobs without a time limit")
    await api.scheduler.write(ev.GangFinished(job=job, outcome="succeeded", cause="completed", message=""))
    _, when, _ = await api("GET", f"/v1/jobs/{job}/when")
    assert when["at_ms"] == api.scheduler.state.jobs[job].ended_at_ms


async def test_plan_writes_nothing_and_a_standby_answers_it_too(start: Start) -> None:
    log = Log()
    leader, standby = await start(log), await start(log, "s2", "standby")
    await running(leader, "first")
    frames = len(log.frames)
    for api in (leader, standby):
        status, found, headers = await api("POST", "/v1/jobs:plan", SPEC)
        assert (status, headers["Gangline-Index"], found["outcome"]) == (200, str(frames), "waits")
        assert (found["reason"]["code"], found["reason"]["need"]["gpus"], found["impossible"]) == ("not_enough_gpus", 2, None)
    _, found, _ = await leader("POST", "/v1/jobs:plan", {**SPEC, "resources": {"gpus": 3}})
    assert found["impossible"].startswith("needs room for 2 ranks")
    assert found["message"] == f"would wait: {found['impossible']}"
    await leader.scheduler.write(ev.NodeJoined(registration=registration("n2")))
    _, found, _ = await standby("POST", "/v1/jobs:plan", SPEC)
    assert (found["outcome"], found["message"]) == ("starts", "would start now: 2 ranks on 1 node")
    assert found["placement"] == [{"node": "n2", "ranks": [0, 1], "gpus": [[0], [1]], "shares": [None, None]}]
    assert (await leader("POST", "/v1/jobs:plan", {**SPEC, "name": "first"}))[0] == 409
    assert (await leader("POST", "/v1/jobs:plan", {"gang": 7}))[0] == 400
    assert len(log.frames) == frames + 1


async def test_a_standby_of_a_large_cluster_asks_the_leader(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    leader, standby = await start(log), await start(log, "s2", "standby")
    standby.scheduler.leader_url = leader.url
    asked = []
    monkeypatch.setattr(api_plan, "cheap", lambda state: asked.append(state) or state is leader.scheduler.state)
    assert (await standby("POST", "/v1/jobs:plan", SPEC))[1]["outcome"] == "waits"
    assert asked == [standby.scheduler.state, leader.scheduler.state]
    monkeypatch.setattr(api_plan, "cheap", lambda _state: False)
    assert (await leader("POST", "/v1/jobs:plan", SPEC))[0] == 503


async def test_plans_are_rationed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_plan, "_FREE_S", 0.0)
    monkeypatch.setattr(api_plan, "PLAN_SHARE", 1e-6)
    api = await start()
    assert (await api("POST", "/v1/jobs:plan", SPEC))[0] == 200
    status, problem, headers = await api("POST", "/v1/jobs:plan", SPEC)
    assert (status, problem["code"]) == (429, "too_often")
    assert int(headers["Retry-After"]) >= 1


async def test_secrets_do_not_come_back(api: Api) -> None:
    _, body, _ = await api("POST", "/v1/jobs", {**SPEC, "env": {"HF_TOKEN": "s3cret"}})
    for path in (f"/v1/jobs/{body['job']}", f"/v1/jobs/{body['job']}/story", "/v1/events"):
        _, text, _ = await api("GET", path)
        assert "HF_TOKEN" in str(text)
        assert "s3cret" not in str(text)


# ---------------------------------------------------------------- cluster


async def test_nodes_and_words_about_them(api: Api) -> None:
    await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
    _, body, _ = await api("GET", "/v1/nodes")
    assert [n["id"] for n in body["nodes"]] == ["n1"]
    status, node, headers = await api("POST", "/v1/nodes/n1:drain", {"reason": "fan", "deadline_s": 60}, Gangline_User="ann")
    assert (status, node["draining"], node["schedulable"], node["reason"], headers["Gangline-Index"]) == (200, True, False, "fan", "3")
    assert (await api("GET", "/v1/nodes/n1"))[1] == node
    assert (await api("POST", "/v1/nodes/n1:undrain"))[1]["schedulable"] is True
    status, body, _ = await api("POST", "/v1/nodes/n1:confirm_dead", {})
    assert (status, body["code"]) == (409, "node_is_up")
    assert (await api("GET", "/v1/nodes/n2"))[0] == 404
    assert (await api("POST", "/v1/nodes/n2:drain"))[0] == 404
    status, body, _ = await api("POST", "/v1/nodes/n1:drian")
    assert status == 404
    assert "did you mean drain?" in body["detail"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"reason": 1}, "/reason"), ({"reason": "a\nb"}, "/reason"), ({"reason": "x" * 1001}, "/reason"), ({"deadline_s": -1}, "/deadline_s"),
        ({"deadline_s": "1h"}, "/deadline_s"), ({"why": "x"}, ""), ([], ""), (b"{", ""), (b'{"reason":"a","reason":"b"}', ""),
    ],
)  # fmt: skip
async def test_bad_words_about_nodes(api: Api, body: Any, pointer: str) -> None:
    await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
    status, answer, _ = await api("POST", "/v1/nodes/n1:drain", body)
    assert (status, answer["errors"][0]["pointer"]) == (400, pointer)
    assert api.scheduler.state.index == 2


async def test_health_of_a_node_with_its_evidence_and_a_word_about_it(api: Api) -> None:
    reg = registration("n1")
    uuid = reg.gpus[1].uuid
    symptom = Symptom("xid-48", 1000, 5, "Xid 48 (bad memory)", "reset_gpu", fatal=True)
    await api.scheduler.write(ev.NodeJoined(registration=reg), ev.HealthReported(node="n1", device=uuid, symptoms=(symptom,)))
    status, body, _ = await api("GET", "/v1/nodes/n1/health")
    assert (status, body["state"], body["deaths"]) == (200, "healthy", [])
    (ailment,) = body["ailments"]
    assert (ailment["gpu"], ailment["index"], ailment["symptoms"][0]["action"]) == (uuid, 1, "reset_gpu")
    # Not withdrawn yet: nobody works on it.
    status, body, _ = await api("POST", "/v1/nodes/n1/health", {"state": "repair", "gpu": "1"})
    assert (status, body["code"]) == (409, "not_withdrawn")
    status, body, _ = await api("POST", "/v1/nodes/n1/health", {"state": "quarantined", "gpu": "1", "reason": "fan"}, Gangline_User="ann")
    assert (status, body["state"], body["ailments"][0]["by"]) == (200, "quarantined", "ann")
    row = (await api("GET", "/v1/nodes/n1"))[1]
    assert (row["health"], row["gpus_withdrawn"], row["spare"]) == ("quarantined", 1, False)
    assert (await api("POST", "/v1/nodes/n1/health", {"state": "repair", "gpu": uuid}))[1]["state"] == "repair"
    status, body, _ = await api("POST", "/v1/nodes/n1/health", {"state": "healthy", "gpu": uuid})
    assert (status, body["state"], body["ailments"][0]["symptoms"][0]["past"]) == (200, "healthy", True)
    assert (await api("POST", "/v1/nodes/n1/health", {"state": "well"}))[1]["errors"][0]["pointer"] == "/state"
    status, body, _ = await api("POST", "/v1/nodes/n1/health", {"state": "healthy", "gpu": "77"})
    assert (status, body["code"]) == (404, "no_such_gpu")
    assert (await api("GET", "/v1/nodes/n9/health"))[0] == 404


async def test_brake(api: Api) -> None:
    status, body, _ = await api("POST", "/v1/brake", {"on": True, "reason": "maintenance"})
    assert (status, body) == (200, {"on": True, "message": "maintenance", "index": 2})
    assert (await api("GET", "/v1/health"))[1]["brake"] is True
    assert (await api("POST", "/v1/brake", {"on": False}))[1]["on"] is False
    assert (await api("POST", "/v1/brake", {}))[0] == 400
    assert (await api("POST", "/v1/brake", {"on": 1}))[0] == 400


async def test_health_answers_from_what_is_known(api: Api) -> None:
    status, body, _ = await api("GET", "/v1/health")
    assert status == 200
    assert body == {
        "name": "s1", "role": "leader", "leader": "s1", "leader_url": api.url, "epoch": 1, "index": 1, "store": "ok", "brake": False,
        "lag_s": 0.0,
    }  # fmt: skip

    async def stuck(min_index: int = 0, wait_s: float = 0.0) -> State:
        await asyncio.Event().wait()
        raise AssertionError

    api.scheduler.view = stuck  # type: ignore[method-assign]
    api.scheduler.store_ok = False
    status, body, _ = await api("GET", "/v1/health")
    assert (status, body["index"], body["store"]) == (200, 1, "unreachable")


async def test_state_digest_is_that_of_every_replica(start: Start) -> None:
    log = Log()
    leader = await start(log)
    standby = await start(log, "s2", "standby")
    await running(leader)
    _, one, _ = await leader("GET", "/v1/state")
    _, two, _ = await standby("GET", f"/v1/state?min_index={one['index']}&wait=5s")
    assert one == two
    assert len(one["digest"]) == 64
    await leader("POST", "/v1/jobs", SPEC)
    assert (await leader("GET", "/v1/state"))[1]["digest"] != one["digest"]


async def test_metrics(api: Api) -> None:
    job = await running(api)
    s = api.scheduler
    await s.write(ev.RanksExited(job=job, node="n1", exits=(RankExit(1, 1, 1), RankExit(0, 1, 1))))
    await s.write(ev.GangRestarting(job=job, generation=1, cause="rank_failed", failure_class="application", message="m", lost_ranks=(1,)))
    await place(s, job, 2)
    await api("POST", "/v1/jobs", {**SPEC, "queue": "research"})
    queued = s.state.queue[0][2]
    await s.write(ev.GangsDeferred(jobs=(queued,), code="gpus", message="m"))
    await api("GET", "/v1/nope")
    _, text, headers = await api("GET", "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = text.decode().splitlines()
    for line in (
        "gangline_log_index 11.0",
        'gangline_leader_info{node="s1",term="1"} 1.0',
        "gangline_leader_changes_total 1.0",
        'gangline_gangs{state="running"} 1.0',
        'gangline_gangs{state="queued"} 1.0',
        'gangline_gpus{model="H100",state="allocated"} 2.0',
        'gangline_gpus{model="H100",state="free"} 0.0',
        'gangline_nodes{state="up"} 1.0',
        'gangline_queue_pending_gangs{queue="research",reason="gpus"} 1.0',
        'gangline_queue_pending_gpus{queue="research"} 2.0',
        'gangline_queue_allocated_gpus{queue="default"} 2.0',
        'gangline_queue_oldest_wait_seconds{queue="research"} 1.0',
        'gangline_gang_restarts_total{cause="rank_failed"} 1.0',
        'gangline_gang_recovery_seconds_count{cause="rank_failed"} 1.0',
        'gangline_gang_recovery_seconds_sum{cause="rank_failed"} 2.0',
        'gangline_gang_start_duration_seconds_count{phase="start"} 2.0',
        'gangline_gang_start_duration_seconds_count{phase="queue"} 1.0',
        'gangline_decisions_total{action="place"} 2.0',
        'gangline_refusals_total{reason="gpus"} 1.0',
        'gangline_http_requests_total{code="201",method="POST",route="/v1/jobs"} 2.0',
        'gangline_http_requests_total{code="404",method="GET",route="none"} 1.0',
        'gangline_http_request_duration_seconds_count{route="/v1/jobs"} 2.0',
        "gangline_stream_clients 0.0",
    ):
        assert line in lines, f"{line}\n{text.decode()}"


# ---------------------------------------------------------------- standbys


async def test_writes_on_a_standby_reach_the_leader(start: Start) -> None:
    log = Log()
    leader = await start(log)
    standby = await start(log, "s2", "standby")
    standby.scheduler.leader_name, standby.scheduler.leader_url = "s1", leader.url
    status, body, headers = await standby("POST", "/v1/jobs", SPEC, Idempotency_Key="k", Gangline_User="ann")
    assert (status, headers["Gangline-Index"], headers["Gangline-Leader"]) == (201, "2", "s1")
    status, again, headers = await standby("POST", "/v1/jobs", SPEC, Idempotency_Key="k", Gangline_User="ann")
    assert (status, again, headers["Idempotent-Replayed"]) == (200, body, "true")
    status, row, headers = await standby("GET", f"/v1/jobs/{body['job']}?min_index={body['index']}&wait=5s")
    assert (status, row["user"], headers["Gangline-Leader"]) == (200, "ann", "s1")
    status, problem, _ = await standby("POST", "/v1/jobs", {"comand": []})
    assert (status, problem["errors"][0]["nearest"]) == (400, "command")
    assert (await standby("DELETE", f"/v1/jobs/{body['job']}?reason=a%20b"))[0] == 202
    assert leader.scheduler.state.jobs[body["job"]].stop == "a b"
    assert (await standby("POST", "/v1/jobs:batch", {"jobs": [SPEC]}))[0] == 200


async def test_a_write_is_passed_on_once(start: Start) -> None:
    log = Log()
    one, two = await start(log, "s1", "standby"), await start(log, "s2", "standby")
    one.scheduler.leader_url, two.scheduler.leader_url = two.url, one.url
    status, body, headers = await one("POST", "/v1/jobs", SPEC)
    assert (status, body["code"], headers["Retry-After"]) == (503, "no_leader", "1")


async def test_no_leader_a_dead_one_and_one_that_loses_the_lead(start: Start) -> None:
    log = Log()
    standby = await start(log, "s2", "standby")
    status, body, headers = await standby("POST", "/v1/jobs", SPEC)
    assert (status, body["code"], headers["Retry-After"]) == (503, "no_leader", "1")
    standby.scheduler.leader_name, standby.scheduler.leader_url = "s1", "http://127.0.0.1:9"
    status, body, headers = await standby("POST", "/v1/jobs", SPEC)
    assert (status, body["code"], headers["Retry-After"]) == (503, "leader_unreachable", "1")
    leader = await start(log)
    leader.scheduler.broken = NotLeader("", "")
    status, body, _ = await leader("POST", "/v1/jobs", SPEC)
    assert (status, body["code"]) == (503, "no_leader")
    leader.scheduler.broken = Unavailable("etcd did not answer")
    status, body, _ = await leader("POST", "/v1/jobs", SPEC)
    assert (status, body["code"]) == (503, "outcome_unknown")


async def test_a_log_that_does_not_answer(start: Start) -> None:
    api = await start(write_timeout_s=0.05)
    api.scheduler.gate.clear()
    status, body, headers = await api("POST", "/v1/jobs", SPEC)
    assert (status, body["code"], headers["Retry-After"]) == (503, "outcome_unknown", "1")


async def test_too_many_commands_are_turned_away(start: Start) -> None:
    api = await start(max_pending=2)
    api.scheduler.gate.clear()
    waiting = [asyncio.create_task(api("POST", "/v1/jobs", SPEC)) for _ in range(3)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    status, body, headers = done.pop().result()
    assert (status, body["code"], headers["Retry-After"]) == (503, "overloaded", "1")
    api.scheduler.gate.set()
    assert sorted(status for status, _, _ in await asyncio.gather(*waiting)) == [201, 201, 503]


# ---------------------------------------------------------------- events


def records(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_events_as_json_lines(api: Api) -> None:
    job = await running(api)
    _, text, headers = await api("GET", "/v1/events")
    assert headers["Content-Type"].startswith("application/x-ndjson")
    assert [(r["index"], r["event"]) for r in records(text)] == [
        (1, "leader_elected"), (2, "node_joined"), (3, "job_submitted"), (4, "gang_placed"), (5, "ranks_started"),
    ]  # fmt: skip
    assert records(text)[3]["message"] == f"{job}: placed on n1 (ranks 0-1) as generation 1"
    assert [r["index"] for r in records((await api("GET", "/v1/events?from=4"))[1])] == [4, 5]
    assert [r["index"] for r in records((await api("GET", f"/v1/events?job={job[:5]}"))[1])] == [3, 4, 5]
    assert [r["index"] for r in records((await api("GET", "/v1/events?node=n1"))[1])] == [2, 4, 5]
    assert (await api("GET", "/v1/events?job=forgotten"))[1] == b""


async def test_b50_compacted_and_future_indexes(api: Api) -> None:
    for i in range(4):
        await api.scheduler.write(ev.NodeJoined(registration=registration(f"n{i}")))
    api.scheduler.log.first = 3
    for query in ("from=1", "from=2&follow=1"):
        status, body, _ = await api("GET", f"/v1/events?{query}")
        assert (status, body["code"], body["first"]) == (410, "compacted", 3)
    assert [r["index"] for r in records((await api("GET", "/v1/events"))[1])] == [3, 4, 5]
    status, body, _ = await api("GET", "/v1/events?from=99&wait=10ms")
    assert (status, body["code"]) == (400, "index_in_the_future")
    assert (await api("GET", "/v1/events?from=6"))[1] == b""
    assert (await api("GET", "/v1/events?from=0"))[0] == 400


class Sse:
    """Reads server-sent events as a browser does."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self.last_id = ""
        self.comments = 0

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            data = ""
            while True:
                line = (await self._content.readline()).decode().rstrip("\n")
                field, _, value = line.partition(": ")
                if field == "id":
                    self.last_id = value
                elif field == "data":
                    data += value
                elif line.startswith(":"):
                    self.comments += 1
                elif not line and data:
                    return dict(json.loads(data))


@asynccontextmanager
async def sse(api: Api, query: str, **headers: str) -> AsyncIterator[Sse]:
    async with api.http.get(f"/v1/events?{query}", headers={"Accept": "text/event-stream", **headers}) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        yield Sse(answer.content)


async def test_sse_follows_and_resumes_without_losing_part_of_a_frame(api: Api) -> None:
    nodes = [ev.NodeJoined(registration=registration(f"n{i}")) for i in range(4)]
    await api.scheduler.write(nodes[0], nodes[1])
    async with sse(api, "from=2&follow=1") as stream:
        assert (await stream.next())["body"]["registration"]["node"] == "n0"
        assert stream.last_id == ""  # half of frame 2 has been seen: a resume must begin with it
        assert (await stream.next())["body"]["registration"]["node"] == "n1"
        assert stream.last_id == "2"
        await api.scheduler.write(nodes[2])
        assert (await stream.next())["index"] == 3
    await api.scheduler.write(nodes[3])
    async with sse(api, "from=1&follow=1", **{"Last-Event-ID": stream.last_id}) as stream:
        assert (await stream.next())["index"] == 4


async def test_sse_from_now_and_signs_of_life(start: Start) -> None:
    api = await start(heartbeat_s=0.02)
    async with sse(api, "follow=1&job=j1") as stream:
        told = asyncio.create_task(stream.next())
        await until(lambda: stream.comments >= 2)
        await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
        await until(lambda: stream.last_id == "2")  # nothing of it was shown, but it need not be read again
        spec = msgspec.convert({"command": ["x"]}, ev.JobSpec)
        await api.scheduler.write(ev.JobSubmitted(job="j1", spec=spec))
        assert (await told)["index"] == 3


async def test_following_json_lines(api: Api) -> None:
    async with api.http.get("/v1/events?follow=1") as answer:
        await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
        async with asyncio.timeout(10):
            assert json.loads(await answer.content.readline())["event"] == "node_joined"


async def test_streams_are_bounded_and_given_back(start: Start) -> None:
    api = await start(max_streams=1)
    async with sse(api, "follow=1"):
        assert api.metrics.streams == 1
        status, body, headers = await api("GET", "/v1/events?follow=1")
        assert (status, body["code"], headers["Retry-After"]) == (503, "too_many_streams", "5")
    await until(lambda: api.metrics.streams == 0)
    async with sse(api, "follow=1"):
        pass


async def test_row_83_a_slow_reader_is_dropped_and_memory_stays_flat(start: Start) -> None:
    api = await start(slow_reader_s=0.1)
    reader, writer = await asyncio.open_connection(*api.address, limit=1024)
    writer.write(b"GET /v1/events?follow=1&from=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    paused = writer.transport
    assert isinstance(paused, asyncio.Transport)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_maybe_resume_transport", lambda: None)
        if paused.is_reading():
            paused.pause_reading()
        await until(lambda: api.metrics.streams == 1)
        wide = registration("n1").__class__(**{**msgspec.structs.asdict(registration("n1")), "labels": {"x": "y" * 60_000}})

        async def flood() -> None:
            while api.metrics.streams:
                await api.scheduler.write(ev.NodeJoined(registration=wide))
                await asyncio.sleep(0.001)

        async with asyncio.timeout(20):
            await flood()
    writer.close()
    assert "gangline_stream_dropped_total 1.0" in api.metrics.telemetry.prometheus().decode()


async def test_a_stream_that_cannot_go_on_is_cut_and_not_garbled(api: Api) -> None:
    async with sse(api, "follow=1&from=1") as stream:
        assert (await stream.next())["index"] == 1
        api.scheduler.log.lost = Gone(5)
        await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.next()
    await until(lambda: api.metrics.streams == 0)


async def test_streams_end_when_the_server_stops(start: Start) -> None:
    api = await start()
    async with api.http.get("/v1/events?follow=1") as answer:
        closing = asyncio.create_task(api.listener.close())
        async with asyncio.timeout(5):
            assert await answer.content.read() == b""
            await closing


# ---------------------------------------------------------------- logs


class Agent:
    """Serves logs as an agent does."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, int, int], bytes] = {}
        self.url = ""
        self.asked: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        query = request.query
        log = self.logs.get((request.match_info["job"], int(request.match_info["rank"]), int(query["generation"])))
        if log is None:
            return web.Response(status=404)
        offset = max(0, len(log) - int(query["tail"])) if "tail" in query else int(query.get("offset", 0))
        headers = {"Gangline-Log-Offset": str(offset), "Gangline-Log-Size": str(len(log)), "Gangline-Log-Generation": query["generation"]}
        if offset > len(log):
            return web.Response(status=416, headers=headers)
        return web.Response(body=log[offset:][: int(query.get("limit", 1 << 20))], headers=headers)


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    served = Agent()
    app = web.Application()
    app.add_routes([web.get("/v1/logs/{job}/{rank}", served.handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    await runner.cleanup()


async def test_logs(api: Api, agent: Agent) -> None:
    job = await running(api, "llama", agent.url)
    agent.logs[job, 1, 1] = b"step 1 \xff\x1b[2J\nstep 2\n"
    status, text, headers = await api("GET", "/v1/jobs/llama/logs?rank=1")
    assert (status, text) == (200, agent.logs[job, 1, 1])
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert (headers["Gangline-Log-Offset"], headers["Gangline-Log-Size"], headers["Gangline-Log-Generation"]) == ("0", "20", "1")
    assert (await api("GET", f"/v1/jobs/{job}/logs?rank=1&offset=13&limit=4"))[1] == b"step"
    assert (await api("GET", f"/v1/jobs/{job}/logs?rank=1&tail=3"))[1] == b" 2\n"
    assert agent.asked[-1] == f"/v1/logs/{job}/1?generation=1&tail=3"


async def test_b51_b52_bad_log_requests(api: Api, agent: Agent) -> None:
    job = await running(api, "llama", agent.url)
    agent.logs[job, 0, 1] = b"text"
    path = f"/v1/jobs/{job}/logs"
    for query in ("offset=-1", "rank=-1", "rank=x", "generation=0", "limit=999999999999", "follow=2"):
        assert (await api("GET", f"{path}?{query}"))[0] == 400
    status, _, headers = await api("GET", f"{path}?offset=99")
    assert (status, headers["Gangline-Log-Size"]) == (416, "4")
    assert (await api("GET", path, Range="bytes=" + ",".join(["0-0"] * 1000)))[1] == b"text"
    for ref in ("%2e%2e%2f", "..%5c", "%2fetc%2fpasswd"):
        assert (await api("GET", f"/v1/jobs/{ref}/logs"))[0] == 404
    assert (await api("GET", f"{path}?rank=2"))[1]["code"] == "no_such_rank"
    assert (await api("GET", f"{path}?generation=7"))[1]["code"] == "no_log"


async def test_logs_that_nobody_has(api: Api, agent: Agent) -> None:
    _, body, _ = await api("POST", "/v1/jobs", SPEC)
    assert (await api("GET", f"/v1/jobs/{body['job']}/logs"))[1]["code"] == "no_log"
    job = await running(api, "llama", "http://127.0.0.1:9")
    status, body, _ = await api("GET", f"/v1/jobs/{job}/logs")
    assert (status, body["code"]) == (502, "agent_unreachable")


async def test_a_followed_log_goes_on_in_the_next_generation_and_ends_with_the_job(start: Start, agent: Agent) -> None:
    api = await start(log_poll_s=(0.005, 0.01))
    s = api.scheduler
    job = await running(api, "llama", agent.url)
    async with api.http.get(f"/v1/jobs/{job}/logs?follow=1") as answer:
        agent.logs[job, 0, 1] = b"one\n"
        async with asyncio.timeout(10):
            assert await answer.content.readline() == b"one\n"
            agent.logs[job, 0, 1] += b"two\n"
            assert await answer.content.readline() == b"two\n"
            await s.write(ev.RanksExited(job=job, node="n1", exits=(RankExit(0, 1, 1), RankExit(1, 1, 1))))
            await s.write(ev.GangRestarting(job=job, generation=1, cause="rank_failed", failure_class="application", message="m"))
            agent.logs[job, 0, 2] = b"three\n"
            await place(s, job, 2)
            assert [await answer.content.readline() for _ in range(3)] == [b"\n", b"[gangline: generation 2]\n", b"three\n"]
            agent.logs[job, 0, 2] += b"bye\n"
            await s.write(ev.GangFinished(job=job, outcome="succeeded", cause="completed", message=""))
            assert await answer.content.read() == b"bye\n"


# ---------------------------------------------------------------- who may ask


async def test_b55_wrong_host(start: Start) -> None:
    api = await start(allowed_hosts=("scheduler.example",))
    for host, status in (
        ("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:7480", 200), ("scheduler.example:7480", 200), ("SCHEDULER.example", 200),
        ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("0.0.0.0", 421), ("a@localhost", 421), ("localhost:x:y", 421), ("", 421),
    ):  # fmt: skip
        answer = await api.raw(f"GET /v1/health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert answer.split(b" ")[1] == b"%d" % status, (host, answer)
    assert (await api.raw(b"GET /v1/health HTTP/1.0\r\n\r\n")).split(b" ")[1] == b"421"


async def test_b56_cross_origin_writes(api: Api) -> None:
    job = await running(api)
    for origin in ("https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1"):
        for method, path in (("DELETE", f"/v1/jobs/{job}"), ("POST", "/v1/jobs"), ("POST", "/v1/brake"), ("PUT", "/v1/jobs")):
            status, body, _ = await api(method, path, SPEC, Origin=origin)
            assert (status, body["code"]) == (403, "cross_origin")
        assert (await api("GET", f"/v1/jobs/{job}", Origin=origin))[0] == 200
    assert (await api("POST", "/v1/jobs", SPEC, Sec_Fetch_Site="cross-site"))[0] == 403
    assert (await api("DELETE", f"/v1/jobs/{job}", Origin=api.url, Sec_Fetch_Site="same-origin"))[0] == 202


GOOD = "g" * 32


async def test_b57_b58_tokens(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# people\n{GOOD}  # ann\n{'h' * 20}\n")
    api = await start(token_file=str(file))
    for path in ("/v1/jobs", "/v1/nodes", "/v1/nope", f"/v1/jobs?token={GOOD}", f"/v1/jobs?access_token={GOOD}"):
        status, body, headers = await api("GET", path)
        assert (status, body["code"], headers["WWW-Authenticate"]) == (401, "unauthorized", 'Bearer realm="gangline"')
    jwt = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9."
    for value in (f"Bearer {GOOD}x", f"Bearer {GOOD[:-1]}", "Bearer", f"Basic {GOOD}", GOOD, f"Bearer {jwt}", "Bearer " + "x" * 8000):
        assert (await api("GET", "/v1/jobs", Authorization=value))[0] == 401
    assert (await api("GET", "/v1/jobs", Authorization="Bearer " + "x" * 65_536))[0] in (400, 401)
    assert (await api("POST", "/v1/jobs", SPEC))[0] == 401
    assert (await api("GET", "/v1/jobs", Authorization=f"Bearer {GOOD}"))[0] == 200
    assert (await api("GET", "/v1/jobs", Authorization=f"bearer {'h' * 20}"))[0] == 200
    for path in ("/v1/health", "/metrics"):
        assert (await api("GET", path))[0] == 200
    file.write_text("n" * 32)
    assert (await api("GET", "/v1/jobs", Authorization=f"Bearer {GOOD}"))[0] == 401
    assert (await api("GET", "/v1/jobs", Authorization=f"Bearer {'n' * 32}"))[0] == 200
    file.unlink()
    assert (await api("GET", "/v1/jobs", Authorization=f"Bearer {'n' * 32}"))[0] == 401


async def test_a_standby_passes_the_token_on(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(GOOD)
    log = Log()
    leader = await start(log, token_file=str(file))
    standby = await start(log, "s2", "standby", token_file=str(file))
    standby.scheduler.leader_name, standby.scheduler.leader_url = "s1", leader.url
    assert (await standby("POST", "/v1/jobs", SPEC, Authorization=f"Bearer {GOOD}"))[0] == 201
    assert (await standby("POST", "/v1/jobs", SPEC))[0] == 401


def test_where_a_scheduler_may_listen(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_listen(host, "")
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "scheduler.example", "localhost.evil.example"):
        with pytest.raises(CannotListen, match="--token-file"):
            check_listen(host, "")
    file = tmp_path / "tokens"
    with pytest.raises(CannotListen, match="no such file"):
        check_listen("0.0.0.0", str(file))
    file.write_text("short\n")
    with pytest.raises(CannotListen, match="at least 16"):
        check_listen("127.0.0.1", str(file))
    file.write_text("# nothing\n")
    with pytest.raises(CannotListen, match="openssl rand"):
        check_listen("0.0.0.0", str(file))
    file.write_text(GOOD)
    check_listen("0.0.0.0", str(file))


# ---------------------------------------------------------------- bad input


BAD_BODIES = {
    "B1 empty": (b"", 400),
    "B2 null": (b"null", 400),
    "B2 list": (b"[]", 400),
    "B2 text": (b'"x"', 400),
    "B2 number": (b"1", 400),
    "B3 257 KiB": (b'{"command":["x"],"env":{"A":"' + b"a" * (257 << 10) + b'"}}', 413),
    "B7 key twice": (b'{"command":["x"],"resources":{"gpus":1,"gpus":8}}', 400),
    "B8 NaN": (b'{"command":["x"],"priority":NaN}', 400),
    "B8 infinity": (b'{"command":["x"],"priority":1e400}', 400),
    "B9 10,000 digits": (b'{"command":["x"],"priority":' + b"9" * 10_000 + b"}", 400),
    "B10 100,000 brackets": (b"[" * 100_000, 400),
    "B14 path as name": (b'{"command":["x"],"name":"../../etc/passwd"}', 400),
    "B15 64 kB name": (b'{"command":["x"],"name":"' + b"a" * 65_536 + b'"}', 400),
    "B16 right-to-left name": ('{"command":["x"],"name":"a\u202eb"}'.encode(), 400),
    "B17 tag as name": (b'{"command":["x"],"name":"<img onerror=x>"}', 400),
    "B19 bool as number": (b'{"command":["x"],"resources":{"gpus":true}}', 400),
    "B20 10^9 GPUs": (b'{"command":["x"],"resources":{"gpus":1000000000}}', 400),
    "B21 10^6 ranks": (b'{"command":["x"],"gang":{"ranks":1000000}}', 400),
    "B22 min above ranks": (b'{"command":["x"],"gang":{"ranks":2,"min_ranks":3}}', 400),
    "B23 priority 2^63": (b'{"command":["x"],"priority":9223372036854775808}', 400),
    "B24 unknown field": (b'{"command":["x"],"replicas":2}', 400),
    "B27 10,000 variables": (json.dumps({"command": ["x"], "env": {f"V{i}": "" for i in range(10_000)}}).encode(), 400),
    "B28 reserved variable": (b'{"command":["x"],"env":{"MASTER_ADDR":"x"}}', 400),
    "B29 NUL in a variable": (b'{"command":["x"],"env":{"A":"\\u0000"}}', 400),
    "B30 no command": (b'{"command":[]}', 400),
    "B31 workdir upwards": (b'{"command":["x"],"workdir":"/data/../etc"}', 400),
    "B33 negative limit": (b'{"command":["x"],"time_limit":"-5s"}', 400),
    "not UTF-8": (b'{"command":["\xff"]}', 400),
    "not JSON": (b"command: [x]", 400),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_specs(api: Api, name: str) -> None:
    body, expected = BAD_BODIES[name]
    status, _, _ = await api("POST", "/v1/jobs", body)
    assert status == expected
    assert api.scheduler.state.index == 1


async def test_b4_compressed_bodies_are_refused_unread(api: Api) -> None:
    status, body, _ = await api("POST", "/v1/jobs", gzip.compress(b" " * (8 << 20)), Content_Encoding="gzip")
    assert (status, body["code"]) == (415, "encoded_body")
    for path in ("/v1/jobs:batch", "/v1/brake"):
        assert (await api("POST", path, b"x", Content_Encoding="br"))[0] == 415


async def test_bodies_that_are_too_large(api: Api) -> None:
    assert (await api("POST", "/v1/jobs:batch", b" " * ((4 << 20) + 1)))[0] == 413
    assert (await api("POST", "/v1/brake", b" " * (17 << 10)))[0] == 413

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 65_536

    async with api.http.post("/v1/jobs", data=endless()) as answer:
        assert answer.status == 413


HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"


async def test_b5_a_body_that_never_ends(start: Start) -> None:
    api = await start(read_timeout_s=0.05)
    answer = await api.raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in answer


async def test_b6_content_length_lies(start: Start) -> None:
    api = await start(read_timeout_s=0.05)
    spec = json.dumps(SPEC).encode()
    answer = await api.raw(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(spec) + 10, spec), end=True)
    assert answer == b""  # it hung up in the middle: nobody is left to be answered
    answer = await api.raw(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(spec) - 1, spec))
    assert answer.split(b" ")[1] == b"400"
    assert api.scheduler.state.index == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET  \r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", HEAD + b"X: " + b"y" * 10_000 + b"\r\n\r\n",
        HEAD + b"Idempotency-Key: a\x00b\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
async def test_what_is_not_http(start: Start, data: bytes) -> None:
    api = await start(read_timeout_s=0.05, idle_timeout_s=0.5)
    answer = await api.raw(data)
    assert answer.split(b" ")[1] == b"400", answer
    assert b"application/problem+json" in answer
    assert b"<" not in answer
    assert (await api("GET", "/v1/health"))[0] == 200


async def test_b43_bad_headers(api: Api) -> None:
    for key in ("k" * 256, "k" * 10_000, "é"):
        assert (await api("POST", "/v1/jobs", SPEC, Idempotency_Key=key))[0] == 400
    for user in ("u" * 256, "%0a", "%00", "%E2%80%AE"):
        assert (await api("POST", "/v1/jobs", SPEC, Gangline_User=user))[0] == 400
    assert api.scheduler.state.index == 1


async def test_b68_methods_that_are_not_there(api: Api) -> None:
    for method, path, allowed in (
        ("PUT", "/v1/jobs", "GET, HEAD, POST"),
        ("TRACE", "/v1/jobs", "GET, HEAD, POST"),
        ("POST", "/v1/jobs/x", "DELETE, GET, HEAD"),
        ("PATCH", "/v1/jobs/x", "DELETE, GET, HEAD"),
        ("DELETE", "/v1/nodes", "GET, HEAD"),
        ("GET", "/v1/brake", "POST"),
    ):
        status, body, headers = await api(method, path)
        assert (status, body["code"], headers["Allow"]) == (405, "method_not_allowed", allowed)


async def test_b69_odd_paths(start: Start, tmp_path: Path) -> None:
    api = await start()
    for path in ("//api///jobs", "//v1/jobs", "/v1//jobs", "/v1/jobs/", "/", "/v2/jobs", "/v1/jobs/a/b", "/v1/../v1/jobs"):
        answer = await api.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404 "), (path, answer)
        assert b"no_such_route" in answer
    (tmp_path / "t").write_text(GOOD)
    closed = await start(name="s2", token_file=str(tmp_path / "t"))
    assert (await closed.raw(b"GET //api///jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).startswith(b"HTTP/1.1 401 ")


async def test_b70_connections_are_bounded_and_idle_ones_closed(start: Start) -> None:
    api = await start(max_connections_per_address=3, idle_timeout_s=0.2)
    slow = [await asyncio.open_connection(*api.address) for _ in range(3)]
    for _, writer in slow:
        writer.write(b"GET /v1/hea")
        await writer.drain()
    await until(lambda: api.listener._total == 3)
    answer = await api.raw(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in answer
    assert json.loads(answer.split(b"\r\n\r\n")[1])["code"] == "too_many_connections"
    async with asyncio.timeout(10):
        for reader, writer in slow:
            assert await reader.read() == b""
            writer.close()
    assert (await api("GET", "/v1/health"))[0] == 200


async def test_a_fault_is_told_in_the_log_and_not_to_the_client(start: Start) -> None:
    api = await start()
    api.scheduler.broken = KeyError("secret detail")
    status, body, _ = await api("POST", "/v1/jobs", SPEC)
    assert (status, body["code"]) == (500, "internal")
    assert "secret" not in str(body)
    line = json.loads(api.said.getvalue())
    assert (line["event"], line["level"], line["path"]) == ("request_failed", "error", "/v1/jobs")
    assert "secret detail" in line["traceback"]
    api.said.truncate(0)


# ---------------------------------------------------------------- queues

TREE = {"research": {"quota": {"gpus": 8}, "queues": {"nlp": {"quota": {"gpus": 6}}, "vision": {"quota": {"gpus": 2}}}}, "batch": {}}


async def declare(api: Api, tree: Any, base: int, query: str = "", **fields: Any) -> tuple[int, Any, Any]:
    return await api("PUT", f"/v1/queues{query}", {"queues": tree, **fields}, If_Match=f'"{base}"', Gangline_User="ann")


async def test_before_anything_is_declared_every_queue_is_open(api: Api) -> None:
    assert (await api("POST", "/v1/jobs", {**SPEC, "queue": "research"}))[0] == 201
    status, body, headers = await api("GET", "/v1/queues")
    assert (status, body["index"], body["declared"], headers["ETag"]) == (200, 0, None, '"0"')
    default, research = body["queues"]
    assert (default["id"], default["leaf"], default["accepts"], default["starts"]) == ("default", True, True, True)
    assert default["quota"] == default["limit"] == {"gpus": None, "cpus": None, "memory_mib": None, "models": {}}
    assert (research["id"], research["pending"], research["allocated"]["jobs"]) == ("research", {"jobs": 1, "gpus": 2}, 0)


async def test_declared_queues_and_what_their_jobs_have(api: Api) -> None:
    status, body, headers = await declare(api, TREE, 0, reason="a start")
    assert (status, body["index"], body["dry_run"], headers["ETag"]) == (200, 2, False, '"2"')
    assert [added["queue"] for added in body["diff"]["added"]] == ["research", "research/nlp", "research/vision", "batch"]
    await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
    _, first, _ = await api("POST", "/v1/jobs", {**SPEC, "queue": "research/nlp"})
    await place(api.scheduler, first["job"], 1)
    await api("POST", "/v1/jobs", {**SPEC, "queue": "research/vision"})
    _, body, headers = await api("GET", "/v1/queues")
    assert (body["index"], headers["ETag"], body["by"], body["reason"], body["declared"]) == (2, '"2"', "ann", "a start", {"queues": TREE})
    rows = {row["id"]: row for row in body["queues"]}
    assert list(rows) == ["research", "research/nlp", "research/vision", "batch"]
    assert [row["parent"] for row in rows.values()] == [None, "research", "research", None]
    assert [row["leaf"] for row in rows.values()] == [False, True, True, True]
    assert rows["research/nlp"]["quota"]["gpus"] == 6
    assert rows["batch"]["over_quota_weight"] == {"gpus": 1, "cpus": 1, "memory": 1, "models": {}}
    assert rows["research/nlp"]["allocated"] == {"jobs": 1, "gpus": 2, "cpus": 2, "memory_mib": 0, "models": {"H100": 2}}
    assert rows["research"]["allocated"] == rows["research/nlp"]["allocated"]
    assert [row["pending"] for row in rows.values()] == [{"jobs": n, "gpus": 2 * n} for n in (1, 0, 1, 0)]


async def test_queues_say_what_they_should_have_and_have_used_and_by_whom(api: Api) -> None:
    a = {"quota": {"gpus": 1}, "usage_half_life": "1h", "user_fairness": True}
    await declare(api, {"a": a, "b": {"quota": {"models": {"H100": {"gpus": 1}}}}}, 0)
    s = api.scheduler
    await s.write(ev.NodeJoined(registration=registration("n1")))
    for user in ("ann", "bob"):
        await api("POST", "/v1/jobs", {**SPEC, "queue": "a"}, Gangline_User=user)
    await place(s, s.state.queue[0][2], 1)
    await s.write(ev.NodeAdministered(node="n1", action="cordon"))
    _, body, _ = await api("GET", "/v1/queues")
    a, b = body["queues"]
    # Both GPUs, and 2 of 8 CPUs, for the last 2 of the 5 s that the node is up.
    assert a["usage"] == {"gpus": pytest.approx(0.4, abs=1e-3), "cpus": pytest.approx(0.1, abs=1e-3), "memory": 0.0}
    assert a["fair_share"] == {"gpus": 2.0, "cpus": 4.0, "memory_mib": 0, "models": {"H100": 2.0}}
    assert a["users"] == [
        {"user": "ann", "running": 1, "gpus": 2.0, "pending": 0, "pending_gpus": 0, "usage": a["usage"]},
        {"user": "bob", "running": 0, "gpus": 0, "pending": 1, "pending_gpus": 2, "usage": {"gpus": 0.0, "cpus": 0.0, "memory": 0.0}},
    ]
    assert (b["usage"], b["users"], b["fair_share"]["models"]) == (None, [], {"H100": 0.0})
    _, text, _ = await api("GET", "/metrics")
    lines = text.decode().splitlines()
    assert any(line.startswith('gangline_queue_usage{queue="a",resource="gpus"} 0.4') for line in lines)
    assert 'gangline_queue_fair_share_gpus{queue="a"} 2.0' in lines


async def test_a_change_says_what_it_changes_and_a_dry_run_changes_nothing(api: Api) -> None:
    await declare(api, TREE, 0)
    other = {"research": {"quota": {"gpus": 7}, "queues": TREE["research"]["queues"]}, "urgent": {"priority": 200}}
    expected = {
        "added": [{"queue": "urgent", "fields": {"priority": 200}}],
        "removed": ["batch"],
        "changed": [{"queue": "research", "field": "quota.gpus", "old": 8, "new": 7}],
        "reordered": False,
        "topologies": [],
    }
    for query, index in (("?dry_run=1", 2), ("", 3)):
        status, body, _ = await declare(api, other, 2, query)
        assert (status, body["diff"], body["index"]) == (200, expected, index)
        assert any("more than its own 7 GPUs" in warning for warning in body["warnings"])
    status, body, _ = await declare(api, other, 2)  # said again: it is so already
    assert (status, body["index"], body["diff"]["changed"], api.scheduler.state.index) == (200, 3, [], 3)


async def test_topologies_go_with_the_queues(api: Api) -> None:
    await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
    near = {**SPEC, "topology": {"required": "rack", "preferred": "nvlink"}}
    assert (await api("POST", "/v1/jobs", near))[0] == 201
    everything = {"default": {}, "research": {}}
    status, body, _ = await declare(api, everything, 0, topologies={"default": ["zone", "rack"]})
    assert (status, body["diff"]["topologies"]) == (200, [{"topology": "default", "old": None, "new": ["zone", "rack"]}])
    assert any("outside of it, without all of its labels: n1" in warning for warning in body["warnings"])
    assert any("1 live job asks for a topology or level" in warning for warning in body["warnings"])
    _, body, _ = await api("GET", "/v1/queues")
    assert body["declared"] == {"topologies": {"default": ["zone", "rack"]}, "queues": everything}
    status, body, _ = await api("POST", "/v1/jobs", near)
    assert (status, body["code"]) == (404, "no_such_topology")
    status, answer, _ = await declare(api, everything, 4, "?dry_run=1")
    assert (status, answer["diff"]["topologies"]) == (200, [{"topology": "default", "old": ["zone", "rack"], "new": None}])
    _, body, _ = await api("POST", "/v1/jobs", {**SPEC, "topology": {"required": "rack"}})
    _, body, _ = await api("GET", f"/v1/jobs/{body['job']}")
    assert body["spec"]["topology"] == {"required": "rack", "name": "default"}


async def test_a_declaration_made_from_another_one_is_refused(api: Api) -> None:
    await declare(api, TREE, 0)
    for base, query in ((0, ""), (9, ""), (0, "?dry_run=1")):
        status, body, _ = await declare(api, {"batch": {}}, base, query)
        assert (status, body["code"]) == (412, "queues_changed")
        assert "by ann in entry 2" in body["detail"]
    assert (await api("PUT", "/v1/queues", {"queues": TREE}))[1]["code"] == "if_match_required"
    assert (await api("PUT", "/v1/queues", {"queues": TREE}))[0] == 428
    assert (await api("PUT", "/v1/queues", {"queues": TREE}, If_Match="*"))[0] == 400
    assert api.scheduler.state.index == 2


async def test_all_problems_of_a_declaration_at_once(api: Api) -> None:
    status, body, _ = await declare(api, {"a": {"quota": {"gpu": 1}}, "B": {}, "c": {"state": "holds"}}, 0, extra=1)
    assert (status, body["code"]) == (400, "bad_input")
    problems = {problem["pointer"]: problem for problem in body["errors"]}
    assert problems.keys() == {"/queues/a/quota/gpu", "/queues/B", "/queues/c/state", "/extra"}
    assert (problems["/queues/a/quota/gpu"]["nearest"], problems["/queues/c/state"]["nearest"]) == ("gpus", "hold")
    for bad in (b"", b"[]", b"1", b'{"queues": {}}', b'{"queues": {"a": {}}, "reason": 1}', b'{"queues": {"a": {}, "a": {}}}'):
        assert (await api("PUT", "/v1/queues", bad, If_Match='"0"'))[0] == 400, bad
    assert (await api("PUT", "/v1/queues?dry=1", {"queues": TREE}, If_Match='"0"'))[0] == 400


async def test_jobs_go_to_leaves_that_are_declared(api: Api) -> None:
    await declare(api, {**TREE, "old": {"state": "drain", "queues": {"er": {}}}}, 0)
    for queue, status, code, said in (
        ("research/nlq", 404, "no_such_queue", "did you mean research/nlp?"),
        ("nlp", 404, "no_such_queue", "did you mean research/nlp?"),
        ("default", 404, "no_such_queue", "there is no queue default"),
        ("research", 404, "no_such_queue", "research/nlp, research/vision"),
        ("old/er", 409, "queue_drains", "with old above it"),
    ):
        seen, body, _ = await api("POST", "/v1/jobs", {**SPEC, "queue": queue})
        assert (seen, body["code"]) == (status, code)
        assert said in body["detail"]
    assert (await api("POST", "/v1/jobs", {**SPEC, "queue": "batch"}))[0] == 201


async def test_a_queue_with_live_jobs_stays(api: Api) -> None:
    await declare(api, TREE, 0)
    _, job, _ = await api("POST", "/v1/jobs", {**SPEC, "queue": "batch"}, Idempotency_Key="k")
    for tree in ({"research": {}}, {"batch": {"queues": {"night": {}}}}):
        for query in ("?dry_run=1", ""):
            status, body, _ = await declare(api, tree, 2, query)
            assert (status, body["code"]) == (409, "queue_in_use")
            assert "has 1 live job" in body["detail"]
    assert (await declare(api, {"batch": {"state": "drain"}}, 2))[0] == 200
    assert (await api("POST", "/v1/jobs", {**SPEC, "queue": "batch"}, Idempotency_Key="k"))[0] == 200
    assert (await api("POST", "/v1/jobs", {**SPEC, "queue": "batch"}))[1]["code"] == "queue_drains"
    await api.scheduler.write(ev.GangFinished(job=job["job"], outcome="cancelled", cause="stopped", message=""))
    assert (await declare(api, {"research": {}}, 4))[0] == 200


async def test_a_standby_passes_a_declaration_on(start: Start) -> None:
    leader = await start()
    standby = await start(leader.scheduler.log, "s2", "standby")
    standby.scheduler.leader_name, standby.scheduler.leader_url = "s1", leader.url
    status, body, headers = await declare(standby, TREE, 0)
    assert (status, body["index"], headers["ETag"]) == (200, 2, '"2"')
    assert list(standby.scheduler.state.queues.specs) == ["default"]
    assert (await standby("GET", "/v1/queues?min_index=2&wait=5s"))[1]["index"] == 2


# ---------------------------------------------------------------- arrays, dependencies, hold


ARRAY = {**SPEC, "name": "sweep", "array": "0-4%2", "gang": {"ranks": 1}}


async def array(api: Api) -> str:
    """Submit an array, with its first two elements as jobs, the first of which has failed."""
    _, body, _ = await api("POST", "/v1/jobs", ARRAY)
    job: str = body["job"]
    s = api.scheduler
    await s.write(ev.ElementsQueued(job=job, indices=(0, 1)))
    await s.write(ev.GangFinished(job=f"{job}.0", outcome="failed", cause="rank_failed", message="m", exit_code=3))
    return job


async def test_an_array_is_one_row_and_its_elements_are_others(api: Api) -> None:
    job = await array(api)
    other = (await api("POST", "/v1/jobs", SPEC))[1]["job"]
    rows = (await api("GET", "/v1/jobs"))[1]["jobs"]
    assert [row["id"] for row in rows] == [other, job]
    assert rows[1]["elements"] == {
        "total": 5, "to_come": 3, "queued": 1, "active": 0, "succeeded": 0, "failed": 1, "cancelled": 0, "at_most": 2, "indices": "0-4",
        "failed_indices": "0",
    }  # fmt: skip
    assert (rows[1]["state"], rows[1]["reason"]) == ("queued", "of 5: 1 queued, 3 to come, 1 failed")
    assert [r["id"] for r in (await api("GET", f"/v1/jobs?array={job}"))[1]["jobs"]] == [f"{job}.0", f"{job}.1"]
    assert [r["id"] for r in (await api("GET", "/v1/jobs?elements=1"))[1]["jobs"]] == [other, job, f"{job}.0", f"{job}.1"]
    pages, cursor = [], ""
    while cursor is not None:
        body = (await api("GET", f"/v1/jobs?elements=1&limit=1&cursor={cursor}"))[1]
        pages += [row["id"] for row in body["jobs"]]
        cursor = body["cursor"]
    assert pages == [other, job, f"{job}.0", f"{job}.1"], "no page has a job twice or leaves one out"
    assert (await api("GET", f"/v1/jobs?array={other}"))[1]["code"] == "no_array"


async def test_elements_are_addressed_by_id_name_and_prefix(api: Api) -> None:
    job = await array(api)
    for ref in (f"{job}.1", "sweep.1", f"{job[:5]}.1"):
        body = (await api("GET", f"/v1/jobs/{ref}"))[1]
        assert (body["id"], body["array"], body["array_index"], body["state"]) == (f"{job}.1", job, 1, "queued")
    waiting = (await api("GET", "/v1/jobs/sweep.4"))[1]
    assert (waiting["state"], waiting["deferred"]["code"]) == ("queued", "array_turn")
    why = (await api("GET", "/v1/jobs/sweep.4/why"))[1]
    assert (why["witness"]["code"], why["order"]) == ("array_turn", None)
    assert (await api("GET", "/v1/jobs/sweep.5"))[1]["code"] == "no_such_element"
    assert (await api("GET", "/v1/jobs/sweep/logs"))[1]["code"] == "is_array"
    story = (await api("GET", f"/v1/jobs/{job}.1/story"))[1]["entries"]
    assert [entry["event"] for entry in story] == ["elements_queued"]


async def test_an_element_whose_turn_has_not_come_is_stopped(api: Api) -> None:
    job = await array(api)
    status, body, _ = await api("DELETE", "/v1/jobs/sweep.3")
    assert (status, body["state"]) == (200, "finished")
    assert (await api("GET", "/v1/jobs/sweep.3"))[1]["outcome"] == "cancelled"
    assert (await api("DELETE", "/v1/jobs/sweep.3"))[0] == 200
    assert (await api("GET", f"/v1/jobs/{job}"))[1]["elements"]["to_come"] == 2


async def test_hold_and_release(api: Api) -> None:
    job = (await api("POST", "/v1/jobs", SPEC))[1]["job"]
    status, body, _ = await api("POST", f"/v1/jobs/{job}:hold", {"reason": "data"}, Gangline_User="ann")
    assert (status, body["held"], body["held_by"]) == (200, True, "ann")
    index = api.scheduler.state.index
    assert (await api("POST", f"/v1/jobs/{job}:hold", {"reason": "data"}))[0] == 200
    assert api.scheduler.state.index == index, "said twice, it is done once"
    assert (await api("POST", f"/v1/jobs/{job}:release", {}))[1]["held"] is False
    assert (await api("POST", f"/v1/jobs/{job}:release"))[0] == 200
    assert (await api("POST", f"/v1/jobs/{job}:relaese"))[1]["code"] == "no_such_action"
    assert (await api("POST", f"/v1/jobs/{job}:release", {"requeue": True}))[0] == 400
    assert (await api("POST", f"/v1/jobs/{job}:hold", {"why": "x"}))[0] == 400
    await api.scheduler.write(ev.GangFinished(job=job, outcome="cancelled", cause="stopped", message="m"))
    assert (await api("POST", f"/v1/jobs/{job}:hold"))[1]["code"] == "job_ended"


async def test_hold_of_an_array_and_its_elements(api: Api) -> None:
    await array(api)
    assert (await api("POST", "/v1/jobs/sweep:hold", {}))[0] == 200
    assert (await api("POST", "/v1/jobs/sweep.1:release", {}))[1]["code"] == "array_held"
    assert (await api("POST", "/v1/jobs/sweep.4:hold", {}))[1]["code"] == "element_not_live"
    assert (await api("POST", "/v1/jobs/sweep.1:hold", {}))[1]["held"] is True


async def test_dependencies_are_named_by_id_name_or_element(api: Api) -> None:
    job = await array(api)
    status, body, _ = await api("POST", "/v1/jobs", {**SPEC, "depends_on": ["sweep", "after_any:sweep.4"]})
    assert status == 201
    shown = (await api("GET", f"/v1/jobs/{body['job']}"))[1]
    assert shown["spec"]["depends_on"] == [f"after_ok:{job}", f"after_any:{job}.4"]
    assert shown["waits_for"] == [{"job": job, "when": "after_ok"}, {"job": f"{job}.4", "when": "after_any"}]
    status, body, _ = await api("POST", "/v1/jobs", {**SPEC, "depends_on": ["nobody"]})
    assert (status, body["code"]) == (404, "no_such_dependency")
    status, body, _ = await api("POST", "/v1/jobs", {**SPEC, "depends_on": ["sweep", f"after_any:{job}"]})
    assert (status, body["code"]) == (422, "dependency_twice")


async def test_plans_of_jobs_that_wait_for_something_else_than_room(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_plan, "_FREE_S", 100.0)  # on a busy machine, too
    await array(api)
    for field, code in (({"depends_on": ["sweep"]}, "dependency"), ({"hold": True}, "held"), ({"begin": "1h"}, "before_begin")):
        assert (await api("POST", "/v1/jobs:plan", {**SPEC, **field}))[1]["reason"]["code"] == code
    assert (await api("POST", "/v1/jobs:plan", {**SPEC, "depends_on": ["nobody"]}))[1]["code"] == "no_such_dependency"


async def test_a_batch_is_a_chain_when_its_jobs_name_those_before_them(api: Api) -> None:
    after = {"a": [], "b": ["a"], "c": ["d"], "d": []}
    chain = [{**SPEC, "name": name, "depends_on": others} for name, others in after.items()]
    results = (await api("POST", "/v1/jobs:batch", {"jobs": chain}))[1]["results"]
    assert results[2]["problem"]["code"] == "no_such_dependency", "only what stands before can be named, so there are no circles"
    assert (await api("GET", "/v1/jobs/b"))[1]["waits_for"] == [{"job": results[0]["job"], "when": "after_ok"}]


async def test_reservations_are_declared_listed_and_removed(api: Api) -> None:
    await api.scheduler.write(ev.NodeJoined(registration=registration("n1")))
    wrong = {"name": "bad name", "nodes": ["n1"], "gpus": 2, "start_in_s": 60}
    status, body, _ = await api("POST", "/v1/reservations", wrong)
    assert status == 400
    assert {e["pointer"] for e in body["errors"]} == {"/name", "/nodes", "/maintenance", "/end_ms"}
    asked = {"name": "fans", "nodes": ["n1"], "start_in_s": 3600, "length_s": 600, "maintenance": True, "reason": "new fans"}
    status, body, _ = await api("POST", "/v1/reservations", asked, Gangline_User="ann")
    assert (status, body["name"], body["state"], body["nodes"], body["by"]) == (200, "fans", "planned", [{"node": "n1", "gpus": None}], "ann")
    status, body, _ = await api("POST", "/v1/reservations", asked)
    assert (status, body["code"]) == (409, "name_in_use")
    for more, code in (({"nodes": ["n9"]}, "no_such_node"), ({"nodes": [], "gpus": 999}, "no_room")):
        status, body, _ = await api("POST", "/v1/reservations", asked | {"name": "other"} | more)
        assert body["code"] == code
    status, body, _ = await api("GET", "/v1/reservations")
    assert [row["name"] for row in body["reservations"]] == ["fans"]
    status, body, _ = await api("DELETE", "/v1/reservations/fans?reason=not+needed")
    assert (status, body["name"]) == (200, "fans")
    status, body, _ = await api("DELETE", "/v1/reservations/fans")
    assert (status, body["code"]) == (404, "no_such_reservation")
