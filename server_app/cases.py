"""What `heterofleet compare` is to run: cases, each a strategy with settings, over seeds, on one task and split.

A plan may stand in a TOML file; what is typed on the command line is added to it and wins:

    nodes = 20
    seeds = [1, 2, 3]
    target = 0.9
    [settings]                      # of every case
    data.partitioner = "iid"
    [cases.paper]                   # a name, then what differs from the settings above
    strategy = "fedmrl"
    fedmrl.projector-start = "random"
    [search]                        # values to choose from, for each case on its own, on validation data
    train.learning-rate = [0.01, 0.02, 0.05]
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strategies
from server_app.overrides import Scalar, merged, parse_override, read_defaults
from server_app.settings import SettingsError, nearest

Values = dict[str, Scalar]

LOCAL, FEDAVG, FINETUNED = "local", "fedavg", "fedavg fine-tuned"
BASELINES = (LOCAL, FEDAVG, FINETUNED)
_PLAN_KEYS = ("nodes", "seeds", "target", "settings", "search", "cases")
_OURS = {"seed": "--seeds", "out-dir": "--out", "resume": "--out", "state-dir": "--out"}
_OURS |= {"alone": "the case local", "experiment": "names of cases", "export": "heterofleet simulate"}
_OF_A_CASE = ("data.augment",)  # the one key under data. that changes neither the task nor its split


@dataclass(frozen=True)
class Job:
    """One run: a strategy with settings and a seed.

    Attributes:
        config: the flat run config; results go to a folder chosen by who runs it.
        nodes: simulated nodes.
        finetune: at the end every node also trains the average once more on its own data and is measured.
    """

    config: Values
    nodes: int
    finetune: bool = False

    @property
    def strategy(self) -> str:
        return str(self.config["strategy"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def folder(self) -> str:
        """Name of its folder: equal for equal jobs, whatever the cases are called."""
        text = json.dumps([self.config, self.nodes, self.finetune], sort_keys=True)
        return f"{self.strategy}-seed{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


@dataclass(frozen=True)
class Variant:
    """A case with one choice of the searched values, and its jobs, one a seed."""

    chosen: Values
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Case:
    """A row of the comparison.

    Attributes:
        name: as shown.
        settings: what differs from the common settings.
        variants: one for each choice of searched values; exactly one without a search.
        measure: prefix of the accuracy that counts: "" after the round, "local_" right after local training.
    """

    name: str
    settings: Values
    variants: tuple[Variant, ...]
    measure: str = ""


@dataclass(frozen=True)
class Comparison:
    """All cases, the baselines first."""

    nodes: int
    seeds: tuple[int, ...]
    target: float | None
    common: Values
    search: dict[str, tuple[Scalar, ...]]
    cases: tuple[Case, ...]

    @property
    def jobs(self) -> list[Job]:
        """Every job once, seed by seed, so that early results hold all cases."""
        found = {job.folder: job for case in self.cases for variant in case.variants for job in variant.jobs}
        return sorted(found.values(), key=lambda job: self.seeds.index(job.seed))


def plan_comparison(
    *,
    plan: Path | None = None,
    nodes: int | None = None,
    seeds: str = "",
    target: float | None = None,
    config: Sequence[str] = (),
    cases: Sequence[str] = (),
    search: Sequence[str] = (),
) -> Comparison:
    """Return what to run, every setting checked before anything starts.

    Args:
        plan: TOML file, see above.
        nodes: simulated nodes; 10 if said nowhere.
        seeds: comma-separated; 1 if said nowhere.
        target: accuracy in (0, 1) to count rounds, bytes and seconds to.
        config: `key=value` for every case.
        cases: `name: key=value key=value`.
        search: `key=value,value`.

    Raises:
        SettingsError: naming the option, case or key.
    """
    table, defaults = _read(plan), read_defaults()
    common = {**_typed("settings", table.get("settings", {}), defaults), **dict(parse_override(text, defaults) for text in config)}
    grid = _grid(table.get("search", {}), search, defaults)
    own = {name: _typed(f"cases.{name}", values, defaults) for name, values in _tables(table, "cases").items()}
    for text in cases:
        name, values = _parse_case(text, defaults)
        if name in own:
            raise SettingsError(f"--case {text!r}: there already is a case named {name!r}")
        own[name] = values
    if taken := sorted(own.keys() & set(BASELINES)):
        raise SettingsError(f"case {taken[0]!r}: that name stands for a row that is always there; choose another")
    count = _whole("nodes", nodes if nodes is not None else table.get("nodes", 10))
    maker = _Maker(count, _seeds(seeds or table.get("seeds", [1])), common, grid)
    made = (*maker.baselines(), *(maker.case(name, values) for name, values in own.items()))
    return Comparison(count, maker.seeds, _target(table.get("target") if target is None else target), common, grid, made)


@dataclass(frozen=True)
class _Maker:
    nodes: int
    seeds: tuple[int, ...]
    common: Values
    grid: dict[str, tuple[Scalar, ...]]

    def baselines(self) -> tuple[Case, ...]:
        """Return what joining must beat: nodes alone, the small model averaged, and that fine-tuned on each node."""
        small: Values = {}
        if "fedmrl.small-model" in self.common and "fedavg.model" not in self.common:
            small = {"fedavg.model": self.common["fedmrl.small-model"]}
        average = self.case(FEDAVG, {"strategy": "fedavg", "eval-local": True, **small}, finetune=True)
        return (
            self.case(LOCAL, {"strategy": "local"}),
            average,
            Case(FINETUNED, average.settings, average.variants, measure="local_"),
        )

    def case(self, name: str, values: Values, *, finetune: bool = False) -> Case:
        for key in values:
            if key.startswith("data.") and key not in _OF_A_CASE:
                raise SettingsError(f"case {name!r}: {key} would change the task or its split; set it for all cases with -c")
        return Case(name, values, tuple(self._variants(name, values, finetune)))

    def _variants(self, name: str, values: Values, finetune: bool) -> Iterable[Variant]:
        method = str(values.get("strategy", self.common.get("strategy", read_defaults()["strategy"])))
        others = set(strategies.names()) - {method}
        grid = {key: found for key, found in self.grid.items() if key not in values and key.split(".")[0] not in others}
        for picked in itertools.product(*grid.values()):
            chosen = dict(zip(grid, picked, strict=True))
            yield Variant(chosen, tuple(self._job(name, {**self.common, **values, **chosen}, seed, finetune) for seed in self.seeds))

    def _job(self, name: str, values: Values, seed: int, finetune: bool) -> Job:
        for key, place in _OURS.items():
            if key in values:
                raise SettingsError(f"case {name!r}: {key} is not set here; see {place}")
        try:
            checked = merged([], {**values, "seed": seed, "alone": False})
        except SettingsError as error:
            raise SettingsError(f"case {name!r}: {error}") from None
        if (least := checked.settings.fleet.min_nodes) > self.nodes:
            raise SettingsError(f"fleet.min-nodes = {least}, but --nodes {self.nodes}: no round would begin; lower one or raise the other")
        if self.grid and not checked.settings.data.val_fraction:
            raise SettingsError(
                "a search chooses on validation data and there is none: set data.val-fraction, for example -c data.val-fraction=0.2"
            )
        return Job(checked.flat, self.nodes, finetune)


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"--plan {path} cannot be read: {error}") from error
    for key in table:
        if key not in _PLAN_KEYS:
            raise SettingsError(f"--plan {path}: {key} is not known{nearest(key, _PLAN_KEYS)}; it may hold {', '.join(_PLAN_KEYS)}")
    return table


def _tables(table: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    found = table.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(value, dict) for value in found.values()):
        raise SettingsError(f"--plan: {key} must be tables, for example [{key}.ours]")
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _typed(where: str, table: Any, defaults: Mapping[str, Scalar]) -> Values:
    if not isinstance(table, dict):
        raise SettingsError(f"--plan: {where} must be a table of settings")
    try:
        return dict(parse_override(f"{key}={_raw(value)}", dict(defaults)) for key, value in _flat(table))
    except SettingsError as error:
        raise SettingsError(f"--plan, [{where}]: {error}") from None


def _raw(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _grid(table: Any, texts: Sequence[str], defaults: dict[str, Scalar]) -> dict[str, tuple[Scalar, ...]]:
    if not isinstance(table, dict):
        raise SettingsError("--plan: search must be a table of lists, for example train.learning-rate = [0.01, 0.02]")
    raw = {key: [_raw(item) for item in value] if isinstance(value, list) else [_raw(value)] for key, value in _flat(table)}
    for text in texts:
        key, _, values = text.partition("=")
        raw[key.strip()] = [value.strip() for value in values.split(",")]
    grid = {key: tuple(dict.fromkeys(parse_override(f"{key}={value}", defaults)[1] for value in values)) for key, values in raw.items()}
    for key, wanted in grid.items():
        if not wanted or key in _OURS or key == "strategy" or (key.startswith("data.") and key not in _OF_A_CASE):
            raise SettingsError(f"{key} cannot be searched: it names what is compared or changes the task; write a case for each value")
    return grid


def _parse_case(text: str, defaults: dict[str, Scalar]) -> tuple[str, Values]:
    name, colon, rest = text.partition(":")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise SettingsError(f"--case {text!r}: {error}") from None
    if not colon or not name.strip() or "=" in name or not words:
        raise SettingsError(f"--case {text!r} is not 'name: key=value key=value'; for example: --case 'ours: strategy=fedmrl'")
    try:
        return name.strip(), dict(parse_override(word, defaults) for word in words)
    except SettingsError as error:
        raise SettingsError(f"--case {text!r}: {error}") from None


def _seeds(given: str | list[Any]) -> tuple[int, ...]:
    items = given.split(",") if isinstance(given, str) else given
    try:
        seeds = tuple(dict.fromkeys(int(str(item)) for item in items))
    except (TypeError, ValueError):
        seeds = ()
    if not seeds or min(seeds) < 0:
        raise SettingsError(f"seeds {given!r}: type whole numbers from 0, for example --seeds 1,2,3")
    return seeds


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{key} = {value!r}: type a whole number from 1")
    return value


def _target(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise SettingsError(f"target = {value!r}: type an accuracy between 0 and 1, for example 0.9")
    return float(value)
