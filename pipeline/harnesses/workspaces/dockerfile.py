"""A task's Dockerfile as steps for a workspace whose root is the host's own programs.

What it takes: FROM one image (by name only: it says what the author had, not what is there), WORKDIR, COPY and ADD of files
of the folder, ENV, ARG with a default, USER, RUN; LABEL, EXPOSE, CMD, ENTRYPOINT, STOPSIGNAL, HEALTHCHECK, MAINTAINER, VOLUME
have no effect. Anything else raises ValueError with line and remedy: nothing is left out silently.
"""

from __future__ import annotations

import json
import re
import shlex
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

WORKDIR = "/app"
"""Where there is no Dockerfile."""

_REMEDY = "run this task in a docker environment (workspaces = harbor:docker)"
_WITHOUT_EFFECT = frozenset(
    ("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER", "VOLUME")
)
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
_HERE_DOCUMENT = re.compile(r"<<-?['\"]?[A-Za-z_]")
_CONTINUED = re.compile(r"(?<!\\)\\[ \t]*$")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class Copy:
    """`sources` of the host, as `docker COPY`: below `target` when that is a folder, else one file as `target`."""

    sources: tuple[Path, ...]
    target: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that has to be there."""

    path: str


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run, as `user`, in `cwd`, with `env`; `line` is where the file says so."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    user: str
    line: int


@dataclass(slots=True)
class Definition:
    """What a Dockerfile comes to."""

    steps: list[Copy | Folder | Command] = field(default_factory=list[Copy | Folder | Command])
    env: dict[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: str = ""


def read(folder: Path) -> Definition:
    """The definition in `folder`; WORKDIR /app and no more where there is no Dockerfile. Raises ValueError."""
    file = folder / "Dockerfile"
    if not file.exists():
        return Definition([Folder(WORKDIR)], workdir=WORKDIR)
    return _Reading(folder, file).definition()


class _Reading:
    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder.resolve()
        self._file = file
        self._made = Definition()
        self._arguments: dict[str, str] = {}
        self._line = 0
        self._seen_from = False
        self._takes: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "ADD": self._add,
            "ENV": self._env,
            "ARG": self._arg,
            "USER": self._user,
            "RUN": self._run,
        }

    def definition(self) -> Definition:
        self._refuse_ignored()
        for number, text in _instructions(self._file.read_text()):
            self._line = number
            word, _, rest = text.partition(" ")
            word = word.upper()
            if word in _WITHOUT_EFFECT:
                continue
            take = self._takes.get(word)
            if take is None:
                raise self._refused(f"{word} is not known")
            take(rest.strip())
        if not self._seen_from:
            raise self._refused("there is no FROM")
        return self._made

    def _refuse_ignored(self) -> None:
        file = self._folder / ".dockerignore"
        lines = file.read_text().splitlines() if file.is_file() else []
        if any(line.strip() and not line.startswith("#") for line in lines):
            raise ValueError(
                f"{file} is not supported: move what it excludes out of the folder, or {_REMEDY}"
            )

    def _refused(self, why: str) -> ValueError:
        return ValueError(f"{self._file}, line {self._line}: {why}; {_REMEDY}")

    def _filled(self, text: str) -> str:
        """With variables as ENV and ARG say; as in Docker, one that is not set is empty."""
        values = {**self._arguments, **self._made.env}

        def value(match: re.Match[str]) -> str:
            escaped, bare, name, operator, word = match.groups()
            if escaped is not None:
                return escaped if escaped == "$" else match[0]
            found = values.get(bare or name, "")
            if operator == "-":
                return found or word
            return (word if found else "") if operator == "+" else found

        return _VARIABLE.sub(value, text)

    def _words(self, text: str) -> list[str]:
        try:
            return shlex.split(self._filled(text))
        except ValueError as error:
            raise self._refused(f"{text!r}: {error}") from error

    def _from(self, rest: str) -> None:
        if self._seen_from:
            raise self._refused("a second FROM: builds in stages are not supported here")
        self._seen_from = True

    def _inside(self, path: str) -> str:
        return _normal(PurePosixPath(self._made.workdir, path))

    def _workdir(self, rest: str) -> None:
        self._made.workdir = self._inside(" ".join(self._words(rest)))
        self._made.steps.append(Folder(self._made.workdir))

    def _copy(self, rest: str) -> None:
        owner, words = "", self._copied(rest)
        while words and words[0].startswith("--"):
            option, _, value = words.pop(0).partition("=")
            if option == "--chown":
                owner = value
            elif option != "--link":
                raise self._refused(f"COPY {option} is not supported here")
        if len(words) < 2:
            raise self._refused("COPY takes what to copy and where to")
        *sources, target = words
        found = tuple(path for source in sources for path in self._sources(source))
        to_folder = target.endswith("/") or len(found) > 1 or target in (".", "..")
        inside = self._inside(target)
        self._made.steps.append(Copy(found, inside + "/" * (to_folder and inside != "/"), owner))

    def _add(self, rest: str) -> None:
        self._copy(rest)
        step = self._made.steps[-1]
        assert isinstance(step, Copy)
        for path in step.sources:
            if path.is_file() and tarfile.is_tarfile(path):
                raise self._refused(
                    f"ADD unpacks {path.name!r}, which is not supported here: COPY it and RUN tar"
                )

    def _copied(self, rest: str) -> list[str]:
        options = re.match(r"(?:--\S+\s+)*", rest)
        assert options is not None
        words = rest[options.end() :]
        if words.startswith("["):
            return [*options[0].split(), *(self._filled(word) for word in self._listed(words))]
        return self._words(rest)

    def _listed(self, text: str) -> list[str]:
        try:
            words = json.loads(text)
        except ValueError as error:
            raise self._refused(f"{text!r} is no list: {error}") from error
        if not words or not all(isinstance(word, str) for word in words):
            raise self._refused(f"{text!r} is no list of strings")
        return words

    def _sources(self, source: str) -> list[Path]:
        if "://" in source or source.startswith(("git@", "<<")):
            raise self._refused(f"{source!r} is not in the folder: there is no network here")
        pattern = source.lstrip("/")
        whole = _normal(PurePosixPath("/", pattern))
        if ".." in PurePosixPath(pattern).parts and not _below(pattern):
            raise self._refused(f"{source!r} leaves the folder")
        found = [self._folder] if whole == "/" else sorted(self._folder.glob(whole[1:]))
        if not found:
            raise self._refused(f"{source!r} is not in {self._folder}")
        for path in found:
            if not path.resolve().is_relative_to(self._folder):
                raise self._refused(f"{source!r} is a link that leaves the folder")
        return found

    def _env(self, rest: str) -> None:
        if _ASSIGNMENT.match(rest):
            parts = [word.partition("=") for word in self._words(rest)]
            pairs = [(name, value) for name, _, value in parts]
        else:
            name, _, value = rest.partition(" ")
            pairs = [(name, self._filled(value.strip()))]
        for name, _ in pairs:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise self._refused(f"{name!r} is no variable's name")
        self._made.env.update(pairs)

    def _arg(self, rest: str) -> None:
        for word in self._words(rest):
            name, equals, value = word.partition("=")
            self._arguments[name] = value if equals else self._arguments.get(name, "")

    def _user(self, rest: str) -> None:
        self._made.user = " ".join(self._words(rest))

    def _run(self, rest: str) -> None:
        if rest.startswith("--") or _HERE_DOCUMENT.search(rest):
            raise self._refused("RUN with options or a here-document is not supported here")
        argv = self._listed(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
        env = {**self._arguments, **self._made.env}
        self._made.steps.append(Command(tuple(argv), self._made.workdir, env, self._made.user, self._line))


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Each instruction with its first line's number; comments are left out, continued lines are joined."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#") or not stripped:
            continue
        first = first if parts else number
        # As Docker: what is continued keeps its white space, and none is put between.
        parts.append(_CONTINUED.sub("", line if parts else line.lstrip()))
        if not _CONTINUED.search(line):
            yield first, "".join(parts).strip()
            parts = []
    if parts:
        yield first, "".join(parts).strip()


def _normal(path: PurePosixPath) -> str:
    """Without . and .., which does not leave /."""
    parts: list[str] = []
    for part in path.parts[1:]:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/" + "/".join(parts)


def _below(path: str) -> bool:
    depth = 0
    for part in PurePosixPath(path).parts:
        depth += -1 if part == ".." else part != "."
        if depth < 0:
            return False
    return True
