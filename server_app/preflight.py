"""What would fail on the nodes, found before anything starts: names, data, and each kind of node's models."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import models
import strategies
import tasks
from client_app.profile import NodeProfile
from server_app.overrides import RunConfig
from server_app.settings import Section, Settings, SettingsError, kebab, nearest
from strategies.seeds import derive_seed
from strategies.trainer import NodeContext


def check_names(settings: Settings, method: Section) -> None:
    """Return if all models without a colon in their names are known; the others are looked up where they are built.

    Raises:
        SettingsError: naming the key, and the nearest name.
    """
    for key, name in [*(("fleet.models", name) for name in settings.fleet.models), *_models_of(settings, method)]:
        if ":" not in name and name not in models.names():
            raise SettingsError(
                f"{key} = {name!r} is no model{nearest(name, models.names())}; `heterofleet models` lists them, "
                "torchvision:<name> and module:function are possible too"
            )


def check_fleet(checked: RunConfig, nodes: int) -> tuple[str, ...]:
    """Return what should be known of a simulated fleet that can begin: nodes of each kind are made as they will be there.

    Raises:
        SettingsError: data that cannot be read or divided, a model that cannot be built for them, or settings of the
            method that do not fit a model.
    """
    check_names(checked.settings, checked.method)
    seen: set[tuple[str, str]] = set()
    described: set[object] = set()  # sources and rank ratios
    warnings: list[str] = []
    for index in range(nodes):
        profile = NodeProfile.of({"partition-id": index, "num-partitions": nodes}, checked.settings)
        fresh = {profile.data, profile.rank_ratio} - described
        if (profile.model, profile.data) in seen and not fresh:
            continue
        try:
            warnings += _check_node(profile, checked, first=not seen, describe=bool(fresh))
        except (ValueError, RuntimeError) as error:
            where = "" if isinstance(error, (tasks.DataError, SettingsError)) else f"{profile.node_name}, model {profile.model}: "
            raise SettingsError(f"{where}{error}") from error
        seen.add((profile.model, profile.data))
        described |= fresh
    return tuple(dict.fromkeys(warnings))


def _check_node(profile: NodeProfile, checked: RunConfig, *, first: bool, describe: bool) -> list[str]:
    """Return the warnings that a node gives of itself."""
    settings = checked.settings
    task = tasks.load(profile, settings)
    if first:
        for key, name in _models_of(settings, checked.method):
            try:
                models.build(name, input_shape=task.input_shape, num_outputs=task.num_outputs)
            except models.ModelError as error:
                raise SettingsError(f"{key} = {name!r}: {error}") from error
    warnings = []
    for run in dict.fromkeys(["local", settings.strategy] if settings.alone else [settings.strategy]):
        own, config = strategies.settings_of({**checked.flat, "strategy": run})
        seed = derive_seed(settings.seed, profile.node_name)
        trainer = strategies.trainer_class(run)(NodeContext(profile, own, config, task, torch.device("cpu"), seed))
        if describe:  # with the public set, where the method has one: it must fit the node's samples
            warnings.append(str(trainer.describe().get("warning", "")))
    return list(filter(None, warnings))


def _models_of(settings: Settings, method: Section) -> Iterator[tuple[str, str]]:
    """Yield the method's settings that name a model: its key and the name."""
    for field in type(method).model_fields:
        if field == "model" or field.endswith("_model"):
            yield f"{settings.strategy}.{kebab(field)}", str(getattr(method, field))
