"""Clients of a directory and of a bucket. They contact no server."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from obstore.store import LocalStore, S3Store
from pydantic import BaseModel, Field, ValidationError

from pipeline.store.errors import BadStore, StoreUnavailable
from pipeline.store.keys import BadKey, checked_prefix
from schemas.config import Store as StoreConfig

_TIMEOUT = timedelta(seconds=60)
_CONNECT_TIMEOUT = timedelta(seconds=5)


class _Credentials(BaseModel):
    access_key: str = Field(min_length=1)
    secret_key: str = Field(min_length=1)


def open_directory(path: Path, url: str) -> LocalStore:
    remedy = f"make {path} a directory that this user can write, or set store.url"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(url, f"cannot make the directory ({error.strerror})", remedy) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreUnavailable(url, "the directory is not writable", remedy)
    return LocalStore(path)


def open_bucket(config: StoreConfig, bucket: str, prefix: str) -> S3Store:
    if config.endpoint and urlsplit(config.endpoint).scheme not in ("http", "https"):
        raise BadStore(f"store.endpoint {config.endpoint!r} is not http(s)://host:port")
    try:
        under = checked_prefix(prefix) or None
    except BadKey as error:
        raise BadStore(f"store.url {config.url!r}: its prefix cannot be used: {error}") from error
    options: dict[str, Any] = {"region": config.region}
    if config.endpoint:
        options["endpoint"] = config.endpoint
    if config.credentials_file:
        access, secret = read_credentials(config)
        options |= {"access_key_id": access, "secret_access_key": secret}
    return S3Store(
        bucket,
        prefix=under,
        client_options={
            "allow_http": config.endpoint.startswith("http://"),
            "connect_timeout": _CONNECT_TIMEOUT,
            "timeout": _TIMEOUT,
        },
        # Retries are ours: a repeated conditional PUT must know that it is one.
        retry_config={"max_retries": 0, "retry_timeout": _TIMEOUT},
        **options,
    )


def read_credentials(config: StoreConfig) -> tuple[str, str]:
    """(access key, secret key) of the credentials file; raises StoreUnavailable that names the file, never its content."""
    path = Path(config.credentials_file)
    remedy = f'write {path} as {{"access_key": "...", "secret_key": "..."}}'
    try:
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise StoreUnavailable(
            config.url, f"cannot read store.credentials_file {path} ({error.strerror})", remedy
        ) from None
    except orjson.JSONDecodeError:
        raise StoreUnavailable(config.url, f"store.credentials_file {path} is not JSON", remedy) from None
    try:
        keys = _Credentials.model_validate(content)
    except ValidationError:
        raise StoreUnavailable(
            config.url, f"store.credentials_file {path} lacks access_key or secret_key", remedy
        ) from None
    return keys.access_key, keys.secret_key
