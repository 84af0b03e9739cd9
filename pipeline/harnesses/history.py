"""Hides what a repository remembers while the agent works: old commits hold many a task's answer.

Promises:
- `take` moves every `.git` below the workdir, and of the folders that it lies in, out of the workspace, into a file of the
  host that has no name (nobody else opens it, and it is gone with the process). In its place is a repository with one commit
  of the tracked files as they are, on a branch of the same name, with the same untracked and ignored files: `git log` has one
  line, and changes that were not committed are in it;
- `History.restore` puts the former repositories back for the verifier and touches no file beside them. What the agent did
  to files is there; its commits, branches, stashes and what it staged are not;
- the host neither unpacks nor reads what was taken, and runs no git: bytes of an archive pass, in both directions;
- a history that lies elsewhere (a `.git` that is a link, borrowed objects) cannot be hidden, and is refused.

A workspace without git gets no repository: there is nothing that could read it.
"""

from __future__ import annotations

import secrets
import tempfile
import weakref
from typing import BinaryIO, cast

from pipeline.harnesses.blocking import on_thread
from pipeline.harnesses.workspaces.base import Workspace, WorkspaceFailed

HISTORY_BYTES = 512 << 20
"""Of all repositories of one workspace together: they pass through the host's memory."""
_REMEDY = "mend the task's repository, or set the environment's hide_git to false"

_FIND = r"""
find "$PWD" -xdev -name .git -prune -print0
above=$PWD
while [ "$above" != / ]; do above=$(dirname "$above"); [ ! -e "$above/.git" ] || printf '%s\0' "$above/.git"; done
"""

# In /. Arguments: the archive, then every .git, deepest first. GIT_DIR is named, so that git asks neither whose it is nor
# whether another repository lies around it; hooks and monitors of the task's repository do not run.
_TAKE = r"""
set -euo pipefail
archive=$1; shift
export LC_ALL=C GIT_DIR=.git GIT_AUTHOR_DATE='2000-01-01T00:00:00Z' GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
export GIT_AUTHOR_NAME=task GIT_AUTHOR_EMAIL=task@localhost GIT_COMMITTER_NAME=task GIT_COMMITTER_EMAIL=task@localhost
silent() { git -c core.fsmonitor=false -c core.hooksPath=/dev/null "$@"; }
refuse() { echo "$1" >&2; exit 3; }
notes=$(mktemp -d)
trap 'rm -rf "$notes"' EXIT
for found in "$@"; do
  [ ! -L "$found" ] || refuse "/$found is a link"
  [ ! -s "$found/objects/info/alternates" ] || refuse "/$found borrows objects of another repository"
done
(umask 077; tar -cf "$archive" --hard-dereference -- "$@")
n=0
for found in "$@"; do
  n=$((n + 1)); note=$notes/$n; mkdir "$note"
  stat -c %u:%g "$found" > "$note/owner"
  cd "/${found%.git}"
  : > "$note/elsewhere"
  [ -d .git ] || sed -n 's/^gitdir: //p' .git > "$note/elsewhere"
  if command -v git > /dev/null && silent rev-parse --git-dir > /dev/null 2>&1; then
    silent ls-files -z | sort -zu > "$note/tracked"
    silent ls-files -zd | sort -zu | comm -z23 "$note/tracked" - > "$note/files"
    silent symbolic-ref -q HEAD > "$note/branch" || rm "$note/branch"
    silent rev-parse -q --verify HEAD > "$note/head" || rm "$note/head"
    silent config --local -z --get-regexp \
      '^(filter\..*|user\..*|core\.(autocrlf|eol|filemode|ignorecase|safecrlf|symlinks|excludesfile))$' > "$note/config" || true
    cp "$(silent rev-parse --git-path info/exclude)" "$note/exclude" 2> /dev/null || true
  fi
  cd /
done
rm -rf -- "$@"
n=0
for found in "$@"; do
  n=$((n + 1)); note=$notes/$n
  cd "/${found%.git}"
  while IFS= read -r target; do [ ! -e "$target" ] || refuse "/$found names $target, which is elsewhere"; done \
    < "$note/elsewhere"
  if [ -e "$note/files" ]; then
    silent init -q --template=
    while IFS= read -rd '' entry; do silent config --replace-all "${entry%%$'\n'*}" "${entry#*$'\n'}"; done < "$note/config"
    mkdir -p .git/info
    [ ! -e "$note/exclude" ] || cp "$note/exclude" .git/info/exclude
    [ ! -e "$note/branch" ] || silent symbolic-ref HEAD "$(cat "$note/branch")"
    silent -c core.looseCompression=1 -c core.safecrlf=false -c advice.addEmptyPathspec=false -c advice.addEmbeddedRepo=false \
      --literal-pathspecs add -f --pathspec-from-file="$note/files" --pathspec-file-nul
    [ ! -e "$note/head" ] || silent commit -q --allow-empty --no-gpg-sign -m 'Start of the task'
    if [ ! -e "$note/branch" ]; then
      branch=$(silent symbolic-ref HEAD); silent checkout -q --detach; silent update-ref -d "$branch"
    fi
    chown -R "$(cat "$note/owner")" .git
  fi
  cd /
done
"""

# In /. Arguments: the archive, then every .git that was taken. One whose folder is gone has no place any more.
_RESTORE = r"""
set -euo pipefail
archive=$1; shift
kept=()
for taken in "$@"; do [ ! -d "/${taken%.git}" ] || kept+=("$taken"); done
rm -rf -- "$@"
[ ${#kept[@]} = 0 ] || tar -xpf "$archive" --numeric-owner -- "${kept[@]}"
rm -f "$archive"
"""


class History:
    """What was taken. `paths` are the `.git`s, from the root. Its archive is freed with it, or when it was put back."""

    def __init__(self, paths: tuple[str, ...] = (), archive: BinaryIO | None = None) -> None:
        self.paths = paths
        self._archive = archive
        if archive is not None:
            weakref.finalize(self, archive.close)

    async def restore(self, workspace: Workspace, *, timeout_s: float = 60.0) -> None:
        """Puts it back, once. Raises `WorkspaceFailed`."""
        if self._archive is None:
            return
        archive, self._archive = self._archive, None
        with archive:
            place = _place()
            await workspace.write(place, await on_thread(archive.read), 0o600)
        script = ["/bin/bash", "-c", _RESTORE, "restore", place, *self.paths]
        await _root(workspace, script, timeout_s, "the history of repositories cannot be put back")


async def take(workspace: Workspace, *, timeout_s: float = 60.0) -> History:
    """Hides the workdir's repositories. Raises `WorkspaceFailed` when it cannot, with the remedy."""
    found = await _root(
        workspace, ["/bin/sh", "-c", _FIND], timeout_s, "repositories cannot be looked for", cwd=""
    )
    # Deepest first: a repository in another's tree is itself again before the outer one looks at its files.
    names = {name.lstrip("/") for name in found.split("\0") if name}
    paths = sorted(names, key=lambda name: (-name.count("/"), name))
    if not paths:
        return History()
    place = _place()
    script = ["/bin/bash", "-c", _TAKE, "take", place, *paths]
    await _root(workspace, script, timeout_s, "the history of repositories cannot be hidden")
    try:
        data = await workspace.get(place, HISTORY_BYTES)
    except ValueError as error:
        raise WorkspaceFailed(
            f"the repositories {paths} are over {HISTORY_BYTES >> 20} MiB ({error}): {_REMEDY}"
        ) from error
    await _root(workspace, ["/bin/rm", "-f", place], timeout_s, "an archive cannot be removed")
    return History(tuple(paths), await on_thread(_kept, data))


def _place() -> str:
    """Of an archive in the workspace. Nobody foresees it, so nothing can lie there in its way."""
    return f"/tmp/{secrets.token_hex(16)}.tar"  # noqa: S108


def _kept(data: bytes) -> BinaryIO:
    file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  # closed by its History
    file.write(data)
    file.seek(0)
    return file


async def _root(workspace: Workspace, argv: list[str], timeout_s: float, what: str, cwd: str = "/") -> str:
    ended = await workspace.run(argv, timeout_s=timeout_s, user="root", cwd=cwd)
    if ended.returncode == 0 and not ended.stopped:
        return ended.stdout.decode(errors="surrogateescape")
    said = ended.stderr.decode(errors="replace").strip()[-300:]
    raise WorkspaceFailed(f"{what} ({said or ended.describe()}): {_REMEDY}")
