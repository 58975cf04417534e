"""A node's key, CA, clock and server: what is told, what refuses, and what to type."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from server_app import certs
from server_app.node_link import Address, check_ca, check_key, check_server
from server_app.settings import SettingsError


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "certs"
    certs.create(folder, ["server.example"], nodes=2)
    return folder


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [("server.example:8000", "server.example", 8000, "server.example:8000"), ("[fd00::20]:1", "fd00::20", 1, "[fd00::20]:1")],
)
def test_an_address_is_host_and_port(text, host, port, shown):
    address = Address.of(text)
    assert (address.host, address.port, str(address)) == (host, port, shown)


@pytest.mark.parametrize("text", ["server.example", "https://server.example:8000", "server:0", "server:65536", "fd00::20:8000", "a b:80"])
def test_what_is_no_address_is_refused_with_one_that_is(text):
    with pytest.raises(SettingsError, match=r"server\.example:8000"):
        Address.of(text)


def test_a_nodes_key_is_shown_as_ssh_keygen_shows_it(fleet):
    check = check_key(fleet / "node-1/node.key", "pi-1")
    assert (check.fatal, check.cure) == (False, "")
    shown = subprocess.run(["ssh-keygen", "-l", "-f", fleet / "node-1/node.pub"], capture_output=True, text=True, check=True).stdout
    assert shown.split()[1] in check.found
    assert "flwr supernode register node.pub fleet --name pi-1" in check.found


def _key(path: Path, key: object) -> Path:
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    return path


def test_keys_that_flower_refuses_are_fatal(tmp_path, fleet):
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "secret", "-f", tmp_path / "locked"], check=True)
    wanted = {
        "no such": (tmp_path / "none", "No such file", "heterofleet certs"),
        "ed25519": (_key(tmp_path / "ed", ed25519.Ed25519PrivateKey.generate()), "another kind than EC", "ssh-keygen -t ecdsa"),
        "locked": (tmp_path / "locked", "passphrase", "ssh-keygen -p"),
        "PKCS8": (fleet / "server.key", "no private key in OpenSSH's format", "ssh-keygen -t ecdsa"),
        "public": (fleet / "node-1/node.pub", "no private key", f"--key {fleet / 'node-1/node.key'}"),
    }
    for name, (path, found, cure) in wanted.items():
        check = check_key(path, "pi-1")
        assert check.fatal, name
        assert found in check.found, name
        assert str(path) in check.found, name
        assert cure in check.cure, name


def test_a_public_half_of_another_key_is_fatal_and_one_that_is_missing_is_made_by_the_cure(tmp_path):
    key = _key(tmp_path / "node.key", ec.generate_private_key(ec.SECP384R1()))
    alone = check_key(key, "pi-1")
    assert not alone.fatal
    subprocess.run(alone.cure, shell=True, check=True, cwd=tmp_path)
    assert check_key(key, "pi-1").cure == ""
    other = _key(tmp_path / "other.key", ec.generate_private_key(ec.SECP384R1()))
    (tmp_path / "node.pub").write_bytes(subprocess.run(["ssh-keygen", "-y", "-f", other], capture_output=True, check=True).stdout)
    wrong = check_key(key, "pi-1")
    assert wrong.fatal
    assert "another key" in wrong.found


def test_a_key_that_others_may_read_is_told(tmp_path):
    key = _key(tmp_path / "node.key", ec.generate_private_key(ec.SECP384R1()))
    key.chmod(0o644)
    check = check_key(key, "pi-1")
    assert not check.fatal
    assert "mode 0644" in check.found
    assert check.cure == f"chmod 600 {key}"


def test_a_ca_must_be_one_and_must_be_valid_by_this_clock(fleet, tmp_path):
    good = check_ca(fleet / "ca.crt")
    assert (good.fatal, good.cure) == (False, "")
    late = check_ca(fleet / "ca.crt", datetime.now(UTC) + timedelta(days=certs.CA_DAYS + 1))
    early = check_ca(fleet / "ca.crt", datetime(1970, 1, 2, tzinfo=UTC))  # a Raspberry Pi without network time
    assert late.fatal
    assert early.fatal
    assert "clock says 1970-01-02" in early.found
    assert "set-ntp" in early.cure
    leaf = check_ca(fleet / "server.pem")
    assert leaf.fatal
    assert "not a CA's" in leaf.found
    (tmp_path / "text").write_text("hello")
    assert "no certificate" in check_ca(tmp_path / "text").found
    assert check_ca(tmp_path / "none").fatal


class _Answer(BaseHTTPRequestHandler):
    """/health as the SuperLink gives it, with a clock that may be wrong."""

    ahead = timedelta(0)
    status = 200

    def do_GET(self) -> None:
        self.send_response_only(self.status)
        self.send_header("Date", format_datetime(datetime.now(UTC) + self.ahead, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


def _served(handler: type[BaseHTTPRequestHandler], folder: Path | None, host: str = "127.0.0.1") -> Iterator[Address]:
    server = ThreadingHTTPServer((host, 0), handler)
    if folder:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield Address(host, server.server_port)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def secure(fleet: Path) -> Iterator[Address]:
    yield from _served(_Answer, fleet)


@pytest.fixture
def plain() -> Iterator[Address]:
    yield from _served(type("Plain", (_Answer,), {}), None)


def test_a_server_that_is_trusted_and_on_time_passes(fleet, secure):
    checks = check_server(secure, fleet / "ca.crt", insecure=False)
    assert [(c.name, c.fatal, c.cure) for c in checks] == [("server", False, ""), ("clock", False, "")]


@pytest.mark.parametrize(
    ("seconds", "fatal", "side"),
    [(-120, False, "ahead of"), (200, False, "behind"), (4000, True, "behind"), (-4000, True, "ahead of")],
)
def test_a_clock_that_differs_from_the_servers_is_told_and_refused_from_five_minutes_on(monkeypatch, plain, seconds, fatal, side):
    monkeypatch.setattr(_Answer, "ahead", timedelta(seconds=seconds))
    _, clock = check_server(plain, None, insecure=True)
    assert clock.fatal is fatal
    told, _, rest = clock.found.partition(" s ")
    assert rest.startswith(f"{side} the server's")
    assert abs(int(told) - abs(seconds)) <= 5
    assert "timedatectl set-ntp true" in clock.cure


def test_a_server_that_another_ca_signed_is_fatal(fleet, secure, tmp_path):
    certs.create(tmp_path / "other", nodes=1)
    for ca, words in ((tmp_path / "other/ca.crt", "other/ca.crt did not sign"), (None, "none of the system's CAs")):
        (check,) = check_server(secure, ca, insecure=False)
        assert check.fatal
        assert words in check.found
        assert "ca.crt" in check.cure


def test_a_server_called_by_a_name_that_its_certificate_lacks_is_fatal_and_its_names_are_told(fleet):
    for address in _served(_Answer, fleet, "127.0.0.2"):
        (check,) = check_server(address, fleet / "ca.crt", insecure=False)
    assert check.fatal
    assert "server.example" in check.found
    assert "--renew --host 127.0.0.2" in check.cure


def test_an_expired_certificate_is_told_with_its_dates_and_the_clock(fleet, tmp_path):
    folder = tmp_path / "old"
    certs.create(folder, nodes=1)
    ca = certs.x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    ca_key, server_key = (certs.load_pem_private_key((folder / name).read_bytes(), None) for name in ("ca.key", "server.key"))
    last = datetime.now(UTC) - timedelta(days=3)
    builder = certs.x509.CertificateBuilder(ca.subject, ca.subject, server_key.public_key(), 7, last - timedelta(days=30), last)
    (folder / "server.pem").write_bytes(builder.sign(ca_key, certs.hashes.SHA256()).public_bytes(Encoding.PEM))
    for address in _served(_Answer, folder):
        (check,) = check_server(address, folder / "ca.crt", insecure=False)
    assert check.fatal
    assert f"to {last:%Y-%m-%d}" in check.found
    assert f"clock says {datetime.now(UTC):%Y-%m-%d}" in check.found
    assert "certs --renew" in check.cure


def test_plain_and_secure_are_told_apart(fleet, secure, plain):
    (calls_tls,) = check_server(plain, fleet / "ca.crt", insecure=False)
    assert calls_tls.fatal
    assert calls_tls.found == f"{plain} speaks plain HTTP, and this node calls it by TLS"
    assert calls_tls.cure.startswith("type --insecure instead of --root-certificates")
    (calls_plain,) = check_server(secure, None, insecure=True)
    assert calls_plain.fatal
    assert calls_plain.found == f"{secure} speaks TLS, and --insecure calls it by plain HTTP"
    assert calls_plain.cure.startswith("type --root-certificates ca.crt instead of --insecure")


@pytest.mark.parametrize(
    ("answer", "insecure", "fatal", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", True, True, "does not speak HTTP (SSH-2.0"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False, True, "does not speak TLS (WRONG_VERSION_NUMBER"),
        (b"", True, False, "nothing answers at"),
        (b"", False, False, "nothing answers at"),
        (None, True, False, "timed out"),
    ],
)
def test_what_speaks_neither_is_refused_and_what_says_nothing_is_waited_for(answer, insecure, fatal, words):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            kept = []
            for _ in range(2):  # the node's protocol, then the other one
                connection, _ = server.accept()
                kept.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
            kept[-1].recv(1)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        (check,) = check_server(Address("127.0.0.1", server.getsockname()[1]), None, insecure=insecure, timeout=0.5)
        thread.join(5)
    assert (check.fatal, words in check.found) == (fatal, True), check
    assert check.cure


def test_a_key_of_another_user_is_to_be_handed_over_not_made_anew(monkeypatch, tmp_path):
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    check = check_key(tmp_path / "node.key", "pi-1")
    assert (check.fatal, check.cure) == (True, f"sudo chown $USER {tmp_path}/node.key; with --systemd, type it with sudo instead")


def test_a_server_that_does_not_answer_is_told_and_not_fatal(fleet):
    for address, words in (
        (Address("127.0.0.1", 1), "nothing answers at 127.0.0.1:1"),
        (Address("no-such-host.invalid", 8000), "no address is known for 'no-such-host.invalid'"),
    ):
        (check,) = check_server(address, fleet / "ca.crt", insecure=False, timeout=2.0)
        assert not check.fatal
        assert words in check.found
        assert "goes on trying" in check.found
        assert check.cure


def test_another_kind_of_server_is_told(monkeypatch, plain):
    monkeypatch.setattr(_Answer, "status", 404)
    (check,) = check_server(plain, None, insecure=True)
    assert "answers 404" in check.found
