"""`-c key=value` of the command line -> a full run config, checked before anything starts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import strategies
from server_app.settings import MOST, Section, Settings, SettingsError, nearest

Scalar = int | float | str | bool
APP_DIR = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RunConfig:
    """A checked run config: flat as Flower wants it, and as settings."""

    flat: dict[str, Scalar]
    settings: Settings
    method: Section


def read_defaults(app_dir: Path = APP_DIR) -> dict[str, Scalar]:
    """Return the flat run config of the app's `pyproject.toml`.

    Raises:
        SettingsError: the folder holds no Flower app.
    """
    path = app_dir / "pyproject.toml"
    if not path.is_file():
        raise SettingsError(f"{app_dir} holds no pyproject.toml; install from a checkout of the project with: pip install -e .")
    table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("flwr", {}).get("app", {}).get("config")
    if table is None:
        raise SettingsError(f"{path} has no table [tool.flwr.app.config]")
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            flat[key] = value
    return flat


def read_comments(app_dir: Path = APP_DIR) -> dict[str, str]:
    """Return key -> the comment behind its default in `pyproject.toml` (keys without one are absent)."""
    comments: dict[str, str] = {}
    inside = False
    for line in (app_dir / "pyproject.toml").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            inside = line.strip() == "[tool.flwr.app.config]"
        elif inside and (found := re.match(r'([\w.-]+)\s*=\s*(?:"[^"]*"|[^"#\s]+)\s*#\s*(.+)', line)):
            comments[found[1]] = found[2].strip()
    return comments


def parse_override(text: str, defaults: dict[str, Scalar]) -> tuple[str, Scalar]:
    """Return (key, value) of one `key=value`, the value in the type of the key's default.

    A value is a TOML scalar; for keys whose default is a string a bare word is that string.

    Raises:
        SettingsError: no `=`, an unknown key (with the nearest), or a value of another type.
    """
    key, sign, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not sign or not key:
        raise SettingsError(f"-c {text!r} is not key=value; for example: -c train.learning-rate=0.05")
    if key not in defaults:
        raise SettingsError(f"{key} is not a setting{nearest(key, defaults)}; `heterofleet strategies` lists them")
    return key, _typed(key, raw, defaults[key])


def _typed(key: str, raw: str, default: Scalar) -> Scalar:
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    if isinstance(default, str):
        return value if isinstance(value, str) else raw
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise SettingsError(f"{key} = {raw!r}: type true or false")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingsError(f"{key} = {raw!r}: type a number, like the default {default}")
    if isinstance(default, float):
        return float(value)
    if not float(value).is_integer():
        raise SettingsError(f"{key} = {raw!r}: type a whole number, like the default {default}")
    if abs(value) > MOST:
        raise SettingsError(f"{key} = {raw}: at most {MOST}")
    return int(value)


def merged(texts: Iterable[str], extra: Mapping[str, Scalar], base: Mapping[str, Scalar] | None = None) -> RunConfig:
    """Return the whole run config: defaults, then `base`, then each `key=value`, then `extra`; checked.

    Args:
        texts: `key=value` in the order typed; the last one of a key counts.
        extra: keys set by other options.
        base: run config of an earlier run, when resuming.

    Raises:
        SettingsError: unknown key or strategy, or a value out of range.
    """
    defaults = read_defaults()
    config = dict(defaults)
    for key, value in (base or {}).items():
        if key not in defaults:
            raise SettingsError(f"the run to resume has the setting {key}, which this version does not know{nearest(key, defaults)}")
        config[key] = value
    given = dict(parse_override(text, defaults) for text in texts) | dict(extra)
    config = strategies.expanded({**config, **given}, set(given))
    settings, method = strategies.settings_of(config)
    return RunConfig(config, settings, method)
