"""What a node does with each message. Called by the handlers in `heterofleet_app`; touches Flower, knows no maths."""

from __future__ import annotations

import resource
import time
import traceback
from collections.abc import Callable
from functools import lru_cache
from logging import ERROR
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.logger import log
from torch import nn

import strategies
import tasks
from client_app.export import export_models
from client_app.profile import NodeProfile, ProfileError, home, simulated_partitions
from client_app.protocol import APP_DIR, PAYLOAD, REPORT, Order, check_code, failure, fingerprint
from client_app.store import PrivateStore
from client_app.training import evaluate
from models import ModelError
from server_app.settings import Settings
from strategies.messages import Payload, Scalar, decode, decode_parts, encode
from strategies.seeds import derive_seed, generator, seeded
from strategies.trainer import NodeContext, Trainer
from tasks import DataError, Task

Handler = Callable[["Work"], RecordDict]


class Work:
    """One message being worked on: who this node is, its task, its trainer, its store, and how long things took."""

    def __init__(self, message: Message, context: Context) -> None:
        self.content = message.content
        self.order = Order.of(message.content)
        check_code(self.order.fingerprint, self.order.app_dir, "server")
        self.settings, config = strategies.settings_of({**context.run_config, "strategy": self.order.run})
        self.profile = NodeProfile.of(context.node_config, self.settings)
        torch.set_num_threads(self.settings.train.threads)
        started = time.perf_counter()
        self.task = _task(self.profile, self.settings)
        self.device = torch.device("cuda" if _use_cuda(self.profile) else "cpu")
        seed = derive_seed(self.settings.seed, self.profile.node_name)
        self.trainer: Trainer = strategies.trainer_class(self.order.run)(
            NodeContext(self.profile, self.settings, config, self.task, self.device, seed)
        )
        simulated_dir = "" if self.settings.state_dir else self.order.state_dir
        state_dir = simulated_dir if self.profile.simulated and simulated_dir else self.profile.state_dir
        self.store = PrivateStore.of(
            state_dir or home() / "state",
            self.order.experiment,
            self.order.lineage,
            self.order.run,
            self.profile.node_name,
            durable=not self.profile.simulated,
        )
        self.report: dict[str, Scalar] = {"node_name": self.profile.node_name, "seconds_load": time.perf_counter() - started}

    def payload(self) -> Payload:
        """Return what the server sent for the method."""
        return Payload(decode(self.content), dict(self.content[PAYLOAD]), decode_parts(self.content))  # type: ignore[arg-type]

    def restore(self, up_to: int) -> bool:
        """Load the newest private state of a round <= `up_to`; return whether there was one."""
        started = time.perf_counter()
        like = self.trainer.private_state()
        state = self.store.load(like, up_to=up_to) if like else None
        if state is not None:
            self.trainer.load_private_state(state)
        self.report["seconds_load"] = float(self.report["seconds_load"]) + time.perf_counter() - started
        return state is not None

    def reply(self, **more: Scalar) -> RecordDict:
        """Return the report so far and `more` as a reply's fixed part."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        fixed: dict[str, Scalar] = {"fingerprint": fingerprint(), "app_dir": str(APP_DIR), "peak_memory_mb": peak}
        return RecordDict({REPORT: ConfigRecord({**self.report, **fixed, **more})})


def describe(work: Work) -> RecordDict:
    """Say who this node is and what it has."""
    task, profile = work.task, work.profile
    facts: dict[str, Scalar] = {
        "model": work.trainer.model_name,
        "rank_ratio": profile.rank_ratio,
        "device": str(work.device),
        "simulated": profile.simulated,
        "num_partitions": profile.fleet_size,
        "num_train": len(task.train),
        "num_test": len(task.test),
        "input_shape": ",".join(map(str, task.input_shape)),
        "num_outputs": task.num_outputs,
        "class_names": ",".join(task.class_names),
        "own_data": bool(profile.data),
    }
    return work.reply(**{**facts, **work.trainer.describe()})


def train(work: Work) -> RecordDict:
    """Train from the state before this round, save the state after it, send the update."""
    order, settings = work.order, work.settings
    work.restore(order.server_round - 1)
    payload = work.payload()
    work.trainer.receive(payload)
    started = time.perf_counter()
    seed = (settings.seed, work.profile.node_name, order.server_round)
    with seeded(*seed, "layers"):  # dropout and the like draw from torch's global generator
        update = work.trainer.train(payload, generator(*seed))
    trained = time.perf_counter()
    private = work.trainer.private_state()
    if private:
        work.store.save(private, server_round=order.server_round, header={"run": order.run, "node": work.profile.node_name})
        work.store.prune(checkpoint_round=order.checkpoint_round)
    work.report |= {"seconds_train": trained - started, "seconds_save": time.perf_counter() - trained}
    work.report |= {name: float(value) for name, value in update.metrics.items()}
    if settings.eval_local:
        work.report |= {f"local_{name}": value for name, value in _evaluate(work).items()}
    content = work.reply(num_examples=update.num_examples)
    content.update(encode(update.tensors, settings.transport.dtype))
    return content


def exchange(work: Work) -> RecordDict:
    """Answer a further exchange of the round from the state after this round's training, and save the state after it."""
    order, node = work.order, work.profile.node_name
    work.restore(order.server_round)
    payload = work.payload()
    seed = (work.settings.seed, node, order.server_round, "exchange", payload.settings.get("step", 0))
    with seeded(*seed, "layers"):
        update = work.trainer.exchange(payload, generator(*seed))
    private = work.trainer.private_state()
    if private:
        work.store.save(private, server_round=order.server_round, header={"run": order.run, "node": node})
    content = work.reply(num_examples=update.num_examples, **update.metrics)
    content.update(encode(update.tensors, work.settings.transport.dtype))
    return content


def evaluate_own(work: Work) -> RecordDict:
    """Evaluate this node's own model, with what was shared last, on its own test split."""
    trained = work.restore(work.order.server_round)
    work.trainer.receive(work.payload())
    return work.reply(test_samples=len(work.task.test), has_state=trained, **_evaluate(work))


def export(work: Work) -> RecordDict:
    """Write this node's models as files that need torch alone, and say where."""
    work.restore(work.order.server_round)
    work.trainer.receive(work.payload())
    folder = (
        Path(work.order.state_dir or work.profile.state_dir).parent / "exports"
        if work.profile.simulated
        else Path(work.profile.state_dir) / "exports"
    )
    models = work.trainer.exportable()
    names = tuple(models) if work.settings.export == "all" else tuple(models)[:1]
    others = {name: _measured(work, models[name]) for name in names[1:]}
    paths = export_models(work.trainer, folder / work.profile.node_name, names=names, metrics=_evaluate(work), others=others)
    return work.reply(path=str(paths[0]), files=len(paths))


def run(handler: Handler, message: Message, context: Context) -> Message:
    """Return `handler`'s reply, or a reply that names this node and the reason: one node's trouble is never the run's."""
    node = str(context.node_config.get("name") or f"partition-{context.node_config.get('partition-id', '?')}")
    try:
        content = handler(Work(message, context))
    except Exception as error:  # whatever a node's data, model or disk raises is reported, not fatal
        reason = str(error) if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {error}"
        told = isinstance(error, (ModelError, DataError, ProfileError))  # what is to be mended is in the words, not in our code
        log(ERROR, "node %s: %s", node, reason if told else traceback.format_exc())
        content = failure(node, reason, simulated_partitions(context.node_config))
    return Message(content, reply_to=message)


def _evaluate(work: Work) -> dict[str, float]:
    """Return the metrics on the test split, and as `val_*` with `val_samples` those on the validation split where there is one."""
    found = evaluate(work.task, work.trainer.predict, work.task.test, batch_size=_EVAL_BATCH, device=work.device)
    if count := len(work.task.val):
        val = evaluate(work.task, work.trainer.predict, work.task.val, batch_size=_EVAL_BATCH, device=work.device)
        found |= {"val_samples": count, **{f"val_{name}": value for name, value in val.items()}}
    return found


def _measured(work: Work, model: nn.Module) -> dict[str, float]:
    return evaluate(work.task, model.eval(), work.task.test, batch_size=_EVAL_BATCH, device=work.device)


_EVAL_BATCH = 256


def _use_cuda(profile: NodeProfile) -> bool:
    if profile.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f'node {profile.node_name} asks for cuda and sees none; in simulation give it a share with --gpus, else set device="auto"'
        )
    return profile.device != "cpu" and torch.cuda.is_available()


@lru_cache(maxsize=256)
def _load(profile: NodeProfile, data_key: str) -> Task:
    return tasks.load(profile, Settings.model_validate_json(data_key))


def _task(profile: NodeProfile, settings: Settings) -> Task:
    """Return the node's task; several nodes share a process in simulation, each has its own entry."""
    kept = settings.model_dump_json(by_alias=True, include={"seed", "data"})
    return _load(profile, kept)
