"""A node behind a slow line: how long a known number of bytes takes, and whether a round gets through.

    python benchmarks/slow_link.py [--mbit 1] [--down-mbit 1] [--dtype float16] [--model cnn1] [--chunks auto|flower] [--via tc|relay]

One SuperLink and one SuperNode as processes on this machine; FedAvg sends `--model` down and up. The line carries --mbit up and
--down-mbit down, all connections together. With `tc` (root, and a kernel with veth and tbf) the node sits in a network namespace of its own
behind a link that the kernel slows down; else a relay in this process passes its bytes on at that rate. `--chunks auto` starts the
node as `heterofleet node --uplink-mbit` does; `flower` leaves Flower's pieces of 5 MB, two at a time.

"ideal" is bytes over the rate. Flower gives up on a request after 30 s without an answer and tries again, as often as it takes; the
node's "retries" are counted in its log.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.edge_fleet import digit_folders, of_kind, run_on
from server_app.deploy import Deployment, deployment
from server_app.link import LaunchError, environment, free_port
from server_app.node_link import Address
from server_app.node_start import Start, transfer_settings

HERE, THERE = "10.213.77.1", "10.213.77.2"  # the server's and the node's end of the slow link
_PIECE, _PAUSE = 4096, 1.0


class Rate:
    """One direction of a line: `pass_on(n)` returns when n more bytes have gone through.

    Attributes:
        bits: a second; 0: as fast as they come.
        passed: bytes so far.
        busy: seconds in which bytes came, without pauses of more than a second.
    """

    def __init__(self, bits: float) -> None:
        self.bits, self.passed, self.busy = bits, 0, 0.0
        self._free_at, self._last, self._lock = 0.0, 0.0, threading.Lock()

    def pass_on(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self.passed += count
            self.busy += now - self._last if now - self._last < _PAUSE else 0.0
            start = max(self._free_at, now)
            self._last = now
            self._free_at = start + (8 * count / self.bits if self.bits else 0.0)
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class Relay:
    """Passes TCP connections on to `target`, all of them together at most at `up` bits a second there and `down` back; 0: no limit.

    Attributes:
        port: where it listens.
        up, down: from those who connect to the target, and back.
    """

    def __init__(self, target: tuple[str, int], up: float, down: float, host: str = "127.0.0.1") -> None:
        self.target, self.up, self.down = target, Rate(up), Rate(down)
        self._listener = socket.socket()
        # Accepted connections take this over: what a sender cannot pass on must wait at the sender, not here.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * _PIECE)
        self._listener.bind((host, 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(self.target)
            except OSError:  # nobody there, as the one who called will see
                near.close()
                continue
            for source, sink, rate in ((near, far, self.up), (far, near, self.down)):
                threading.Thread(target=self._pump, args=(source, sink, rate), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, rate: Rate) -> None:
        try:
            while piece := source.recv(_PIECE):
                rate.pass_on(len(piece))
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one side hung up
            source.close()
            sink.close()

    def close(self) -> None:
        self._listener.close()


@contextmanager
def slow_namespace(up: float, down: float) -> Iterator[list[str]]:
    """Yield the words that start a command in a network namespace behind a slow link; raises PermissionError where none can be made."""
    held = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stderr=subprocess.DEVNULL)
    inside = ["nsenter", f"--net=/proc/{held.pid}/ns/net"]
    slow = {
        way: ["root", "tbf", "rate", f"{int(1000 * mbit)}kbit", "burst", "16kb", "latency", "400ms"]
        for way, mbit in (("up", up), ("down", down))
    }
    try:
        while held.poll() is None and os.readlink(f"/proc/{held.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.02)
        for command in (
            ["ip", "link", "add", "slow0", "type", "veth", "peer", "name", "slow1", "netns", str(held.pid)],
            ["ip", "addr", "add", f"{HERE}/30", "dev", "slow0"],
            [*inside, "ip", "addr", "add", f"{THERE}/30", "dev", "slow1"],
            ["ip", "link", "set", "slow0", "up"],
            [*inside, "ip", "link", "set", "slow1", "up"],
            [*inside, "ip", "link", "set", "lo", "up"],
            ["tc", "qdisc", "add", "dev", "slow0", *slow["down"]],
            [*inside, "tc", "qdisc", "add", "dev", "slow1", *slow["up"]],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PermissionError(f"{' '.join(command)}: {done.stderr.strip() or 'not permitted'}")
        yield inside
    finally:
        held.kill()
        held.wait()  # the namespace and both ends of the link go with it


def start_node(made: Deployment, address: Address, args: argparse.Namespace, folder: Path, prefix: list[str]) -> Path:
    """Start the node as `heterofleet node` does and return its log; the end of the deployment ends it."""
    home = made.home("far")
    config = {"name": "far", "model": args.model, "data": str(folder / "pictures"), "state-dir": str(home / "state")}
    start = Start(address, config, insecure=True, port=free_port(), uplink_mbit=args.mbit if args.chunks == "auto" else 0.0)
    env = environment(home, f"{made.token}/far/") | transfer_settings(start.uplink_mbit)
    env |= {"no_proxy": f"127.0.0.1,{HERE}", "NO_PROXY": f"127.0.0.1,{HERE}", "HETEROFLEET_HOME": str(home)}
    log = folder / "far.log"
    with log.open("wb") as stream:
        made.processes["far"] = subprocess.Popen(
            [*prefix, *start.command], cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
    return log


def measure(args: argparse.Namespace, folder: Path) -> bool:
    """Run one federation over the slow line and print what it took; return whether all rounds counted."""
    digit_folders([folder / "pictures"], 60)
    with ExitStack() as stack:
        prefix: list[str] = []
        if args.via == "tc":
            prefix = stack.enter_context(slow_namespace(args.mbit, args.down_mbit))
        made = stack.enter_context(deployment(folder / "logs", keys=0, secure=False))
        made.start_superlink()
        host = HERE if prefix else "127.0.0.1"
        up, down = (0.0, 0.0) if prefix else (args.mbit * 1e6, args.down_mbit * 1e6)
        relay = Relay(("127.0.0.1", made.port), up, down, host)
        stack.callback(relay.close)
        log = start_node(made, Address(host, relay.port), args, folder, prefix)
        made.wait_online(1)
        settings = {"strategy": "fedavg", "fedavg.model": args.model, "num-rounds": args.rounds, "fleet.min-nodes": 1, "eval-every": 0}
        before = [(rate.passed, rate.busy) for rate in (relay.up, relay.down)]
        try:
            rows = run_on(made, folder / "out", {**settings, "transport.dtype": args.dtype, "fleet.round-timeout": args.timeout})
        except LaunchError as error:
            print(f"the run failed: {error}")
            told = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "ERROR" in line or "Error" in line]
            print("\n".join(told[-4:]))
            return False
        went = [(rate.passed - passed, rate.busy - busy) for rate, (passed, busy) in zip((relay.up, relay.down), before, strict=True)]
    return report(rows, args, went, log.read_text(encoding="utf-8", errors="replace"))


def report(rows: list[dict], args: argparse.Namespace, went: list[tuple[int, float]], log: str) -> bool:
    """Print the numbers; return whether all rounds counted."""
    pieces = transfer_settings(args.mbit)["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] if args.chunks == "auto" else "5242880"
    line = f"{args.mbit:g} Mbit/s up and {args.down_mbit:g} down by {args.via}"
    print(f"{line}, {args.model} in {args.dtype}, pieces of {int(pieces) / 1e6:.2f} MB")
    print(f"{'round':>6}{'MB down':>9}{'MB up':>7}{'ideal s':>9}{'seconds':>9}{'train s':>9}")
    rounds = of_kind(rows, "round")
    trained = {row["round"]: row.get("seconds_train", 0.0) for row in of_kind(rows, "node")}
    for row in rounds:
        ideal = 8e-6 * (row["bytes_down"] / args.down_mbit + row["bytes_up"] / args.mbit)
        numbers = f"{row['bytes_down'] / 1e6:>9.2f}{row['bytes_up'] / 1e6:>7.2f}{ideal:>9.1f}{row['seconds']:>9.1f}"
        print(f"{row['round']:>6}{numbers}{trained.get(row['round'], 0.0):>9.1f}")
    for way, mbit, (passed, busy) in zip(("up", "down"), (args.mbit, args.down_mbit), went, strict=True):
        ideal = 8e-6 * passed / mbit
        # What goes down waits in the kernel before the slow link of tc, behind the relay that counts.
        line = f", the line was busy for {busy:.1f} s" if way == "up" or args.via == "relay" else ""
        print(f"{passed / 1e6:.2f} MB {way} in all: {ideal:.1f} s at that rate{line}")
    print(f"retries: {log.count('Connection attempt failed')}; failures: {len(of_kind(rows, 'failure'))}")
    for row in of_kind(rows, "failure"):
        print(f"round {row['round']}: {row['reason']}")
    return len(rounds) == args.rounds and not of_kind(rows, "failure")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=1.0, help="megabits a second from the node to the server")
    parser.add_argument("--down-mbit", type=float, default=0.0, help="to the node; by default as --mbit")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    parser.add_argument("--model", default="cnn1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--chunks", choices=("auto", "flower"), default="auto")
    parser.add_argument("--via", choices=("tc", "relay"), default="relay")
    parser.add_argument("--timeout", type=float, default=1800.0, help="fleet.round-timeout in seconds")
    args = parser.parse_args()
    args.down_mbit = args.down_mbit or args.mbit
    with tempfile.TemporaryDirectory() as folder:
        return 0 if measure(args, Path(folder)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
