"""The methods. A folder here that holds a `config.py` is one; nothing else registers it.

A method's folder has `config.py` (class `Config`), `strategy.py` (class `Strategy`, the server half) and
`trainer.py` (class `NodeTrainer`, the node half). The halves are imported only where they run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.settings import Section, Settings, checked

if TYPE_CHECKING:
    from strategies.engine import HeteroStrategy
    from strategies.trainer import Trainer


def names() -> tuple[str, ...]:
    """Return the names of all methods, sorted."""
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.py")))


def settings_of(run_config: Mapping[str, Any]) -> tuple[Settings, Section]:
    """Return the run's settings and the chosen method's own, both checked.

    Raises:
        SettingsError: naming each wrong key.
    """
    settings = Settings.from_run_config(run_config, strategies=names())
    return settings, config_of(settings.strategy, settings.method)


def config_of(name: str, values: Mapping[str, Any]) -> Section:
    """Return the settings of method `name` from its table; raises SettingsError naming each wrong key."""
    config: type[Section] = importlib.import_module(f"strategies.{name}.config").Config
    return checked(config, values, prefix=f"{name}.")


def expanded(run_config: dict[str, Any], typed: set[str]) -> dict[str, Any]:
    """Return a flat run config with what stands for several settings (a method's presets) written out.

    A method that has any defines `expanded` beside its `Config`; `typed` are the keys that somebody set.
    """
    name = str(run_config.get("strategy"))
    if name not in names():
        return run_config
    hook = getattr(importlib.import_module(f"strategies.{name}.config"), "expanded", None)
    return run_config if hook is None else dict(hook(run_config, typed))


def strategy_class(name: str) -> type[HeteroStrategy]:
    """Return the server half of method `name`."""
    half: type[HeteroStrategy] = importlib.import_module(f"strategies.{name}.strategy").Strategy
    return half


def trainer_class(name: str) -> type[Trainer]:
    """Return the node half of method `name`."""
    half: type[Trainer] = importlib.import_module(f"strategies.{name}.trainer").NodeTrainer
    return half
