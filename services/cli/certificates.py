"""The authority of a deployment and its servers' certificate: made, and made again when they are not what is wanted. Pure but for
random keys; what is kept are the keys.

Promises:
- a certificate that is good for `SOON` and longer, has every wanted name and is of its key and its authority, is kept as it is;
- any other is issued anew for the same key, with the reason;
- a client that trusts `ca` trusts `server` under its names, and nothing else that other people issue.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=825)
"""What clients accept of a server at most."""
AUTHORITY_VALID = timedelta(days=3650)
SOON = timedelta(days=30)
_SKEW = timedelta(hours=1)
"""Clocks of machines differ."""
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "packtrain")])


@dataclass(frozen=True)
class Issued:
    """A certificate, PEM; `why` it was issued just now, empty when it was kept; and until when it is good."""

    pem: bytes
    why: str
    until: datetime


def new_key() -> bytes:
    """A key of curve P-256, PEM without a password."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def authority(key: bytes, kept: bytes | None, now: datetime) -> Issued:
    """The authority of a key. Raises ValueError on a key that is none of ours."""
    ours = _key(key)
    why, old = _fault(kept, ours, ours.public_key(), now)
    if not why and old is not None:
        return Issued(kept or b"", "", old.not_valid_after_utc)
    usage = _usage(key_cert_sign=True, crl_sign=True)
    made = (
        _builder(_NAME, ours, now, AUTHORITY_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(ours, hashes.SHA256())
    )
    return Issued(made.public_bytes(serialization.Encoding.PEM), why, made.not_valid_after_utc)


def server(
    key: bytes, kept: bytes | None, hosts: Sequence[str], authority_key: bytes, now: datetime
) -> Issued:
    """The servers' certificate under these names and addresses. Raises ValueError on a key that is none of ours."""
    ours, issuer = _key(key), _key(authority_key)
    names = [_general(host) for host in hosts]
    why, old = _fault(kept, ours, issuer.public_key(), now)
    if not why and old is not None:
        found = list(old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        missing = [host for host, name in zip(hosts, names, strict=True) if name not in found]
        if not missing and len(found) == len(names):
            return Issued(kept or b"", "", old.not_valid_after_utc)
        why = f"it lacked {', '.join(missing)}" if missing else "it had more names"
    # Nodes of a cluster are each other's clients.
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    made = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "packtrain server")]), ours, now, VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(uses, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False
        )
        .sign(issuer, hashes.SHA256())
    )
    return Issued(made.public_bytes(serialization.Encoding.PEM), why, made.not_valid_after_utc)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, valid: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("it is no key of an elliptic curve")  # noqa: TRY004  # what the file says is wrong, no type
    return key


def _fault(
    kept: bytes | None,
    key: ec.EllipticCurvePrivateKey,
    issuer: ec.EllipticCurvePublicKey,
    now: datetime,
) -> tuple[str, x509.Certificate | None]:
    """(what is wrong with a kept certificate, the certificate); no fault: it may stay."""
    if kept is None:
        return "there was none", None
    try:
        found = x509.load_pem_x509_certificate(kept)
    except ValueError:
        return "it could not be read", None
    algorithm = found.signature_hash_algorithm
    try:
        if algorithm is None:
            raise InvalidSignature
        issuer.verify(found.signature, found.tbs_certificate_bytes, ec.ECDSA(algorithm))
    except InvalidSignature:
        return "it was another authority's", found
    if found.public_key() != key.public_key():
        return "it was of another key", found
    if found.not_valid_after_utc - now < SOON:
        past = found.not_valid_after_utc <= now
        return f"it {'expired' if past else 'expires'} on {found.not_valid_after_utc:%Y-%m-%d}", found
    return "", found


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(**given: bool) -> x509.KeyUsage:
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: given.get(name, False) for name in names})
