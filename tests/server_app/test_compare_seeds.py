"""What `heterofleet compare` says where there is one seed only."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from server_app import compare_show
from server_app.cases import LOCAL, plan_comparison
from server_app.compare import write_comparison
from tests.server_app.test_compare import finished, job_of


@pytest.mark.parametrize("seeds", ["3", "1,2"])
def test_one_seed_is_told_to_say_little_on_the_terminal_and_the_page_and_shows_no_spread(tmp_path, seeds):
    made = plan_comparison(nodes=2, seeds=seeds, cases=["ours: strategy=fedmrl"])
    for seed in made.seeds:
        for name, last in ((LOCAL, 0.5), ("ours", 0.6 + seed / 10)):
            finished(tmp_path / "jobs", job_of(made, name, seed), {"a": last, "b": last})
    result = write_comparison(made, tmp_path)
    console = Console(width=300, record=True, file=io.StringIO())
    compare_show.results(console, result)
    shown, page = console.export_text(), (tmp_path / "compare.html").read_text()
    ours = json.loads((tmp_path / "compare.json").read_text())["rows"][3]
    one = seeds == "3"
    for text in (shown, page.partition("Every run")[0]):  # further down the page is the deviation over nodes
        assert text.count("One seed says little") == text.count("--seeds 1,2,3") == one
        assert ("±" not in text) == one
    assert (ours["std"] is None, ours["gain_std"] is None) == (one, one)
    assert ("90.0% – 90.0%" in shown, "70.0% – 80.0%" in shown) == (False, not one)
