"""The key of one transfer between hosts: a certificate that both sides present and require, and that no file holds."""

from __future__ import annotations

import datetime

_YEARS = (2000, 2100)  # valid on a host whose clock is wrong, too: the key is used once


def make_transfer_key() -> tuple[str, str]:
    """Return a new self-signed certificate and its private key (EC P-256), both as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trainyard transfer")])
    first, last = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in _YEARS)
    builder = x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(first).not_valid_after(last)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    encoding, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(encoding, pkcs8, serialization.NoEncryption())
    return certificate.public_bytes(encoding).decode(), private.decode()
