"""What a node presents to its server and whether the server can be reached, checked before `flower-supernode` starts.

Flower ends a node at once for a wrong key, CA or clock, and goes on trying for ever where nothing answers; so does this:
the former are fatal, the latter is told.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import shlex
import socket
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key, load_ssh_public_key

from server_app.settings import SettingsError

SKEW_LIMIT = 300  # seconds; flwr.common.constant.TIMESTAMP_TOLERANCE, beyond which the SuperLink refuses signed requests
_SKEW_WORTH_SAYING = 30
_MAKE_KEY = 'ssh-keygen -t ecdsa -b 384 -N "" -f node.key'
_SET_CLOCK = "sudo timedatectl set-ntp true"


@dataclass(frozen=True)
class Check:
    """One line of what was found.

    Attributes:
        name: what was looked at.
        found: the result, with the file or address and the value.
        cure: what to type or change; empty where all is well.
        fatal: the node would be refused or could not train.
    """

    name: str
    found: str
    cure: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class Address:
    """Where the SuperLink is; `host` without the brackets of an IPv6 address."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """Return the address in `HOST:PORT`; raises SettingsError for anything else."""
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})", text)
        if "://" in text:
            raise SettingsError(f"--superlink {text}: type it without the scheme, such as server.example:8000")
        if not found or not 1 <= int(found[3]) <= 65535:
            raise SettingsError(f"--superlink {text}: type HOST:PORT, such as server.example:8000 or [fd00::20]:8000")
        return cls(found[1] or found[2], int(found[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_key(path: Path, name: str) -> Check:
    """Return whether Flower can read the node's private key, only its owner can, and the `.pub` to register belongs to it."""
    try:
        content, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        denied = isinstance(error, PermissionError)
        cure = (
            f"sudo chown $USER {_quoted(path)}; with --systemd, type it with sudo instead"
            if denied
            else f"--key FILE of `heterofleet certs`, or {_MAKE_KEY}"
        )
        return Check("key", f"{path}: {error.strerror}", cure, fatal=True)
    try:
        key = load_ssh_private_key(content, None)
    except TypeError:
        return Check("key", f"{path} has a passphrase, which Flower cannot ask for", f'ssh-keygen -p -N "" -f {_quoted(path)}', fatal=True)
    except (ValueError, UnsupportedAlgorithm):
        private = path.with_suffix(".key")
        cure = f"--key {_quoted(private)}" if path.suffix == ".pub" and private.is_file() else _MAKE_KEY
        return Check("key", f"{path} is no private key in OpenSSH's format", cure, fatal=True)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return Check("key", f"{path} is of another kind than EC, which is all that Flower takes", _MAKE_KEY, fatal=True)
    public = key.public_key()
    shown = f"{path}, {public.curve.name}, {_fingerprint(public)}"
    beside = next((file for file in (path.with_suffix(".pub"), Path(f"{path}.pub")) if file.is_file()), None)
    if beside and not _belongs(beside, public):
        cure = f"ssh-keygen -y -f {_quoted(path)} > {_quoted(beside)}   then register it anew"
        return Check("key", f"{beside} belongs to another key than {path}: what was registered from it is not this node", cure, fatal=True)
    if mode & 0o077:
        return Check("key", f"{shown}; others may read it (mode {mode:04o})", f"chmod 600 {_quoted(path)}")
    if not beside:
        wanted = path.with_suffix(".pub")
        cure = f"ssh-keygen -y -f {_quoted(path)} > {_quoted(wanted)}"
        return Check("key", f"{shown}; there is no {wanted}", cure)
    return Check("key", f"{shown}; where runs are started: flwr supernode register {beside.name} fleet --name {name}")


def _fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return what `ssh-keygen -l` shows."""
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _belongs(public_file: Path, key: ec.EllipticCurvePublicKey) -> bool:
    try:
        return load_ssh_public_key(public_file.read_bytes()) == key
    except (OSError, ValueError, UnsupportedAlgorithm):
        return False


def check_ca(path: Path, now: datetime | None = None) -> Check:
    """Return whether the file holds a CA's certificate that is valid at `now` (the clock's time by default)."""
    moment = now or datetime.now(UTC)
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        return Check("CA", f"{path}: {error.strerror}", "--root-certificates with this fleet's ca.crt", fatal=True)
    except ValueError:
        return Check("CA", f"{path} holds no certificate in PEM form", "--root-certificates with this fleet's ca.crt", fatal=True)
    for certificate in certificates:
        if not _signs(certificate):
            return Check("CA", f"{path} is a certificate, but not a CA's", "--root-certificates with ca.crt, not server.pem", fatal=True)
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not first <= moment <= last:
            found = f"{path} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}, and this machine's clock says {moment:%Y-%m-%d %H:%M}"
            return Check("CA", found, f"{_SET_CLOCK}; if the clock is right, take a new ca.crt", fatal=True)
    return Check("CA", f"{path}, until {min(c.not_valid_after_utc for c in certificates):%Y-%m-%d}")


def _signs(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def check_server(address: Address, ca: Path | None, *, insecure: bool, timeout: float = 5.0) -> list[Check]:
    """Return whether the server answers, is who it should be, and shows the same time; asks for nothing but `/health`.

    Args:
        address: of the SuperLink.
        ca: certificates to trust; None: the system's.
        insecure: plain HTTP.
        timeout: seconds to wait for the connection and for the answer.
    """
    try:
        connection = socket.create_connection((address.host, address.port), timeout)
    except socket.gaierror as error:
        return [Check("server", f"no address is known for {address.host!r} ({error.strerror}); the node goes on trying", "check the name")]
    except OSError as error:
        return [_silent(address, error)]
    try:
        with connection if insecure else _secured(connection, address, ca) as channel:
            return _talk(address, channel, timeout)
    except ssl.SSLCertVerificationError as error:
        return [_untrusted(address, error, ca, timeout)]
    except (OSError, http.client.HTTPException) as error:
        return [_other_protocol(address, insecure=insecure, timeout=timeout) or _unclear(address, error, insecure=insecure)]


def _secured(connection: socket.socket, address: Address, ca: Path | None) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(ca) if ca else None)
    return context.wrap_socket(connection, server_hostname=address.host)


def _unclear(address: Address, error: OSError | http.client.HTTPException, *, insecure: bool) -> Check:
    """Return what is told of a port that took the connection and speaks neither protocol."""
    if isinstance(error, (ConnectionError, TimeoutError, ssl.SSLEOFError)):  # a tunnel with nothing at its other end
        return _silent(address, error)
    reason = getattr(error, "reason", None) or error
    return Check("server", f"{address} does not speak {'HTTP' if insecure else 'TLS'} ({reason})", "check host and port", fatal=True)


def _silent(address: Address, error: OSError) -> Check:
    cure = f"on the server: flower-superlink --host 0.0.0.0 --port {address.port} ..., and no firewall between"
    return Check("server", f"nothing answers at {address} ({error.strerror or error}); the node goes on trying", cure)


def _other_protocol(address: Address, *, insecure: bool, timeout: float) -> Check | None:
    """Return what to type where the server speaks TLS and the node plain HTTP or the other way round; None where neither is so."""
    if insecure:
        if _presented(address, timeout) is None:
            return None
        found = f"{address} speaks TLS, and --insecure calls it by plain HTTP"
        return Check(
            "server", found, "type --root-certificates ca.crt instead of --insecure, and --key node.key if nodes have keys", fatal=True
        )
    try:
        with socket.create_connection((address.host, address.port), timeout) as connection:
            _ask(address, connection, timeout)
    except (OSError, http.client.HTTPException):
        return None
    cure = "type --insecure instead of --root-certificates and --key, on a network you trust; else start the SuperLink with its certificate"
    return Check("server", f"{address} speaks plain HTTP, and this node calls it by TLS", cure, fatal=True)


def _talk(address: Address, connection: socket.socket, timeout: float) -> list[Check]:
    answer = _ask(address, connection, timeout)
    if answer.status == 200:
        return [Check("server", f"{address} answers"), *_clock(answer.getheader("Date"))]
    return [Check("server", f"{address} answers {answer.status} for /health: not a SuperLink of Flower 1.42", "check host and port")]


def _ask(address: Address, connection: socket.socket, timeout: float) -> http.client.HTTPResponse:
    """Return the answer for `/health` over an open connection; raises OSError or HTTPException where no HTTP comes back."""
    asked = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    asked.sock = connection
    asked.request("GET", "/health")
    answer = asked.getresponse()
    answer.read()
    return answer


def _clock(date: str | None) -> list[Check]:
    """Return how far this machine's clock is from the server's `Date` header."""
    if date is None:
        return []
    skew = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
    if abs(skew) < _SKEW_WORTH_SAYING:
        return [Check("clock", "the same as the server's")]
    told = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the server's"
    if abs(skew) < SKEW_LIMIT:
        return [Check("clock", f"{told}; from {SKEW_LIMIT} s on the node is refused", _SET_CLOCK)]
    return [Check("clock", f"{told}: a node with a key is refused from {SKEW_LIMIT} s on", _SET_CLOCK, fatal=True)]


def _untrusted(address: Address, error: ssl.SSLCertVerificationError, ca: Path | None, timeout: float) -> Check:
    """Return why the server's certificate was refused: dates, names or another CA."""
    certificate = _presented(address, timeout)
    if certificate is None:
        return Check("server", f"{address}: {error.verify_message}", "see docs/deploy.md, symptoms", fatal=True)
    first, last, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    if not first <= now <= last:
        dates = f"from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}"
        found = f"the certificate of {address} is valid {dates}, this machine's clock says {now:%Y-%m-%d %H:%M}"
        return Check("server", found, f"{_SET_CLOCK}; if the clock is right, on the server: heterofleet certs --renew", fatal=True)
    if "mismatch" in error.verify_message.lower():
        names = ", ".join(_names(certificate)) or "no name at all"
        found = f"the certificate of {address} is for {names}"
        return Check("server", found, f"--superlink with one of these, or: heterofleet certs --renew --host {address.host}", fatal=True)
    trusted = f"{ca} did not sign" if ca else "none of the system's CAs signed"
    found = f"{trusted} the certificate of {address} ({error.verify_message})"
    return Check("server", found, "--root-certificates with this fleet's ca.crt", fatal=True)


def _presented(address: Address, timeout: float) -> x509.Certificate | None:
    """Return the certificate the server shows, unchecked, to say what is wrong with it; None where it shows none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.host, address.port), timeout) as connection,
            context.wrap_socket(connection, server_hostname=address.host) as secure,
        ):
            shown = secure.getpeercert(binary_form=True)
    except OSError:
        return None
    return x509.load_der_x509_certificate(shown) if shown else None


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
