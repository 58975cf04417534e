import pytest

from strategies.fedhm.weighting import shares

TIERS = (1.0, 0.5, 0.25, 0.125)


@pytest.mark.parametrize(
    ("scheme", "temperature", "expected"),
    [
        ("paper", 1.0, (0.401, 0.243, 0.189, 0.167)),
        ("code", 1.0, (0.705, 0.259, 0.035, 0.0006)),
        ("code", 5.0, (0.383, 0.313, 0.210, 0.094)),
        ("uniform", 1.0, (0.25, 0.25, 0.25, 0.25)),
    ],
)
def test_published_values(scheme, temperature, expected):
    assert shares(TIERS, scheme=scheme, temperature=temperature) == pytest.approx(expected, abs=6e-4)


def test_normalised_over_those_that_replied():
    replied = shares(TIERS[1:])
    assert sum(replied) == pytest.approx(1.0, abs=1e-12)
    everyone = shares(TIERS)
    assert replied[0] / replied[2] == pytest.approx(everyone[1] / everyone[3], rel=1e-12)


def test_samples_multiply():
    assert shares((0.5, 0.5), num_examples=(10, 30)) == pytest.approx((0.25, 0.75), rel=1e-12)


def test_extreme_tiers_neither_overflow_nor_vanish():
    assert all(s > 1e-7 for s in shares((1.0, 1 / 512), scheme="code"))
    assert sum(shares((1.0, 0.5), temperature=1e-6)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank_ratios": ()}, "no node"),
        ({"rank_ratios": (2.0,)}, "not within"),
        ({"rank_ratios": (1.0,), "temperature": 0.0}, "temperature"),
        ({"rank_ratios": (1.0,), "num_examples": (0,)}, "0 samples"),
        ({"rank_ratios": (1.0,), "scheme": "softmax"}, "'softmax' is unknown"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        shares(**arguments)
