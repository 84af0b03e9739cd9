"""The mean reward of every source, with nats-py alone: written by the AsyncAPI document (`packtrain schema asyncapi`).
Reads the run from its first event, whenever it is started, and ends when the run has stopped and all is read.

    python examples/consumers/plain_nats.py --nats nats://127.0.0.1:4222 --token-file token --run demo
"""

import argparse
import asyncio
import json
import secrets
import ssl
from collections import Counter, defaultdict
from pathlib import Path

import nats
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js import JetStreamContext, api

VERSIONS = {"sequence.finished": {"1", "2", "3"}, "run.stopped": {"1"}}  # bodies understood here


class Rewards:
    def __init__(self, run: str) -> None:
        self.run, self.stopped = run, False
        self.of, self.skipped, self._seen = defaultdict[str, list[float]](list), Counter[str](), set[str]()

    def read(self, message: Msg) -> None:
        """Takes an event; counts what the document's rules tell a reader to skip."""
        head, subject = message.headers or {}, message.subject
        type_ = head.get("ce-type", "")
        if head.get("ce-specversion") != "1.0" or head.get("ce-typeversion") not in VERSIONS.get(type_, ()):
            self.skipped["unknown type or version"] += 1
        elif not head.get("Nats-Expected-Last-Subject-Sequence", "").isdecimal():
            self.skipped["published without compare-and-set"] += 1
        elif subject in self._seen:
            self.skipped["not the first event on its subject"] += 1
        elif type_ == "run.stopped":
            self.stopped = subject == f"rl.{self.run}.run.stopped.all.{self.run}"
        else:
            try:
                body = json.loads(message.data)
                source, sequence, reward = body["source"], body["sequence"], float(body["reward"])
            except (ValueError, TypeError, KeyError):
                source, sequence, reward = "", "", 0.0
            if subject != f"rl.{self.run}.sequence.finished.{source}.{sequence}":
                self.skipped["invalid"] += 1
                return
            self._seen.add(subject)
            self.of[source].append(reward)


async def messages(js: JetStreamContext, run: str):
    """Everything that matters here, in order, each once, whatever happens to the server."""
    stream, following = f"RL_{run}", 1
    while True:
        try:
            config = api.ConsumerConfig(
                filter_subjects=[f"rl.{run}.{type_}.>" for type_ in VERSIONS],
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=following,
                ack_policy=api.AckPolicy.NONE, inactive_threshold=60, mem_storage=True, num_replicas=1,
                name=f"plain-{secrets.token_hex(8)}",
            )  # fmt: skip
            consumer, given = (await js.add_consumer(stream, config)).name, 0
            pull = await js.pull_subscribe_bind(consumer=consumer, stream=stream)
            while True:
                try:
                    fetched = await pull.fetch(256, timeout=2)
                except TimeoutError:
                    fetched, last = [], (await js.consumer_info(stream, consumer)).delivered
                    if last and last.consumer_seq != given:
                        raise ConnectionError("messages were lost on the way") from None
                for message in fetched:
                    if message.metadata.sequence.consumer != given + 1:
                        raise ConnectionError("messages were lost on the way")
                    given, following = given + 1, message.metadata.sequence.stream + 1
                    yield message
        except (Error, OSError, TimeoutError) as error:  # begin again after the last that came
            print(f"reading on from {following}: {error or type(error).__name__}", flush=True)
            await asyncio.sleep(0.5)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nats", required=True, metavar="URL", help="the server, nats://host:port")
    parser.add_argument("--token-file", type=Path, help="file with the server's token")
    parser.add_argument("--nkey-seed", help="file with the seed of the server's user reader, for a token")
    parser.add_argument("--ca", help="PEM file of who signed the server's certificate, for tls://")
    parser.add_argument("--run", required=True, help="run id")
    given = parser.parse_args()
    token = given.token_file and given.token_file.read_text().strip()
    tls = ssl.create_default_context(cafile=given.ca) if given.ca else None
    seed, inbox = given.nkey_seed, "_INBOX.reader" if given.nkey_seed else "_INBOX"
    opened = nats.connect(
        given.nats, token=token, nkeys_seed=seed, inbox_prefix=inbox, tls=tls, max_reconnect_attempts=-1
    )
    client = await asyncio.wait_for(opened, 10)
    rewards = Rewards(given.run)
    async for message in messages(client.jetstream(), given.run):
        rewards.read(message)
        if rewards.stopped and message.metadata.num_pending == 0:
            break
    await client.close()
    for source, values in sorted(rewards.of.items()):
        print(source, len(values), f"{sum(values) / len(values):.6f}")
    print("skipped", dict(rewards.skipped))


if __name__ == "__main__":
    asyncio.run(main())
