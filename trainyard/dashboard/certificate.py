"""The TLS certificate of the dashboard: the user's, or a self-signed one that is created once."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.common.inputs import read_regular, user_path

FILE = "tls.pem"  # key and certificate, in the state folder
FILE_LIMIT = 1 << 20  # bytes of a file
VALID = timedelta(days=825)  # the longest that Apple's systems accept
RENEW = timedelta(days=30)  # before the end


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key.

    Attributes:
        file: PEM file of the certificate and of those that signed it.
        key_file: PEM file of its key, without a passphrase.
        names: host names and IP addresses that it is valid for.
        fingerprint: SHA-256, as browsers show it.
        self_signed: whether `own_certificate` made it.
        end: when it expires.
    """

    file: Path
    key_file: Path
    names: tuple[str, ...]
    fingerprint: str
    self_signed: bool
    end: datetime

    @classmethod
    def read(cls, file: Path, key_file: Path, self_signed: bool) -> Certificate:
        """Read a certificate. Raises OSError and ValueError."""
        found = x509.load_pem_x509_certificate(read_regular(file, FILE_LIMIT))
        fingerprint = found.fingerprint(hashes.SHA256()).hex(":").upper()
        return cls(file, key_file, _names(found), fingerprint, self_signed, found.not_valid_after_utc)


def user_certificate(file: str, key_file: str) -> Certificate:
    """Return the certificate that a user gave.

    Args:
        file: the option `dashboard_certificate`.
        key_file: the option `dashboard_key`.

    Raises:
        UserError: a file is unreadable, the key is of another certificate or has a passphrase, or every user may read it.
    """
    path, key = user_path(file, "dashboard_certificate"), user_path(key_file, "dashboard_key")
    try:
        found = Certificate.read(path, key, self_signed=False)
        open_key = stat.S_IMODE(key.stat().st_mode) & 0o007
    except (OSError, ValueError) as error:
        raise UserError(f"dashboard_certificate: cannot read {path} and {key}: {error}") from None
    if open_key:
        raise UserError(f"dashboard_key: other users may read {key}: run chmod 600 {key}")
    problem = _key_problem(path, key)
    if problem:
        raise UserError(f"dashboard_key: {key} is not the key of {path}, or has a passphrase: {problem}")
    if found.end < datetime.now(UTC):
        raise UserError(f"dashboard_certificate: {path} expired on {found.end:%Y-%m-%d}: renew it")
    return found


def own_certificate(folder: Path, address: str) -> Certificate:
    """Return the self-signed certificate for an address; make it if there is none, or if it ends soon.

    Args:
        folder: folder of the certificate.

    Raises:
        UserError: the folder cannot be written.
    """
    path = folder / FILE
    try:
        with contextlib.suppress(FileNotFoundError, ValueError):
            found = Certificate.read(path, path, self_signed=True)
            current = found.end > datetime.now(UTC) + RENEW and address in found.names
            if current and not _key_problem(path, path):
                return found
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, _make(address), 0o600)
        return Certificate.read(path, path, self_signed=True)
    except OSError as error:
        raise UserError(f"cannot write the certificate of the dashboard to {path}: {error.strerror}") from None


def _make(address: str) -> bytes:
    """Return a new key and its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trainyard dashboard")])
    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(address))]
    with contextlib.suppress(ValueError):  # a host name that is not ASCII
        names.append(x509.DNSName(socket.gethostname()))
    now = datetime.now(UTC)
    usage = [ExtendedKeyUsageOID.SERVER_AUTH]
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
    builder = builder.not_valid_after(now + VALID).add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    return text + builder.sign(key, hashes.SHA256()).public_bytes(pem)


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the host names and addresses of a certificate; a name with a wildcard is left out."""
    try:
        listed = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    found = [name.lower() for name in listed.get_values_for_type(x509.DNSName) if "*" not in name]
    return (*found, *(str(address) for address in listed.get_values_for_type(x509.IPAddress)))


def _key_problem(file: Path, key_file: Path) -> str:
    """Return why OpenSSL does not take a certificate with its key, or an empty string."""
    try:
        # Without a password, OpenSSL would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(file, key_file, password="")
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", None) or error)
    return ""
