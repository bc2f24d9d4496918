"""HTTP: OpenAI's API over a `Service`, as a Starlette app. Torch-free."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engines.fleet.borrowing import PATH
from engines.serving.answers import Answer
from engines.serving.metrics import Outcome
from engines.serving.refusals import Refused
from engines.serving.requests import Asked, Kind
from engines.serving.service import Call, Lending, Service, Stalled

_MOST_BODIES = 32
"""Bodies of the largest size that are read at a time, in bytes together."""
_MOST_ORDERS_BYTES = 2**16
_OUTCOMES: dict[int, Outcome] = {429: "overload", 503: "draining"}
T = TypeVar("T")


def make_app(service: Service, *, api_key: str | None = None) -> ASGIApp:
    """`api_key`: what clients must send as `Authorization: Bearer KEY`, except to /health."""

    lender = service.lender

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_card(service)]})

    async def model(request: Request) -> Response:
        if (name := request.path_params["name"]) != service.model.name:
            raise Refused(404, f"model={name!r}: is not served here", param="model", code="model_not_found")
        return _json(_card(service))

    async def health(request: Request) -> Response:
        try:
            service.check_open()
        except Refused as refused:
            return _refusal(refused)
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        more = [] if lender is None else await asyncio.to_thread(lender.samples)
        return PlainTextResponse(service.metrics.text(service.load, more), media_type="text/plain; version=0.0.4")

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        assert isinstance(error, Refused)
        return _refusal(error)

    app = Starlette(
        routes=[
            Route("/v1/completions", Generation(service, "completion"), methods=["POST"]),
            Route("/v1/chat/completions", Generation(service, "chat"), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
            *([] if lender is None else _loans(service, lender)),
        ],
        exception_handlers={Refused: refuse, HTTPException: refuse},
    )
    return app if api_key is None else KeyCheck(app, api_key)


def _loans(service: Service, lender: Lending) -> list[Route]:
    async def status(request: Request) -> Response:
        return _json(await asyncio.to_thread(lender.status))  # it may wait for a step

    async def lend(request: Request) -> Response:
        service.check_open()
        body = await read_body(request, _MOST_ORDERS_BYTES, service.limits.stall_s)
        lender.lend(body)
        return _json({"lent": True})

    return [Route(PATH, status, methods=["GET"]), Route(PATH, lend, methods=["POST"])]


async def read_body(
    request: Request, most: int, stall_s: float, count: Callable[[int], None] = lambda _: None
) -> bytes:
    """Returns the JSON of a request, of at most so many bytes; `count` gets the length of each part. Raises `Refused`,
    also if it has not come within `stall_s` seconds."""
    if (kind := request.headers.get("content-type", "").partition(";")[0].strip().lower()) != "application/json":
        # A browser sends this type from foreign pages only if the server allows it, which this one does not.
        raise Refused(415, f"Content-Type: {kind!r}: must be application/json")
    too_long = Refused(413, f"the body is longer than {most} bytes, which this server takes at most")
    if int(request.headers.get("content-length", 0)) > most:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(stall_s):
            async for part in request.stream():
                body += part
                count(len(part))
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        raise Refused(408, "the body has not come in time") from None
    return bytes(body)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _refusal(refused: Refused) -> Response:
    return _json(refused.body, refused.status, refused.headers)


def _card(service: Service) -> dict[str, Any]:
    model = service.model
    card = {"id": model.name, "object": "model", "created": service.created, "owned_by": "curtail"}
    return {**card, "max_model_len": model.max_model_len}


class KeyCheck:
    """Answers 401 to requests without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._digest = app, hashlib.sha256(f"Bearer {key}".encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_right = hmac.compare_digest(hashlib.sha256(given).digest(), self._digest)
        if scope["type"] == "http" and scope["path"] != "/health" and not is_right:
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            await _refusal(Refused(401, message, code="invalid_api_key"))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class ClientLeft(Exception):
    """The connection has ended before the answer."""


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` returns. Cancels it, and raises `ClientLeft`, when the connection ends first."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving, working = asyncio.create_task(left()), asyncio.create_task(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


class Generation:
    """POST /v1/completions, or /v1/chat/completions."""

    def __init__(self, service: Service, kind: Kind) -> None:
        self._service, self._kind = service, kind
        self._num_body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        outcome: Outcome = "failed"
        try:
            asked, prompts = await self._read(Request(scope, receive))
            outcome = await self._answer(asked, prompts, arrived, scope, receive, send)
        except Refused as refused:
            outcome = _OUTCOMES.get(refused.status, "failed" if refused.status >= 500 else "refused")
            await _refusal(refused)(scope, receive, send)
        except (ClientLeft, ClientDisconnect):
            outcome = "client_left"
        except (Stalled, TimeoutError):
            outcome = "stalled"
        finally:
            self._service.metrics.requests[outcome] += 1

    async def _read(self, request: Request) -> tuple[Asked, list[list[int]]]:
        """Returns what the body asks for, and the token ids of its prompts."""
        self._service.check_open()
        most, num_bytes = self._service.limits.max_body_bytes, 0

        def count(num_new: int) -> None:
            nonlocal num_bytes
            num_bytes += num_new
            self._num_body_bytes += num_new
            if self._num_body_bytes > most * _MOST_BODIES:
                raise Refused(429, "the server is reading as many bodies as it takes", code="overloaded")

        try:
            body = await read_body(request, most, self._service.limits.stall_s, count)
            return await self._service.read(body, self._kind)
        finally:
            self._num_body_bytes -= num_bytes

    async def _answer(
        self, asked: Asked, prompts: list[list[int]], arrived: float, scope: Scope, receive: Receive, send: Send
    ) -> Outcome:
        service = self._service
        answer = Answer(asked, service.model.name, prompts, service.model.template.tokenizer)
        call = service.call(asked, prompts, arrived)
        try:
            if asked.streams:
                return await _unless_left(receive, self._stream(call, answer, asked.includes_usage, send))
            await _unless_left(receive, self._finish(call, answer))
            async with asyncio.timeout(service.limits.stall_s):
                await _json(answer.whole())(scope, receive, send)
            return "ok"
        finally:
            service.close(call)
            service.metrics.e2e.add(time.monotonic() - arrived)

    @staticmethod
    async def _finish(call: Call, answer: Answer) -> None:
        while not answer.is_complete:
            for tokens in await call.take():
                answer.take(tokens)

    async def _stream(self, call: Call, answer: Answer, includes_usage: bool, send: Send) -> Outcome:
        """Sends server-sent events. An error before the first token is an answer of its own, a later one an event."""
        found = await call.take()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        outcome: Outcome = "ok"
        while True:
            chunks = [chunk for tokens in found for chunk in answer.chunks(tokens)]
            if answer.is_complete:
                break
            await self._send(send, *map(_event, chunks))
            try:
                found = await call.take()
            except Refused as refused:
                chunks, outcome = [refused.body], "failed"
                break
        if includes_usage and answer.is_complete:
            chunks.append(answer.last_chunk())
        await self._send(send, *map(_event, chunks), b"data: [DONE]\n\n", is_last=True)
        return outcome

    async def _send(self, send: Send, *events: bytes, is_last: bool = False) -> None:
        if events:
            async with asyncio.timeout(self._service.limits.stall_s):
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": not is_last})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
