"""Run config -> checked, frozen settings. Needs pydantic only, so that both halves can read it.

Flower allows only scalars in the run config; a list is a comma-separated string. Every key is
kebab-case under its section (`train.batch-size`), its default stands in `pyproject.toml`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

S = TypeVar("S", bound=BaseModel)
NO_TEST = "data.test-fraction = 0: a node without a test split of its own is not evaluated, and simulated nodes have none"
MOST = 2**63 - 1  # of whole numbers in Flower's run config


class SettingsError(ValueError):
    """A run-config key is unknown or its value is out of range; the message says which and what to type."""


def kebab(name: str) -> str:
    """Return a field's name as it is typed."""
    return name.replace("_", "-")


def split_list(value: Any) -> Any:
    """Return the items of a comma-separated string; refuse empty items, which hide typing errors."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    items = [item.strip() for item in value.split(",")]
    if any(not item for item in items):
        raise ValueError(f"empty item in the list {value!r}")
    return items


StrList = Annotated[tuple[str, ...], BeforeValidator(split_list)]
Ratio = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
RatioList = Annotated[tuple[Ratio, ...], BeforeValidator(split_list)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of every group of settings: frozen, kebab-case keys, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=kebab, populate_by_name=True)


class FleetSettings(Section):
    """Who takes part. The tables are read by partition number, cyclically, in simulation only."""

    models: StrList = Field(("cnn1", "cnn2", "cnn3", "cnn4", "cnn5"), min_length=1)
    rank_ratios: RatioList = Field((1.0, 0.5, 0.25, 0.125), min_length=1)
    data: StrList = ()
    min_nodes: int = Field(2, ge=1)
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    quorum: float = Field(0.5, gt=0.0, le=1.0)
    join_timeout: Positive = 120.0
    round_timeout: Positive = 3600.0
    return_timeout: NonNegative = 20.0
    retries: int = Field(1, ge=0, le=10)


class DataSettings(Section):
    """Where samples come from and how a simulated federation splits them."""

    source: str = "embedded"
    image_column: str = ""
    image_size: int = Field(0, ge=0, le=4096)
    image_channels: Literal[0, 1, 3] = 0
    label_column: str = "label"
    num_classes: int = Field(0, ge=0)
    partitioner: Literal["iid", "dirichlet", "pathological", "shard", "natural"] = "dirichlet"
    alpha: Positive = 0.5
    classes_per_node: int = Field(2, ge=1)
    shards_per_node: int = Field(2, ge=1)
    natural_column: str = ""
    samples_per_node: int = Field(0, ge=0)
    min_samples: int = Field(10, ge=1)
    test_fraction: float = Field(0.2, ge=0.0, lt=1.0)
    val_fraction: float = Field(0.0, ge=0.0, lt=1.0)
    shared_test: int = Field(1000, ge=0)
    augment: Literal["none", "flip", "crop-flip"] = "none"


class TrainSettings(Section):
    """The node's local training, common to all methods."""

    batch_size: int = Field(32, ge=1)
    local_epochs: int = Field(1, ge=1)
    learning_rate: Positive = 0.02
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    weight_decay: NonNegative = 0.0
    clip_norm: NonNegative = 0.0
    threads: int = Field(1, ge=1)


class TransportSettings(Section):
    """How shared tensors travel."""

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class Settings(Section):
    """Everything a run needs, checked before round 1. `method` holds the chosen strategy's own keys, raw."""

    strategy: str = "fedmrl"
    seed: int = Field(1, ge=0, le=MOST)
    num_rounds: int = Field(15, ge=1)
    experiment: str = ""
    out_dir: str = ""
    state_dir: str = ""
    resume: str = ""
    alone: bool = True
    export: Literal["none", "own", "all"] = "none"
    eval_every: int = Field(1, ge=0)
    eval_local: bool = False
    fleet: FleetSettings = FleetSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    transport: TransportSettings = TransportSettings()
    method: dict[str, Any] = {}

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any], *, strategies: tuple[str, ...]) -> Settings:
        """Return checked settings from Flower's flat run config.

        Args:
            run_config: flat keys such as `train.batch-size`.
            strategies: names of all known methods; tables of the methods not chosen are ignored.

        Raises:
            SettingsError: unknown key or strategy, or a value out of range, with the nearest valid name.
        """
        nested: dict[str, Any] = {}
        for key, value in run_config.items():
            section, _, name = key.rpartition(".")
            if section:
                nested.setdefault(section, {})[name] = value
            else:
                nested[key] = value
        chosen = str(nested.get("strategy", cls.model_fields["strategy"].default))
        if chosen not in strategies:
            raise SettingsError(f"strategy = {chosen!r} is unknown{nearest(chosen, strategies)}; choose one of {', '.join(strategies)}")
        tables = {name: nested.pop(name, {}) for name in strategies}
        nested["method"] = tables[chosen]
        return checked(cls, nested, prefix="")


def nearest(word: str, choices: Any) -> str:
    """Return " (did you mean 'x'?)" for the closest choice, or an empty string."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def checked(model: type[S], values: Mapping[str, Any], *, prefix: str) -> S:
    """Return `model` built from `values`; every problem is one line with the full key, value and cure.

    Raises:
        SettingsError: naming each wrong key under `prefix`.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        told = {issue["loc"][:2]: _explain(model, issue, prefix) for issue in reversed(error.errors())}  # of one key the first
        raise SettingsError("\n".join(reversed(told.values()))) from None


def _explain(model: type[BaseModel], issue: Any, prefix: str) -> str:
    path = [str(p).replace("_", "-") for p in issue["loc"]]
    if not path:  # several keys that do not fit together
        return f"{prefix}*: {issue['msg'].removeprefix('Value error, ')}"
    key = prefix + ".".join(path)
    if issue["type"] == "literal_error":
        return _not_a_choice(key, issue["input"], model, issue["loc"])
    if issue["type"] == "too_short":
        return f"{key} is empty: name at least {issue['ctx']['min_length']}"
    if issue["type"] != "extra_forbidden":
        return f"{key} = {issue['input']!r}: {issue['msg']}"
    holder = _holder(model, path[:-1])
    names = [kebab(n) for n in holder.model_fields] if hasattr(holder, "model_fields") else []
    return f"{key} is not a setting{nearest(path[-1], names)}"


def _holder(model: Any, path: list[str]) -> Any:
    """Return the section that the last key of a path is in."""
    for part in path:
        field = model.model_fields.get(part.replace("-", "_"))
        model = field.annotation if field else model
    return model


def _not_a_choice(key: str, value: Any, model: type[BaseModel], path: tuple[str, ...]) -> str:
    names = [kebab(str(part)) for part in path]
    field = _holder(model, names[:-1]).model_fields[names[-1].replace("-", "_")]
    choices = [str(choice) for choice in get_args(field.annotation)]
    return f"{key} = {value!r}{nearest(str(value), choices)}; choose one of {', '.join(choices)}"
