"""Buckets, by the MinIO SDK, which speaks to any S3. Imported only where a bucket may have to be made."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.credentials.providers import EnvAWSProvider
from minio.error import S3Error

from pipeline.store.errors import BadStore, StoreUnavailable
from pipeline.store.objects import read_credentials
from schemas.config import Store as StoreConfig


def ensure_bucket(config: StoreConfig) -> bool:
    """Makes the bucket of an s3:// store unless it exists; True if this call made it. Blocking: it speaks to the server.

    A user who may neither look for the bucket nor make it is left to the first write, which tells; so is one whose keys
    are in neither file nor environment (an instance's role). Raises BadStore on a store that is not s3:// or a name that
    no bucket may have, StoreUnavailable naming the endpoint and the remedy.
    """
    bucket = bucket_of(config)
    if not config.credentials_file and not os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    with speaking(config, f"make bucket {bucket!r}", "its user may make buckets") as (client, _):
        return _make(client, bucket)


def bucket_of(config: StoreConfig) -> str:
    """Name of the bucket of an s3:// store; raises BadStore."""
    url = urlsplit(config.url)
    if url.scheme != "s3" or not url.netloc:
        raise BadStore(f"store.url {config.url!r} names no bucket; use s3://bucket/prefix")
    return url.netloc


@contextmanager
def speaking(config: StoreConfig, what: str, right: str) -> Generator[tuple[Minio, LastAnswer]]:
    """A client of the store's server, and the last answer that it had. In it, errors become BadStore, or StoreUnavailable that says
    `what` cannot be done, and what to check: the server, and the `right`."""
    endpoint = config.endpoint or f"https://s3.{config.region}.amazonaws.com"
    remedy = f"check that {endpoint} is up and that {right}"
    try:
        # Retries are few: a launcher waits, and a person before it.
        pool = LastAnswer(
            timeout=urllib3.Timeout(connect=5, read=30), retries=urllib3.Retry(2, backoff_factor=0.2)
        )
        yield _client(config, endpoint, pool), pool
    except S3Error as error:
        raise StoreUnavailable(config.url, f"cannot {what} ({error.code})", remedy) from error
    except ValueError as error:
        raise BadStore(f"store.url {config.url!r}, store.endpoint {endpoint!r}: {error}") from error
    except urllib3.exceptions.HTTPError as error:
        raise StoreUnavailable(
            config.url, f"no answer from {endpoint} ({type(error).__name__})", remedy
        ) from error


class LastAnswer(urllib3.PoolManager):
    """Keeps the last answer as the server gave it: the SDK drops what it does not know."""

    answer: urllib3.BaseHTTPResponse | None = None

    def urlopen(self, *args: Any, **kwargs: Any) -> urllib3.BaseHTTPResponse:
        self.answer = super().urlopen(*args, **kwargs)
        return self.answer


def _client(config: StoreConfig, endpoint: str, pool: urllib3.PoolManager) -> Minio:
    keys = read_credentials(config) if config.credentials_file else (None, None)
    return Minio(
        urlsplit(endpoint).netloc,
        access_key=keys[0],
        secret_key=keys[1],
        credentials=None if keys[0] else EnvAWSProvider(),
        secure=urlsplit(endpoint).scheme == "https",
        region=config.region,
        http_client=pool,
    )


def _make(client: Minio, bucket: str) -> bool:
    visible = True
    try:
        if client.bucket_exists(bucket):
            return False
    except S3Error as error:
        if error.code != "AccessDenied":
            raise
        visible = False
    try:
        client.make_bucket(bucket)
    except S3Error as error:
        # Another starter made it between the two calls; or it may be there, for all that this user may see.
        if error.code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists") or (
            error.code == "AccessDenied" and not visible
        ):
            return False
        raise
    return True
