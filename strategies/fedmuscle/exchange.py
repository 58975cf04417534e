"""The three ways in which representations travel, without messages: what nodes upload, what the server makes of it.

- `step`: after every optimiser step each node uploads its representations of the next public batch, and gets those of
  M peers. The server relays; a peer's matrix is one record, however many nodes get it.
- `gradient`: the same uploads, but the server evaluates the objective and returns dL/dZ, (B, D) whatever M; nodes see no
  other node's representations. Exact, because there is one optimiser step per exchange, from the uploaded weights.
- `round`: the uploads of a round's T batches go with the training reply, the peers' come with the next training message;
  a node then takes T steps with fresh anchors against peers one round old.

Letters: S batches that travel together (1, or T with `round`), B samples of a batch, D dimensions, M peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from strategies.fedmuscle.config import Config
from strategies.fedmuscle.elastic import nested_muscle_loss
from strategies.fedmuscle.objectives import objective_loss
from strategies.fedmuscle.public import batch_digest, choose_peers, public_indices
from strategies.fedmuscle.transport import decode_rows, encode_rows
from strategies.messages import Payload, Tensors
from strategies.seeds import generator

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
GRADIENT_LIMIT = 1e4  # length of a row of dL/dZ; unit rows at tau = 0.001 stay below


@dataclass(frozen=True)
class Batches:
    """The public batches that one upload is about.

    Attributes:
        server_round: 1-based.
        step: 0-based, of the first batch.
        indices: (S, B) int64, into the public set.
        digest: `public.batch_digest`: equal on two nodes exactly if row i is the same item.
    """

    server_round: int
    step: int
    indices: torch.Tensor
    digest: str

    @classmethod
    def of(cls, config: Config, seed: int, manifest: str, num_items: int, server_round: int, step: int = 0) -> Batches:
        """Return the batches from `step` on: all T of the round with `exchange = round`, else one."""
        steps = range(config.steps) if config.exchange == "round" else (step,)
        drawn = [public_indices(seed, server_round, s, num_items=num_items, batch_size=config.public_batch) for s in steps]
        indices = torch.stack(drawn)
        return cls(server_round, step, indices, batch_digest(manifest, indices))

    @property
    def settings(self) -> dict[str, int | str]:
        """What a payload about these batches says of them."""
        return {"round": self.server_round, "step": self.step, "digest": self.digest}


def layout(config: Config, batches: int) -> Tensors:
    """Return names, shapes and dtypes of an upload about so many batches."""
    return {
        "rows": torch.empty(batches, config.public_batch, config.dim, dtype=_DTYPES[config.transport]),
        "tag": torch.empty(2, dtype=torch.int64),
        "digest": torch.empty(16, dtype=torch.uint8),
    }


def pack(rep_SBD: torch.Tensor, batches: Batches, transport: str) -> Tensors:
    """Return the upload: unit rows as they travel, tagged with round, step and digest."""
    S, B, D = rep_SBD.shape
    return {
        "rows": encode_rows(rep_SBD.reshape(S * B, D), transport).reshape(S, B, D).cpu(),
        "tag": torch.tensor([batches.server_round, batches.step]),
        "digest": torch.tensor(list(bytes.fromhex(batches.digest)), dtype=torch.uint8),
    }


def unpack(upload: Tensors, batches: Batches, *, sender: str) -> torch.Tensor:
    """Return an upload's rows (S, B, D) as they travelled, checked: they can be relayed as they are.

    Raises:
        ValueError: naming the sender: tensors are missing, of another round, step or public batch, or rows not of length 1.
    """
    if upload.keys() != {"rows", "tag", "digest"}:
        raise ValueError(f"node {sender!r} uploaded {sorted(upload) or 'nothing'}, expected rows, tag and digest")
    tag = tuple(upload["tag"].tolist())
    if tag != (batches.server_round, batches.step):
        raise ValueError(f"node {sender!r} uploaded representations of (round, step) {tag}, now is {(batches.server_round, batches.step)}")
    if bytes(upload["digest"].tolist()).hex() != batches.digest:
        raise ValueError(f"node {sender!r} uploaded representations of other public items than the others; is its public set the same?")
    unit_rows(upload["rows"], batches, width=None, sender=sender)
    return upload["rows"]


def unit_rows(rows_SBD: torch.Tensor, batches: Batches, *, width: int | None, sender: str) -> torch.Tensor:
    """Return rows as they travelled as unit rows, float32 (S, B, D); raises ValueError naming the sender where they are not."""
    S, B = batches.indices.shape
    if rows_SBD.dim() != 3 or tuple(rows_SBD.shape[:2]) != (S, B):
        raise ValueError(f"node {sender!r} sent representations of shape {tuple(rows_SBD.shape)}, expected {S} batches of {B}")
    D = rows_SBD.shape[2] if width is None else width
    return decode_rows(rows_SBD.reshape(S * B, -1), shape=(S * B, D), sender=sender).reshape(S, B, D)


def relayed(config: Config, seed: int, anchors: Iterable[str], uploads: Mapping[str, torch.Tensor], batches: Batches) -> dict[str, Payload]:
    """Return each anchor's payload with the rows of at most M peers that did upload; anchors without peers are left out.

    Parts are numbered and not named after nodes: who is who is no node's business.
    """
    parts: dict[str, Tensors] = {name: {"rows": rows} for name, rows in uploads.items()}
    payloads = {}
    for anchor in anchors:
        chosen = _peers(config, seed, anchor, uploads, batches)
        if chosen:
            payloads[anchor] = Payload(settings=dict(batches.settings), parts={f"peer-{i}": parts[peer] for i, peer in enumerate(chosen)})
    return payloads


def graded(config: Config, seed: int, uploads: Mapping[str, torch.Tensor], batches: Batches) -> dict[str, Payload]:
    """Return each uploader's payload with dL/dZ (B, D) of its own upload against at most M peers', and the loss."""
    rep = {name: unit_rows(rows, batches, width=config.dim, sender=name)[0] for name, rows in sorted(uploads.items())}
    payloads = {}
    for anchor, anchor_BD in rep.items():
        chosen = _peers(config, seed, anchor, uploads, batches)
        if not chosen:
            continue
        z_BD = anchor_BD.clone().requires_grad_()
        draws = generator(seed, anchor, batches.server_round, batches.step, "objective")
        loss = alignment_loss(config, z_BD, [rep[peer] for peer in chosen], draws)
        loss.backward()
        gradient_BD = torch.zeros_like(z_BD) if z_BD.grad is None else z_BD.grad
        settings = {**batches.settings, "loss": float(loss.detach()), "peers": len(chosen)}
        payloads[anchor] = Payload({"gradient": gradient_BD}, settings)
    return payloads


def _peers(config: Config, seed: int, anchor: str, uploads: Mapping[str, torch.Tensor], batches: Batches) -> tuple[str, ...]:
    return choose_peers(anchor, uploads, count=config.peers, seed=seed, server_round=batches.server_round, step=batches.step)


def alignment_loss(config: Config, anchor_BD: torch.Tensor, peers: list[torch.Tensor], draws: torch.Generator) -> torch.Tensor:
    """Return the configured objective of unit rows, 0-d, with the temperatures for as many peers as there are.

    Args:
        config: names objective, evaluator, temperatures and prefixes.
        anchor_BD: the node's own.
        peers: of the anchor's shape.
        draws: CPU generator, for the sampled evaluator.
    """
    if config.evaluator == "sampled" and anchor_BD.device.type != "cpu":
        seed = int(torch.randint(2**62, (), generator=draws))
        draws = torch.Generator(device=anchor_BD.device).manual_seed(seed)
    if config.prefixes and config.objective == "muscle" and peers:
        sizes = sorted({*config.prefixes, config.dim})
        return nested_muscle_loss(anchor_BD, peers, config.schedule, sizes, evaluator=config.evaluator, generator=draws)
    return objective_loss(config.objective, anchor_BD, peers, config.schedule, evaluator=config.evaluator, generator=draws)


def checked_gradient(payload: Payload, shape: tuple[int, int]) -> torch.Tensor:
    """Return the gradient that the server sent.

    Raises:
        ValueError: none, another shape, not finite, or too large to come from unit rows (the server is not trusted either).
    """
    gradient_BD = payload.tensors.get("gradient")
    if gradient_BD is None or tuple(gradient_BD.shape) != shape:
        found = "no gradient" if gradient_BD is None else f"a gradient of shape {tuple(gradient_BD.shape)}"
        raise ValueError(f"the server sent {found}, expected {shape}")
    longest = float(gradient_BD.float().norm(dim=1).max())
    if not longest <= GRADIENT_LIMIT:
        raise ValueError(f"the server sent a gradient with a row of length {longest:.3g} (limit {GRADIENT_LIMIT:g})")
    return gradient_BD.float()
