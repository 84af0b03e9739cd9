"""`packtrain secrets`: the keys of a deployment's users, servers and sessions, in one directory that only its owner may enter.

Promises:
- nothing that is there is made again, unless it is asked for; what follows from keys (users of the broker and of the store,
  certificates) is written anew each time, for the same runs and hosts unless others are given;
- a file is there whole or not at all, and what was killed half-way is completed by the same command; two at once wait for each other;
- no secret is printed, in an argument or in the environment;
- a container's user, who is not the directory's owner, can read what is given to it: files are 0444 (the authority's key and the
  store's admin 0600), and what keeps other people out is the directory, 0700.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import nkeys
import orjson

from pipeline.log.permissions import users_conf
from pipeline.store.identities import identities
from pipeline.store.policies import KINDS
from schemas.names import checked_name
from services.cli.embedded import BadInput, LaunchError

EVERY_RUN = "*"
HOSTS = ("localhost", "127.0.0.1", "nats", "broker")
"""What a server is reached as on its machine, and in a composition."""
STORE_ONLY = "admin"
USERS = tuple(kind for kind in KINDS if kind != STORE_ONLY)
TOKENS: dict[str, Callable[[], str]] = {
    "run-key": lambda: secrets.token_hex(32),
    "engine-token": lambda: secrets.token_hex(32),
    "grafana-password": lambda: secrets.token_urlsafe(18),
}
ROTATED = (*KINDS, *TOKENS, "server", "authority")
"""What `--rotate` takes: a user (its keys of broker and store), a token, the servers' key, or the authority with it."""
_PRIVATE = 0o600
GIVEN = 0o444
"""The mode of what a container is given."""
_HOST = re.compile(r"(?=.{1,253}$)(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]{0,512}")
_NAMED = re.compile(r"\s*(export\s+)?PACKTRAIN_SECRETS\s*=")
_PLAIN = re.compile(r"[\w./+,:@=-]+", re.ASCII)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Whom the keys are for; kept beside them (`settings.json`)."""

    runs: tuple[str, ...] = (EVERY_RUN,)
    hosts: tuple[str, ...] = ()
    bucket: str = "packtrain"
    prefix: str = ""
    work: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Names of the broker's consumers that a user may have, by user; without: any for harness and teacher, none for the reader."""


@dataclass(frozen=True)
class Given:
    """What the command line says; None and empty: as it was before. `work`: as of `Settings`, of the users in it."""

    runs: Sequence[str] = ()
    hosts: Sequence[str] = ()
    bucket: str | None = None
    prefix: str | None = None
    work: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    rotate: Sequence[str] = ()


def make(directory: Path, given: Given, environment: Path, say: Say) -> None:
    """Makes what is missing, and names the directory in the file `environment` (`.env`). Raises BadInput, LaunchError."""
    check(given)
    if find_spec("cryptography") is None:
        raise LaunchError(
            "certificates are made by the package cryptography, not installed here: pip install 'packtrain[deploy]'"
        )
    directory = directory.absolute()
    line = _line(environment, directory)
    with opened(directory):
        maker = _Maker(directory, set(given.rotate), say)
        settings = settings_of(directory, given)
        maker.keys(settings)
        maker.certificates((*HOSTS, *settings.hosts))
        for name, new in TOKENS.items():
            maker.secret(directory / name, name, new)
        write(directory / "settings.json", orjson.dumps(asdict(settings), option=orjson.OPT_INDENT_2), GIVEN)
        maker.tell(settings)
        _put(environment, line)


class _Maker:
    def __init__(self, directory: Path, rotate: set[str], say: Say) -> None:
        self._at = directory
        self._rotate = rotate
        self._say = say
        self._made: list[str] = []
        self._changed: list[str] = []

    def secret(self, path: Path, what: str, new: Callable[[], str], mode: int = GIVEN) -> str:
        """The text of a secret's file, made if it is not there or to be rotated."""
        if path.exists() and what not in self._rotate:
            text = read(path).decode().strip()
            if not text:
                raise BadInput(f"{path} holds nothing; remove it, and it is made anew")
            path.chmod(mode)
            return text
        text = new()
        write(path, f"{text}\n".encode(), mode)
        self._made.append(what)
        return text

    def keys(self, settings: Settings) -> None:
        """The users' keys of broker and store, and what the servers are told of them."""
        public: dict[str, str] = {}
        for kind in USERS:
            path = self._at / "broker" / f"{kind}.nk"
            public[kind] = public_key(path, self.secret(path, kind, new_seed))
        self._users("broker/users.conf", users_conf(public, settings.runs, settings.work))
        store: dict[str, tuple[str, str]] = {}
        for kind in KINDS:
            path = self._at / "store" / f"{kind}.json"
            mode = _PRIVATE if kind == STORE_ONLY else GIVEN
            store[kind] = _pair(path, self.secret(path, kind, lambda kind=kind: _new_pair(kind), mode))
        known = identities(store, settings.bucket, settings.prefix, settings.runs)
        self._users("store/s3.json", json.dumps(known, indent=2))

    def _users(self, file: str, text: str) -> None:
        there = (self._at / file).exists()
        if write(self._at / file, text.encode(), GIVEN) and there:
            self._changed.append(file)

    def certificates(self, hosts: Sequence[str]) -> None:
        from services.cli import certificates

        if "authority" in self._rotate:
            self._rotate.add("server")
        keys: dict[str, bytes] = {}
        now = datetime.now(UTC)
        for name, file, mode in (("authority", "ca", _PRIVATE), ("server", "server", GIVEN)):
            path = self._at / "tls" / f"{file}-key.pem"
            keys[name] = self.secret(path, name, lambda: certificates.new_key().decode(), mode).encode()
            kept = self._at / "tls" / f"{file}.pem"
            old = read(kept) if kept.exists() else None
            try:
                issued = (
                    certificates.authority(keys[name], old, now)
                    if name == "authority"
                    else certificates.server(keys[name], old, hosts, keys["authority"], now)
                )
            except ValueError as error:
                raise BadInput(f"{path} holds no key: {error}; remove it, and it is made anew") from error
            write(kept, issued.pem, GIVEN)
            until = f"until {issued.until:%Y-%m-%d}"
            of = "authority" if name == "authority" else f"certificate of {', '.join(hosts)}"
            if issued.why:
                why = "" if old is None else f", since {issued.why}"
                self._say(f"{of}: issued, good {until}{why}")

    def tell(self, settings: Settings) -> None:
        runs = "every run" if EVERY_RUN in settings.runs else f"run {', '.join(settings.runs)}"
        place = "/".join(filter(None, (settings.bucket, settings.prefix)))
        made = list(dict.fromkeys(self._made))
        self._say(f"made: {', '.join(made)}" if made else "all keys were there")
        self._say(f"{self._at}: {len(USERS)} users of broker and store, of {runs}, bucket {place}")
        if self._rotate:
            self._say("what uses the new keys is to be started again")
        if not settings.work.get("harness"):
            self._say(
                "harness and teacher may have any work consumer: --config FILE narrows them to those of its pools and teachers"
            )
        if self._changed:
            self._say(
                f"{' and '.join(self._changed)} changed: broker and store read them on SIGHUP, or when they are started again"
            )


def check(given: Given) -> None:
    """Raises BadInput or BadName on what no deployment could have."""
    for name in given.rotate:
        if name not in ROTATED:
            raise BadInput(f"--rotate {name[:80]!r} is no key of a deployment; keys: {', '.join(ROTATED)}")
    for run in given.runs:
        if run != EVERY_RUN:
            checked_name(run, "--run")
    for host in given.hosts:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            continue
        if not _HOST.fullmatch(host):
            raise BadInput(f"--host {host[:80]!r} is neither a host's name nor an address")

    if given.bucket is not None and not _BUCKET.fullmatch(given.bucket):
        raise BadInput(f"--bucket {given.bucket[:80]!r} is no name of a bucket: 3 to 63 of a-z 0-9 . -")
    if given.prefix is not None and not _PREFIX.fullmatch(given.prefix):
        # A wildcard would be one in every user's policy.
        raise BadInput(f"--prefix {given.prefix[:80]!r} is no plain prefix: A-Z a-z 0-9 . _ - and /")


def settings_of(directory: Path, given: Given) -> Settings:
    """What is given, and else what was the last time. Raises BadInput."""
    path = directory / "settings.json"
    was = Settings()
    if path.exists():
        try:
            kept = orjson.loads(read(path))
            was = Settings(
                tuple(kept["runs"]),
                tuple(kept["hosts"]),
                kept["bucket"],
                kept["prefix"],
                dict(kept.get("work", {})),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise BadInput(f"{path} cannot be read: {error}; remove it, and give --run and --host") from error
    return Settings(
        runs=tuple(dict.fromkeys(given.runs)) or was.runs,
        hosts=tuple(host for host in dict.fromkeys(given.hosts) if host not in HOSTS) or was.hosts,
        bucket=given.bucket or was.bucket,
        prefix=was.prefix if given.prefix is None else given.prefix.strip("/"),
        work={**was.work, **{kind: sorted(set(names)) for kind, names in given.work.items()}},
    )


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[None]:
    """The directory, ours alone while it lasts. Raises BadInput on one that others can enter."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not what a link leads to: whoever can change the link would have the next keys.
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise BadInput(
            f"{directory} cannot be used: {error.strerror}; name another with --directory"
        ) from error
    try:
        is_ = os.fstat(handle)
        if is_.st_uid != os.geteuid():
            raise BadInput(f"{directory} is another user's; name another with --directory")
        if stat.S_IMODE(is_.st_mode) & 0o077:
            raise BadInput(
                f"others can enter {directory} (mode {stat.S_IMODE(is_.st_mode):04o}); chmod 700 {directory}, or name another with --directory"
            )
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write(path: Path, body: bytes, mode: int) -> bool:
    """Writes a file in one step, nobody else's to read before it is of that mode; False: it was so already. Raises LaunchError."""
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        if path.exists() and path.read_bytes() == body:
            path.chmod(mode)
            return False
        draft = path.with_name(f".{path.name}.new")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "wb") as file:
            file.write(body)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        draft.replace(path)
        return True
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be written: {error.strerror}; name another directory with --directory"
        ) from error


def _line(environment: Path, directory: Path) -> str:
    """What has a composition find the directory. Raises BadInput."""
    text = str(directory)
    if set(text) & set("'\\") or not text.isprintable():
        # What a quoted backslash means is not the same to both programs of Docker.
        raise BadInput(f"{directory} cannot be named in {environment}; name another with --directory")
    return f"PACKTRAIN_SECRETS={text}" if _PLAIN.fullmatch(text) else f"PACKTRAIN_SECRETS='{text}'"


def _put(environment: Path, line: str) -> None:
    """Has the line in the file, whose other lines stay as they are. Raises BadInput, LaunchError."""
    environment = environment.resolve()
    there = environment.exists()
    text = read(environment).decode(errors="surrogateescape") if there else ""
    kept = [each for each in text.removesuffix("\n").split("\n") if text and not _NAMED.match(each)]
    mode = stat.S_IMODE(environment.stat().st_mode) if there else 0o644
    body = "".join(f"{each}\n" for each in (*kept, line))
    write(environment, body.encode(errors="surrogateescape"), mode)


def read(path: Path) -> bytes:
    """Raises BadInput."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; remove it, and it is made anew") from error


def new_seed() -> str:
    """A user's, `SU...`."""
    return nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode()


def public_key(path: Path, seed: str) -> str:
    """`U...`, of the seed that the file holds. Raises BadInput."""
    try:
        return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()
    except (nkeys.NkeysError, ValueError) as error:
        # The error may hold what it was given.
        raise BadInput(
            f"{path} holds no nkey seed ({type(error).__name__}); remove it, and it is made anew"
        ) from None


def public_keys(directory: Path) -> dict[str, str]:
    """`U...` of each of the broker's users, of the seeds that are there. Raises BadInput."""
    keys: dict[str, str] = {}
    for kind in USERS:
        path = directory / "broker" / f"{kind}.nk"
        try:
            keys[kind] = bytes(nkeys.from_seed(bytearray(path.read_bytes().strip())).public_key).decode()
        except OSError as error:
            raise BadInput(
                f"{path} cannot be read ({error.strerror}); `packtrain secrets` makes the keys"
            ) from None
        except (nkeys.NkeysError, ValueError, LookupError):
            raise BadInput(
                f"{path} holds no nkey seed; `packtrain secrets --rotate {kind}` makes it anew"
            ) from None
    return keys


def _new_pair(kind: str) -> str:
    return json.dumps({"access_key": f"packtrain-{kind}", "secret_key": secrets.token_urlsafe(30)})


def _pair(path: Path, text: str) -> tuple[str, str]:
    try:
        found = json.loads(text)
        return str(found["access_key"]), str(found["secret_key"])
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{path} holds no access_key and secret_key; remove it, and it is made anew") from None
