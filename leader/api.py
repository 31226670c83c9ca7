"""The HTTP API of a scheduler, docs/api.md: `make_app` puts the routes together, api_server.py listens.

    request ─▶ guard (host, token, origin) ─▶ route ─▶ Service: view, execute, entries ─▶ answer, stamped with its log index
                                                └── a write on a standby ─▶ the leader

A route reads the state between two awaits and never keeps it. Everything that a client can make grow has a bound in ApiOptions.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from gangline.core import telemetry
from gangline.core.model.clusterfile import MAX_BYTES as MAX_CLUSTER_BYTES
from gangline.core.model.jobfile import MAX_BYTES
from gangline.leader.api_cluster import ClusterRoutes
from gangline.leader.api_context import ApiOptions, Context
from gangline.leader.api_events import EventRoutes
from gangline.leader.api_exec import ExecRoutes
from gangline.leader.api_guard import CannotListen, Guard, check_listen
from gangline.leader.api_http import MAX_BODY, Refusal, from_aiohttp
from gangline.leader.api_jobs import JobRoutes
from gangline.leader.api_logs import LogRoutes
from gangline.leader.api_plan import PlanRoutes
from gangline.leader.api_queues import QueueRoutes
from gangline.leader.api_reservations import ReservationRoutes
from gangline.leader.api_server import Listener
from gangline.leader.api_why import WhyRoutes
from gangline.leader.commands import Refused
from gangline.leader.metrics import Metrics
from gangline.leader.service import NotLeader, Service, Unavailable

__all__ = ["ApiOptions", "CannotListen", "Listener", "check_listen", "make_app", "serve"]

#: body of an operator's word
_SMALL = 16 << 10

_Next = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(service: Service, options: ApiOptions, metrics: Metrics | None = None, log: telemetry.Log | None = None) -> Listener:
    """Start listening and return the listener, which knows its url and is to be closed. Raises CannotListen."""
    check_listen(options.host, options.token_file)
    listener = Listener(make_app(service, options, metrics, log), options)
    await listener.start()
    return listener


def make_app(service: Service, options: ApiOptions, metrics: Metrics | None = None, log: telemetry.Log | None = None) -> web.Application:
    """Return the application. Without `metrics` and `log` it keeps its own and writes to stderr."""
    context = Context(service, options, metrics or Metrics(telemetry.setup("scheduler"), lambda: context.seen))
    app = web.Application(middlewares=[_guard(context, log or telemetry.structured_logging())], client_max_size=MAX_BODY)
    jobs, cluster, events, logs = JobRoutes(context), ClusterRoutes(context), EventRoutes(context), LogRoutes(context)
    queues, why, reservations = QueueRoutes(context), WhyRoutes(context), ReservationRoutes(context)
    writes = context.writes
    app.add_routes(
        [
            web.post("/v1/jobs", writes(jobs.submit, MAX_BYTES)),
            web.post("/v1/jobs:plan", PlanRoutes(context).plan),
            web.post("/v1/jobs:batch", writes(jobs.submit_batch, MAX_BODY)),
            web.get("/v1/jobs", jobs.list),
            web.get("/v1/jobs/{job}", jobs.show),
            web.post("/v1/jobs/{job}:{action}", writes(jobs.act, _SMALL)),
            web.delete("/v1/jobs/{job}", writes(jobs.stop, _SMALL)),
            web.get("/v1/jobs/{job}/story", events.story),
            web.get("/v1/jobs/{job}/logs", logs.logs),
            web.post("/v1/jobs/{job}/exec", ExecRoutes(context).execute),
            web.get("/v1/jobs/{job}/why", why.why),
            web.get("/v1/jobs/{job}/when", why.when),
            web.get("/v1/nodes", cluster.nodes),
            web.get("/v1/nodes/{node}", cluster.node),
            web.get("/v1/nodes/{node}/health", cluster.node_health),
            web.post("/v1/nodes/{node}/health", writes(cluster.set_health, _SMALL)),
            web.post("/v1/nodes/{node}:{action}", writes(cluster.administer, _SMALL)),
            web.get("/v1/queues", queues.queues),
            web.put("/v1/queues", writes(queues.declare, MAX_CLUSTER_BYTES)),
            web.get("/v1/reservations", reservations.list),
            web.post("/v1/reservations", writes(reservations.create, MAX_CLUSTER_BYTES)),
            web.delete("/v1/reservations/{name}", writes(reservations.delete, _SMALL)),
            web.get("/v1/events", events.events),
            web.post("/v1/brake", writes(cluster.brake, _SMALL)),
            web.get("/v1/state", cluster.state),
            web.get("/v1/health", cluster.health),
            web.get("/metrics", cluster.metrics),
        ]
    )

    async def stop_streams(_app: web.Application) -> None:
        context.closing.set()

    async def close(_app: web.Application) -> None:
        await context.close()

    app.on_shutdown.append(stop_streams)
    app.on_cleanup.append(close)
    return app


def _guard(context: Context, log: telemetry.Log) -> Any:
    """Return the middleware around every route: who may ask, what an error looks like, what is counted."""
    options, metrics = context.options, context.metrics
    guard = Guard(options.host, options.allowed_hosts, options.token_file)

    @web.middleware
    async def middleware(request: web.Request, handler: _Next) -> web.StreamResponse:
        began = time.perf_counter()
        failed = True
        try:
            guard.check(request)
            response = await handler(request)
            failed = False
        except Refusal as e:
            response = e.response()
        except Refused as e:
            response = Refusal(e.status, e.code, e.message).response()
        except web.HTTPException as e:
            response = from_aiohttp(e).response()
        except (NotLeader, Unavailable) as e:
            response = Refusal(503, "unavailable", str(e), retry_after_s=1).response()
        except (ConnectionError, TimeoutError):
            raise
        except Exception as e:  # noqa: BLE001 - the one place that keeps a fault in a route from being silent
            log.error("request_failed", method=request.method, path=request.path, error=e)
            response = Refusal(500, "internal", "a fault of the scheduler; its log says more").response()
        if failed and request.writer.output_size > 0:
            raise ConnectionResetError("a stream has begun: it is cut, and its client asks again")
        resource = request.match_info.route.resource
        streamed = response.prepared
        if not streamed and "Gangline-Index" not in response.headers:
            response.headers.update(context.stamp())
        route = resource.canonical if resource is not None else "none"
        metrics.answered(route, request.method, response.status, None if streamed else time.perf_counter() - began)
        return response

    return middleware
