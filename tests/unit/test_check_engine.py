"""A given engine is asked before a run starts: whether it is there, well, and not paused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from services.cli.embedded import LaunchError
from services.cli.engine_health import check_engine


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b"no"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


HEALTHY = {"/health": (200, b"")}


@pytest.mark.parametrize(
    "more", [{}, {"/is_paused": (200, b'{"is_paused": false}')}, {"/is_paused": (404, b"is_paused")}]
)
def test_an_engine_that_samples_is_taken(more: dict[str, tuple[int, bytes]]) -> None:
    with answering({**HEALTHY, **more}) as url:
        check_engine(url)


def test_an_engine_that_would_answer_nothing_is_refused() -> None:
    with (
        answering({**HEALTHY, "/is_paused": (200, b'{"is_paused": true}')}) as url,
        pytest.raises(LaunchError, match=rf"{url} is paused.*POST {url}/resume"),
    ):
        check_engine(url)
    with answering({"/health": (503, b"")}) as url, pytest.raises(LaunchError, match="gave 503"):
        check_engine(url)
    with pytest.raises(LaunchError, match="does not answer"):
        check_engine(url)
