"""HTTP around ``TinyEngine``: vLLM's generate and reinforcement-learning endpoints, over aiohttp.

Promises: what a client did wrong is a 400 that names it, what it may retry is a 503 with Retry-After; a dropped connection
takes its request out of the batch; without a token only loopback addresses are served, as whoever reaches the port can
replace the weights. Access control and request parsing are all that this module adds.
"""

from __future__ import annotations

import hmac
import ipaddress
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import cast, get_args

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError

from pipeline.engines.tiny import answers
from pipeline.engines.tiny.engine import EngineDead, EnginePaused, RequestRefused, TinyEngine
from pipeline.engines.tiny.runner import WeightsRefused
from pipeline.engines.wire import GenerateRequest, PauseMode, error_body

RETRY_AFTER_S = 1
SHUTDOWN_S = 2.0
"""How long requests, among them an upload that has stalled, may take to end once the server stops."""
_JSON_LIMIT = 4 * 2**20
_OPEN_PATHS = frozenset({"/health"})
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _EngineMetrics(Collector):
    """Reads the engine at scrape time: no counter is kept twice."""

    def __init__(self, engine: TinyEngine) -> None:
        self._engine = engine

    def collect(self) -> list[Metric]:
        engine, counters = self._engine, self._engine.counters
        prefix = "packtrain_engine"
        return [
            GaugeMetricFamily(
                f"{prefix}_requests_running", "Requests in the running batch", len(engine.scheduler.running)
            ),
            GaugeMetricFamily(
                f"{prefix}_requests_waiting", "Requests not yet admitted", len(engine.scheduler.waiting)
            ),
            GaugeMetricFamily(f"{prefix}_weight_version", "Weight version in use", engine.version),
            GaugeMetricFamily(f"{prefix}_paused", "1 while paused", int(engine.paused is not None)),
            GaugeMetricFamily(
                f"{prefix}_cache_blocks_free",
                "KV cache blocks that no request owns",
                engine.scheduler.free_blocks,
            ),
            CounterMetricFamily(f"{prefix}_requests", "Requests taken", counters.requests),
            CounterMetricFamily(
                f"{prefix}_requests_refused", "Requests refused with a 400", counters.refused
            ),
            CounterMetricFamily(f"{prefix}_steps", "Model steps", counters.steps),
            CounterMetricFamily(f"{prefix}_prompt_tokens", "Prompt tokens taken", counters.prompt_tokens),
            CounterMetricFamily(f"{prefix}_sampled_tokens", "Tokens sampled", counters.sampled_tokens),
            CounterMetricFamily(f"{prefix}_weight_loads", "Weight swaps", counters.weight_loads),
            CounterMetricFamily(
                f"{prefix}_unknown_fields", "Request fields accepted and not used", counters.unknown_fields
            ),
        ]


def create_app(engine: TinyEngine, token: str | None = None, model_name: str = "tiny") -> web.Application:
    """The application; it starts the engine with itself and stops it at its clean-up.

    token: when given, every path but /health wants ``Authorization: Bearer <token>``.
    Run it with ``handler_cancellation=True`` (``serve`` does), or requests of vanished clients run to their end.
    """
    app = web.Application(middlewares=[_errors(engine), _authorized(token)], client_max_size=_JSON_LIMIT)
    registry = CollectorRegistry()
    registry.register(_EngineMetrics(engine))

    async def generate(request: web.Request) -> web.StreamResponse:
        body = GenerateRequest.model_validate_json(await request.read())
        params = body.sampling_params
        if body.content_parts:
            raise RequestRefused("content_parts: this engine's policies see no images")
        if body.stream and params.prompt_logprobs is not None:
            raise RequestRefused("prompt_logprobs are not streamed: send stream=false")
        engine.counters.unknown_fields += len(body.unknown_fields()) + len(params.unknown_fields())
        # As vLLM names it.
        name = f"generate-tokens-{body.request_id or uuid.uuid4().hex}"
        if body.stream:
            return await _streamed(request, engine, body, name)
        answer: dict[str, object] = {"request_id": name}
        if params.prompt_logprobs is not None:
            scored = await engine.score(body.token_ids, params.prompt_logprobs)
            answer["prompt_logprobs"] = answers.prompt_logprobs(body.token_ids, scored)
        answer["choices"] = [answers.whole(await engine.generate(body.token_ids, params))]
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=200 if engine.healthy else 503)

    async def pause(request: web.Request) -> web.Response:
        await engine.pause(_mode(request, "abort"))
        return web.json_response({"status": "paused"})

    async def resume(_: web.Request) -> web.Response:
        await engine.resume()
        return web.json_response({"status": "resumed"})

    async def is_paused(_: web.Request) -> web.Response:
        return web.json_response({"is_paused": engine.paused is not None})

    async def update_weights(request: web.Request) -> web.Response:
        version, mode = _version(request.query.get("version", "")), _mode(request, "keep")
        await engine.load_weights(await _blob(request, engine), version, mode)
        return web.json_response({"success": True, "new_version": str(engine.version)})

    async def update_weight_version(request: web.Request) -> web.Response:
        await engine.set_version(_version(str((await _object(request)).get("new_version", ""))))
        return web.json_response({"success": True, "new_version": str(engine.version)})

    async def weight_version(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(engine.version)})

    async def models(_: web.Request) -> web.Response:
        model = {
            "id": model_name,
            "object": "model",
            "owned_by": "packtrain",
            "max_model_len": engine.max_context,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/health", health)
    app.router.add_post("/pause", pause)
    app.router.add_post("/resume", resume)
    app.router.add_get("/is_paused", is_paused)
    app.router.add_post("/update_weights", update_weights)
    app.router.add_post("/update_weight_version", update_weight_version)
    app.router.add_get("/weight_version", weight_version)
    app.router.add_get("/weight_info", weight_version)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)

    async def lifetime(_: web.Application):
        await engine.start()
        yield
        await engine.stop()

    async def shutdown(_: web.Application) -> None:
        # aiohttp waits for open requests before it cleans up: answer them now with what they have.
        await engine.stop()

    app.cleanup_ctx.append(lifetime)
    app.on_shutdown.append(shutdown)
    return app


async def serve(app: web.Application, host: str, port: int, token: str | None) -> tuple[web.AppRunner, int]:
    """Listen; returns the runner (``await runner.cleanup()`` stops it) and the bound port (``port`` 0: any free one).

    Raises ValueError for an address beyond loopback without a token. ``token`` is what ``create_app`` was given.
    """
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"host {host!r} is reachable from outside and no token is set: set one, or bind 127.0.0.1"
        )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, cast("tuple[str, int]", runner.addresses[0])[1]


async def _streamed(
    request: web.Request, engine: TinyEngine, body: GenerateRequest, name: str
) -> web.StreamResponse:
    """An event a model step; what goes wrong after the first byte is an event too."""
    async with engine.streaming(body.token_ids, body.sampling_params) as growing:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        stream = None
        try:
            async for sequence in growing:
                stream = stream or answers.Stream(sequence)
                await _event(response, {"request_id": name, "choices": [stream.new()]})
        except EngineDead as error:
            await _event(response, error_body(str(error), "engine_dead", 500))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _event(response: web.StreamResponse, event: Mapping[str, object]) -> None:
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


def _mode(request: web.Request, default: PauseMode) -> PauseMode:
    mode = request.query.get("mode", default)
    if mode not in get_args(PauseMode):
        raise RequestRefused(f"mode {mode!r} is unknown: use one of {', '.join(get_args(PauseMode))}")
    return cast(PauseMode, mode)


def _version(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise RequestRefused(f"version {text[:40]!r} is not a whole number of at most 18 digits")
    return int(text)


async def _object(request: web.Request) -> dict[str, object]:
    try:
        body: object = await request.json()
    except ValueError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body is not a JSON object")
    return cast("dict[str, object]", body)


async def _blob(request: web.Request, engine: TinyEngine) -> bytes:
    """The raw body, up to the model's own size and a header: longer blobs cannot fit and are not read."""
    limit = engine.weight_bytes + 2**20
    blob = bytearray()
    async for chunk in request.content.iter_chunked(2**20):
        blob += chunk
        if len(blob) > limit:
            raise RequestRefused(
                f"the weights exceed {limit} bytes, more than this model's float32 parameters take"
            )
    return bytes(blob)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _authorized(token: str | None):
    expected = None if token is None else f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if (
            expected is not None
            and request.path not in _OPEN_PATHS
            and not hmac.compare_digest(given, expected)
        ):
            return web.json_response(
                error_body("a valid bearer token is needed", "unauthorized", 401), status=401
            )
        return await handler(request)

    return check


def _errors(engine: TinyEngine):
    @web.middleware
    async def translate(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ValidationError as error:
            engine.counters.refused += 1
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            return web.json_response(
                error_body(f"{where}: {first['msg']}", "invalid_request", 400), status=400
            )
        except (RequestRefused, WeightsRefused) as error:
            engine.counters.refused += 1
            return web.json_response(error_body(str(error), "invalid_request", 400), status=400)
        except EnginePaused as error:
            retry = {"Retry-After": str(RETRY_AFTER_S)}
            return web.json_response(error_body(str(error), "engine_paused", 503), status=503, headers=retry)
        except EngineDead as error:
            return web.json_response(error_body(str(error), "engine_dead", 500), status=500)

    return translate
