#!/bin/bash
# Makes environment/repository.tar.gz: the task's repository, whose second commit holds the answer.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=Post GIT_AUTHOR_EMAIL=post@example.org GIT_COMMITTER_NAME=Post GIT_COMMITTER_EMAIL=post@example.org
commit() {
    export GIT_AUTHOR_DATE="2026-01-0$1T12:00:00Z" GIT_COMMITTER_DATE="2026-01-0$1T12:00:00Z"
    git -C "$work" add -A
    git -C "$work" commit -q -m "$2"
}
git init -q --template= -b release "$work"
cp "$here/PRICES.md" "$work/PRICES.md"
commit 1 'The prices'
cp "$here/charges_before.py" "$work/charges.py"
commit 2 'Charges of parcels'
printf '__pycache__/\n' > "$work/.gitignore"
commit 3 'What is not kept'
cp "$here/charges_after.py" "$work/charges.py"
commit 4 'Names for the numbers'
tar -C "$work" --sort=name --mtime=2026-01-04 --owner=0 --group=0 --numeric-owner -c . | gzip -9n > "$here/../environment/repository.tar.gz"
