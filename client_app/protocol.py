"""The fixed parts of every message: what the server tells a node, what a node says beside its result."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from strategies.messages import Scalar

ORDER, REPORT, FAILURE, PAYLOAD = "order", "report", "failure", "payload"
APP_DIR = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Order:
    """What the server tells a node beside the payload.

    Attributes:
        run: name of the strategy now running (`local` when nodes are compared with being alone).
        experiment, lineage: where the node keeps its private state.
        server_round: 1-based; 0 before the first.
        checkpoint_round: newest round the server could resume from.
        fingerprint, app_dir: the server's code; a node with other code refuses.
        state_dir: where simulated nodes keep state unless they were told otherwise.
    """

    run: str
    experiment: str
    lineage: str
    server_round: int
    checkpoint_round: int
    fingerprint: str
    app_dir: str
    state_dir: str = ""

    def record(self) -> ConfigRecord:
        """Return the order as a Flower record."""
        return ConfigRecord(asdict(self))

    @classmethod
    def of(cls, content: RecordDict) -> Order:
        """Return the order of a message; raises ValueError when the server is of another version."""
        try:
            return cls(**dict(content[ORDER]))  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the server speaks another version of this app ({error}); install the same version on both") from None


@cache
def fingerprint(app_dir: Path = APP_DIR) -> str:
    """Return the sha256 of all Python files of the app: equal on two machines exactly if they run the same code."""
    digest = hashlib.sha256()
    folders = ("server_app", "client_app", "strategies", "models", "tasks")
    files = [app_dir / "heterofleet_app.py", *(f for folder in folders for f in (app_dir / folder).rglob("*.py"))]
    for path in sorted(files):
        digest.update(path.relative_to(app_dir).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class ReplyError(ValueError):
    """A node's reply is a failure or cannot be used; the message is the reason.

    Attributes:
        node: the node's name, where it said so.
        partitions: how many nodes are simulated; 0 for a real node.
    """

    def __init__(self, reason: str, node: str = "", partitions: int = 0) -> None:
        super().__init__(reason)
        self.node, self.partitions = node, partitions


def failure(node: str, reason: str, partitions: int) -> RecordDict:
    """Return the reply of a node that could not do what it was asked."""
    return RecordDict({FAILURE: ConfigRecord({"node": node, "reason": reason, "partitions": partitions})})


def report_of(content: RecordDict) -> dict[str, Scalar]:
    """Return a reply's report; raises ReplyError with the node's reason, or when the node runs other code."""
    if FAILURE in content:
        said = dict(content[FAILURE])
        raise ReplyError(str(said["reason"]), str(said["node"]), int(said["partitions"]))  # type: ignore[arg-type]
    if REPORT not in content:
        raise ReplyError("the reply has no report: the node runs another version of this app")
    report: dict[str, Scalar] = dict(content[REPORT])  # type: ignore[arg-type]
    check_code(str(report.pop("fingerprint", "")), str(report.pop("app_dir", "")), "node")
    return report


def check_code(theirs: str, their_dir: str, who: str) -> None:
    """Raise ValueError, naming both folders and versions, unless `theirs` is this process's fingerprint."""
    if theirs != fingerprint():
        raise ValueError(
            f"the {who} runs other code: {their_dir or 'unknown folder'} ({theirs[:12] or 'no fingerprint'}), "
            f"here {APP_DIR} ({fingerprint()[:12]}); use one version everywhere, and one SuperLink per checkout"
        )
