"""What a rolling update counts, and what it tells haproxy."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from aiohttp import web

from rolling.rolling_update import Outcome, Proxy, send


def test_failures_are_counted_by_reason_and_can_be_written() -> None:
    outcome = Outcome(10)
    for reason in ("HTTP 503", "TimeoutError", "HTTP 503"):
        outcome.fail(reason)
    assert json.loads(json.dumps(asdict(outcome)))["failed"] == {"HTTP 503": 2, "TimeoutError": 1}


def test_the_proxy_knows_both_servers_and_retries_nothing(tmp_path: Path) -> None:
    proxy = Proxy(tmp_path, 4001, 4002)
    text = (tmp_path / "haproxy.cfg").read_text()
    assert f"bind 127.0.0.1:{proxy.port}" in text
    assert "server one 127.0.0.1:4001 check" in text
    assert "server two 127.0.0.1:4002 check" in text
    assert "retries 0" in text


def test_an_answer_without_the_outputs_is_a_failure() -> None:
    outcome = Outcome(200)
    answers = iter([(200, [0.0] * 10), (503, []), (200, [0.0] * 9)])

    async def run() -> None:
        stop = asyncio.Event()

        async def respond(_: web.Request) -> web.Response:
            status, data = next(answers, (200, [0.0] * 10))
            if outcome.answered > 2:
                stop.set()
            return web.json_response({"outputs": [{"data": data}]}, status=status)

        app = web.Application()
        app.router.add_post("/", respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            await send(f"http://127.0.0.1:{runner.addresses[0][1]}/", outcome, stop)
        finally:
            await runner.cleanup()

    asyncio.run(run())
    assert outcome.failed == {"HTTP 503": 1, "HTTP 200": 1}
    assert outcome.answered > 2
