"""Schedules: numbers worked out by hand."""

import math

import pytest

from strategies.fedmuscle.temperatures import FixedSchedule, LinearSchedule, Temperatures, resolve


def test_linear_equals_the_papers_pair_at_four_models():
    pair = LinearSchedule().at(3)
    assert (pair.tau, pair.tau_prev) == pytest.approx((0.2, 0.15))
    assert pair.gamma == pytest.approx(5 / 3)


@pytest.mark.parametrize("num_peers", [1, 2, 3, 5, 9, 31])
def test_linear_weighs_agreement_alike_for_any_number_of_peers(num_peers):
    pair = LinearSchedule(0.05).at(num_peers)
    assert pair.gamma == pytest.approx(20 / (num_peers * (num_peers + 1)))
    assert pair.agreement(num_peers) == pytest.approx(10.0)


def test_fixed_weight_of_agreement_falls_and_seven_peers_are_refused():
    fixed = FixedSchedule()
    weights = [fixed.at(m).agreement(m) for m in range(1, 7)]
    assert weights == pytest.approx([5, 25 / 3, 10, 10, 25 / 3, 5])
    for m in (7, 8, 31):
        with pytest.raises(ValueError, match=f"with {m} peers.*linear schedule"):
            fixed.at(m)
    assert FixedSchedule(0.2, 0.19).at(9).agreement(9) > 0


@pytest.mark.parametrize("pair", [(0.15, 0.2), (0.2, 0.2), (0.2, 0.0), (0.2, -0.1), (math.inf, 0.1), (math.nan, 0.1)])
def test_pairs_without_positive_gamma_are_refused(pair):
    with pytest.raises(ValueError, match="0 < tau-prev < tau"):
        Temperatures(*pair)
    with pytest.raises(ValueError, match="0 < tau-prev < tau"):
        FixedSchedule(*pair)


@pytest.mark.parametrize("tau0", [0.0, -1.0, math.nan, math.inf])
def test_bad_tau0_is_refused(tau0):
    with pytest.raises(ValueError, match="tau0"):
        LinearSchedule(tau0)


def test_resolve():
    assert resolve((0.2, 0.15), 3) == Temperatures(0.2, 0.15)
    assert resolve(Temperatures(0.2, 0.15), 31) == Temperatures(0.2, 0.15)
    assert resolve(LinearSchedule(0.1), 1) == Temperatures(0.2, 0.1)
    with pytest.raises(ValueError, match="two numbers"):
        resolve((0.2,), 3)
    with pytest.raises(ValueError, match="at least 1"):
        LinearSchedule().at(0)
