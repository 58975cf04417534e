"""torchvision's classifiers and a user's own builders."""

import sys
import types

import pytest
import torch
from torch import nn

from models import ModelError, SplitModel, build


def make(name, input_shape=(3, 32, 32), num_outputs=5, feature_dim=None):
    return build(name, input_shape=input_shape, num_outputs=num_outputs, feature_dim=feature_dim)


def split_model(outputs, feature_dim):
    return SplitModel(nn.Linear(7, 4), nn.Linear(4, outputs), input_shape=(7,), feature_dim=feature_dim, num_outputs=outputs)


@pytest.fixture
def own(monkeypatch):
    """An importable module `own_models`, to which a test adds functions."""
    module = types.ModuleType("own_models")
    monkeypatch.setitem(sys.modules, "own_models", module)
    return module


@pytest.mark.parametrize(
    ("name", "width"), [("resnet18", 512), ("squeezenet1_1", 512), ("shufflenet_v2_x0_5", 1024), ("regnet_y_400mf", 440)]
)
def test_torchvision_models_split_before_their_classifier(name, width):
    model = make(f"torchvision:{name}", (1, 28, 28)).eval()
    batch = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    assert model.feature_dim == width
    assert model.features(batch).shape == (2, width)
    assert model(batch).shape == (2, 5)
    assert next(part for part in model.modules() if isinstance(part, nn.Conv2d)).in_channels == 1


def test_torchvision_model_keeps_its_arithmetic():
    from torchvision.models import resnet18

    model, whole = make("torchvision:resnet18").eval(), resnet18(weights=None, num_classes=5).eval()
    state = whole.state_dict()
    model.extractor.load_state_dict({key: value for key, value in state.items() if not key.startswith("fc.")})
    model.head.load_state_dict({"weight": state["fc.weight"], "bias": state["fc.bias"]})
    batch = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(batch), whole(batch))


def test_torchvision_model_is_resized_only_for_another_width():
    name = "torchvision:shufflenet_v2_x0_5"
    assert make(name, feature_dim=1024).state_dict().keys() == make(name).state_dict().keys()
    model = make(name, feature_dim=20).eval()
    rep = model.features(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    assert rep.shape == (2, 20)
    assert rep.min() >= 0
    assert model.head.weight.shape == (5, 20)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("alexnet", (3, 32, 32), r"'torchvision:alexnet' .*\(3, 32, 32\).* smallest is \(3, 63, 63\)$"),
        ("vgg11", (1, 8, 8), r"'torchvision:vgg11' .*\(1, 8, 8\).* smallest is \(1, 32, 32\)$"),
        ("vit_b_16", (3, 28, 28), r"smallest is \(3, 16, 16\), the next from yours \(3, 32, 32\)$"),
        ("vit_b_16", (3, 16, 32), "square"),
        ("resnet19", (3, 32, 32), "did you mean 'resnet18'"),
        ("resnet18", (13,), r"takes images .*\(13,\)"),
    ],
)
def test_torchvision_problems_are_named(name, shape, message):
    with pytest.raises(ModelError, match=message):
        make(f"torchvision:{name}", shape)


def test_asking_for_a_torchvision_model_twice_draws_the_same_random_numbers():
    starts = []
    for _ in range(2):  # the first call also checks the shape, the second remembers
        torch.manual_seed(7)
        starts.append(make("torchvision:shufflenet_v2_x0_5", (1, 20, 20)).head.weight)
    assert torch.equal(*starts)


def test_last_linear_of_a_users_module_becomes_the_head(own):
    def tiny(input_shape, num_outputs, feature_dim):
        return nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, num_outputs))

    own.tiny = tiny
    model = make("own_models:tiny", (2, 4))
    assert model.feature_dim == 6
    assert [tuple(part.weight.shape) for part in model.modules() if isinstance(part, nn.Linear)] == [(6, 8), (5, 6)]
    assert model.head.out_features == 5
    assert model.training
    with torch.device("meta"):
        assert make("own_models:tiny", (2, 4)).head.weight.is_meta
    assert make("own_models:tiny", (2, 4), feature_dim=3).features(torch.ones(4, 2, 4)).shape == (4, 3)


def test_a_users_single_linear_and_split_model(own):
    own.line = lambda input_shape, num_outputs, feature_dim: nn.Linear(input_shape[0], num_outputs)
    assert make("own_models:line", (7,)).feature_dim == 7
    own.split = lambda input_shape, num_outputs, feature_dim: split_model(outputs=num_outputs, feature_dim=4)
    assert make("own_models:split", (7,)).head.in_features == 4
    with pytest.raises(ModelError, match="has feature_dim 4, but was asked for 9"):
        make("own_models:split", (7,), feature_dim=9)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Sequential(nn.Linear(7, 5), nn.Softmax(dim=1)), "more than its last Linear"),
        (nn.Linear(7, 4), r"Linear with 5 outputs"),
        (nn.Flatten(), r"Linear with 5 outputs"),
        (nn.Linear(6, 5), r"cannot take samples of shape \(7,\)"),
        (nn.GRU(7, 5), "returns tuple"),
        ("a string", "returned str"),
        (
            SplitModel(nn.Linear(7, 4), nn.Linear(4, 5), input_shape=(7,), feature_dim=3, num_outputs=5),
            r"representation \(2, 4\), not \(2, 3\)",
        ),
        (split_model(outputs=6, feature_dim=4), r"outputs \(2, 6\), not \(2, 5\)"),
    ],
)
def test_what_is_no_model_for_these_shapes_is_refused(own, net, message):
    own.wrong = lambda input_shape, num_outputs, feature_dim: net
    with pytest.raises(ModelError, match=message) as caught:
        make("own_models:wrong", (7,))
    assert "own_models:wrong" in str(caught.value)


def test_missing_modules_and_functions_are_named(own):
    own.small_net = lambda *arguments: None
    with pytest.raises(ModelError, match=r"'no_such_module_here' cannot be imported"):
        make("no_such_module_here:net")
    with pytest.raises(ModelError, match=r"no function 'smal_net' \(did you mean 'small_net'\?\)"):
        make("own_models:smal_net")
