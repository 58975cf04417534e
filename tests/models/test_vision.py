"""The built-in models: sizes against the papers' numbers, layouts, shapes, gradients, export."""

import pytest
import torch
from torch.export import Dim, export

import models
from models import ModelError, build, names
from models.cost import parameter_count

IMAGE = (3, 32, 32)
RESNETS = ("resnet18", "resnet34", "resnet18_gn", "resnet34_gn")
# One of each make: the others differ in widths or depth only.
MAKES = ("cnn1", "cnn2", "resnet18", "resnet18_gn", "mobilenetv3_small", "vit_tiny", "mlp")


def make(name, input_shape=IMAGE, num_outputs=10, feature_dim=None):
    return build(name, input_shape=input_shape, num_outputs=num_outputs, feature_dim=feature_dim)


def layout(model):
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()]


def batch_of(size, shape=IMAGE):
    return torch.rand(size, *shape, generator=torch.Generator().manual_seed(3))


def test_names_are_those_of_the_configuration():
    assert names() == ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5", *RESNETS, "mobilenetv3_small", "vit_tiny", "mlp")


@pytest.mark.parametrize(
    ("name", "num_outputs", "feature_dim", "count"),
    [
        ("cnn1", 10, None, 2_621_558),
        ("cnn2", 10, None, 1_815_142),
        ("cnn3", 10, None, 1_320_558),
        ("cnn4", 10, None, 1_060_358),
        ("cnn5", 10, None, 670_058),
        ("cnn1", 100, None, 2_666_648),
        ("cnn2", 100, None, 1_860_232),
        ("cnn3", 100, None, 1_365_648),
        ("cnn4", 100, None, 1_105_448),
        ("cnn5", 100, None, 715_148),
        ("cnn5", 10, 100, 465_658),
        ("cnn5", 10, 200, 516_758),
        ("cnn5", 10, 500, 670_058),
        ("cnn5", 100, 100, 474_748),
        ("resnet34", 100, None, 21_328_292),
        ("resnet18", 10, None, 11_173_962),
    ],
)
def test_parameters_equal_the_published_counts(name, num_outputs, feature_dim, count):
    with torch.device("meta"):
        assert parameter_count(make(name, num_outputs=num_outputs, feature_dim=feature_dim)) == count


def test_feature_dim_of_a_cnn_changes_the_last_hidden_layer_and_the_head_only():
    usual, narrow = dict(make("cnn5").named_parameters()), dict(make("cnn5", feature_dim=100).named_parameters())
    assert list(usual) == list(narrow)
    changed = {name for name in usual if usual[name].shape != narrow[name].shape}
    assert changed == {"extractor.fc2.weight", "extractor.fc2.bias", "head.weight"}
    assert narrow["extractor.fc2.weight"].shape == (100, 500)


def test_resnet_names_walk_from_stem_to_head():
    model = make("resnet18")
    convs = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Conv2d)]
    assert convs[:4] == ["extractor.stem.conv", "extractor.layer1.0.conv1", "extractor.layer1.0.conv2", "extractor.layer1.1.conv1"]
    assert len(convs) == 1 + 16 + 3
    stem = model.extractor.stem.conv
    assert (stem.kernel_size, stem.stride) == ((3, 3), (1, 1))
    assert model.extractor[:4](batch_of(1)).shape == (1, 256, 8, 8)


@pytest.mark.parametrize("name", ["resnet18_gn", "resnet34_gn", "cnn1", "vit_tiny"])
def test_models_without_batchnorm_have_no_buffers(name):
    with torch.device("meta"):
        assert not list(make(name).buffers())


@pytest.mark.parametrize("name", names())
def test_same_name_same_layout(name):
    with torch.device("meta"):
        layouts = [layout(make(name)) for _ in range(2)]
    assert layouts[0] == layouts[1]
    assert {dtype for _, _, dtype in layouts[0]} <= {torch.float32, torch.int64}


@pytest.mark.parametrize("name", MAKES)
def test_outputs_come_through_both_parts_for_one_sample(name):
    model = make(name).eval()
    with torch.no_grad():
        rep = model.features(batch_of(1))
        outputs = model(batch_of(1))
    assert rep.shape == (1, model.feature_dim)
    assert outputs.shape == (1, 10)
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, model.classify(rep))
    assert isinstance(model.head, torch.nn.Linear)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 40, 17)])
def test_grey_images_of_other_sizes(name, shape):
    outputs = make(name, shape, 3).eval()(batch_of(1, shape))
    assert outputs.shape == (1, 3)
    assert torch.isfinite(outputs).all()


@pytest.mark.parametrize("name", MAKES)
def test_tiny_images_work_or_are_refused_with_the_smallest_shape(name):
    if not name.startswith("cnn"):
        assert make(name, (1, 8, 8), 4).eval()(batch_of(1, (1, 8, 8))).shape == (1, 4)
        assert make(name, (1, 1, 1), 4).eval()(batch_of(1, (1, 1, 1))).shape == (1, 4)
        return
    for shape in ((1, 8, 8), (1, 15, 32)):
        with pytest.raises(ModelError, match=rf"'{name}' .*\(1, {shape[1]}, {shape[2]}\).* smallest is \(1, 16, 16\)"):
            make(name, shape)
    assert make(name, (1, 16, 16)).eval()(batch_of(1, (1, 16, 16))).shape == (1, 10)


@pytest.mark.parametrize("name", MAKES)
def test_every_parameter_learns_from_a_batch_of_two(name):
    model = make(name, feature_dim=100).train()
    assert model.feature_dim == 100
    model(batch_of(2)).square().sum().backward()
    untouched = [key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.isfinite().all()]
    assert untouched == []
    assert next(model.extractor.parameters()).grad.abs().sum() > 0


def test_vit_blocks_start_with_different_weights_and_see_every_pixel():
    model = make("vit_tiny", (3, 30, 21)).eval()
    first, second = (model.extractor.blocks[i].self_attn.in_proj_weight for i in (0, 1))
    assert not torch.equal(first, second)
    image = batch_of(1, (3, 30, 21)).requires_grad_()
    model(image).square().sum().backward()
    assert (image.grad.abs().sum(dim=1) > 0).all()


def test_vit_evaluates_through_a_replaced_linear():
    model = make("vit_tiny").eval()
    block = model.extractor.blocks[0]
    before = model.features(batch_of(1))
    block.linear1 = torch.nn.Sequential(block.linear1, torch.nn.Hardtanh(0.0, 0.1))
    with torch.no_grad():
        assert not torch.allclose(before, model.features(batch_of(1)))


def test_representations_are_clipped_only_where_the_architecture_says_so():
    rep = {name: make(name).eval().features(batch_of(4)) for name in ("cnn1", "mlp", "vit_tiny", "mobilenetv3_small")}
    assert rep["cnn1"].min() == 0
    assert rep["mlp"].min() == 0
    assert rep["vit_tiny"].min() < 0
    assert rep["mobilenetv3_small"].min() < 0


def test_mlp_takes_vectors():
    model = make("mlp", (13,), 2)
    assert parameter_count(model) == (13 + 1) * 256 + (256 + 1) * 128 + (128 + 1) * 2
    assert model(batch_of(5, (13,))).shape == (5, 2)


@pytest.mark.parametrize("name", [name for name in names() if name not in RESNETS[1:]])
def test_export_with_any_batch_size(name):
    shape = (3, 16, 16)
    model = make(name, shape).eval()
    program = export(model, (batch_of(2, shape),), dynamic_shapes={"batch": {0: Dim("samples", min=1)}})
    for size in (1, 3):
        torch.testing.assert_close(program.module()(batch_of(size, shape)), model(batch_of(size, shape)))


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ModelError, match=r"'resnet81' is unknown \(did you mean 'resnet18'\?\); choose one of cnn1, "):
        make("resnet81")
    with pytest.raises(ModelError, match=r"'cnn1:' is unknown"):
        make("cnn1:")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_shape": (13,)}, r"'cnn1' takes images .*\(13,\).*'mlp'"),
        ({"input_shape": ()}, "at least one axis"),
        ({"input_shape": (3, 0, 32)}, r"\(3, 0, 32\)"),
        ({"num_outputs": 0}, "num_outputs = 0"),
        ({"feature_dim": 0}, "feature_dim = 0"),
    ],
)
def test_wrong_sizes_are_refused_by_name(wrong, message):
    with pytest.raises(ModelError, match=message):
        make("cnn1", **wrong)


def test_a_name_is_registered_once():
    def cnn1(input_shape, num_outputs, feature_dim):
        raise NotImplementedError

    with pytest.raises(ModelError, match="'cnn1' is registered twice"):
        models.register(cnn1)


def test_pooling_before_the_relu_changes_neither_the_output_nor_the_gradient():
    model = models.build("cnn2", input_shape=(3, 32, 32), num_outputs=10).double()
    layers = dict(model.extractor.named_children())
    order = [n for n in layers if not n.startswith(("pool", "relu1", "relu2"))]
    batch = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def paper(x):
        for name in order:
            x = layers[name](x)
            if name.startswith("conv"):
                x = torch.nn.functional.max_pool2d(torch.relu(x), 2)
        return model.head(x)

    gradients = []
    for forward in (model, paper):
        model.zero_grad()
        output = forward(batch)
        output.square().sum().backward()
        gradients.append([output.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
