"""The public schedule and the draw of peers: the same everywhere, from numbers only."""

import numpy as np
import pytest
import torch

from strategies.fedmuscle.public import batch_digest, choose_peers, public_indices
from tasks.public import set_digest


def batch(step, server_round=1, seed=7, num_items=103, batch_size=10):
    return public_indices(seed, server_round, step, num_items=num_items, batch_size=batch_size)


def test_a_pass_uses_no_item_twice_and_drops_the_rest():
    items = torch.cat([batch(step) for step in range(10)])
    assert items.dtype == torch.int64
    assert len(set(items.tolist())) == 100
    assert set(items.tolist()) <= set(range(103))


def test_batches_follow_from_seed_round_and_step_alone():
    state = np.random.get_state()[1].copy()
    torch.manual_seed(0)
    first = batch(3)
    torch.manual_seed(1)
    assert torch.equal(first, batch(3))
    assert np.array_equal(state, np.random.get_state()[1])
    others = [batch(4), batch(3, server_round=2), batch(3, seed=8), batch(13)]
    assert all(not torch.equal(first, other) for other in others)


def test_the_stream_never_changes():
    """Nodes with different versions must agree; these are the first indices of the first release."""
    assert public_indices(1, 1, 0, num_items=50, batch_size=5).tolist() == [10, 7, 46, 40, 20]


def test_the_second_pass_is_another_permutation():
    assert not torch.equal(batch(0), batch(10))
    assert len(set(torch.cat([batch(step) for step in range(10, 20)]).tolist())) == 100


def test_all_items_are_drawn_alike():
    counts = torch.zeros(12)
    for server_round in range(600):
        counts[batch(0, server_round=server_round, num_items=12, batch_size=4)] += 1
    # 600 draws of 4 of 12: mean 200, standard deviation 11.5
    assert (counts - 200).abs().max() < 5 * 11.5


@pytest.mark.parametrize(("num_items", "batch_size"), [(5, 6), (0, 1), (5, 0)])
def test_sets_smaller_than_a_batch_are_refused(num_items, batch_size):
    with pytest.raises(ValueError, match=f"batch of {batch_size} from a public set of {num_items} items"):
        batch(0, num_items=num_items, batch_size=batch_size)


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="step = -1"):
        batch(-1)


def test_digests_tell_sets_orders_and_items_apart():
    inputs = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2)
    digest = set_digest(inputs)
    assert digest == set_digest(inputs.clone().permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3))
    different = [inputs.flip(0), inputs.reshape(2, 12), inputs.float(), inputs[:1]]
    assert len({digest, *map(set_digest, different)}) == 5
    indices = torch.tensor([3, 1])
    digests = [batch_digest("a", indices), batch_digest("b", indices), batch_digest("a", indices.flip(0)), batch_digest("a", indices[:1])]
    assert len(set(digests)) == 4
    assert batch_digest("a", indices) == batch_digest("a", indices.int())


def test_peers_are_drawn_by_node_and_step():
    names = [f"n{i}" for i in range(8)]
    draw = lambda node="n0", step=0, present=names, count=3: choose_peers(node, present, count=count, seed=1, server_round=2, step=step)  # noqa: E731
    assert draw() == draw(present=names[::-1])
    assert len(set(draw())) == 3
    assert "n0" not in draw(count=100)
    assert len(draw(count=100)) == 7
    assert draw(count=0) == ()
    assert draw(present=["n0"]) == ()
    assert len({draw(step=s) for s in range(10)}) > 5
    gone = draw()[0]
    assert draw(present=[n for n in names if n != gone])[:2] == draw()[1:]
    seen = [peer for s in range(300) for peer in draw(step=s)]
    # 900 draws of 7 peers: mean 128.6, standard deviation 8.6
    assert all(abs(seen.count(n) - 900 / 7) < 5 * 8.6 for n in names[1:])
    with pytest.raises(ValueError, match="-1 peers"):
        draw(count=-1)
