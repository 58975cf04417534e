"""FedHM on a node held to 1 core and 1 GB: does a round finish, and what does it take in memory, disk and seconds?

    python benchmarks/edge_node.py [--model resnet18_gn] [--rank-ratio 0.25] [--memory-mb 1024] [--rounds 2]

A SuperLink and two SuperNodes run on this machine as in a deployment, with TLS and keys. `pi`, at --rank-ratio, is held to one core
and to --memory-mb, all its processes together; `lab` has the full model and no limit. Both read digits from folders of pictures.

The limit is a memory cgroup (version 2 or 1, which need root or a delegated group); where none can be made, it is RLIMIT_DATA, which
holds for each process on its own: the first line says which. The cgroup's peak counts the node's own memory and the file pages that it
was the first to touch; the sum of resident memory counts pages that processes share several times.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import resource
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from packaging.requirements import Requirement

from benchmarks.edge_fleet import digit_folders, of_kind, run_on
from server_app import processes
from server_app.deploy import deployment
from server_app.overrides import APP_DIR

NODE = "pi"
CUDA_PARTS = ("nvidia-", "cuda-", "triton")
GROUPS = {  # files of a memory cgroup, by version
    2: {"limit": "memory.max", "swap": "memory.swap.max", "peak": "memory.peak", "events": "memory.events"},
    1: {"limit": "memory.limit_in_bytes", "swap": "", "peak": "memory.max_usage_in_bytes", "events": "memory.oom_control"},
}


@dataclass(frozen=True)
class Group:
    """A memory cgroup of its own; every process that a member starts is a member."""

    folder: Path
    version: int

    @classmethod
    def of(cls, limit: int) -> Group | None:
        """Return a new group with `limit` bytes, or None where this process may not make one."""
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            version = 2 if not controllers else 1
            if version == 1 and controllers != "memory":
                continue
            root = Path("/sys/fs/cgroup") / ("" if version == 2 else "memory")
            made = cls(root / path.strip("/") / f"edge-node-{os.getpid()}", version)
            try:
                made.folder.mkdir()
            except OSError:
                continue
            try:
                made._write("limit", str(limit))
                if GROUPS[version]["swap"]:
                    made._write("swap", "0")
            except OSError:
                made.folder.rmdir()
                continue
            return made
        return None

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def peak(self) -> int:
        """Return the most bytes it ever held."""
        return int((self.folder / GROUPS[self.version]["peak"]).read_text(encoding="ascii"))

    def killed(self) -> int:
        """Return how many of its processes the kernel killed for memory."""
        lines = (self.folder / GROUPS[self.version]["events"]).read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def _write(self, what: str, text: str) -> None:
        path = self.folder / GROUPS[self.version][what]
        if not path.exists():
            raise FileNotFoundError(path)
        path.write_text(text, encoding="ascii")


@dataclass
class Resident:
    """Peaks in MB of resident memory: of the largest process of each program, and of all the node's processes together."""

    mark: str
    by_program: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    together: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        """Read /proc until `done`."""
        while not self.done.wait(0.1):
            now = 0.0
            for pid in processes.marked(self.mark):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
                    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
                except (OSError, StopIteration):  # it has just ended
                    continue
                program = next((Path(os.fsdecode(word)).name for word in words if b"flower-" in word or b"flwr-" in word), "other")
                now += kilobytes / 1024
                self.by_program[program] = max(self.by_program[program], kilobytes / 1024)
            self.together = max(self.together, now)


@contextmanager
def followed(mark: str) -> Iterator[Resident]:
    """Yield the peaks of the processes with this mark while they are read."""
    found = Resident(mark)
    reader = threading.Thread(target=found.sample, daemon=True)
    reader.start()
    try:
        yield found
    finally:
        found.done.set()
        reader.join()


def hold(pid: int, limit: int, group: Group | None) -> str:
    """Hold a process and all it will start to one core and `limit` bytes; return how."""
    os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    if group:
        group.add(pid)
        return f"cgroup v{group.version}, all processes together"
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
    return "RLIMIT_DATA, each process on its own"


def installed_bytes(requirements: Path) -> dict[str, int]:
    """Return the bytes on this disk of each package that a requirements file names or needs, by its name."""
    lines = (line.split("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines())
    waiting, found = [Requirement(line) for line in lines if line], dict[str, int]()
    while waiting:
        name = waiting.pop().name.lower().replace("_", "-")
        if name in found:
            continue
        try:
            made = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        paths = [Path(str(file.locate())) for file in made.files or ()]
        found[name] = sum(path.stat().st_size for path in paths if path.is_file())
        needs = map(Requirement, made.requires or ())
        waiting += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def show_disk() -> None:
    """Print what the node's requirements take."""
    sizes = installed_bytes(APP_DIR / "requirements-node.txt")
    cuda = sum(size for name, size in sizes.items() if name.startswith(CUDA_PARTS))
    whole = sum(sizes.values())
    most = ", ".join(f"{name} {sizes[name] / 1e6:.0f}" for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:6])
    print(f"disk of requirements-node.txt here: {whole / 1e6:.0f} MB in {len(sizes)} packages, {cuda / 1e6:.0f} MB of it CUDA's ({most})")


def measure(args: argparse.Namespace, folder: Path) -> bool:
    """Run the federation, print what it took; return whether every round had the held node's update."""
    limit = args.memory_mb * 2**20
    digit_folders([folder / NODE, folder / "lab"], args.samples)
    group = Group.of(limit)
    try:
        with deployment(folder / "logs", keys=2) as made, followed(f"{made.token}/{NODE}/") as resident:
            made.start_superlink()
            for number, (name, ratio) in enumerate({NODE: args.rank_ratio, "lab": 1.0}.items(), start=1):
                made.register(name, f"node-{number}")
                config = {"name": name, "model": args.model, "rank-ratio": ratio, "data": str(folder / name)}
                made.start_node(name, {**config, "state-dir": str(folder / f"state-{name}")}, key=f"node-{number}")
                if name == NODE:
                    how = hold(made.processes[name].pid, limit, group)
            made.wait_online(2)
            print(f"{NODE}: {args.model} at rank ratio {args.rank_ratio:g}, 1 core and {args.memory_mb} MB ({how}),", end=" ")
            print(f"{args.samples} pictures, batch {args.batch_size}", flush=True)
            settings = {"strategy": "fedhm", "fedhm.model": args.model, "num-rounds": args.rounds, "fleet.min-nodes": 2}
            train = {"train.batch-size": args.batch_size, "transport.dtype": "float16", "eval-every": 1}
            rows = run_on(made, folder / "out", {**settings, **train})
        return report(rows, args.rounds, resident, group)
    finally:
        if group:
            group.folder.rmdir()


def report(rows: list[dict], rounds: int, resident: Resident, group: Group | None) -> bool:
    """Print seconds and megabytes; return whether the held node was in every round."""
    print(f"{'round':>6}{'seconds':>9}{'of pi: load':>13}{'train':>8}{'MB peak':>9}{'MB up':>7}{'accuracy':>10}")
    mine = of_kind(rows, "node", NODE)
    seconds = {row["round"]: row["seconds"] for row in of_kind(rows, "round")}
    for own in mine:
        print(f"{own['round']:>6}{seconds[own['round']]:>9.1f}{own['seconds_load']:>13.2f}{own['seconds_train']:>8.2f}", end="")
        print(f"{own['peak_memory_mb']:>9.0f}{own['bytes_up'] / 1e6:>7.2f}{own['accuracy']:>10.3f}")
    programs = ", ".join(f"{name} {megabytes:.0f}" for name, megabytes in sorted(resident.by_program.items()))
    print(f"peak resident memory in MB of one process: {programs}; of all together {resident.together:.0f}")
    if group:
        print(f"peak of the cgroup: {group.peak() / 2**20:.0f} MB; processes killed for memory: {group.killed()}")
    failures = [row for row in of_kind(rows, "failure") if row.get("node") == NODE]
    for row in failures:
        print(f"failure in round {row['round']}: {row['reason']}")
    finished = len(mine) == rounds and not failures
    print("every round finished" if finished else "NOT every round finished")
    return finished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18_gn", help="fedhm.model")
    parser.add_argument("--rank-ratio", type=float, default=0.25)
    parser.add_argument("--memory-mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=80, help="pictures a node, a fifth of them for testing")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    show_disk()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if measure(args, Path(folder)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
