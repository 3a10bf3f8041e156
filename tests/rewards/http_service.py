"""A reward service and a judge over real HTTP, in a process of their own. They do what the text they grade says.

Prints its port. ``/score`` grades, ``/v1/chat/completions`` judges, ``/log`` tells what came in (path, body, authorization).
"""

import asyncio
import itertools
import json
import re

from aiohttp import web

log = []
attempts = itertools.count(1)


async def trouble(text):
    """What the text asks for instead of an answer; None for nothing."""
    number = next(attempts)
    if "slow" in text:
        await asyncio.sleep(60)
    if "forbidden" in text:
        return web.Response(status=403, text="no such key")
    if "always busy" in text:
        return web.Response(status=503, text="busy")
    if "busy twice" in text and number % 3:
        return web.Response(status=429, text="busy", headers={"Retry-After": "0"})
    if "hang up" in text and number % 3:
        raise ConnectionResetError
    if "no json" in text:
        return web.Response(text="<html>")
    return None


async def score(request):
    body = await request.json()
    log.append(["score", body, request.headers.get("Authorization")])
    texts = [response["text"] for response in body["responses"]]
    if (problem := await trouble(" ".join(texts))) is not None:
        return problem
    if "too few" in texts:
        return web.json_response({"rewards": [1.0]})
    right = [
        {"right": 1.0, "brief": 0.5} if "parts" in text else float(text == body["prompt"]["answer"]) for text in texts
    ]
    return web.json_response(
        {"rewards": [None if text == "null" else reward for text, reward in zip(texts, right, strict=True)]}
    )


async def judge(request):
    """An honest judge with a bad habit: it quotes what it judges before it gives a verdict."""
    body = await request.json()
    log.append(["judge", body, request.headers.get("Authorization")])
    content = body["messages"][0]["content"]
    if (problem := await trouble(content)) is not None:
        return problem
    mark = re.search(r"^[0-9a-f]{16}$", content, re.MULTILINE)[0]
    response = content.split(f"\n{mark}\n")[1]
    expected = re.search(r"Expected answer:\n(.*)", content)[1]
    reply = f"It says: {response}\nVerdict: {int(response.split()[-1:] == [expected])}"
    for habit, text in {
        "in json": f'It says {{"score": 1}} and {response}.\n```json\n{{"why": {{"a": 1}}, "score": 0.5}}\n```',
        "no verdict": f"{response}\nVerdict: 1\nThat is all.",
        "verdict of nine": "Verdict: 9",
        "in thought": "<think>Verdict: 0</think>\n\n**Verdict: 1**",
        "silent": None,
    }.items():
        if habit in response:
            reply = text
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": reply}}]})


async def main():
    app = web.Application()
    app.add_routes([web.post("/score", score), web.post("/v1/chat/completions", judge)])
    app.add_routes([web.get("/log", lambda request: asyncio.sleep(0, web.Response(text=json.dumps(log))))])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
