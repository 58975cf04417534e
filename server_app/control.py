"""A SuperLink's Control API over HTTP: submit a run, ask how it is, copy its log.

The `flwr` commands do the same at a second of CPU each, too much for polling. The names below are not
public in Flower; this file is the only place that uses them, and the requirements hold Flower at 1.42.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
)
from flwr.proto.federation_config_pb2 import SimulationConfig
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

Scalar = int | float | str | bool


@dataclass(frozen=True)
class RunState:
    """How Flower sees a run.

    Attributes:
        status: "pending", "starting", "running" or "finished".
        result: "completed", "failed" or "stopped" once finished, else empty.
        details: Flower's reason, or empty.
        bytes_sent, bytes_recv: from the SuperLink to its nodes and back, as `flwr ls` shows them; 0 in simulation.
    """

    status: str
    result: str
    details: str
    bytes_sent: int = 0
    bytes_recv: int = 0


class Control:
    """One client of the SuperLink at `address` (host:port); over TLS where its CA's file is given. Close it after use."""

    def __init__(self, address: str, ca: Path | None = None) -> None:
        self._client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=ca is None,
            root_certificates=ca.read_bytes() if ca else None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def start(self, app_dir: Path, run_config: Mapping[str, Scalar], federation: Mapping[str, Any] | None = None) -> int:
        """Submit the app in `app_dir` and return the run's id.

        Args:
            app_dir: folder with the app's `pyproject.toml`.
            run_config: overrides of keys of `[tool.flwr.app.config]`.
            federation: fields of Flower's SimulationConfig, such as `num_supernodes`; not for real nodes.

        Raises:
            RuntimeError: the SuperLink took no run.
        """
        content = build_fab_from_disk(app_dir)
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})),
            override_config=user_config_to_proto(dict(run_config)),
            override_federation_config=SimulationConfig(**(federation or {})),
        )
        response = self._client.StartRun(request)
        if not response.HasField("run_id"):
            raise RuntimeError(f"the SuperLink took no run: {response.note or 'no reason given'}")
        return int(response.run_id)

    def state(self, run_id: int) -> RunState:
        """Return how the run is now."""
        run = self._client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id]
        status = run.status
        return RunState(status.status, status.sub_status, status.details, run.bytes_sent, run.bytes_recv)

    def register(self, public_key: Path, name: str) -> int:
        """Let the node that holds the key of this OpenSSH public key file in, and return its id.

        Raises:
            RuntimeError: the SuperLink did not take it.
        """
        key = load_ssh_public_key(public_key.read_bytes())
        if not isinstance(key, EllipticCurvePublicKey):
            raise RuntimeError(f"{public_key} holds no elliptic-curve key; make one with `heterofleet certs`")
        response = self._client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name))
        if not response.node_id:
            raise RuntimeError(f"the SuperLink did not register {public_key}")
        return int(response.node_id)

    def online(self) -> set[str]:
        """Return the names under which nodes that are connected now were registered; of unregistered ones their ids."""
        found = self._client.ListNodes(ListNodesRequest()).nodes_info
        return {info.name or str(info.node_id) for info in found if info.status == NodeStatus.ONLINE}

    def stop(self, run_id: int) -> None:
        """Ask Flower to stop the run."""
        self._client.StopRun(StopRunRequest(run_id=run_id))

    def log(self, run_id: int) -> Iterator[str]:
        """Yield pieces of the run's log as they come, until the run ends."""
        for piece in self._client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=0.0)):
            yield piece.log_output

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
