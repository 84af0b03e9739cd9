"""What each user of the broker may do: the least that its work needs. Pure.

Promises:
- a service publishes its own facts and nobody else's, on the subjects of its runs alone; it acknowledges, declares and looks at
  its own work consumers, writes its own keys of the run's bucket, and makes, changes and removes no stream;
- it subscribes to its own inbox and to nothing else: not to facts, letters, or what is answered to others. Facts it reads through
  JetStream's consumers, and makes one only with a filter of facts that it needs.

What the broker cannot limit, as its permissions know whole tokens of a subject and nothing of a request's body:
- a message of the run is looked up by its sequence or subject in a request's body: who may look up, may look up all of them. What
  is limited of reading is making consumers, and reading other runs;
- a fold's consumer has a random name, so a service may pull from any consumer of its run, and make or change one of any name
  into one that reads its own filters. It can so hold up another's work; it can neither acknowledge it nor forge a fact
  (harness and teacher can acknowledge where they are not held to a configuration's consumers, `work_of`);
- where JetStream sends an answer to, or what a consumer was made to push, is not checked. Within the run such a message is no event,
  and becomes a dead letter (a snapshot that it falls on is thrown away, and the log refolded). Facts that a service reads it could
  so copy into another run of the account: runs that do not trust each other need an account each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.config import RunConfig
from schemas.names import MALFORMED, checked_name, harness_work, subject_filter, teacher_work

EVERY_RUN = "*"
ALL_FACTS = "*"
_STOPPED = "run.stopped"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish, and subscribe to; it may no other."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Needs:
    """`facts` it publishes; `folds`: types it reads in order; `work`: names of its work consumers (None: `harness-<pool>` and the
    like, of which the configuration has the names); `keys` of the run's bucket that it writes; whether it reads the bucket, and
    looks at every consumer and the dead letters."""

    facts: tuple[str, ...] = ()
    folds: tuple[str, ...] = ()
    work: tuple[str, ...] | None = ()
    keys: tuple[str, ...] = ()
    reads_bucket: bool = False
    looks_at_consumers: bool = False


_NEEDS: dict[str, _Needs] = {
    "dispatcher": _Needs(
        facts=("sequence.dispatched", "run.stopped"),
        folds=(ALL_FACTS,),
        keys=("dispatcher.>",),
        reads_bucket=True,
    ),
    "agent-loop": _Needs(
        facts=("sequence.opened", "sequence.finished", "sequence.failed"),
        folds=("sequence.verified",),
        work=("agent-loop",),
        keys=("host.agent-loop.*",),
    ),
    "harness": _Needs(
        facts=("sequence.verified",), folds=("limit.changed",), work=None, keys=("host.harness.*",)
    ),
    "grader": _Needs(facts=("sample.graded",), work=("grader",)),
    "teacher": _Needs(facts=("sequence.scored",), work=None),
    "sampler": _Needs(
        facts=(
            "sample.completed",
            "sample.accepted",
            "sample.rejected",
            "sample.shaped",
            "batch.yielded",
            "batch.replanned",
        ),
        folds=(ALL_FACTS,),
        keys=("sampler.>",),
        reads_bucket=True,
    ),
    "hook": _Needs(facts=("sample.shaped", "sample.rejected"), work=("hook", "hook-graded")),
    "packer": _Needs(
        facts=("window.packed", "sequence.quarantined"),
        folds=("batch.yielded", "batch.replanned", "step.trained"),
    ),
    "trainer": _Needs(facts=("batch.consumed", "step.trained", "policy.published"), folds=("step.trained",)),
    "engine": _Needs(folds=("policy.published",)),
    "collector": _Needs(folds=(ALL_FACTS,), keys=("collector.>",), reads_bucket=True),
    "dashboard": _Needs(
        folds=(ALL_FACTS,), keys=("dashboard.>",), reads_bucket=True, looks_at_consumers=True
    ),
    "reader": _Needs(reads_bucket=True, looks_at_consumers=True),
}
KINDS = (*_NEEDS, "launcher")
"""reader: commands that only read, and consumers of a run's users. launcher: begins runs, changes limits, retries dead letters,
stops, exports and imports: everything within its account."""


def permissions_for(kind: str, run: str, work: Sequence[str] | None = None) -> Permissions:
    """What the user of that kind may do in a run; `run`: a name, or `EVERY_RUN` of the account.

    `work`: names of its work consumers (`work_of`), where they are in the configuration; of a reader: of its durables
    (`sub-<name>`), of which it has none else. None: of harness and teacher, any name. Raises ValueError on a kind that is none,
    BadName on a run that is no name.
    """
    if kind not in KINDS:
        raise ValueError(f"no user {kind!r} of the broker; users: {', '.join(KINDS)}")
    every = run == EVERY_RUN
    if not every:
        checked_name(run, "run")
    # A wildcard is a whole token: for every run it also covers the streams of their buckets, which are asked in the same way.
    stream, bucket = ("*", "*") if every else (f"RL_{run}", f"RL_{run}")
    bucket_stream = "*" if every else f"KV_{bucket}"
    if kind == "launcher":
        asked = ("$JS.API.>", "$JS.ACK.>") if every else _streams(stream, bucket_stream)
        return Permissions((f"rl.{run}.>", f"dlq.{run}.>", f"$KV.{bucket}.>", *asked), ("_INBOX.>",))
    needs = _NEEDS[kind]
    api = "$JS.API"
    publish = [f"rl.{run}.{fact}.*.*" for fact in needs.facts]
    publish += [f"$KV.{bucket}.{key}" for key in needs.keys]
    publish += [f"dlq.{run}.{MALFORMED}.*"]
    publish += [f"{api}.STREAM.INFO.{stream}", f"{api}.STREAM.MSG.GET.{stream}"]
    publish += [f"{api}.CONSUMER.MSG.NEXT.{stream}.*"]
    if kind == "reader":
        publish += [f"{api}.STREAM.NAMES", f"{api}.STREAM.LIST"]
        publish += [f"{api}.CONSUMER.CREATE.{stream}.*", f"{api}.CONSUMER.CREATE.{stream}.*.>"]
        for name in work or ():
            publish += _durable(stream, name)
            publish += [f"{api}.CONSUMER.{verb}.{stream}.{name}" for verb in ("RESET", "DELETE")]
    else:
        for fold in dict.fromkeys((_STOPPED, *needs.folds)):
            publish.append(f"{api}.CONSUMER.CREATE.{stream}.*.{_filter(run, fold)}")
        for name in work if work is not None else needs.work if needs.work is not None else ("*",):
            publish += [*_durable(stream, name), f"dlq.{run}.{name}.*"]
    if needs.keys or needs.reads_bucket:
        publish.append(f"{api}.STREAM.INFO.{bucket_stream}")
    if needs.reads_bucket:
        publish.append(f"{api}.STREAM.MSG.GET.{bucket_stream}")
    if needs.looks_at_consumers:
        publish += [f"{api}.CONSUMER.LIST.{stream}", f"{api}.CONSUMER.INFO.{stream}.*"]
        publish.append(f"{api}.CONSUMER.CREATE.{stream}.*.dlq.{run}.>")
    return Permissions(tuple(dict.fromkeys(publish)), (f"_INBOX.{kind}.>",))


def _filter(run: str, type_: str) -> str:
    return (
        f"rl.*.{type_ if type_ != ALL_FACTS else '*.*'}.*.*"
        if run == EVERY_RUN
        else subject_filter(run, type_)
    )


def _streams(*names: str) -> tuple[str, ...]:
    """Everything that is asked of these streams, and which there are."""
    api = "$JS.API"
    found = [f"{api}.INFO", f"{api}.STREAM.NAMES", f"{api}.STREAM.LIST"]
    for name in names:
        found += [f"{api}.STREAM.*.{name}", f"{api}.STREAM.MSG.*.{name}"]
        found += [f"{api}.DIRECT.GET.{name}", f"{api}.DIRECT.GET.{name}.>"]
        found += [f"{api}.CONSUMER.*.{name}", f"{api}.CONSUMER.*.{name}.>"]
        found += [f"{api}.CONSUMER.DURABLE.CREATE.{name}.*", f"{api}.CONSUMER.MSG.NEXT.{name}.*"]
        found += [f"$JS.ACK.{name}.>"]
    return tuple(found)


def _durable(stream: str, name: str) -> list[str]:
    api = "$JS.API.CONSUMER"
    return [
        f"{api}.DURABLE.CREATE.{stream}.{name}",
        f"{api}.INFO.{stream}.{name}",
        f"$JS.ACK.{stream}.{name}.>",
    ]


def work_of(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """The work consumers whose names are the configuration's, by kind: what a harness of any pool, and a teacher, declares."""
    return {
        "harness": tuple(harness_work(pool.name) for pool in config.pools),
        "teacher": tuple(
            teacher_work(teacher, source.name) for source in config.sources for teacher in source.teachers
        ),
    }


def users_conf(
    keys: Mapping[str, str],
    runs: Iterable[str] = (EVERY_RUN,),
    work: Mapping[str, Sequence[str]] | None = None,
    domain: str = "",
) -> str:
    """The server's `authorization` block, for its configuration to include: a user for each kind, by the public key (`U...`) of its
    nkey, with what it may in the runs. `domain`: of the JetStream that a leaf node passes requests on to. Holds no secret.

    Raises ValueError on a kind or a key that is none.
    """
    runs, work = tuple(runs), work or {}
    users: list[str] = []
    for kind, key in keys.items():
        if not (key.startswith("U") and key.isalnum() and key.isascii()):
            raise ValueError(f"the public key of {kind} is no nkey of a user (U...)")
        found = [permissions_for(kind, run, work.get(kind)) for run in runs]
        publish = dict.fromkeys(_within(subject, domain) for each in found for subject in each.publish)
        subscribe = dict.fromkeys(subject for each in found for subject in each.subscribe)
        users.append(
            f"    # {kind}\n    {{ nkey: {key}, permissions: {{\n"
            f"      publish: {{ allow: {_list(publish)} }}\n      subscribe: {{ allow: {_list(subscribe)} }} }} }}\n"
        )
    return f"authorization {{\n  users: [\n{''.join(users)}  ]\n}}\n"


def _within(subject: str, domain: str) -> str:
    if domain and subject.startswith("$KV."):
        return f"$JS.{domain}.API.{subject}"
    return subject.replace("$JS.API.", f"$JS.{domain}.API.", 1) if domain else subject


def _list(subjects: Iterable[str]) -> str:
    return "[\n" + "".join(f"        {json.dumps(subject)}\n" for subject in subjects) + "      ]"


def table() -> str:
    """What each user may do, in words, as a table in Markdown."""
    lines = [
        "| user | publishes | reads in order | work consumers | keys of the run's bucket |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if kind == "launcher":
            cells = ["everything", "everything", "everything", "everything"]
        else:
            needs = _NEEDS[kind]
            folds = (
                "everything"
                if kind == "reader" or ALL_FACTS in needs.folds
                else _cell((_STOPPED, *needs.folds))
            )
            named = "durables that `work` names" if kind == "reader" else _cell(needs.work or ())
            work = named if needs.work is not None else _cell((f"{kind}-...",))
            keys = [
                *(f"writes `{key}`" for key in needs.keys),
                *(["reads all"] if needs.reads_bucket else []),
            ]
            cells = [_cell(needs.facts), folds, work, "; ".join(keys) or "-"]
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"
