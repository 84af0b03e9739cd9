"""The bucket's own lifecycle as a backstop: a rule that expires a run's payloads and sidecars days after they were written.

Promises:
- a run has one rule, below its own prefix; to set it again changes nothing;
- the other rules of the bucket stay as the server gave them, whatever they hold;
- S3 has its rules read and written as a whole: of two runs that begin at once in one bucket, the one that finds its rule gone
  afterwards sets it again.

The rule is of Amazon S3's PutBucketLifecycleConfiguration, which SeaweedFS and MinIO serve too.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element, fromstring

from minio import Minio
from minio.commonconfig import ENABLED, Filter
from minio.lifecycleconfig import Expiration, LifecycleConfig, Rule

from pipeline.store.bucket import LastAnswer, bucket_of, speaking
from pipeline.store.errors import StoreUnavailable
from schemas.config import Store as StoreConfig
from schemas.keys import run_prefix

_TRIES = 5
_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"


def set_expiry(config: StoreConfig, run: str, days: int) -> bool:
    """Gives the run the rule, or with 0 days takes it away; whether that changed the bucket. Blocking: it speaks to the server.

    Raises BadStore on a store that is not s3://, StoreUnavailable when the server refuses the rules, or others change them at
    every try.
    """
    bucket, prefix = bucket_of(config), _prefix(config, run)
    changed = False
    with speaking(config, f"set the lifecycle of bucket {bucket!r}", "its user may set lifecycles") as (
        client,
        answers,
    ):
        for _ in range(_TRIES):
            rules = _rules(client, answers, bucket)
            mine = [rule for rule in rules if _of(rule) == prefix]
            if [rule.findtext("Expiration/Days") for rule in mine] == ([str(days)] if days else []):
                return changed
            others = [rule for rule in rules if rule not in mine]
            rule = Rule(
                ENABLED,
                rule_filter=Filter(prefix=prefix),
                rule_id=f"packtrain {prefix}"[:255],
                expiration=Expiration(days=days or 1),
            )
            changed = True
            if others or days:
                client.set_bucket_lifecycle(bucket, _Whole([rule] if days else [], others))
            else:
                client.delete_bucket_lifecycle(bucket)
    raise StoreUnavailable(
        config.url,
        f"the lifecycle of bucket {bucket!r} does not hold the rule for {prefix} when it was set",
        "see that the server keeps lifecycle rules and that nothing else sets them, or set retention.expire_days = 0",
    )


def _prefix(config: StoreConfig, run: str) -> str:
    root = urlsplit(config.url).path.strip("/")
    return f"{root}/{run_prefix(run)}/payloads/".lstrip("/")


def _rules(client: Minio, answers: LastAnswer, bucket: str) -> list[Element]:
    """The rules, without their XML namespace."""
    try:
        if client.get_bucket_lifecycle(bucket) is None:
            return []
    except ValueError:
        pass  # a rule that the SDK cannot read: what the server said is here all the same
    if answers.answer is None:
        return []
    root = fromstring(answers.answer.data)  # noqa: S314  # from the store that the run trusts with its data; expat ends entity bombs
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root.findall("Rule")


def _of(rule: Element) -> str | None:
    """The prefix that a rule is for; None for one of several conditions."""
    return rule.findtext("Filter/Prefix") or rule.findtext("Prefix")


@dataclass(frozen=True)
class _Whole(LifecycleConfig):
    """Our rules, and others as they are."""

    others: list[Element]

    def toxml(self, element: Element | None) -> Element:
        root = super().toxml(element)
        root.extend(self.others)
        return root
