"""What a fleet authenticates itself with: a CA, the server's certificate, a key for each node, secrets for the SuperExecs.

Flower accepts node keys on NIST curves only, in OpenSSH's format; see `flower-supernode --auth-supernode-private-key`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from server_app.settings import SettingsError

CONTAINER_UID = 49999  # of the user in Flower's images, who must be able to read what compose hands in
CA_DAYS = 3650
# `superlink` is the service's name in docker/compose*.yml, by which the server app reaches it.
ALWAYS = ("localhost", "superlink")
ALWAYS_IP = ("127.0.0.1", "::1")
_SKEW = timedelta(hours=1)  # nodes whose clock is behind; Flower itself refuses more than 5 minutes
_HOST = re.compile(r"^(?=.{1,253}$)(\*\.)?([a-zA-Z0-9_]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*$")


class CertsError(SettingsError):
    """Nothing was written; the message says why and what to type."""


@dataclass(frozen=True)
class Server:
    """The server's certificate as it now stands on disk: its file, every name and address in it, and its last day."""

    path: Path
    names: tuple[str, ...]
    until: datetime


def create(out: Path, hosts: Sequence[str] = (), addresses: Sequence[str] = (), *, nodes: int, days: int = 365) -> Server:
    """Make the folder `out` with everything a fleet needs; it appears whole or not at all.

    Args:
        out: folder that does not exist yet or is empty. It gets ca.crt, ca.key, server.pem, server.key,
            superexec.secret, and for each node a folder node-1, node-2, ... with ca.crt, node.key, node.pub, superexec.secret.
        hosts: DNS names by which nodes reach the server, besides localhost and superlink.
        addresses: IP addresses likewise, besides 127.0.0.1 and ::1.
        nodes: how many nodes get a key.
        days: validity of the server's certificate; the CA's is ten years.

    Raises:
        CertsError: `out` holds something or cannot be written, or a name, an address, or a number is wrong.
    """
    san = _alternative_names(hosts, addresses)
    if nodes < 1 or not 1 <= days <= CA_DAYS:
        raise CertsError(f"--nodes {nodes} --days {days}: type at least one node and 1 to {CA_DAYS} days")
    if out.exists() and not out.is_dir():
        raise CertsError(f"--out {out} is a file; name a folder that is to be made")
    if out.exists() and any(out.iterdir()):
        raise CertsError(f"{out} exists and is not replaced; name another --out, or type --renew for a new server certificate")
    try:
        server = _made(out.resolve(), san, nodes, days)
    except OSError as error:
        raise CertsError(f"cannot make {out}: {error}") from None
    return _described(out / "server.pem", server)


def renew(out: Path, hosts: Sequence[str] = (), addresses: Sequence[str] = (), *, days: int = 365) -> Server:
    """Replace server.pem in `out` by one for the same key, valid from now; nodes keep their keys and their ca.crt.

    Args:
        out: folder that `create` made.
        hosts: as in `create`; neither hosts nor addresses: the names of the old certificate.
        addresses: as in `create`.
        days: validity of the new certificate, which the CA's own end may cut short.

    Raises:
        CertsError: a file is missing or unreadable, the CA has expired, or a name, an address or `days` is wrong.
    """
    if not 1 <= days <= CA_DAYS:
        raise CertsError(f"--days {days}: type 1 to {CA_DAYS}")
    try:
        ca = x509.load_pem_x509_certificate((out / "ca.crt").read_bytes())
        ca_key = load_pem_private_key((out / "ca.key").read_bytes(), password=None)
        old = x509.load_pem_x509_certificate((out / "server.pem").read_bytes())
    except (OSError, ValueError) as error:
        raise CertsError(
            f"cannot renew in {out}: {error}; it needs ca.crt, ca.key and server.pem as `heterofleet certs` wrote them"
        ) from None
    server_key = old.public_key()
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or not isinstance(server_key, ec.EllipticCurvePublicKey):
        raise CertsError(f"cannot renew in {out}: its keys are not elliptic-curve keys as `heterofleet certs` writes them")
    if ca_key.public_key() != ca.public_key():
        raise CertsError(f"cannot renew in {out}: ca.key does not belong to ca.crt")
    if ca.not_valid_after_utc <= datetime.now(UTC):
        raise CertsError(
            f"the CA in {out} expired on {ca.not_valid_after_utc:%Y-%m-%d}; make a new folder and give every node its new ca.crt"
        )
    if hosts or addresses:
        san = _alternative_names(hosts, addresses)
    else:
        san = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    server = _signed(ca, ca_key, server_key, san, days)
    draft = out / f".server-{secrets.token_hex(4)}.pem"
    try:
        _write(draft, server.public_bytes(Encoding.PEM), 0o644)
        draft.replace(out / "server.pem")
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CertsError(f"cannot renew in {out}: {error}") from None
    return _described(out / "server.pem", server)


def next_steps(out: Path, server: Server) -> str:
    """Return the commands to type after `create`: the server's, the registration of the nodes, a node's, and compose's."""
    folder = out.resolve()
    own = [name for name in server.names if name not in (*ALWAYS, *ALWAYS_IP) and "*" not in name]
    address = f"[{own[0]}]" if own and ":" in own[0] else (own or ["localhost"])[0]
    folders = sorted(folder.glob("node-*"), key=lambda path: int(path.name.removeprefix("node-")))
    register = "\n".join(f"  flwr supernode register {_quoted(node / 'node.pub')} fleet --name {node.name}" for node in folders)
    kept = [folder / "server.key", folder / "superexec.secret"]
    kept += [node / name for node in folders for name in ("node.key", "superexec.secret")]
    return f"""\
1. The server:
  flower-superlink --host 0.0.0.0 --port 8000 --disable-runtime-dependency-installation --enable-supernode-auth \\
    --ssl-ca-certfile {_quoted(folder / "ca.crt")} --ssl-certfile {_quoted(folder / "server.pem")} \\
    --ssl-keyfile {_quoted(folder / "server.key")} --database superlink.db

2. Where you start runs, in ~/.flwr/config.toml:
  [superlink.fleet]
  address = "{address}:8000"
  root-certificates = "{folder / "ca.crt"}"
and once, while the server runs and before the nodes start:
{register}

3. Each node gets its own folder and nothing else; there, with {folders[0].name} for example:
  heterofleet node --superlink {address}:8000 --root-certificates {folders[0].name}/ca.crt \\
    --key {folders[0].name}/node.key --name {folders[0].name} --model cnn1 --data /srv/pictures \\
    --state-dir /var/lib/heterofleet

With docker compose, whose containers run as user {CONTAINER_UID}, skip 1 and 3; where they run, type first:
  sudo chown {CONTAINER_UID} {" ".join(map(_quoted, kept))}

ca.key signs certificates that all nodes trust: keep it off the server and the nodes."""


def _made(out: Path, san: x509.SubjectAlternativeName, nodes: int, days: int) -> x509.Certificate:
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))  # mode 0700
    try:
        ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
        ca = _root(ca_key)
        server = _signed(ca, ca_key, server_key.public_key(), san, days)
        _write(draft / "ca.key", _pem(ca_key), 0o600)
        _write(draft / "ca.crt", ca.public_bytes(Encoding.PEM), 0o644)
        _write(draft / "server.key", _pem(server_key), 0o600)
        _write(draft / "server.pem", server.public_bytes(Encoding.PEM), 0o644)
        _write(draft / "superexec.secret", secrets.token_bytes(32), 0o600)
        for number in range(1, nodes + 1):
            _node(draft / f"node-{number}", ca)
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return server


def _alternative_names(hosts: Sequence[str], addresses: Sequence[str]) -> x509.SubjectAlternativeName:
    for host in hosts:
        if re.fullmatch(r"[0-9.]+", host) or ":" in host:
            raise CertsError(f"--host {host!r} is an address or has a port; type --ip for an address, and no port")
        if not _HOST.match(host):
            raise CertsError(f"--host {host!r} is not a DNS name, such as server.example")
    parsed = []
    for address in addresses:
        try:
            parsed.append(ipaddress.ip_address(address))
        except ValueError:
            raise CertsError(f"--ip {address!r} is not an address, such as 192.168.1.20 or fd00::20") from None
    local = [ipaddress.ip_address(address) for address in ALWAYS_IP]
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in dict.fromkeys((*hosts, *ALWAYS))]
    names += [x509.IPAddress(address) for address in dict.fromkeys((*parsed, *local))]
    return x509.SubjectAlternativeName(names)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _root(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return a CA's certificate with all that Python 3.13's strict verification wants to see."""
    now = datetime.now(UTC)
    name = _name(f"heterofleet CA {secrets.token_hex(4)}")  # two CAs must not share a name
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - _SKEW, now + timedelta(days=CA_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(sign_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.sign(key, hashes.SHA384())


def _signed(
    ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePublicKey, san: x509.SubjectAlternativeName, days: int
) -> x509.Certificate:
    now = datetime.now(UTC)
    until = min(now + timedelta(days=days), ca.not_valid_after_utc)
    name = _name("heterofleet SuperLink")
    builder = x509.CertificateBuilder(ca.subject, name, key, x509.random_serial_number(), max(now - _SKEW, ca.not_valid_before_utc), until)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(sign_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(san, critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    issuer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
    return builder.sign(ca_key, hashes.SHA384())


def _node(folder: Path, ca: x509.Certificate) -> None:
    """Make a node's folder. Its SuperExec secret is its own: with the server's it could run server apps."""
    folder.mkdir(mode=0o700)
    key = ec.generate_private_key(ec.SECP384R1())
    _write(folder / "ca.crt", ca.public_bytes(Encoding.PEM), 0o644)
    _write(folder / "node.key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)
    _write(folder / "node.pub", key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n", 0o644)
    _write(folder / "superexec.secret", secrets.token_bytes(32), 0o600)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file that nobody else could read at any moment, then give it its mode."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        os.fchmod(descriptor, mode)
        stream.write(content)


def _described(path: Path, certificate: x509.Certificate) -> Server:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return Server(path, tuple(str(name.value) for name in names), certificate.not_valid_after_utc)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
