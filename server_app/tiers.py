"""What a model costs a node at each rank ratio of FedHM, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

import models
from server_app import show
from server_app.overrides import merged
from server_app.settings import SettingsError
from strategies.fedhm.config import Config
from strategies.fedhm.tiers import cost_of

NOTE = "Factors cut parameters, arithmetic and traffic, not the activations that training keeps: each pair of factors adds one."


def print_tiers(
    console: Console, names: Sequence[str], shape: tuple[int, ...], outputs: int, ratios: Sequence[float], overrides: list[str]
) -> None:
    """Print the models in full and at each of `ratios`, cut as the run config's `fedhm.*` says; no names: `fedhm.model`.

    Raises:
        SettingsError: a ratio outside (0, 1], a wrong override, or a model that cannot be built.
    """
    method = merged([*overrides, "strategy=fedhm"], {}).method
    if not isinstance(method, Config) or not all(0 < ratio <= 1 for ratio in ratios):
        raise SettingsError(f"--rank-ratio {min(ratios):g}: type a number above 0 and at most 1, such as 0.25")
    columns = ("model", "ratio", "parameters", "forward MACs", "sent one way", "activations")
    table = show.table(f"for samples of shape {shape} and {outputs} outputs; fedhm.rho = {method.rho}", columns, numbers=5)
    for name in names or [method.model]:
        try:
            model = models.build(name, input_shape=shape, num_outputs=outputs)
        except models.ModelError as error:
            raise SettingsError(str(error)) from error
        for ratio in sorted({1.0, *ratios}, reverse=True):
            cost = cost_of(model, ratio, method)
            sent, kept = f"{cost.bytes / 1e6:.2f} MB", f"{cost.activation_bytes / 1e6:.2f} MB a sample"
            table.add_row(name, f"{ratio:g}", f"{cost.parameters:,}", show.count(cost.macs), sent, kept)
    console.print(table)
    console.print(NOTE)
