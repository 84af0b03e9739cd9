"""The shell script by which a program runs in a sandbox that one can only send commands to, and what the script tells.

Promises:
- the program's bytes come back as they were, its outputs apart, each cut to its end; none of them can be taken for the
  script's own words, which carry a mark that is new for every run;
- at the time limit, and when it has written more than `MOST_WRITTEN` bytes, the program is killed with all that it started:
  all processes that carry the mark in their environment, which only a process that clears it loses. They are stopped
  before they are killed, so that none is missed by starting another;
- it needs bash, coreutils or busybox, and /proc; what decides while the program runs takes no new process, so that it works
  in a sandbox whose processes are all used up.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import cast

from pipeline.harnesses.workspaces.base import Ended, Stopped

MOST_WRITTEN = 256 << 20
"""Bytes of output, both together, that a program may leave in the sandbox's disk."""

_VARIABLE = re.compile(r"(?!(?:UID|EUID|PPID|SHELLOPTS|BASHOPTS|BASH_VERSINFO)$)[A-Za-z_]\w*", re.ASCII)
"""A name that bash lets one assign to."""

_STRIKE = r"""
marked() {
  for p in /proc/[0-9]*; do
    while IFS= read -r -d '' v; do
      if [ "$v" = "PACKTRAIN_RUN=$mark" ]; then kill "-$1" "${p#/proc/}" && n=$((n+1)); break; fi
    done 2>/dev/null <"$p/environ"
  done
}
strike() {
  n=0; last=-1
  while [ "$n" -ne "$last" ]; do last=$n; n=0; marked STOP; done
  marked KILL
}
"""

_RUN = r"""
d=$(mktemp -d /tmp/.packtrain-XXXXXXXX) && mkfifo "$d/pipe" || exit 97
base64 -d >"$d/in" <<'STDIN'
@stdin@
STDIN
ooms() { cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null | sed -n 's/^oom_kill //p'; }
before=$(ooms)
(
  { echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
  @cd@PACKTRAIN_RUN=$mark @program@
) <"$d/in" >"$d/out" 2>"$d/err" &
child=$!
( read -rt @seconds@ <>"$d/pipe"; : >"$d/time"; strike ) >/dev/null 2>&1 </dev/null & clock=$!
(
  until [ $(( $(wc -c <"$d/out") + $(wc -c <"$d/err") )) -gt @most@ ]; do read -rt 1 <>"$d/pipe"; done
  : >"$d/output"; strike
) >/dev/null 2>&1 </dev/null & scale=$!
wait "$child"; code=$?
why=
if [ -e "$d/time" ]; then why=time; wait "$clock"; elif [ -e "$d/output" ]; then why=output; wait "$scale"; fi
kill "$clock" "$scale" 2>/dev/null
after=$(ooms)
echo "$mark $code,$why,$before,$after"
tail -c @keep@ "$d/out" | base64
echo "$mark err"
tail -c @keep@ "$d/err" | base64
echo "$mark end"
rm -rf "$d"
"""


def program(
    mark: str,
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: str = "",
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    output_bytes: int = 1 << 20,
) -> str:
    """The script that runs `argv`. `mark` is hexadecimal and new; `output_bytes` is what is kept of each output."""
    # Assigned by the shell: an argument of `env` is seen by everybody on the machine. Names that no shell takes are few, and
    # hold no secret of ours.
    given = {name: value for name, value in (env or {}).items() if _VARIABLE.fullmatch(name)}
    others = [f"{name}={value}" for name, value in (env or {}).items() if name not in given]
    assigned = "".join(f"{name}={shlex.quote(value)} " for name, value in given.items())
    filled = {
        "stdin": base64.encodebytes(stdin).decode().strip(),
        "cd": f"cd -- {shlex.quote(cwd)} || exit 126; " if cwd else "",
        "program": f"{assigned}exec {shlex.join([*(['/usr/bin/env', *others] if others else []), *argv])}",
        "seconds": f"{max(timeout_s, 0.01):.3f}",
        "most": str(MOST_WRITTEN),
        "keep": str(output_bytes),
    }
    run = re.sub(r"@(\w+)@", lambda found: filled[found[1]], _RUN)
    return f"mark={mark}{_STRIKE}{run}"


def kill(mark: str) -> str:
    """The script that kills what runs under a mark, with all that it started."""
    return f"mark={mark}{_STRIKE}strike"


_END = r"""
others() {
  n=0
  for p in /proc/[0-9]*; do
    case " $keep $$ " in *" ${p#/proc/} "*) continue ;; esac
    read -r state <"$p/stat" || continue
    case ${state##*) } in [ZX]*) continue ;; esac
    n=$((n + 1))
    [ -z "$1" ] || kill "-$1" "${p#/proc/}"
  done 2>/dev/null
}
others TERM
while [ "$n" -gt 0 ] && [ "$rounds" -gt 0 ]; do rounds=$((rounds - 1)); sleep 0.05; others; done
last=0
while [ "$n" -ne "$last" ]; do last=$n; others STOP; done
others KILL
rounds=100
while [ "$n" -gt 0 ] && [ "$rounds" -gt 0 ]; do rounds=$((rounds - 1)); sleep 0.05; others; done
echo "$mark $n left"
"""


def end(mark: str, keep: Sequence[int], grace_s: float) -> str:
    """The script that ends all processes but its own and those; it prints the mark, how many are left, and `left`."""
    return f'mark={mark}; keep="{" ".join(map(str, keep))}"; rounds={round(grace_s / 0.05)}{_END}'


def read(mark: str, path: str, most: int) -> str:
    """The script that gives a file's bytes, one more than `most` at most."""
    name = shlex.quote(path)
    return (
        f"[ -f {name} ] || {{ echo {mark} none; exit; }}\n"
        f"echo {mark} file; head -c {most + 1} {name} | base64; echo {mark} end"
    )


def contents(mark: str, said: str) -> bytes | None:
    """The bytes that `read` told, None where there is no such file. Raises ValueError when it did not come to its end."""
    if f"{mark} none\n" in said:
        return None
    found = re.search(rf"{mark} file\n(.*?){mark} end\n", said, re.DOTALL)
    if found is None:
        raise ValueError(f"the sandbox gave no file: {said[-500:]!r}")
    return base64.b64decode(found[1])


def ended(mark: str, said: str, seconds: float) -> Ended:
    """What `program` told; raises ValueError when it did not come to its end."""
    found = re.search(rf"{mark} (\d+),(\w*),(\d*),(\d*)\n(.*?){mark} err\n(.*?){mark} end\n", said, re.DOTALL)
    if found is None:
        raise ValueError(f"the sandbox did not run the program to its end: {said[-500:]!r}")
    code, why, before, after, out, err = found.groups()
    return Ended(
        returncode=int(code),
        stdout=base64.b64decode(out),
        stderr=base64.b64decode(err),
        stopped=cast(Stopped, why),
        seconds=seconds,
        oom=before != after,
    )
