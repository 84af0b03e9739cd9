"""Posts events of a run to a URL, as CloudEvents over HTTP (binary mode: `ce-` headers, the body as JSON).

    python examples/consumers/webhooks.py .packtrain/runs/demo/config.toml http://127.0.0.1:8000/hook --type step.trained

At least once and in order: an event counts as posted when the URL has answered 2xx, is tried again until then (--patience
bounds it), and the broker keeps the place under --name. Killed or given up, a later start goes on with the event that was
not answered; the receiver tells a second one by its `ce-id`. Ends when the run has stopped; --follow goes on.
"""

import argparse
import asyncio
import logging
from pathlib import Path

import aiohttp
import tenacity

from pipeline.log import Log, end_tasks
from schemas.envelope import Event, encode
from schemas.facts import FACTS
from services.cli.reach import broker_of, read_record

LOG = logging.getLogger("webhooks")
QUIET_S = 2.0


class Hook:
    def __init__(self, session: aiohttp.ClientSession, url: str, run: str, patience_s: float) -> None:
        self._session, self._url, self._run = session, url, run
        self._tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((aiohttp.ClientError, TimeoutError)),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=30),
            stop=tenacity.stop_after_delay(patience_s),
            before_sleep=tenacity.before_sleep_log(LOG, logging.WARNING),
            reraise=True,
        )

    async def post(self, event: Event) -> None:
        """Returns when the URL has taken the event; raises ClientError or TimeoutError when patience is over."""
        await self._tries(self._once, event)
        LOG.info("posted %d %s %s", event.seq, event.fact.type, event.fact.id())

    async def _once(self, event: Event) -> None:
        message = encode(event, self._run)
        # What begins with Nats- is for the broker.
        headers = {name: value for name, value in message.headers.items() if not name.startswith("Nats-")}
        post = self._session.post(self._url, data=message.body, headers=headers, allow_redirects=False)
        async with post as answer:
            if not 200 <= answer.status < 300:
                raise aiohttp.ClientError(f"event {event.seq}: the URL answered {answer.status}")


async def consume(log: Log, hook: Hook, name: str, types: set[str], follow: bool) -> None:
    events = log.subscribe(durable=name)
    while True:
        # Asking for the next event acknowledges the one before.
        coming = asyncio.ensure_future(anext(events))
        try:
            while not (await asyncio.wait([coming], timeout=QUIET_S))[0]:
                if not follow and await log.last("run.stopped", "all", log.run):
                    return
            event = coming.result()
        finally:
            await end_tasks([coming])
        if event.fact.type in types:
            await hook.post(event)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path, help="a run's config.toml")
    parser.add_argument("url", help="where events are posted")
    parser.add_argument("--type", action="append", choices=sorted(FACTS), help="post these; else all")
    parser.add_argument(
        "--name",
        default="webhooks",
        help="of the place that the broker keeps, by default webhooks; one for each URL and set of types",
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="give up on an event after S seconds"
    )
    parser.add_argument("--follow", action="store_true", help="go on when the run has stopped")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not given.config.is_file():
        parser.error(f"no file {given.config}")
    config = read_record(given.config)
    timeout = aiohttp.ClientTimeout(total=30)
    async with broker_of(config) as broker, aiohttp.ClientSession(timeout=timeout) as session:
        log = await Log.connect(broker, config.run, "webhooks", user="reader")
        try:
            hook = Hook(session, given.url, config.run, given.patience)
            await consume(log, hook, given.name, set(given.type or FACTS), given.follow)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SystemExit(
                f"webhooks: gave up: {error or type(error).__name__}; start again to go on"
            ) from None
        finally:
            await log.close()


if __name__ == "__main__":
    asyncio.run(main())
