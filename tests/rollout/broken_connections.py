"""A proxy before an engine that breaks off some of its streamed answers."""

from __future__ import annotations

import aiohttp
from aiohttp import web


class BreakingProxy:
    """Forwards everything; of the first ``times`` streamed answers only ``events`` elements.

    Then the connection is cut (``how`` is ``cut``), or the answer ends as if it were whole (``end``). ``broken`` counts them.
    """

    def __init__(self, url: str, how: str, times: int, events: int) -> None:
        self.url, self.broken = "", 0
        self._target, self._how, self._times, self._events = url, how, times, events

    async def __aenter__(self) -> BreakingProxy:
        self._client = aiohttp.ClientSession()
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        url, body = self._target + request.path, await request.read()
        async with self._client.request(
            request.method, url, data=body, headers={"content-type": "application/json"}
        ) as got:
            streamed = got.content_type == "text/event-stream"
            answer = web.StreamResponse(status=got.status, headers={"content-type": got.content_type})
            await answer.prepare(request)
            left = self._events if streamed and self.broken < self._times else -1
            self.broken += left >= 0
            while left and (line := await got.content.readline()):
                await answer.write(line)
                left -= line == b"\n"
            if left == 0 and self._how == "cut":
                request.transport.abort()
            await answer.write_eof()
            return answer
