"""Private state: versions, atomicity, refusals."""

import stat

import pytest
import torch

from client_app.store import PrivateStore, StoreError


def make(tmp_path, node="a", lineage="one"):
    return PrivateStore.of(tmp_path, "exp", lineage, "fedmrl", node)


def state(value, shape=(2, 3)):
    return {"w": torch.full(shape, float(value)), "n": torch.tensor(int(value))}


def test_the_newest_version_up_to_a_round_is_read(tmp_path):
    store = make(tmp_path)
    assert store.load(state(0), up_to=9) is None
    store.save(state(1), server_round=1)
    store.save(state(4), server_round=4)
    assert torch.equal(store.load(state(0), up_to=3)["w"], state(1)["w"])
    assert torch.equal(store.load(state(0), up_to=4)["w"], state(4)["w"])
    assert store.load(state(0), up_to=0) is None
    assert store.header(4)["round"] == 4


def test_saving_an_earlier_round_gives_up_the_later_versions(tmp_path):
    store = make(tmp_path)
    for r in (1, 2, 3):
        store.save(state(r), server_round=r)
    store.save(state(20), server_round=2)
    assert store.rounds() == [1, 2]
    assert torch.equal(store.load(state(0), up_to=9)["w"], state(20)["w"])


def test_prune_keeps_what_a_resumed_run_would_read(tmp_path):
    store = make(tmp_path)
    for r in (1, 3, 5, 7):
        store.save(state(r), server_round=r)
    store.prune(checkpoint_round=6)
    assert store.rounds() == [5, 7]
    store.prune(checkpoint_round=0)
    assert store.rounds() == [5, 7]


def test_nodes_experiments_and_lineages_do_not_mix(tmp_path):
    make(tmp_path).save(state(1), server_round=1)
    assert make(tmp_path, node="b").load(state(0), up_to=9) is None
    assert make(tmp_path, lineage="two").load(state(0), up_to=9) is None
    assert PrivateStore.of(tmp_path, "../../evil", "l", "r", "n").folder.resolve().is_relative_to(tmp_path.resolve())


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"w": torch.zeros(2, 4), "n": torch.tensor(0)}, r"w is \(2, 3\).*\(2, 4\)"),
        ({"w": torch.zeros(2, 3)}, "n is unexpected"),
        ({**state(0), "extra": torch.zeros(1)}, "extra is missing"),
        ({"w": torch.zeros(2, 3, dtype=torch.float64), "n": torch.tensor(0)}, "float32.*float64"),
    ],
)
def test_another_layout_is_refused_with_the_difference(tmp_path, like, words):
    make(tmp_path).save(state(1), server_round=1)
    with pytest.raises(StoreError, match=words):
        make(tmp_path).load(like, up_to=1)


def test_a_non_finite_state_does_not_replace_a_finite_one(tmp_path):
    store = make(tmp_path)
    store.save(state(1), server_round=1)
    bad = state(2)
    bad["w"][0, 0] = float("nan")
    with pytest.raises(StoreError, match="w is not finite"):
        store.save(bad, server_round=1)
    assert torch.equal(store.load(state(0), up_to=1)["w"], state(1)["w"])


def test_a_damaged_file_is_named_not_half_read(tmp_path):
    store = make(tmp_path)
    path = store.save(state(1), server_round=1)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(StoreError, match=path.name):
        store.load(state(0), up_to=1)


def test_a_write_that_breaks_off_leaves_the_old_version(tmp_path, monkeypatch):
    store = make(tmp_path)
    store.save(state(1), server_round=1)

    def broken(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("client_app.store.save_file", broken)
    with pytest.raises(StoreError, match=r"No space left.*state-dir"):
        store.save(state(2), server_round=1)
    assert torch.equal(store.load(state(0), up_to=1)["w"], state(1)["w"])
    assert [p.name for p in store.folder.iterdir()] == ["round-000001.safetensors"]


def test_only_the_owner_can_read_it(tmp_path):
    path = make(tmp_path).save(state(1), server_round=1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
