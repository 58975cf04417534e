"""What survives: the same bits whoever answers first, and after a kill and a resume, in every way of exchanging."""

import random

import pytest
import torch

from tests.fedmuscle.muscle_fixture import muscle, states
from tests.fleet_fixture import grid, rows, run


def numbers(out):
    nodes = [(r["round"], r["node"], r["accuracy"], r["loss"], r["train_loss"]) for r in rows(out, "node")]
    return nodes, [r["method"] for r in rows(out, "round")]


@pytest.mark.parametrize("way", ["round", "step", "gradient"])
def test_the_order_of_replies_does_not_change_a_bit(tmp_path, way):
    settings = muscle(tmp_path, fedmuscle__exchange=way, fedmuscle__steps=2)
    run(settings, tmp_path / "straight", nodes=4)
    shuffled = grid(settings, 4)
    shuffled.shuffle = random.Random(5)
    run(settings, tmp_path / "shuffled", shuffled)
    one, two = states(tmp_path / "straight"), states(tmp_path / "shuffled")
    assert all(torch.equal(one[k][n], two[k][n]) for k in one for n in one[k])
    assert numbers(tmp_path / "straight") == numbers(tmp_path / "shuffled")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize(("way", "after"), [("round", 11), ("step", 17), ("gradient", 24)])
def test_a_run_killed_after_any_message_and_resumed_ends_with_the_same_bits(tmp_path, way, after):
    settings = muscle(tmp_path, fedmuscle__exchange=way, fedmuscle__steps=2, num_rounds=3)
    run(settings, tmp_path / "straight")
    cut = grid(settings)

    def kill(kind, node, content):
        if len(cut.received) >= after:
            raise Killed
        return content

    cut.tamper = kill
    with pytest.raises(Killed):
        run(settings, tmp_path / "cut", cut)
    run({**settings, "resume": str(tmp_path / "cut")}, tmp_path / "cut")
    one, two = states(tmp_path / "straight"), states(tmp_path / "cut")
    last = [k for k in one if k.endswith("3")]
    assert len(last) == 3
    assert all(torch.equal(one[k][n], two[k][n]) for k in last for n in one[k])
    assert numbers(tmp_path / "straight") == numbers(tmp_path / "cut")
