"""Whether a given engine can serve a run."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from services.cli.check import check_engine_url
from services.cli.embedded import LaunchError

_ENGINE_S = 5.0


def check_engine(url: str) -> None:
    """Refuses an engine that does not answer GET /health with 200 within a few seconds; raises LaunchError."""
    check_engine_url(url)
    parts = urlsplit(url)
    assert parts.hostname is not None
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_ENGINE_S)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        response = connection.getresponse()
        status = response.status
        response.read()
        # vLLM in development mode, and the tiny engine, say so; others have no such path.
        connection.request("GET", f"{parts.path.rstrip('/')}/is_paused")
        paused = b'"is_paused":true' in connection.getresponse().read(4096).replace(b" ", b"")
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise LaunchError(
            f"engine {url} does not answer: {reason}; start it, or leave engine.url empty for the tiny engine"
        ) from error
    finally:
        connection.close()
    if status != 200:
        raise LaunchError(f"engine {url} is not healthy: GET /health gave {status}; see its log")
    if paused:
        raise LaunchError(
            f"engine {url} is paused, and would answer nothing: POST {url}/resume, or see who paused it"
        )
