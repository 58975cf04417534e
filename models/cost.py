"""What a model costs a node: parameters, arithmetic, memory for training."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.registry import Shape, build


@dataclass(frozen=True)
class ModelCost:
    """One model's size for one shape of samples.

    Attributes:
        name: as given to `models.build`.
        input_shape: of one sample.
        num_outputs: width of the output.
        feature_dim: width of the representation.
        parameters: numbers learned; 4 bytes each in float32.
        macs: multiply-accumulates of one sample's forward pass.
        activation_bytes: per sample, kept from the forward to the backward pass in training.
    """

    name: str
    input_shape: Shape
    num_outputs: int
    feature_dim: int
    parameters: int
    macs: int
    activation_bytes: int


def summary(name: str, input_shape: Shape, num_outputs: int) -> ModelCost:
    """Return the cost of the model `name`; torch's random numbers are left as they were.

    Raises:
        ModelError: as `models.build`.
    """
    with torch.random.fork_rng(devices=[]):
        model = build(name, input_shape=input_shape, num_outputs=num_outputs)
    return ModelCost(
        name=name,
        input_shape=model.input_shape,
        num_outputs=num_outputs,
        feature_dim=model.feature_dim,
        parameters=parameter_count(model),
        macs=forward_macs(model, input_shape),
        activation_bytes=activation_bytes(model, input_shape),
    )


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters; shared ones count once, buffers (running statistics) not at all."""
    return sum(parameter.numel() for parameter in model.parameters())


def forward_macs(model: nn.Module, input_shape: Shape) -> int:
    """Return the multiply-accumulates of one sample's forward pass in evaluation.

    Counted are matrix products: convolutions, Linears, and attention with its two products of tokens
    by tokens. Biases, norms, activations and pooling are not; in these models they are a few percent.
    """
    # Loads triton where that is installed: 75 MB that a node does not need.
    from torch.utils.flop_counter import FlopCounterMode

    probe = _copy(model).eval()
    counter = FlopCounterMode(display=False)
    # torch counts no CPU attention kernel but the plain one.
    with sdpa_kernel(SDPBackend.MATH), counter:
        probe(torch.zeros(1, *input_shape))
    return counter.get_total_flops() // 2


def activation_bytes(model: nn.Module, input_shape: Shape) -> int:
    """Return the bytes per sample that a float32 training forward pass keeps for the backward pass.

    Counts each stored tensor once (with the sample itself and max-pooling's int64 indices), and no
    parameters or buffers. It is what a batch of 4 keeps beyond a batch of 2, per sample, so that
    what does not grow with the batch (BatchNorm's means) drops out. The loss is not included.
    """
    return (_saved_bytes(model, input_shape, 4) - _saved_bytes(model, input_shape, 2)) // 2


def _saved_bytes(model: nn.Module, input_shape: Shape, batch_size: int) -> int:
    probe = _copy(model).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*probe.parameters(), *probe.buffers())}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The result holds the graph, and with it every stored tensor: no address is used twice meanwhile.
        outputs = probe(torch.zeros(batch_size, *input_shape))
    del outputs
    return sum(saved.values())


def _copy(model: nn.Module) -> nn.Module:
    """Return a float32 copy on the CPU in which everything learns: frozen parts would change kernels and what is stored."""
    return copy.deepcopy(model).to("cpu", torch.float32).requires_grad_(True)
