"""The jobs of a comparison, each in a process and a folder of its own, one process a core.

A job's folder is a run's folder (`status.json`, `metrics.jsonl`, checkpoints, `log.txt`) and holds two files more:
`job.json` (`state`: running, done, failed or stopped; `reason`; `cpu_seconds` of all its attempts that ended in order;
`fingerprint` of the code) and, for a job that fine-tunes, `finetuned.json`. A job that is not done is resumed from its
last complete round; where the code has changed since, it starts anew. What a job kept for its nodes is removed once it is done.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client_app.protocol import fingerprint
from server_app.cases import Comparison, Job
from server_app.checkpoint import write_text
from server_app.launch import read_status
from server_app.link import uninterrupted
from server_app.overrides import merged
from server_app.settings import SettingsError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_LOOK = 0.3  # seconds between looks at running jobs
_PATIENCE = 10.0  # seconds a stopped job has to end by itself


@dataclass
class Progress:
    """How far all jobs are.

    Attributes:
        total: jobs in all.
        skipped: jobs that were done before.
        over: job -> its `job.json`, in the order in which they ended.
        running: job -> its `status.json` now.
        eta_seconds: of everything; None until a job has shown how long a round takes.
    """

    total: int
    skipped: int = 0
    over: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    eta_seconds: float | None = None


def job_record(folder: Path) -> dict[str, Any]:
    """Return `job.json` of a job's folder, or an empty dict."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / "job.json").read_text(encoding="utf-8")))
    return {}


def is_done(folder: Path) -> bool:
    """Return whether the job of this folder ended as planned."""
    return bool(job_record(folder).get("state") == "done")


def check_cases(comparison: Comparison, jobs_dir: Path) -> tuple[str, ...]:
    """Return what `preflight.check_fleet` says of the cases, all of which can begin; what is done already is not asked.

    Args:
        comparison: what is to run.
        jobs_dir: holds the folders of earlier jobs.

    Raises:
        SettingsError: naming the case.
    """
    from server_app.preflight import check_fleet  # torch: seconds

    warnings: list[str] = []
    for name, job in _first_jobs(comparison):
        if is_done(jobs_dir / job.folder):
            continue
        try:
            warnings += (f"case {name!r}: {warning}" for warning in check_fleet(merged([], job.config), job.nodes))
        except SettingsError as error:
            raise SettingsError(f"case {name!r}: {error}") from error
    return tuple(dict.fromkeys(warnings))


def _first_jobs(comparison: Comparison) -> Iterator[tuple[str, Job]]:
    """Yield each choice of each case at the first seed, and the first case at every seed: those differ in their splits alone."""
    for case in comparison.cases:
        for variant in case.variants:
            yield case.name, variant.jobs[0]
    first = comparison.cases[0]
    for job in first.variants[0].jobs[1:]:
        yield first.name, job


def run_jobs(jobs: list[Job], out_dir: Path, workers: int, on_progress: Callable[[Progress], None] = lambda progress: None) -> Progress:
    """Run what is not done yet, `workers` jobs at once, and return how all ended; a failed job does not end the others.

    On any exception (Ctrl-C) every process it started is ended before it goes on.
    """
    waiting = [job for job in jobs if not is_done(out_dir / job.folder)]
    if waiting:
        _start_server()
    pool = _Pool(waiting, out_dir, max(1, min(workers, len(waiting))), Progress(len(jobs), skipped=len(jobs) - len(waiting)))
    try:
        while pool.step():
            on_progress(pool.progress)
    finally:
        with uninterrupted():
            pool.end()
    on_progress(pool.progress)
    return pool.progress


class _Pool:
    """Starts a process a job: one that dies takes no other with it, and its memory is given back."""

    def __init__(self, waiting: list[Job], out_dir: Path, workers: int, progress: Progress) -> None:
        self.waiting, self.out_dir, self.workers, self.progress = list(waiting), out_dir, workers, progress
        self.running: dict[str, tuple[Job, BaseProcess, float, int]] = {}
        self.pace: dict[str, float] = {}  # strategy -> seconds a round
        self.context = multiprocessing.get_context("forkserver")

    def step(self) -> bool:
        """Start what there is room for, wait a little, take what has ended; return whether anything is left."""
        while self.waiting and len(self.running) < self.workers:
            self._start(self.waiting.pop(0))
        if not self.running:
            return False
        wait([process.sentinel for _, process, _, _ in self.running.values()], timeout=_LOOK)
        for name, (job, process, began, first) in list(self.running.items()):
            status = read_status(self.out_dir / name)
            done = int(status.get("round") or 0) - first
            if done > 0:
                self.pace[job.strategy] = (time.monotonic() - began) / done
            self.progress.running[name] = status
            if process.exitcode is not None:
                self._take(name, process)
        self.progress.eta_seconds = self._eta()
        return True

    def _start(self, job: Job) -> None:
        folder = self.out_dir / job.folder
        if (job_record(folder) or {"fingerprint": fingerprint()}).get("fingerprint") != fingerprint():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        first = int(read_status(folder).get("round") or 0) if (folder / "run.json").exists() else 0
        process = self.context.Process(target=_child, args=(job, folder), daemon=True, name=job.folder)
        process.start()
        self.running[job.folder] = (job, process, time.monotonic(), first)
        self.progress.running[job.folder] = {}

    def _take(self, name: str, process: BaseProcess) -> None:
        del self.running[name], self.progress.running[name]
        record = job_record(self.out_dir / name)
        if process.exitcode and record.get("state") not in ("failed", "stopped"):
            how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
            memory = "; the machine may be out of memory: try fewer --jobs" if process.exitcode == -signal.SIGKILL else ""
            record |= {"state": "failed", "reason": f"its process ended with {how}{memory}; see {self.out_dir / name / 'log.txt'}"}
            write_text(self.out_dir / name / "job.json", json.dumps(record))
        self.progress.over[name] = record

    def _eta(self) -> float | None:
        if not self.pace:
            return None
        typical = sum(self.pace.values()) / len(self.pace)
        left = sum(int(job.config["num-rounds"]) * self.pace.get(job.strategy, typical) for job in self.waiting)
        for name, (job, *_) in self.running.items():
            rounds = int(job.config["num-rounds"]) - int(self.progress.running.get(name, {}).get("round") or 0)
            left += rounds * self.pace.get(job.strategy, typical)
        return left / self.workers

    def end(self) -> None:
        """End every process that still runs: ask, wait, then kill."""
        processes = [process for _, process, _, _ in self.running.values()]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _PATIENCE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()


def _start_server() -> None:
    """Start the process from which jobs are forked: it has the imports, one thread, and no ear for a terminal's Ctrl-C."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["server_app.app", "server_app.inprocess", "heterofleet_app", "client_app.app"]
    )
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1"):
            forkserver.ensure_running()
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _environment(**wanted: str) -> Iterator[None]:
    """Set these variables for what is started inside."""
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _child(job: Job, folder: Path) -> None:
    """Run a job in a process of its own; ends with the parent, and on SIGTERM in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all processes: the parent decides
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with open(folder / "log.txt", "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    work(job, folder)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def work(job: Job, folder: Path) -> None:
    """Run a job in this process until `job.json` says done; whatever ends it is written there too.

    Raises:
        SettingsError, CheckpointError, FleetError: as the run itself.
    """
    record = {"cpu_seconds": 0.0, **job_record(folder), "fingerprint": fingerprint()}
    began, before = time.process_time(), float(record["cpu_seconds"])

    def note(state: str, reason: str = "") -> None:
        spent = {"state": state, "reason": reason, "cpu_seconds": before + time.process_time() - began}
        write_text(folder / "job.json", json.dumps({**record, **spent}))

    folder.mkdir(parents=True, exist_ok=True)
    note("running")
    try:
        _work(job, folder)
    except Exception as error:
        note("failed", str(error) if isinstance(error, (ValueError, RuntimeError)) and str(error) else f"{type(error).__name__}: {error}")
        raise
    except BaseException:
        note("stopped", "stopped before its end")
        raise
    shutil.rmtree(folder / "state", ignore_errors=True)  # gigabytes, with many nodes
    note("done")


def _work(job: Job, folder: Path) -> None:
    from server_app import inprocess
    from server_app.finetune import finetune

    again = {"resume": str(folder)} if (folder / "run.json").exists() else {}
    if read_status(folder).get("state") != "completed":
        inprocess.run({**job.config, **again}, job.nodes, folder)
    if job.finetune:
        finetune(job.config, job.nodes, folder)
