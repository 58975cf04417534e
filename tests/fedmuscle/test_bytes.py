"""Bytes of a public batch in each way of exchanging, at the paper's size (B = 32, D = 256), from serialised messages."""

from __future__ import annotations

import pytest
from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from strategies.messages import decode_parts, wire_bytes
from tests.fedmuscle.muscle_fixture import muscle
from tests.fleet_fixture import pictures, run

B, D, M, KB = 32, 256, 3, 1024
WIDTH = {"float32": 4, "float16": 2, "int8": 1}


def on_the_wire(content):
    """Return the bytes of a message's content in Flower's own serialisation, with every object's header."""
    return sum(len(obj.deflate()) for obj in get_all_nested_objects(content).values())


def measured(tmp_path, peers=M, **changes):
    pictures(tmp_path / "public", count=64, seed=9)
    settings = muscle(tmp_path, num_rounds=2, fedmuscle__public_batch=B, fedmuscle__dim=D, fedmuscle__peers=peers, **changes)
    return run(settings, tmp_path / "out", nodes=peers + 1)


@pytest.mark.parametrize(("transport", "peers"), [("float32", 3), ("int8", 3), ("float16", 5)])
def test_step_downloads_m_matrices_and_uploads_one(tmp_path, transport, peers):
    the_grid = measured(tmp_path, peers, fedmuscle__exchange="step", fedmuscle__steps=2, fedmuscle__transport=transport)
    down = [c for kind, _, c in the_grid.sent if kind == "train.exchange"]
    assert len(down) == 2 * 2 * (peers + 1)
    for content in down:
        rows = peers * B * D * WIDTH[transport]
        assert len(decode_parts(content)) == peers
        paths = sum(len(dict(content["order"])[key]) for key in ("app_dir", "state_dir"))  # as long as this machine's folders
        assert rows < wire_bytes(content) <= rows + 0.9 * KB + paths
        # Flower's own description of a record, an array and its one chunk, for each matrix
        assert on_the_wire(content) <= rows + (peers + 2) * KB
    up = [c for kind, _, c in the_grid.received if kind == "train.exchange"]
    assert sum(wire_bytes(c) <= B * D * WIDTH[transport] + 1.5 * KB for c in up) == len(up)


def test_gradient_downloads_one_matrix_whatever_the_number_of_peers(tmp_path):
    the_grid = measured(tmp_path, fedmuscle__exchange="gradient", fedmuscle__steps=1, fedmuscle__transport="int8")
    down = [c for kind, _, c in the_grid.sent if kind == "train.exchange"]
    assert len(down) == 2 * 4
    fixed = 0
    for content in down:
        fixed = wire_bytes(RecordDict({"order": content["order"]}))
        assert B * D * 4 < wire_bytes(content) - fixed <= B * D * 4 + KB
    assert fixed < KB


def test_round_carries_all_batches_in_the_training_messages(tmp_path):
    steps = 4
    the_grid = measured(tmp_path, fedmuscle__steps=steps, fedmuscle__transport="float16")
    first, second = ([c for kind, _, c in the_grid.sent if kind == "train"][i : i + 4] for i in (0, 4))
    assert all(wire_bytes(c) < KB for c in first)
    for content in second:
        rows = steps * M * B * D * 2
        assert rows < wire_bytes(content) <= rows + 2 * KB
    assert not [kind for kind, _, _ in the_grid.sent if kind == "train.exchange"]
    assert all(wire_bytes(c) < KB for kind, _, c in the_grid.sent if kind == "evaluate")
