"""Real brokers of `infra/nats/`, with TLS and a user for each kind of service: their configuration is the deployed one, with other
paths and ports."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nkeys

from pipeline.log.permissions import EVERY_RUN, KINDS, users_conf
from schemas.config import Broker
from tests.backends import INSIDE
from tests.natsserver import NatsServer

INFRA = Path(__file__).parents[1] / "infra" / "nats"


def public_key(seed: str) -> str:
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def nkey_pair() -> tuple[str, str]:
    """(seed, public key) of a new user."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    return seed.decode(), public_key(seed.decode())


@dataclass
class Authority:
    """A certificate authority in a directory: `ca.pem`, and certificates that it signs."""

    directory: Path
    _parts: tuple[object, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        self.directory.mkdir(parents=True, exist_ok=True)
        now, long = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)

        def name(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        own = ec.generate_private_key(ec.SECP256R1())

        def write(
            file: str, key: ec.EllipticCurvePrivateKey, subject: str, hosts: Sequence[str], authority: bool
        ) -> None:
            names: list[x509.GeneralName] = []
            for host in hosts:
                try:
                    names.append(x509.IPAddress(ipaddress.ip_address(host)))
                except ValueError:
                    names.append(x509.DNSName(host))
            built = (
                x509.CertificateBuilder()
                .subject_name(name(subject))
                .issuer_name(name("test authority"))
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - long)
                .not_valid_after(now + long)
                .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            )
            if names:
                built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
            pem = built.sign(own, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
            (self.directory / f"{file}.pem").write_bytes(pem)
            kept = key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            (self.directory / f"{file}-key.pem").write_bytes(kept)

        write("ca", own, "test authority", (), True)
        self._sign = lambda file, hosts: write(
            file, ec.generate_private_key(ec.SECP256R1()), file, hosts, False
        )

    def sign(self, file: str, hosts: Sequence[str] = ("localhost", "127.0.0.1")) -> None:
        """`<file>.pem` and `<file>-key.pem`, for these hosts."""
        self._sign(file, hosts)

    @property
    def ca(self) -> str:
        return str(self.directory / "ca.pem")


class SecuredBroker(NatsServer):
    """`infra/nats/<conf>`: seeds of all kinds in `<directory>/<kind>.nk`. `replace`: further text of the configuration, by what
    stands there; `extra`: lines after it."""

    def __init__(
        self,
        directory: Path,
        runs: Iterable[str] = (EVERY_RUN,),
        *,
        conf: str = "nats.conf",
        keys: Mapping[str, tuple[str, str]] | None = None,
        replace: Mapping[str, str] | None = None,
        extra: str = "",
        work: Mapping[str, Sequence[str]] | None = None,
        domain: str = "",
    ) -> None:
        super().__init__(directory)
        self.keys = dict(keys) if keys is not None else {kind: nkey_pair() for kind in KINDS}
        for kind, (seed, _) in self.keys.items():
            (directory / f"{kind}.nk").write_text(seed)
        self.authority = Authority(directory / "tls")
        self.authority.sign("server")
        public = {kind: key for kind, (_, key) in self.keys.items()}
        (directory / "users.conf").write_text(users_conf(public, runs, work, domain))
        text = (INFRA / conf).read_text()
        changes = {
            **(replace or {}),
            "/etc/nats": str(directory),
            # A client that learns a container's own address from it finds no such name in the certificate.
            'listen: "0.0.0.0:4222"': f'listen: "{INSIDE}:{self.port}"\nclient_advertise: "localhost:{self.port}"',
            'http: "127.0.0.1:8222"': "",
            '"/data"': f'"{directory / "js"}"',
            "sync_interval: always": 'sync_interval: "2m"',
        }
        for old, new in changes.items():
            text = text.replace(old, new)
        self._config.write_text(f"{text}\n{extra}\n")

    def user(self, kind: str, key: str = "") -> Broker:
        """The broker as that kind's service is configured. `key`: of whom the seed is, when it is another's."""
        return Broker(
            url=f"tls://localhost:{self.port}",
            credentials_file=str(self.directory / f"{key or kind}.nk"),
            ca_file=self.authority.ca,
        )
