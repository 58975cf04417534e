"""The ServerApp's main: checks the settings, runs the strategies one after the other, writes the report."""

from __future__ import annotations

import json
import logging
import secrets
import shlex
import traceback
from collections.abc import Mapping
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid

import strategies
from client_app.profile import home, safe_name
from client_app.protocol import APP_DIR, Order, fingerprint
from models import ModelError
from server_app.checkpoint import write_tensors, write_text
from server_app.preflight import check_names
from server_app.recorder import Recorder
from server_app.report import write_report
from server_app.resume import CheckpointError, check_resume, is_free, read_header
from server_app.rundata import read_object
from server_app.settings import NO_TEST, Settings, SettingsError
from strategies.engine import HeteroStrategy
from strategies.fleet import FleetError
from tasks import DataError

# What a user can mend: told in words, without a traceback.
EXPECTED = (SettingsError, CheckpointError, FleetError, ModelError, DataError)


def main(grid: Grid, context: Context) -> None:
    """Run what the run config says; the out-dir's status.json says how it ended, and so does Flower's status."""
    torch.set_num_threads(1)
    run_config = dict(context.run_config)
    out_dir = Path(str(run_config.get("resume") or run_config.get("out-dir") or home() / "runs" / str(context.run_id))).expanduser()
    try:
        out_dir = out_dir.resolve()
        out_dir.mkdir(parents=True, exist_ok=True)
        run_all(grid, run_config, out_dir, context.run_id)
    except BaseException as error:
        reason = str(error) if isinstance(error, (ValueError, RuntimeError)) and str(error) else f"{type(error).__name__}: {error}"
        log(ERROR, "%s", reason if isinstance(error, EXPECTED) else traceback.format_exc())
        logging.getLogger("flwr").addFilter(_without_traceback)
        _mark_failed(out_dir, reason)
        raise


def _without_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback out of a record about an expected error: Flower logs one of whatever ends a ServerApp."""
    if record.exc_info and isinstance(record.exc_info[1], EXPECTED):
        record.exc_info = None
    return True


def run_all(grid: Grid, run_config: Mapping[str, Any], out_dir: Path, run_id: int) -> None:
    """Run the chosen strategy, after `local` where nodes are compared with being alone, and write the report.

    All nodes are met for each strategy before the first of them trains, so that what does not fit is known at once.

    Raises:
        SettingsError, CheckpointError, FleetError: with the reason; checkpoints stay as they are.
    """
    settings, method = strategies.settings_of(run_config)
    check_names(settings, method)
    header = _open(settings, run_config, out_dir, run_id)
    if not settings.data.test_fraction:
        log(WARNING, NO_TEST)
    runs = tuple(dict.fromkeys((["local"] if settings.alone else []) + [settings.strategy]))
    recorder = Recorder(out_dir, header, runs, settings.num_rounds)
    log(INFO, "results: %s", out_dir)
    if not settings.resume:
        recorder.status()
    prepared = []
    for run in runs:
        strategy = _prepared(run_config, recorder, run, header)
        prepared.append((run, strategy))
        if strategy.first_round <= settings.num_rounds:
            _check_nodes(header, run_config, out_dir, strategy.meet(grid))
    for run, strategy in prepared:
        recorder.enter(run, strategy.first_round - 1)
        if strategy.first_round <= settings.num_rounds:
            _run_one(grid, recorder, run, strategy, export=run == settings.strategy)
    recorder.status(round=settings.num_rounds, eta_seconds=0)
    report = write_report(out_dir)
    recorder.status(state="completed", report=str(report))
    log(INFO, "report: %s", report)


def _prepared(run_config: Mapping[str, Any], recorder: Recorder, run: str, header: dict[str, Any]) -> HeteroStrategy:
    """Return the server half of one run, with the state of its newest checkpoint where the run goes on."""
    settings, config = strategies.settings_of({**run_config, "strategy": run})
    found = recorder.checkpoints(run).load() if settings.resume else None
    done = found[0] if found else 0
    order = Order(
        run=run,
        experiment=header["experiment"],
        lineage=header["lineage"],
        server_round=0,
        checkpoint_round=done,
        fingerprint=fingerprint(),
        app_dir=str(APP_DIR),
        state_dir=str(recorder.out_dir / "state"),
    )
    recorder.rewind(run, done)
    strategy: HeteroStrategy = strategies.strategy_class(run)(settings, config, order, recorder)
    if found is not None:
        strategy.load_state_dict(found[1])
        log(INFO, "%s: resumed after round %d", run, done)
    strategy.first_round = done + 1
    return strategy


def _run_one(grid: Grid, recorder: Recorder, run: str, strategy: HeteroStrategy, *, export: bool) -> None:
    rounds = strategy.settings.num_rounds
    strategy.start(grid, num_rounds=rounds)
    if shared := strategy.shared_tensors():
        write_tensors(recorder.out_dir / "shared" / f"{run}.safetensors", shared)
    if strategy.settings.export != "none" and export:
        paths = strategy.export(rounds)
        write_text(recorder.out_dir / "exports.json", json.dumps(paths, indent=1, sort_keys=True))


def _open(settings: Settings, run_config: Mapping[str, Any], out_dir: Path, run_id: int) -> dict[str, Any]:
    """Return the run's header: a new one, or that of the run that is resumed, checked against the settings."""
    if settings.resume:
        header = read_header(out_dir)
        check_resume(out_dir, header, run_config)
        return header
    if not is_free(out_dir):
        raise SettingsError(
            f"out-dir = {str(out_dir)!r} already holds a run; go on with it by resume={shlex.quote(str(out_dir))}, or name another folder"
        )
    for left in ("status.json", "metrics.jsonl"):  # of a run that failed before its first round
        (out_dir / left).unlink(missing_ok=True)
    experiment = safe_name(settings.experiment or f"{settings.strategy}-{run_id}")
    header = {"experiment": experiment, "lineage": secrets.token_hex(6), "run_config": dict(run_config), "fingerprint": fingerprint()}
    write_text(out_dir / "run.json", json.dumps(header, indent=1))
    return header


def _check_nodes(header: dict[str, Any], run_config: Mapping[str, Any], out_dir: Path, nodes: int) -> None:
    """Note how many nodes are simulated, or refuse to go on with another number."""
    if "nodes" in header:
        check_resume(out_dir, header, run_config, nodes)
        return
    header["nodes"] = nodes
    write_text(out_dir / "run.json", json.dumps(header, indent=1))


def _mark_failed(out_dir: Path, reason: str) -> None:
    """Write the reason, unless nothing has begun: what an earlier run here says of itself stays."""
    path = out_dir / "status.json"
    status = read_object(path)
    if (out_dir / "run.json").exists() and status.get("state") in ("completed", "failed"):
        return
    try:
        write_text(path, json.dumps({**status, "state": "failed", "reason": reason}))
    except OSError as error:
        log(ERROR, "%s cannot be written: %s", path, error)
