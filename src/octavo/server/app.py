"""The HTTP application: routes, and the life of the engine behind them.

Every route but the health checks needs the API key when there is one (deny by default). Answers of generating routes end with their
client: see ``asgi.until_disconnect``. Owns no token and no text; ``calls`` runs generation, ``openai_types`` reads bodies.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

import octavo
from octavo.core.clock import Clock
from octavo.core.request import ParameterError
from octavo.core.speculative_params import SpeculativeParams
from octavo.engine.params import RequestOptions
from octavo.engine.replay_advice import Replayer
from octavo.engine.serving import ServingEngine
from octavo.server import asgi
from octavo.server.asgi import App, BodyReader, ClientLeft, Header, KeyCheck, Receive, Scope, Send
from octavo.server.calls import Answer, Call, CallIdentity, ChoiceFormat, Wanted, open_call
from octavo.server.chat import ChatFormat, chat_prompt
from octavo.server.choices import num_shown
from octavo.server.cluster import ClusterRoutes
from octavo.server.completions import CompletionFormat, completion_prompts
from octavo.server.errors import APIError, invalid
from octavo.server.explain import Explainer
from octavo.server.openai_types import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    parse_body,
)
from octavo.server.options import ServerOptions
from octavo.server.prometheus import exposition
from octavo.server.prompts import Prompt, PromptReader, run_aside

OPEN_PATHS = frozenset({"/health", "/health/live"})  # the only ones that need no key


@dataclass(slots=True)
class Exchange:
    """One HTTP request whose body has been read."""

    scope: Scope
    body: bytes
    send: Send
    headers: tuple[Header, ...]
    received_s: float  # on the engine's clock


class Service:
    """What the routes do, for one engine."""

    def __init__(self, engine: ServingEngine, options: ServerOptions, replayer: Replayer | None = None) -> None:
        self.engine = engine
        self.options = options
        self.model = engine.model
        self.reader = PromptReader(self.model.tokenizer, engine.max_model_len)
        self.model_name = engine.model_name
        self.started = int(time.time())
        self.reports = engine.reports(options.explain_cache, replayer)
        self.explainer = Explainer(engine, self.reports)
        self.cluster = ClusterRoutes(engine.cluster, options.api_key is not None)

    @property
    def fingerprint(self) -> str:
        """As answers show it. Workers say it when they are ready."""
        return "fp_" + hashlib.blake2b(self.engine.fingerprint.encode(), digest_size=6).hexdigest()

    async def completions(self, exchange: Exchange) -> None:
        request = await run_aside(len(exchange.body) // 16, parse_body, exchange.body, CompletionRequest)
        self._check_model(request.model)
        prompts = await completion_prompts(request, len(exchange.body), self.reader)
        call = await self._open(exchange, request, "cmpl", prompts, DEFAULT_COMPLETION_TOKENS)
        await self._answer(exchange, request, call, CompletionFormat(request, self.model.tokenizer))

    async def chat_completions(self, exchange: Exchange) -> None:
        request = await run_aside(len(exchange.body) // 16, parse_body, exchange.body, ChatRequest)
        self._check_model(request.model)
        prompt = await chat_prompt(request, len(exchange.body), self.model, self.reader)
        call = await self._open(exchange, request, "chatcmpl", [prompt], None)
        await self._answer(exchange, request, call, ChatFormat(request, self.model.tokenizer))

    async def _open(
        self,
        exchange: Exchange,
        request: CompletionRequest | ChatRequest,
        id_prefix: str,
        prompts: list[Prompt],
        default_max_tokens: int | None,
    ) -> Call:
        params = await run_aside(len(exchange.body) // 16, request.params)
        options = RequestOptions(
            cache_salt=request.cache_salt or None,
            speculative=SpeculativeParams.of(request.speculative),
            priority=request.priority or 0,
            user=request.user,
            session=request.checked_cache_key(),
            received_s=exchange.received_s,
        )
        explain = (self.options.explain_cache, bool(request.explain))
        wanted = Wanted(params, num_shown(request), default_max_tokens, request.checked_request_id(), request.warnings, options, *explain)
        try:
            return await open_call(self.engine, CallIdentity(id_prefix, self.model_name, self.fingerprint), prompts, wanted)
        except ParameterError as error:
            raise ParameterError(request.name_of(error.param), error.value, error.limit, error.code) from None

    async def _answer(self, exchange: Exchange, request: SamplingFields, call: Call, choice_format: ChoiceFormat) -> None:
        include_usage = request.check_stream_options()
        answer = Answer(self.engine, call, choice_format, exchange.scope, exchange.send, self.explainer)
        with self.explainer.answering(call.response_id, [one.request for one in call.prepared]):
            if request.stream:
                await answer.streamed(exchange.headers, include_usage)
            else:
                await answer.whole(exchange.headers)

    async def tokenize(self, exchange: Exchange) -> None:
        """A prompt's token ids (with what the model puts before it, unless ``add_special_tokens`` is false), or a conversation's."""
        request = await run_aside(len(exchange.body) // 16, parse_body, exchange.body, TokenizeRequest)
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt: exactly one of prompt and messages is needed", "prompt", "missing_field")
        if request.prompt is not None:
            (ids,) = await self.reader.encode_all([request.prompt], request.add_special_tokens is not False, "prompt")
        else:
            ids = (await chat_prompt(request, len(exchange.body), self.model, self.reader)).token_ids
        content: dict[str, Any] = {"count": len(ids), "max_model_len": self.engine.max_model_len, "tokens": ids}
        content["token_strs"] = await run_aside(len(ids), self._token_texts, ids) if request.return_token_strs else None
        await self._send_with_warnings(exchange, content, request.warnings)

    async def detokenize(self, exchange: Exchange) -> None:
        request = await run_aside(len(exchange.body) // 16, parse_body, exchange.body, DetokenizeRequest)
        self._check_model(request.model)
        text = await run_aside(len(request.tokens), self._decode, request.tokens)
        await self._send_with_warnings(exchange, {"prompt": text}, request.warnings)

    def _token_texts(self, token_ids: list[int]) -> list[str]:
        return [self.model.tokenizer.token_text(token_id) for token_id in token_ids]

    def _decode(self, token_ids: list[int]) -> str:
        size = self.model.tokenizer.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise invalid(f"tokens: {token_id} is not allowed; token ids are integers from 0 to {size - 1}", "tokens")
        return self.model.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def _send_with_warnings(self, exchange: Exchange, content: dict[str, Any], warnings: list[str]) -> None:
        await asgi.send_json(exchange.send, content | ({"warnings": warnings} if warnings else {}), headers=exchange.headers)

    async def models(self, exchange: Exchange) -> None:
        await asgi.send_json(exchange.send, {"object": "list", "data": [self._model_card()]}, headers=exchange.headers)

    async def one_model(self, exchange: Exchange) -> None:
        self._check_model(exchange.scope["path_params"]["model"])
        await asgi.send_json(exchange.send, self._model_card(), headers=exchange.headers)

    async def version(self, exchange: Exchange) -> None:
        await asgi.send_json(exchange.send, {"version": octavo.__version__}, headers=exchange.headers)

    async def metrics(self, exchange: Exchange) -> None:
        body, content_type = exposition(await self.reports.metrics())
        await asgi.send_body(exchange.send, 200, body, ((b"content-type", content_type), *exchange.headers))

    async def explain(self, exchange: Exchange) -> None:
        content = await self.explainer.of_id(exchange.scope["path_params"]["request_id"])
        await asgi.send_json(exchange.send, content, headers=exchange.headers)

    async def requests(self, exchange: Exchange) -> None:
        content = await self.explainer.listed(exchange.scope["query_string"])
        await asgi.send_json(exchange.send, content, headers=exchange.headers)

    async def explain_summary(self, exchange: Exchange) -> None:
        content = await self.explainer.summary(exchange.scope["query_string"])
        await asgi.send_json(exchange.send, content, headers=exchange.headers)

    async def cluster_status(self, exchange: Exchange) -> None:
        await asgi.send_json(exchange.send, self.cluster.status(), headers=exchange.headers)

    async def cluster_drain(self, exchange: Exchange) -> None:
        await asgi.send_json(exchange.send, await self.cluster.drain(exchange.body), headers=exchange.headers)

    async def cluster_undrain(self, exchange: Exchange) -> None:
        await asgi.send_json(exchange.send, await self.cluster.undrain(exchange.body), headers=exchange.headers)

    async def cluster_restart(self, exchange: Exchange) -> None:
        await asgi.send_json(exchange.send, await self.cluster.restart(exchange.body), headers=exchange.headers)

    async def health(self, exchange: Exchange) -> None:
        """200 while requests are taken and the engine makes progress, else 503."""
        health = self.engine.health()
        await asgi.send_json(exchange.send, {"status": health.detail}, 200 if health.ready else 503, exchange.headers)

    async def live(self, exchange: Exchange) -> None:
        """200 while the engine works, also when it is shutting down."""
        health = self.engine.health()
        await asgi.send_json(exchange.send, {"status": health.detail}, 200 if health.live else 503, exchange.headers)

    def routes(self) -> list[tuple[str, str, Callable[[Exchange], Awaitable[None]]]]:
        """Method, path and handler of each."""
        return [
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("POST", "/v1/completions", self.completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.one_model),
            ("GET", "/v1/requests", self.requests),
            ("GET", "/v1/requests/{request_id:path}/explain", self.explain),
            ("GET", "/v1/explain/summary", self.explain_summary),
            ("GET", "/v1/cluster", self.cluster_status),
            ("POST", "/v1/cluster/drain", self.cluster_drain),
            ("POST", "/v1/cluster/undrain", self.cluster_undrain),
            ("POST", "/v1/cluster/restart", self.cluster_restart),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/health/live", self.live),
            ("GET", "/metrics", self.metrics),
            ("GET", "/version", self.version),
        ]

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "octavo",
            "root": self.model.name,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise APIError(404, f"model: {name!r:.200} is not served here; there is: {self.model_name}", "model", "model_not_found")


class Endpoint:
    """A route as an ASGI application: reads the body, runs a handler until it or its client ends, and answers errors in OpenAI's shape."""

    def __init__(self, bodies: BodyReader, handler: Callable[[Exchange], Awaitable[None]], clock: Clock) -> None:
        self._bodies = bodies
        self._handler = handler
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, received_s = False, self._clock.now()

        async def tracked(message: asgi.Message) -> None:
            nonlocal started
            started = True
            await send(message)

        headers = ((b"x-request-id", asgi.request_id(scope)),)
        try:
            async with self._bodies.read(scope, receive) as body:
                await asgi.until_disconnect(receive, self._handler(Exchange(scope, body, tracked, headers, received_s)))
        except ClientLeft:
            pass
        except asgi.BodyRefused as error:
            await asgi.refuse_body(receive, send, error, headers)
        except Exception as error:
            if started:
                raise
            await asgi.send_error(send, error, headers)


def create_app(engine: ServingEngine, options: ServerOptions | None = None, replayer: Replayer | None = None) -> App:
    """The ASGI application. It starts ``engine`` with its lifespan and stops it at the end. ``replayer``: what runs recorded windows again
    to say what would have helped (None: nobody)."""
    options = options or ServerOptions()
    service = Service(engine, options, replayer)
    bodies = BodyReader(options.max_body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop(0.0)

    def route(method: str, path: str, handler: Callable[[Exchange], Awaitable[None]]) -> Route:
        return Route(path, Endpoint(bodies, handler, engine.clock), methods=[method])

    routes = [route(*one) for one in service.routes()]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    if options.api_key is not None:
        return KeyCheck(app, options.api_key, OPEN_PATHS)
    return app


async def _http_error(request: HTTPRequest, error: Exception) -> Response:
    """Unknown paths and methods, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        api_error = APIError(405, f"{request.method} is not allowed for {request.url.path}", code="method_not_allowed")
    else:
        api_error = APIError(error.status_code, f"{request.url.path} is not a route of this server", code="not_found")
    return Response(api_error.body(), api_error.status, dict(error.headers or {}), "application/json")
