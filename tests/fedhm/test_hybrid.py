"""Which layers become low-rank, and what travels, on models small enough to count by hand."""

import pytest
import torch
from torch import nn

import models
from strategies.fedhm import hybrid
from strategies.fedhm.hybrid import choose_ranks, hybridize, load_state, ranks_of, state_of, with_ranks
from strategies.fedhm.lowrank import Factored


class Small(nn.Module):
    """Stem, two convolutions, one pointwise, one depthwise, batch norm, two Linear."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
        self.point = nn.Conv2d(32, 32, 1)
        self.depth = nn.Conv2d(32, 32, 3, groups=32, padding=1)
        self.hidden = nn.Linear(32, 24)
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        x = self.depth(self.point(self.body(self.stem(x).relu()))).mean((2, 3))
        return self.out(self.hidden(x).relu())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.out(self.decode(self.encode(x)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Small()


def _reasons(choices):
    return {c.name: c.reason.split(" ")[0] if c.rank is None else c.rank for c in choices}


def test_default_choice_by_hand(model):
    expected = {"stem": "among", "body.0": 8, "body.3": 8, "point": "1x1", "depth": "depthwise:", "hidden": 6, "out": "classifier"}
    choices = choose_ranks(model, 0.25, rho=1)
    assert _reasons(choices) == expected
    body = next(c for c in choices if c.name == "body.0")
    assert body.parameters == (32 * 16 * 9, 8 * (32 * 3 + 16 * 3))
    assert "rank 8, 4608 -> 1152 parameters" in str(body)


@pytest.mark.parametrize(
    ("name", "classes", "rho", "full", "tiers"),
    [
        ("resnet34", 100, 15, 21.328, (8.401, 4.985, 3.277, 2.708)),
        ("resnet18", 10, 3, 11.174, (4.158, 2.210, 1.236, 0.914)),
    ],
)
def test_published_parameter_counts_in_millions(name, classes, rho, full, tiers):
    with torch.device("meta"):
        model = models.build(name, input_shape=(3, 32, 32), num_outputs=classes)
    total = sum(p.numel() for p in model.parameters())
    assert total / 1e6 == pytest.approx(full, abs=6e-4)
    for divisor, expected in zip((2, 4, 8, 12), tiers, strict=True):
        saved = sum(c.parameters[0] - c.parameters[1] for c in choose_ranks(model, 1 / divisor, rho=rho))
        assert (total - saved) / 1e6 == pytest.approx(expected, abs=6e-4)


def test_rho_counts_only_layers_that_could_be_factorized(model):
    assert list(ranks_of(choose_ranks(model, 0.25, rho=3))) == ["hidden"]


def test_head_of_a_split_model_is_the_classifier():
    model = nn.Sequential()
    model.head, model.extractor = nn.Linear(32, 32), nn.Linear(32, 32)
    assert list(ranks_of(choose_ranks(model, 0.25))) == ["extractor"]


def test_ratio_one_stays_full_and_equal(model):
    same, choices = hybridize(model, 1.0)
    assert ranks_of(choices) == {}
    assert state_of(same).keys() == model.state_dict().keys()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(same.eval()(x), model.eval()(x))


def test_break_even_stays_full_with_the_figure(model):
    choices = {c.name: c for c in choose_ranks(model, 0.6, rule="full-rank")}
    assert choices["hidden"].rank is None  # rank round(.6 * 24) = 14 of 24 * 32 / 56 = 13.7
    assert choices["hidden"].reason == "rank 14 saves nothing: break-even at 13.7"


def test_own_predicate_decides_but_tied_and_hooked_layers_stay_full(model):
    every = hybridize(model, 0.25, predicate=lambda name, module: True)[1]
    assert {"point", "out", "stem"} <= set(ranks_of(every))
    assert "depth" not in ranks_of(every)
    tied = choose_ranks(Tied(), 0.25, predicate=lambda name, module: True)
    assert _reasons(tied) == {"encode": "its", "decode": "its", "out": 1}
    old = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    old[0].register_forward_pre_hook(lambda module, args: None)
    assert _reasons(choose_ranks(old, 0.25))["0"] == "it"
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    assert _reasons(choose_ranks(new, 0.25))["0"] == "ParametrizedLinear"


def test_hybrid_is_a_copy_and_runs_and_learns(model):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    thin, _ = hybridize(model, 0.25, rho=1)
    assert isinstance(thin.body[0], Factored)
    thin(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in hybrid.factor_parameters(thin))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_state_travels_under_the_full_models_names_and_comes_back(model):
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    thin, choices = hybridize(model, 0.25, rho=1)
    state = state_of(thin)
    assert state["body.0.weight.ut"].shape == (8, 96)
    assert state["body.0.weight.vt"].shape == (8, 48)
    assert {"body.0.bias", "stem.weight", "body.1.running_mean", "body.1.num_batches_tracked"} <= state.keys()
    assert not {"scratch", "body.0.weight"} & state.keys()
    assert all(t.is_contiguous() for t in state.values())
    empty = with_ranks(Small(), ranks_of(choices), spectral=False)
    load_state(empty, state)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(empty.eval()(x), thin.eval()(x))


def test_tied_weights_travel_once_and_stay_tied():
    model = Tied()
    state = {name: tensor + 1 for name, tensor in state_of(model).items()}
    assert "decode.weight" not in state
    load_state(model, state)
    assert torch.equal(model.decode.weight, state["encode.weight"])
    assert model.decode.weight is model.encode.weight


def test_load_refuses_by_name_and_copies_nothing(model):
    thin, _ = hybridize(model, 0.25, rho=1)
    state = {k: v + 1 if v.is_floating_point() else v for k, v in state_of(thin).items()}
    before = state_of(thin)["stem.weight"].clone()
    for broken, message in (
        ({k: v for k, v in state.items() if k != "out.bias"}, "'out.bias' is missing"),
        (state | {"extra": torch.zeros(1)}, "'extra' is not in this model"),
        (state | {"body.0.weight.ut": torch.zeros(4, 96)}, r"'body.0.weight.ut' is \(4, 96\), this model needs \(8, 96\)"),
        (state | {"out.bias": torch.zeros(1)}, r"'out.bias' is \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            load_state(thin, broken)
    assert torch.equal(state_of(thin)["stem.weight"], before)


def test_integer_buffers_may_be_left_out(model):
    state = {k: v for k, v in state_of(model).items() if v.is_floating_point()}
    load_state(model, state)
    assert int(model.body[1].num_batches_tracked) == 0


def test_penalty_is_that_of_the_products(model):
    thin, _ = hybridize(model.double(), 0.25, rho=1)
    expected = sum(layer.weight.square().sum() for layer in hybrid.factored_layers(thin).values())
    torch.testing.assert_close(hybrid.frobenius_penalty(thin), expected, rtol=0, atol=1e-9)
    assert hybrid.frobenius_penalty(model) == 0.0


def test_unknown_layer_is_named(model):
    with pytest.raises(ValueError, match=r"layer 'body\.9'"):
        with_ranks(model, {"body.9": 2})
    with pytest.raises(ValueError, match=r"layer 'body\.1'.*no Conv2d"):
        with_ranks(model, {"body.1": 2})


def test_transformer_layer_runs_in_training_and_evaluation():
    """Its fast path reads `linear1.weight` instead of calling the layer."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    thin, choices = hybridize(nn.Sequential(layer, nn.Linear(16, 2)), 0.2)
    assert set(ranks_of(choices)) == {"0.linear1", "0.linear2"}
    x = torch.randn(2, 3, 16)
    trained = thin.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(thin.eval()(x), trained, rtol=1e-4, atol=1e-5)
