"""Certificates for tests: one authority, a server and a client that it signed."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


def write_certificates(into: Path) -> None:
    """ca.pem, server.pem, server.key, client.pem, client.key."""
    authority, authority_key = _certificate("authority", None)
    (into / "ca.pem").write_bytes(authority.public_bytes(_PEM))
    for name in ("server", "client"):
        certificate, key = _certificate(name, (authority, authority_key))
        (into / f"{name}.pem").write_bytes(certificate.public_bytes(_PEM))
        private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (into / f"{name}.key").write_bytes(private)


def _certificate(
    name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    own = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(own), critical=False)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    return certificate, key
