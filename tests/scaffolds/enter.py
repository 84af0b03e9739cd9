"""Runs inside the namespaces that `stage.py` made: `python enter.py CHANNEL PORT`.

Brings the loopback interface up, listens on PORT of 127.0.0.1 and sends the listening socket over the Unix socket CHANNEL: a
socket stays in the network namespace that it was made in, whoever serves it. Then it reads a command from there, as JSON of
argv, env, cwd and stdin (a file of less than a pipe holds) up to the end of file, runs it and returns its exit status. As pid 1 it reaps; when it ends, the kernel
kills all that the command left.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import struct
import sys
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def loopback_up() -> None:
    with socket.socket() as some:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(some, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(some, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def main() -> int:
    channel_fd, port = (int(argument) for argument in sys.argv[1:])
    loopback_up()
    with socket.socket(fileno=channel_fd) as channel:
        with socket.create_server(("127.0.0.1", port), backlog=128) as listening:
            fds = array.array("i", [listening.fileno()])
            channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        with channel.makefile("rb") as commands:
            text = commands.read()
    if not text:
        return 125
    command = json.loads(text)
    child = os.fork()
    if child == 0:
        try:
            os.chdir(command["cwd"])
            # A pipe, as a workspace gives it: scaffolds tell one from a file.
            reading, writing = os.pipe()
            os.dup2(reading, 0)
            os.write(writing, Path(command["stdin"]).read_bytes())
            os.close(reading)
            os.close(writing)
            os.execve(command["argv"][0], command["argv"], command["env"])
        except OSError as error:
            print(f"{command['argv'][0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
