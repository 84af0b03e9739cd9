import sys
from pathlib import Path

EXPECTED = """\
; Settings of the queue server.
; Keep the comments: operators read them.

[server]
host = 127.0.0.1
port = 7070          ; the load balancer expects this one
workers = 16

[storage]
path = /var/lib/queue
; seconds between two writes to disk
flush = 5
compression = none

[logging]
level = warning
rotate = daily
"""
found = Path("/app/queue.ini").read_text()
print(found)
sys.exit(found.rstrip("\n") != EXPECTED.rstrip("\n"))
