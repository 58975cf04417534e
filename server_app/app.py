"""The ServerApp's main: checks the settings, runs the strategies one after the other, writes the report."""

from __future__ import annotations

import json
import secrets
import traceback
from collections.abc import Mapping
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid

import strategies
from client_app.profile import home, safe_name
from client_app.protocol import APP_DIR, Order, fingerprint
from server_app.checkpoint import CheckpointError, write_tensors, write_text
from server_app.recorder import Recorder
from server_app.report import write_report
from server_app.settings import Settings, SettingsError
from strategies.engine import HeteroStrategy

# What may differ between a run and the run that goes on with it; everything else decides the result.
_MAY_CHANGE = {"num-rounds", "out-dir", "state-dir", "resume", "export", "experiment"}
_MAY_CHANGE |= {f"fleet.{key}" for key in ("min-nodes", "quorum", "join-timeout", "round-timeout", "retries")}


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
        log(ERROR, "%s", traceback.format_exc())
        _mark_failed(out_dir, reason)
        raise


def run_all(grid: Grid, run_config: Mapping[str, Any], out_dir: Path, run_id: int) -> None:
    """Run the chosen strategy, after `local` where nodes are compared with being alone, and write the report.

    Raises:
        SettingsError, CheckpointError, FleetError: with the reason; checkpoints stay as they are.
    """
    settings, _ = strategies.settings_of(run_config)
    header = _open(settings, run_config, out_dir, run_id)
    runs = tuple(dict.fromkeys((["local"] if settings.alone else []) + [settings.strategy]))
    recorder = Recorder(out_dir, header, runs, settings.num_rounds)
    log(INFO, "results: %s", out_dir)
    for run in runs:
        _run_one(grid, run_config, recorder, run, header)
    recorder.status(round=settings.num_rounds, eta_seconds=0)
    report = write_report(out_dir)
    recorder.status(state="completed", report=str(report))
    log(INFO, "report: %s", report)


def _run_one(grid: Grid, run_config: Mapping[str, Any], recorder: Recorder, run: str, header: dict[str, Any]) -> None:
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
    recorder.enter(run, done)
    strategy: HeteroStrategy = strategies.strategy_class(run)(settings, config, order, recorder)
    if found is not None:
        strategy.load_state_dict(found[1])
        log(INFO, "%s: resumed after round %d", run, done)
        if done >= settings.num_rounds:
            return
    strategy.first_round = done + 1
    strategy.start(grid, num_rounds=settings.num_rounds)
    if shared := strategy.shared_tensors():
        write_tensors(recorder.out_dir / "shared" / f"{run}.safetensors", shared)
    if settings.export != "none" and run == run_config["strategy"]:
        paths = strategy.export(settings.num_rounds)
        write_text(recorder.out_dir / "exports.json", json.dumps(paths, indent=1, sort_keys=True))


def _open(settings: Settings, run_config: Mapping[str, Any], out_dir: Path, run_id: int) -> dict[str, Any]:
    """Return the run's header: a new one, or that of the run that is resumed, checked against the settings."""
    path = out_dir / "run.json"
    if not settings.resume:
        if path.exists():
            raise SettingsError(
                f"out-dir = {str(out_dir)!r} already holds a run; go on with it by resume = {str(out_dir)!r}, or name another folder"
            )
        experiment = safe_name(settings.experiment or f"{settings.strategy}-{run_id}")
        header = {"experiment": experiment, "lineage": secrets.token_hex(6), "run_config": dict(run_config), "fingerprint": fingerprint()}
        write_text(path, json.dumps(header, indent=1))
        return header
    if not path.exists():
        raise CheckpointError(f"resume = {settings.resume!r}: no run.json in it; name the out-dir of an earlier run")
    header = json.loads(path.read_text(encoding="utf-8"))
    before = header["run_config"]
    differences = [
        f"{key}: {before.get(key)!r} then, {run_config.get(key)!r} now"
        for key in sorted({*before, *run_config} - _MAY_CHANGE)
        if before.get(key) != run_config.get(key)
    ]
    if differences:
        raise CheckpointError(f"cannot resume {out_dir} with other settings: {'; '.join(differences)}")
    return dict(header)


def _mark_failed(out_dir: Path, reason: str) -> None:
    path = out_dir / "status.json"
    try:
        status = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_text(path, json.dumps({**status, "state": "failed", "reason": reason}))
    except (OSError, ValueError) as error:
        log(ERROR, "%s cannot be written: %s", path, error)
