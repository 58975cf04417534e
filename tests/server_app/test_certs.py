"""Certificates and keys: what they say, who may read them, what is refused, and whether strict verifiers accept them."""

from __future__ import annotations

import ipaddress
import os
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from typer.testing import CliRunner

from server_app import cli
from server_app.certs import CA_DAYS, CertsError, create, renew


@pytest.fixture
def fleet(tmp_path):
    folder = tmp_path / "certs"
    create(folder, ["server.example"], ["10.1.2.3"], nodes=2, days=90)
    return folder


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def verify(folder, subject, when=None):
    """Check server.pem as a browser would: chain, names, dates, key usages."""
    builder = PolicyBuilder().store(Store([certificate(folder / "ca.crt")])).time(when or datetime.now(UTC))
    return builder.build_server_verifier(subject).verify(certificate(folder / "server.pem"), [])


@pytest.mark.parametrize("name", ["server.example", "localhost", "superlink"])
def test_the_server_is_verified_by_every_name(fleet, name):
    assert len(verify(fleet, x509.DNSName(name))) == 2


@pytest.mark.parametrize("address", ["10.1.2.3", "127.0.0.1", "::1"])
def test_the_server_is_verified_by_every_address(fleet, address):
    assert len(verify(fleet, x509.IPAddress(ipaddress.ip_address(address)))) == 2


def test_another_name_another_ca_or_another_year_are_refused(fleet, tmp_path):
    with pytest.raises(VerificationError):
        verify(fleet, x509.DNSName("other.example"))
    with pytest.raises(VerificationError):
        verify(fleet, x509.DNSName("localhost"), datetime.now(UTC) + timedelta(days=91))
    create(tmp_path / "second", nodes=1)
    (fleet / "ca.crt").write_bytes((tmp_path / "second/ca.crt").read_bytes())
    with pytest.raises(VerificationError):
        verify(fleet, x509.DNSName("localhost"))


def test_each_private_key_belongs_to_its_public_half(fleet):
    for key, public in (("ca.key", "ca.crt"), ("server.key", "server.pem")):
        assert load_pem_private_key((fleet / key).read_bytes(), None).public_key() == certificate(fleet / public).public_key()


def test_node_keys_are_of_the_kind_flower_reads_and_differ(fleet):
    public = []
    for name in ("node-1", "node-2"):
        key = load_ssh_private_key((fleet / name / "node.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.curve.name == "secp384r1"
        assert load_ssh_public_key((fleet / name / "node.pub").read_bytes()) == key.public_key()
        assert (fleet / name / "ca.crt").read_bytes() == (fleet / "ca.crt").read_bytes()
        public.append((fleet / name / "node.pub").read_text())
    assert public[0] != public[1]


def test_every_superexec_has_a_secret_of_its_own(fleet):
    found = [path.read_bytes() for path in fleet.rglob("superexec.secret")]
    assert {len(secret) for secret in found} == {32}
    assert len(set(found)) == len(found) == 3


def test_nobody_else_reads_what_is_secret_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        create(tmp_path / "open", nodes=1)
        os.umask(0o077)
        create(tmp_path / "closed", nodes=1)
    finally:
        os.umask(before)
    for folder in (tmp_path / "open", tmp_path / "closed"):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
        public = {"ca.crt", "server.pem", "node.pub"}
        folders = {folder.name, "node-1"}
        assert {modes[name] for name in public} == {0o644}
        assert {modes[name] for name in folders} == {0o700}
        assert {mode for name, mode in modes.items() if name not in public | folders} == {0o600}


def test_nothing_is_overwritten(fleet):
    before = {path: path.read_bytes() for path in fleet.rglob("*") if path.is_file()}
    with pytest.raises(CertsError, match="--renew"):
        create(fleet, nodes=2)
    assert {path: path.read_bytes() for path in fleet.rglob("*") if path.is_file()} == before


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("server_app.certs._node", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(CertsError, match="disk full"):
        create(tmp_path / "certs", nodes=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hosts", "addresses", "nodes", "days", "reason"),
    [
        (["10.0.0.1"], [], 1, 1, "type --ip"),
        (["server.example:8000"], [], 1, 1, "no port"),
        (["a b"], [], 1, 1, "not a DNS name"),
        (["bücher.example"], [], 1, 1, "not a DNS name"),
        (["-a.example"], [], 1, 1, "not a DNS name"),
        ([], ["server"], 1, 1, "not an address"),
        ([], [], 0, 1, "at least one node"),
        ([], [], 1, 0, "days"),
        ([], [], 1, 3651, "3650"),
    ],
)
def test_wrong_names_and_numbers_are_refused_before_anything_is_written(tmp_path, hosts, addresses, nodes, days, reason):
    with pytest.raises(CertsError, match=reason):
        create(tmp_path / "certs", hosts, addresses, nodes=nodes, days=days)
    assert list(tmp_path.iterdir()) == []


def test_renewal_changes_the_certificate_only_and_keeps_key_and_names(fleet):
    before = {path: path.read_bytes() for path in fleet.rglob("*") if path.is_file()}
    old = certificate(fleet / "server.pem")
    (fleet / "server.key").chmod(0)  # as compose wants it: another user's
    server = renew(fleet, days=200)
    (fleet / "server.key").chmod(0o600)
    after = {path: path.read_bytes() for path in fleet.rglob("*") if path.is_file()}
    assert {path.name for path in after if before.get(path) != after[path]} == {"server.pem"}
    new = certificate(fleet / "server.pem")
    assert new.public_key() == old.public_key()
    assert new.serial_number != old.serial_number
    assert server.names == ("server.example", "localhost", "superlink", "10.1.2.3", "127.0.0.1", "::1")
    assert timedelta(days=199) < server.until - datetime.now(UTC) <= timedelta(days=200)
    verify(fleet, x509.DNSName("server.example"))


def test_renewal_for_another_name_drops_the_old_one(fleet):
    assert renew(fleet, ["moved.example"]).names[:3] == ("moved.example", "localhost", "superlink")
    with pytest.raises(VerificationError):
        verify(fleet, x509.DNSName("server.example"))


def test_renewal_needs_the_cas_key_and_the_right_one(fleet, tmp_path):
    create(tmp_path / "second", nodes=1)
    (fleet / "ca.key").write_bytes((tmp_path / "second/ca.key").read_bytes())
    with pytest.raises(CertsError, match="does not belong"):
        renew(fleet)
    (fleet / "ca.key").unlink()
    with pytest.raises(CertsError, match=r"ca\.key"):
        renew(fleet)


def test_the_help_tells_how_long_a_certificate_may_last_and_the_command_holds_to_it(tmp_path):
    shown = CliRunner().invoke(cli.app, ["certs", "--help"], env={"COLUMNS": "200"}).output
    assert f"[1<=x<={CA_DAYS}]" in shown
    last = CliRunner().invoke(cli.app, ["certs", "--out", str(tmp_path / "last"), "--days", str(CA_DAYS)])
    assert last.exit_code == 0, last.output
    over = CliRunner().invoke(cli.app, ["certs", "--out", str(tmp_path / "over"), "--days", str(CA_DAYS + 1)], env={"COLUMNS": "200"})
    assert over.exit_code == 2
    assert f"1<=x<={CA_DAYS}" in over.output
    assert not (tmp_path / "over").exists()


def test_the_command_prints_what_to_type_next_and_the_paths_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(cli.out, "width", 300)
    monkeypatch.setattr(cli.err, "width", 300)
    folder = tmp_path / "with space"
    wanted = ["certs", "--out", str(folder), "--host", "server.example", "--nodes", "2"]
    done = CliRunner().invoke(cli.app, wanted)
    assert done.exit_code == 0, done.output
    assert f"register '{folder}/node-2/node.pub' fleet --name node-2" in done.output
    assert 'address = "server.example:8000"' in done.output
    assert "--enable-supernode-auth" in done.output
    assert f"sudo chown 49999 '{folder}/server.key'" in done.output
    again = CliRunner().invoke(cli.app, wanted)
    assert again.exit_code == 2
    assert "not replaced" in again.output
    renewed = CliRunner().invoke(cli.app, ["certs", "--out", str(folder), "--renew", "--days", "7"])
    assert renewed.exit_code == 0
    assert "nodes need nothing new" in renewed.output


def test_a_file_is_not_taken_for_a_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CertsError, match="out is a file; name a folder"):
        create(tmp_path / "out", nodes=1)
    assert (tmp_path / "out").read_text() == "mine"
