"""Buckets, by the MinIO SDK, which speaks to any S3. Imported only where a bucket may have to be made."""

from __future__ import annotations

from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.credentials.providers import EnvAWSProvider
from minio.error import S3Error

from pipeline.store.errors import StoreUnavailable
from pipeline.store.objects import read_credentials
from schemas.config import Store as StoreConfig


def ensure_bucket(config: StoreConfig) -> bool:
    """Makes the bucket of an s3:// store unless it exists; True if this call made it. Blocking: it speaks to the server.

    Raises ValueError on a store that is not s3://, StoreUnavailable naming the endpoint and the remedy.
    """
    url = urlsplit(config.url)
    if url.scheme != "s3" or not url.netloc:
        raise ValueError(f"store.url {config.url!r} names no bucket; use s3://bucket/prefix")
    endpoint = urlsplit(config.endpoint or f"https://s3.{config.region}.amazonaws.com")
    keys = read_credentials(config) if config.credentials_file else (None, None)
    client = Minio(
        endpoint.netloc,
        access_key=keys[0],
        secret_key=keys[1],
        credentials=None if keys[0] else EnvAWSProvider(),
        secure=endpoint.scheme == "https",
        region=config.region,
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=5, read=30), retries=urllib3.Retry(2, backoff_factor=0.2)
        ),
    )
    remedy = f"check that {endpoint.geturl()} is up and that its user may make buckets"
    try:
        if client.bucket_exists(url.netloc):
            return False
        client.make_bucket(url.netloc)
    except S3Error as error:
        if error.code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            # Another starter made it between the two calls.
            return False
        raise StoreUnavailable(
            config.url, f"cannot make bucket {url.netloc!r} ({error.code})", remedy
        ) from error
    except urllib3.exceptions.HTTPError as error:
        raise StoreUnavailable(
            config.url, f"no answer from {endpoint.geturl()} ({type(error).__name__})", remedy
        ) from error
    return True
