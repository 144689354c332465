"""A real server that speaks TLS alone and asks for the certificate of its clients, with its users in a file."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.fleet import keep_log
from tests.support.waiting import eventually, patient

PROGRAM: Final = "redis-server"
_TRIES: Final = 5


@dataclass(frozen=True, kw_only=True)
class Signed:
    """Files of a certificate and its key, PEM."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates of a test; `file` is its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str) -> Signed:
        """Return a new certificate for 127.0.0.1, of a server or of a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key).add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        found = Signed(certificate=self._folder / f"{name}.pem", key=self._folder / f"{name}.key")
        found.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        found.key.write_bytes(text)
        found.key.chmod(0o600)
        return found

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
        )


class TlsServer:
    """One `redis-server`. `url` is the address with the administrator's login and a client's certificate."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            pytest.fail(f"no {PROGRAM} with TLS; on Debian: apt-get install redis-server")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.data = folder, folder / "data"
        self.data.mkdir()
        self.authority = Authority(folder / "certificates")
        self.of_client = self.authority.sign("client")
        self.log_path = folder / "redis.log"
        keep_log(self)
        self._program, self._of_server = program, self.authority.sign("server")
        self._password = secrets.token_urlsafe(32)
        self.users = folder / "users.acl"
        self.write_users([])
        self._start()

    def write_users(self, lines: Sequence[str], administrator: str = "default") -> None:
        """Write the file of users, the administrator first; read at a start and by `ACL LOAD`."""
        self._administrator = administrator
        self.users.write_text("\n".join([f"user {administrator} on >{self._password} ~* &* +@all", *lines]) + "\n")
        self.users.chmod(0o600)

    def address(self, login: str = "", **parameters: str) -> str:
        """Return an address, with further parameters of TLS; `login` is `user:password@`."""
        asked = {
            "ssl_cert_reqs": "required",
            "ssl_ca_certs": str(self.authority.file),
            "ssl_certfile": str(self.of_client.certificate),
            "ssl_keyfile": str(self.of_client.key),
            **parameters,
        }
        return f"rediss://{login}127.0.0.1:{self.port}/0?{urlencode({k: v for k, v in asked.items() if v})}"

    def restart(self) -> None:
        """End the server as an administrator does, and start it again on its data, at another port."""
        self.client.close()
        self.process.terminate()
        assert self.process.wait(timeout=patient(30)) == 0
        self._start()

    def _start(self) -> None:
        for _ in range(_TRIES):  # another process may take the port that was free a moment ago
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = int(free.getsockname()[1])
            options = {
                "port": "0", "tls-port": str(self.port), "bind": "127.0.0.1", "dir": str(self.data),
                "tls-cert-file": str(self._of_server.certificate), "tls-key-file": str(self._of_server.key),
                "tls-ca-cert-file": str(self.authority.file), "tls-auth-clients": "yes", "save": "",
                "appendonly": "yes", "aclfile": str(self.users), "maxmemory-policy": "noeviction",
            }  # fmt: skip
            words = [word for name, value in options.items() for word in (f"--{name}", value)]
            with self.log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    [self._program, *words], stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
                    env={**os.environ, "LC_ALL": "C"},
                )  # fmt: skip
            self.url = self.address(f"{self._administrator}:{self._password}@")
            self.client: Any = redis.Redis.from_url(self.url, decode_responses=True)

            def answers() -> str:
                if self.process.poll() is not None:
                    return "ended"
                return "ready" if self.client.ping() else ""

            if eventually(answers, what=f"{PROGRAM} at its port") == "ready":
                return
        pytest.fail(f"{PROGRAM} does not start: {self.log_path.read_text('utf-8', 'replace')[-2000:]}")

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=patient(30))
