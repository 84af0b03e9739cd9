"""Buckets, by the MinIO SDK, which speaks to any S3. Imported only where a bucket may have to be made."""

from __future__ import annotations

import os
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
    url = urlsplit(config.url)
    if url.scheme != "s3" or not url.netloc:
        raise BadStore(f"store.url {config.url!r} names no bucket; use s3://bucket/prefix")
    if not config.credentials_file and not os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    endpoint = config.endpoint or f"https://s3.{config.region}.amazonaws.com"
    remedy = f"check that {endpoint} is up and that its user may make buckets"
    try:
        return _make(_client(config, endpoint), url.netloc)
    except S3Error as error:
        raise StoreUnavailable(
            config.url, f"cannot make bucket {url.netloc!r} ({error.code})", remedy
        ) from error
    except ValueError as error:
        raise BadStore(f"store.url {config.url!r}, store.endpoint {endpoint!r}: {error}") from error
    except urllib3.exceptions.HTTPError as error:
        raise StoreUnavailable(
            config.url, f"no answer from {endpoint} ({type(error).__name__})", remedy
        ) from error


def _client(config: StoreConfig, endpoint: str) -> Minio:
    keys = read_credentials(config) if config.credentials_file else (None, None)
    return Minio(
        urlsplit(endpoint).netloc,
        access_key=keys[0],
        secret_key=keys[1],
        credentials=None if keys[0] else EnvAWSProvider(),
        secure=urlsplit(endpoint).scheme == "https",
        region=config.region,
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=5, read=30), retries=urllib3.Retry(2, backoff_factor=0.2)
        ),
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
