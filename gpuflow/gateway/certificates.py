"""The certificate of a gateway that speaks TLS: the operator's, or a self-signed one for development.

Called by `gpuflow gateway`. A self-signed pair is made once in the state folder, and again where it lacks the host or
has nearly expired; its key is for this user alone.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpuflow.errors import InvalidSettings
from gpuflow.private_files import write_private

#: How long a self-signed certificate is good for, and how long before its end it is made anew, in days.
_DAYS: Final = 365
_RENEW_DAYS: Final = 30


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The files of a certificate (with its chain) and of its key, PEM."""

    certificate: Path
    key: Path


def given_pair(certificate: Path, key: Path) -> Pair:
    """Return the operator's pair. Raises InvalidSettings where the two cannot be used together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise InvalidSettings(
            f"--ssl-certfile {certificate} and --ssl-keyfile {key} cannot be used: {error}; give a PEM certificate "
            "with its chain, and its key without a password"
        ) from None
    return Pair(certificate=certificate, key=key)


def development_pair(folder: Path, host: str) -> Pair:
    """Return a self-signed pair for `host` and this machine, made in `folder` on first use. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    pair = Pair(certificate=folder / "gateway.crt", key=folder / "gateway.key")
    names = _names(host)
    if not _is_good(pair, names):
        key = ec.generate_private_key(ec.SECP256R1())
        plain = serialization.NoEncryption()
        write_private(
            pair.key,
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode("ascii"),
        )
        made = _certificate(key, names).public_bytes(serialization.Encoding.PEM)
        write_private(pair.certificate, made.decode("ascii"))
    return pair


def _names(host: str) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), host]):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            if name.isascii() and name:
                found.append(x509.DNSName(name))
    return found


def _is_good(pair: Pair, names: list[x509.GeneralName]) -> bool:
    """Whether the pair that is there belongs together, has every name, and does not end soon."""
    try:
        found = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
        key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
        has = set(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=_RENEW_DAYS)
    return found.public_key() == key.public_key() and set(names) <= has and found.not_valid_after_utc > soon


def _certificate(key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName]) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpuflow gateway (development)")])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
