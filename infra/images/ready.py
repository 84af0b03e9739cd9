#!/usr/bin/env -S python3 -I -S
"""Whether the packtrain process of this container is ready: exit status 0 or 1, and why not on standard output.

    packtrain-ready [PORT]      of metrics.bind; 9464 without it

A socket and no HTTP library: it is started every few seconds in every container, and takes 20 ms so.
"""

import socket
import sys


def main() -> int:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 9464
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as asked:
            asked.sendall(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")
            said = b"".join(iter(lambda: asked.recv(4096), b""))
    except OSError as error:
        print(f"port {port}: {error}")
        return 1
    head, _, body = said.partition(b"\r\n\r\n")
    print(body.decode(errors="replace").strip())
    return 0 if head.split(b" ", 2)[1:2] == [b"200"] else 1


if __name__ == "__main__":
    sys.exit(main())
