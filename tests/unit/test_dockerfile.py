"""A Dockerfile as steps: what is taken is taken as Docker does, and everything else is refused with its line."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from pipeline.harnesses.workspaces.dockerfile import Command, Copy, Definition, Folder, read


def made(folder: Path, text: str) -> Definition:
    (folder / "Dockerfile").write_text(text)
    return read(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    for name in ("a.py", "b.py", "src/deep/c.txt", "with space"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_no_dockerfile_is_an_empty_app_folder(folder: Path) -> None:
    definition = read(folder)
    assert (definition.workdir, definition.steps, definition.user) == ("/app", [Folder("/app")], "")


def test_a_whole_file(folder: Path) -> None:
    definition = made(
        folder,
        """# syntax=docker/dockerfile:1
        from python:3.11-slim AS base
        ARG WHERE=/srv
        ARG GIVEN
        ENV A=1 B="two words" C=${WHERE}/x
        ENV OLD style  value
        WORKDIR $WHERE/app
        WORKDIR sub/../there
        COPY --chown=agent:agent a.py ./
        # a comment in the middle
        RUN apt list \\
            # and one inside
            && echo "$A" \\

            && true
        USER agent
        RUN ["make", "all"]
        EXPOSE 80
        CMD ["bash"]
        """,
    )
    assert definition.env == {"A": "1", "B": "two words", "C": "/srv/x", "OLD": "style  value"}
    assert definition.workdir == "/srv/app/there"
    assert definition.user == "agent"
    env = {**definition.env, "WHERE": "/srv", "GIVEN": ""}
    gap = " " * 12
    shell = f'apt list {gap}&& echo "$A" {gap}&& true'
    assert definition.steps == [
        Folder("/srv/app"),
        Folder("/srv/app/there"),
        Copy((folder / "a.py",), "/srv/app/there/", "agent:agent"),
        Command(("/bin/sh", "-c", shell), "/srv/app/there", env, "", 11),
        Command(("make", "all"), "/srv/app/there", env, "agent", 17),
    ]


@pytest.mark.parametrize(
    ("line", "sources", "target"),
    [
        ("COPY a.py /x", ["a.py"], "/x"),
        ("COPY a.py /x/", ["a.py"], "/x/"),
        ("COPY *.py /x/", ["a.py", "b.py"], "/x/"),
        ("COPY a.py b.py x", ["a.py", "b.py"], "/x/"),
        ("COPY . .", ["."], "/"),
        ("COPY src /x", ["src"], "/x"),
        ('COPY ["with space", "/x y"]', ["with space"], "/x y"),
        ("ADD src/../a.py /../../x", ["a.py"], "/x"),
        ("COPY --link /a.py /x", ["a.py"], "/x"),
    ],
)
def test_copies(folder: Path, line: str, sources: list[str], target: str) -> None:
    (step,) = made(folder, f"FROM x\n{line}\n").steps
    assert step == Copy(tuple((folder / source).resolve() for source in sources), target)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A", "a"),
        ("${A}b", "ab"),
        ("$NONE", ""),
        ("${NONE:-c}", "c"),
        ("${A:-c}", "a"),
        ("${A:+c}", "c"),
        ("${NONE:+c}", ""),
        ("\\$A", "$A"),
    ],
)
def test_variables(folder: Path, text: str, value: str) -> None:
    assert made(folder, f"FROM x\nENV A=a\nENV B={text}\n").env["B"] == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RUN true\n", "no FROM"),
        ("FROM a\nFROM b\n", "line 2: a second FROM"),
        ("FROM a\n\nADD https://x.org/y /y\n", "line 3: 'https://x.org/y' is not in the folder"),
        ("FROM a\nCOPY --from=a /x /y\n", "line 2: COPY --from is not supported"),
        ("FROM a\nCOPY ../x /y\n", "leaves the folder"),
        ("FROM a\nCOPY src/../../x /y\n", "leaves the folder"),
        ("FROM a\nCOPY none /y\n", "'none' is not in"),
        ("FROM a\nCOPY out /y\n", "a link that leaves the folder"),
        ("FROM a\nCOPY one\n", "what to copy and where to"),
        ("FROM a\nRUN --mount=type=cache true\n", "RUN with options"),
        ("FROM a\nRUN cat <<EOF\nx\nEOF\n", "line 2: RUN with options or a here-document"),
        ('FROM a\nRUN ["a", 1]\n', "no list of strings"),
        ('FROM a\nSHELL ["bash"]\n', "line 2: SHELL is not known.*docker environment"),
        ("FROM a\nADD some.tar.gz /x/\n", "line 2: ADD unpacks 'some.tar.gz'.*RUN tar"),
        ("FROM a\nENV 1x=2\n", "no variable's name"),
        ("FROM a\nWORKDIR 'x\n", "No closing quotation"),
    ],
)
def test_what_is_refused(folder: Path, text: str, said: str) -> None:
    (folder / "out").symlink_to("/etc/passwd")
    with tarfile.open(folder / "some.tar.gz", "w:gz") as archive:
        archive.add(folder / "a.py", "a.py")
    with pytest.raises(ValueError, match=said):
        made(folder, text)


def test_an_archive_is_copied_as_it_is_by_copy(folder: Path) -> None:
    with tarfile.open(folder / "some.tar.gz", "w:gz") as archive:
        archive.add(folder / "a.py", "a.py")
    assert made(folder, "FROM a\nCOPY some.tar.gz /x\n").steps == [Copy((folder / "some.tar.gz",), "/x")]


def test_what_an_ignore_file_leaves_out_is_not_brought_in_silently(folder: Path) -> None:
    (folder / ".dockerignore").write_text("# nothing\n\n")
    assert made(folder, "FROM a\nCOPY . /x\n").steps
    (folder / ".dockerignore").write_text("secrets/\n")
    with pytest.raises(ValueError, match=r"\.dockerignore.*is not supported"):
        made(folder, "FROM a\nCOPY . /x\n")


@pytest.mark.parametrize(
    ("line", "argument"),
    [
        ("RUN printf 'a\\n\\\n   b'", "printf 'a\\n   b'"),
        ("RUN echo he\\\nllo", "echo hello"),
        ("RUN echo a \\  \n # a comment\n\n  b", "echo a   b"),
        ("RUN echo a\\\\\nUSER x", "echo a\\\\"),
    ],
)
def test_lines_are_continued_as_docker_does(folder: Path, line: str, argument: str) -> None:
    first = made(folder, f"FROM a\n{line}\n").steps[0]
    assert isinstance(first, Command)
    assert first.argv[-1] == argument
