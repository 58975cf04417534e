"""A clean copy of this checkout, for tests that build or run it as a newcomer would."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client_app", "models", "server_app", "strategies", "tasks")


def copy_of_checkout(folder: Path) -> Path:
    """Make `folder`, copy into it the files that git has or would add, and return it: no environment, cache or result.

    The folder's last name must be letters, digits and dashes: Flower refuses to build an app from others.
    """
    for name in _files():
        if (ROOT / name).is_file():  # one that was deleted and not yet committed is still listed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _files() -> list[str]:
    """Return the checkout's files relative to its root; outside of git (a downloaded archive) all but the known rest."""
    listing = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        rest = {"__pycache__", "build", "dist", "runs", "heterofleet.egg-info"}
        paths = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        found = [str(path) for path in paths if not any(part in rest or part.startswith(".") for part in path.parts)]
    return [name for name in found if name]
