"""The cache folder: where it is, one builder at a time, nothing half-written left in place."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client_app.profile import home
from tasks import DataError

log = logging.getLogger(__name__)


def cache_root() -> Path:
    """Return the folder of all caches, `<home()>/cache`; it may not exist yet."""
    return home() / "cache"


def digest(value: Any) -> str:
    """Return 24 hexadecimal digits that stand for `value`, anything that JSON can write."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target` among all processes of this machine; wait for it where another one builds it.

    Raises:
        DataError: the cache folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = target.with_name(f"{target.name}.lock").open("a")
    except OSError as error:
        raise unwritable(error) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is filling %s; waiting for it", target)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def unwritable(error: OSError) -> DataError:
    """Return the error to raise where `error` kept the cache from being written."""
    return DataError(
        f"the cache folder {cache_root()} cannot be written ({error.strerror or error}); free some space there, or set "
        "HETEROFLEET_HOME to a folder that this user may write"
    )
