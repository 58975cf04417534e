"""The model that a node uses under a method is the one that rows, tables and cards name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fleet_fixture import config, rows, run

BN = "tests.user_models:batch_norm_net"


@pytest.mark.parametrize(
    ("strategy", "together"),
    [("fedavg", ["mlp", "mlp"]), ("fedhm", ["mlp at 1", "mlp at 0.5"]), ("fedmrl", [BN, "mlp"])],
)
def test_rows_and_cards_name_the_model_in_use(tmp_path: Path, strategy: str, together: list[str]) -> None:
    settings = config(tmp_path, strategy=strategy, alone=True, export="own", num_rounds=1, fleet__models=f"{BN},mlp", fedhm__model="mlp")
    settings["fleet.rank-ratios"] = "1.0,0.5"
    run(settings, tmp_path / "out", nodes=2)
    assert [row["model"] for row in rows(tmp_path / "out", "node", "local")] == [BN, "mlp"]
    assert [row["model"] for row in rows(tmp_path / "out", "node", strategy)] == together
    cards = sorted((tmp_path / "out" / "exports").rglob("*.json"))
    assert [json.loads(card.read_text(encoding="utf-8"))["architecture"] for card in cards] == together
