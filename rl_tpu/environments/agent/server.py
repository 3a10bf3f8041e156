"""The HTTP endpoint that agents talk to: every session has a base URL of its own."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from rl_tpu.environments.agent.protocol import ApiError, parse_chat_request
from rl_tpu.environments.agent.responses import completion, events, models
from rl_tpu.environments.agent.session import Session
from rl_tpu.errors import UserError
from rl_tpu.registry import describe

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
SHUTDOWN_S = 1.0
"""What an open connection gets at the end; sessions are closed before."""
SESSION_HEADER = "X-Session-ID"
EVERYWHERE = ("0.0.0.0", "::", "")


class Endpoint:
    """In the driver's process, on its event loop. A session's URL holds a secret; whoever knows it needs no key."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """``port`` 0: any free one."""
        self._host = host
        self._port = port
        self._sessions: dict[str, Session] = {}
        app = web.Application(middlewares=[_errors_as_json], client_max_size=MAX_BODY_BYTES)
        for place in ("/s/{session}/v1", "/v1"):
            app.router.add_post(f"{place}/chat/completions", self._chat)
            app.router.add_get(f"{place}/models", self._models)
        # An agent that hangs up, or is killed, ends its request.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)

    async def open(self) -> None:
        """Listen. Raises UserError if the address cannot be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            raise UserError(f"environment option host={self._host!r}, port={self._port}: {error}") from error
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    @property
    def host(self) -> str:
        """Where agents find it."""
        return socket.gethostname() if self._host in EVERYWHERE else self._host

    @property
    def url(self) -> str:
        """Of all sessions: a request says in its header X-Session-ID which one it belongs to, by a name given to `name`."""
        return f"{self._root}/v1"

    def add(self, session: Session) -> str:
        """The base URL under which the session is served from now on."""
        key = secrets.token_urlsafe(16)
        self._sessions[key] = session
        return f"{self._root}/s/{key}/v1"

    def name(self, base_url: str, name: str) -> None:
        """Another name, which nobody can guess, for the session of a base URL."""
        self._sessions[name] = self._sessions[_key(base_url)]

    def remove(self, base_url: str) -> None:
        """Requests to that session are answered with 404 from now on."""
        session = self._sessions[_key(base_url)]
        for key in [key for key, other in self._sessions.items() if other is session]:
            del self._sessions[key]

    @property
    def _root(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._port}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            body = await request.json()
        except ValueError:
            raise ApiError("the body is no JSON") from None
        chat = parse_chat_request(body)
        answer = await session.chat(chat)
        if not chat.stream:
            return web.json_response(completion(answer, chat.logprobs))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in events(answer, chat.logprobs, chat.include_usage):
            await response.write(event.encode())
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(models(self._session(request).context_tokens))

    def _session(self, request: web.Request) -> Session:
        key = request.match_info.get("session") or request.headers.get(SESSION_HEADER, "")
        session = self._sessions.get(key)
        if session is None:
            raise ApiError("there is no such session, or it has ended", status=404)
        return session


def _key(base_url: str) -> str:
    return base_url.split("/")[-2]


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        status, body = error.status, error.body
    except web.HTTPException as error:  # no such route, too large a body, ...
        status, body = (
            error.status,
            ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status).body,
        )
    except Exception as error:
        log.exception("the endpoint for agents failed")
        status, body = 500, ApiError(describe(error), status=500).body
    return web.json_response(body, status=status)
