"""What is hidden of a repository while the agent works, in overlay workspaces. All for real."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pipeline.harnesses.history import take
from pipeline.harnesses.workspaces.base import Workspace, WorkspaceFailed
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces
from tests.workspace_parts import refusal, spec

pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason=refusal()),
    pytest.mark.asyncio(loop_scope="module"),
]

GIT = "git -c user.name=A -c user.email=a@b -c init.defaultBranch=main"
REPOSITORY = f"""
rm -rf /app; mkdir /app; cd /app
{GIT} init -q; git checkout -q -b work/one
printf 'the answer is 42\\n' > answer; printf '*.o\\n' > .gitignore; {GIT} add -A; {GIT} commit -q -m one
printf 'what is it?\\n' > answer; {GIT} commit -qam two
git tag v1 HEAD~1; git config user.name Task; git config user.email task@x
printf '*.tmp\\n' >> .git/info/exclude
touch a.o b.tmp untracked; printf 'x' > 'a name
of lines'; git add 'a name
of lines'; {GIT} commit -qm three
"""
FACTS = "git status --porcelain --branch --ignored; git config user.name; find . -path ./.git -prune -o -type f -print | sort"
EVERYTHING = "git cat-file --batch-all-objects --batch | LC_ALL=C tr -cd '[:print:]\\n'"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workspace(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workspace]:
    """Of no definition, shared: /app is emptied by who uses it."""
    async with OverlayWorkspaces().open(spec("hidden", tmp_path_factory.mktemp("none"))) as opened:
        yield opened


async def sh(workspace: Workspace, script: str, user: str = "root", cwd: str = "") -> str:
    """Output of a script that must succeed."""
    ended = await workspace.run(["/bin/bash", "-ec", script], timeout_s=30, user=user, cwd=cwd)
    assert ended.returncode == 0, ended.describe()
    return ended.stdout.decode()


async def test_a_history_is_hidden_and_put_back(workspace: Workspace) -> None:
    await sh(workspace, REPOSITORY, cwd="/")
    before = await sh(workspace, FACTS)
    objects = await sh(workspace, EVERYTHING)
    assert "the answer is 42" in objects

    history = await take(workspace)

    assert history.paths == ("app/.git",)
    assert await sh(workspace, FACTS) == before
    assert await sh(workspace, "git log --all --format=%s") == "Start of the task\n"
    assert (await sh(workspace, "git for-each-ref; git reflog")).count("\n") == 2
    assert "the answer is 42" not in await sh(workspace, EVERYTHING)
    assert await sh(workspace, "ls -A /tmp") == ""
    assert await sh(workspace, "grep -rl 'answer is 42' /app /tmp /var /home || true") == ""

    await sh(workspace, "git config core.filemode true; git config user.name Agent")
    await sh(workspace, "echo 42 > answer; echo new > more; git add -A; git commit -qm mine")
    await history.restore(workspace)

    assert "the answer is 42" in await sh(workspace, EVERYTHING)
    assert await sh(workspace, EVERYTHING) == objects
    assert (
        await sh(workspace, "git log --format=%s; cat answer more; git fsck 2>&1")
        == "three\ntwo\none\n42\nnew\n"
    )
    assert await sh(workspace, "git status --porcelain") == " M answer\n?? more\n?? untracked\n"
    assert await sh(workspace, "ls -A /tmp") == ""
    await history.restore(workspace)


async def test_repositories_in_and_around_one_another(workspace: Workspace) -> None:
    await sh(
        workspace,
        f"""
        {REPOSITORY}
        mkdir -p lib/inner; cd lib/inner; {GIT} init -q; echo 'secret 1' > file; {GIT} add -A; {GIT} commit -qm one
        echo changed > file; cd /app
        {GIT} -c protocol.file.allow=always submodule --quiet add ./lib/inner part 2>&1
        {GIT} commit -qm 'with a part'; git checkout -q --detach; {GIT} add lib 2>/dev/null; {GIT} commit -qm lib
        chown -R agent /app
        """,
        cwd="/",
    )
    files = await sh(workspace, "cat lib/inner/file part/file")
    history = await take(workspace)
    assert history.paths == ("app/lib/inner/.git", "app/part/.git", "app/.git")
    for place in (".", "lib/inner", "part"):
        # By its owner, who may use it.
        seen = await sh(
            workspace, "git log --all --format=%s; git status --porcelain", user="agent", cwd=f"/app/{place}"
        )
        assert seen == "Start of the task\n" + ("?? untracked\n" if place == "." else "")
        assert (
            "secret 1" not in await sh(workspace, EVERYTHING, user="agent", cwd=f"/app/{place}")
            or place == "part"
        )
    assert (await sh(workspace, "git status", user="agent")).startswith("HEAD detached")
    await sh(workspace, "rm -rf part; rm -rf lib; echo a > lib; echo b >> answer", user="agent")
    await history.restore(workspace)
    assert (await sh(workspace, "git log --format=%s", user="agent")).startswith("lib\nwith a part\nthree\n")
    assert await sh(workspace, "cat lib; ls") == "a\na name\nof lines\na.o\nanswer\nb.tmp\nlib\nuntracked\n"
    assert files == "changed\nsecret 1\n"


async def test_what_was_not_committed_shows_no_answer(workspace: Workspace) -> None:
    await sh(
        workspace,
        f"""
        rm -rf /app; mkdir -p /app/src; cd /app; {GIT} init -q
        echo 'return 42' > src/right; echo gone > src/deleted; echo s > staged
        {GIT} add -A; {GIT} commit -qm right
        echo 'return 41' > src/right; rm src/deleted; echo 'the 42' > staged; git add staged; echo t > staged
        """,
        cwd="/",
    )
    history = await take(workspace)
    seen = await sh(workspace, EVERYTHING + "; git status --porcelain; git log --format=%s")
    assert "return 41" in seen
    assert "return 42" not in seen
    assert "the 42" not in seen
    assert "deleted" not in seen
    assert seen.endswith("Start of the task\n")
    await history.restore(workspace)
    assert await sh(workspace, "git status --porcelain") == " D src/deleted\n M src/right\nMM staged\n"


async def test_a_repository_without_a_commit_and_one_above_the_workdir(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM x\nWORKDIR /srv/deep/app\n"
        f"RUN cd /srv && {GIT} init -q && echo x > file && git add file && cd deep/app && {GIT} init -q\n"
    )
    async with OverlayWorkspaces().open(spec("above", tmp_path)) as opened:
        history = await take(opened)
        assert history.paths == ("srv/deep/app/.git", "srv/.git")
        assert await sh(opened, "git status --porcelain --branch") == "## No commits yet on main\n"
        assert "A  file\n" in await sh(opened, "git status --porcelain", cwd="/srv")
        await history.restore(opened)
        # Without git there is no repository for the agent, and the former one is back all the same.
        await sh(opened, "rm /usr/bin/git")
        history = await take(opened)
        assert await sh(opened, "ls -A /srv /srv/deep/app") == "/srv:\ndeep\nfile\n\n/srv/deep/app:\n"
        await history.restore(opened)
        assert await sh(opened, "cat .git/HEAD") == "ref: refs/heads/main\n"


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("mv .git /var/elsewhere; ln -s /var/elsewhere .git", "/app/.git is a link"),
        ("mv .git /var/elsewhere; echo 'gitdir: /var/elsewhere' > .git", "/var/elsewhere"),
        ("git clone -q --shared . /var/elsewhere; rm -rf .git; mv /var/elsewhere/.git .", "borrows"),
    ],
)
async def test_a_history_that_lies_elsewhere_is_refused(
    workspace: Workspace, script: str, named: str
) -> None:
    await sh(workspace, f"rm -rf /var/elsewhere; {REPOSITORY}", cwd="/")
    await sh(workspace, script)
    with pytest.raises(WorkspaceFailed, match=named) as told:
        await take(workspace)
    assert "hide_git" in str(told.value)


async def test_what_a_hostile_agent_left_is_replaced(workspace: Workspace) -> None:
    await sh(workspace, REPOSITORY + "mkdir sub; cd sub; git init -q; touch x", cwd="/")
    history = await take(workspace)
    await sh(
        workspace,
        """
        rm -rf .git sub/.git /var/target; mkdir -p /var/target/hooks; touch /var/target/keep; ln -s /var/target .git
        echo 'gitdir: /var/target' > sub/.git
        """,
    )
    await history.restore(workspace)
    assert await sh(workspace, "git log --format=%s; ls /var/target") == "three\ntwo\none\nhooks\nkeep\n"
    assert (
        await sh(workspace, "git status --porcelain --branch", cwd="/app/sub")
        == "## No commits yet on master\n?? x\n"
    )


async def test_programs_that_a_repository_names_do_not_run(workspace: Workspace) -> None:
    await sh(
        workspace,
        REPOSITORY
        + """
        rm -f /var/ran; git config core.fsmonitor 'touch /var/ran; false'; git config commit.gpgsign true
        for hook in pre-commit post-commit reference-transaction post-index-change; do
          printf '#!/bin/sh\\ntouch /var/ran\\n' > .git/hooks/$hook; chmod +x .git/hooks/$hook
        done
        """,
        cwd="/",
    )
    history = await take(workspace)
    await history.restore(workspace)
    assert await sh(workspace, "ls /var/ran 2>/dev/null || echo none") == "none\n"


async def test_no_repository_costs_nothing(workspace: Workspace) -> None:
    await sh(workspace, "rm -rf /app; mkdir /app; echo x > /app/x", cwd="/")
    history = await take(workspace)
    assert history.paths == ()
    await history.restore(workspace)
    assert await sh(workspace, "ls -A") == "x\n"
