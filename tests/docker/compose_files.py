"""The compose files as docker compose reads them: merge keys resolved, `${VAR}` replaced, overrides laid on top."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docker"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def read(*names: str, **variables: str) -> dict[str, Any]:
    """Return the files laid over each other; a variable without value or default stands as its own name in lower case."""
    merged: dict[str, Any] = {}
    for name in names:
        merged = _over(merged, yaml.safe_load(_filled((FOLDER / name).read_text(encoding="utf-8"), variables)))
    return merged


def _filled(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        return variables.get(name, rest if kind == "-" else name.lower())

    return VARIABLE.sub(value, text)


def _over(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _over(below[key], value) if key in below else value for key, value in above.items()}
