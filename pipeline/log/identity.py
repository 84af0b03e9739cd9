"""Who a client of the broker is, and whom it believes: token, nkey seed or .creds file, and TLS.

Promises: what is read is checked before anything is sent, so that a bad file is told at once, in one line that names key, file
and remedy; no message holds anything of what stands in a file.
"""

# nkeys has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import ssl
from collections import UserString
from typing import Any

from pipeline.secret_file import SecretUnreadable, read_secret
from schemas.config import Broker

NO_TLS = "speaks no TLS"
_CREDS = "BEGIN NATS USER JWT"
_CREDS_SEED = "BEGIN USER NKEY SEED"


class BrokerUnavailable(ConnectionError):
    """The broker cannot be used; the message names its address, the reason and the remedy."""


def identity_of(broker: Broker) -> dict[str, Any]:
    """The arguments of nats-py's `connect` that say who we are. Raises BrokerUnavailable."""
    try:
        if broker.token_file:
            return {"token": read_secret(broker.token_file, "broker.token_file")}
        if not broker.credentials_file:
            return {}
        text = read_secret(broker.credentials_file, "broker.credentials_file")
    except SecretUnreadable as error:
        raise BrokerUnavailable(str(error)) from error
    if _CREDS in text and _CREDS_SEED in text:
        seed = text.partition(_CREDS_SEED)[2].split("\n")[1].strip() if "\n" in text else ""
        found: dict[str, Any] = {"user_credentials": UserString(text + "\n")}
    else:
        seed, found = text, {"nkeys_seed_str": text}
    if not _is_user_seed(seed):
        raise BrokerUnavailable(
            f"broker.credentials_file {broker.credentials_file!r} holds neither the nkey seed of a user (SU...) nor a .creds file; "
            "`packtrain secrets` writes seeds"
        )
    return found


def _is_user_seed(text: str) -> bool:
    import nkeys

    if not text.startswith("SU") or not text.isascii() or "\n" in text:
        return False
    try:
        nkeys.from_seed(bytearray(text.encode())).wipe()
    # Whatever it finds wrong: its own errors, those of base64, an index.
    except Exception:
        return False
    return True


def tls_of(broker: Broker) -> ssl.SSLContext | None:
    """The TLS that is asked for; None: none is, so a server that demands it is checked against the system's authorities.

    Raises BrokerUnavailable.
    """
    if not (broker.url.startswith(("tls://", "wss://")) or broker.ca_file or broker.cert_file):
        return None
    try:
        context = ssl.create_default_context(cafile=broker.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise _unreadable("broker.ca_file", broker.ca_file, error) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if broker.cert_file:
        try:
            # A key with a passphrase is refused: OpenSSL would ask for it at the terminal.
            context.load_cert_chain(broker.cert_file, broker.key_file, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise _unreadable(
                "broker.cert_file", f"{broker.cert_file} with key_file {broker.key_file}", error
            ) from None
    return context


def _unreadable(key: str, path: str, error: OSError) -> BrokerUnavailable:
    reason = "no PEM of a certificate and its key" if isinstance(error, ssl.SSLError) else error.strerror
    return BrokerUnavailable(f"{key} {path!r} cannot be used ({reason}); set {key}")


def refusal_of(broker: Broker, error: Exception) -> str:
    """What the server does that will never let us in, with the remedy, by an error of a first connection; empty: it may yet."""
    said = str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in said:
            return f"cannot prove its name: {error.verify_message}; name the host in broker.url as its certificate does"
        return f"has a certificate that is not trusted ({error.verify_message}); set broker.ca_file to the PEM of its authority"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or said
        return (
            f"fails at TLS ({reason}); does it ask for our certificate (broker.cert_file, broker.key_file)?"
        )
    if NO_TLS in said:
        return f"{NO_TLS}, which broker.url or broker.ca_file asks for; turn it on there, or use nats:// without ca_file"
    if not any(word in said.lower() for word in ("authorization", "authentication", "revoked")):
        return ""
    if broker.credentials_file:
        return f"refused the identity in {broker.credentials_file}: {said}; set broker.credentials_file"
    if broker.token_file:
        return f"refused the token in {broker.token_file}: {said}; set broker.token_file"
    return "lets in nobody without an identity; set broker.credentials_file (or broker.token_file)"
