"""`heterofleet models --rank-ratio`: numbers counted by hand for one MLP, and the sentence about activations."""

from typer.testing import CliRunner

from server_app.cli import app


def test_models_at_a_rank_ratio(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shape = ["--input-shape", "1,8,8", "--classes", "3"]
    result = CliRunner().invoke(app, ["models", "mlp", "--rank-ratio", "0.25", *shape])
    dense = 64 * 256 + 256 + 128 + 128 * 3 + 3
    assert result.exit_code == 0, result.output
    assert f"{dense + 256 * 128:,}" in result.output
    assert f"{dense + 32 * (256 + 128):,}" in result.output
    assert f"{4 * (dense + 32 * 384) / 1e6:.2f} MB" in result.output
    assert "not the activations" in result.output
    uncut = CliRunner().invoke(app, ["models", "mlp", "--rank-ratio", "0.25", *shape, "-c", "fedhm.rho=2"])
    assert uncut.output.count(f"{dense + 256 * 128:,}") == 2


def test_a_wrong_ratio_or_model_is_refused(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shape = ["--input-shape", "1,8,8", "--classes", "3"]
    wrong = CliRunner().invoke(app, ["models", "mlp", "--rank-ratio", "0", *shape])
    assert (wrong.exit_code, "--rank-ratio 0: type a number" in wrong.output) == (2, True)
    unknown = CliRunner().invoke(app, ["models", "mlpp", "--rank-ratio", "0.5", *shape])
    assert (unknown.exit_code, "mlp" in unknown.output) == (2, True)
