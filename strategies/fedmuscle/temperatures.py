"""Temperatures of the Muscle loss, and how they follow the number of peers.

With N = M + 1 models the loss needs tau^(N) for anchor-peer terms and, through
gamma = 1 / tau^(N-1) - 1 / tau^(N) > 0, tau^(N-1) for peer-peer terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Temperatures:
    """One pair of temperatures, taken as given.

    Attributes:
        tau: tau^(N), divides anchor-peer similarities.
        tau_prev: tau^(N-1), of the peers among themselves; 0 < tau_prev < tau.

    Raises:
        ValueError: when gamma would not be positive and finite.
    """

    tau: float
    tau_prev: float

    def __post_init__(self) -> None:
        if not (0.0 < self.tau_prev < self.tau < math.inf):
            raise ValueError(
                f"temperatures tau = {self.tau}, tau-prev = {self.tau_prev}: need 0 < tau-prev < tau, else peers that agree "
                "would be counted twice (gamma <= 0); for example 0.2 and 0.15"
            )

    @property
    def gamma(self) -> float:
        """1 / tau^(N-1) - 1 / tau^(N), the weight of peer-peer similarities."""
        return 1.0 / self.tau_prev - 1.0 / self.tau

    def agreement(self, num_peers: int) -> float:
        """Return the log-weight of the positive tuple when all models agree, M / tau - gamma M (M - 1) / 2."""
        return num_peers / self.tau - self.gamma * num_peers * (num_peers - 1) / 2


@dataclass(frozen=True)
class FixedSchedule:
    """The same pair for any number of peers, as printed in the paper.

    Attributes:
        tau: as in `Temperatures`.
        tau_prev: as in `Temperatures`.
    """

    tau: float = 0.2
    tau_prev: float = 0.15

    def __post_init__(self) -> None:
        Temperatures(self.tau, self.tau_prev)

    def at(self, num_peers: int) -> Temperatures:
        """Return the pair.

        Raises:
            ValueError: with so many peers that agreement lowers the positive's weight (0.2 and 0.15: from 7 on).
        """
        pair = Temperatures(self.tau, self.tau_prev)
        # The weight is exactly 0 at 7 peers for the default pair; rounding must not decide.
        if num_peers > 0 and pair.agreement(num_peers) <= 1e-9 * num_peers / pair.tau:
            raise ValueError(
                f"fixed temperatures {self.tau}, {self.tau_prev} with {num_peers} peers penalise models that agree; "
                "use the linear schedule, fewer peers, or tau-prev nearer to tau"
            )
        return pair


@dataclass(frozen=True)
class LinearSchedule:
    """tau^(N) = tau0 N, so gamma = 1 / (tau0 M (M + 1)) and agreement weighs 1 / (2 tau0) for any M.

    An exchangeable latent model z^m = u + noise gives temperatures linear in N; tau0 = 0.05 equals the
    paper's pair at N = 4.

    Attributes:
        tau0: temperature per model, > 0.
    """

    tau0: float = 0.05

    def __post_init__(self) -> None:
        if not (0.0 < self.tau0 < math.inf):
            raise ValueError(f"tau0 = {self.tau0}: need a positive number, for example 0.05")

    def at(self, num_peers: int) -> Temperatures:
        """Return tau0 (M + 1) and tau0 M for M >= 1 peers."""
        if num_peers < 1:
            raise ValueError(f"temperatures for {num_peers} peers: need at least 1")
        return Temperatures(self.tau0 * (num_peers + 1), self.tau0 * num_peers)


Schedule = FixedSchedule | LinearSchedule


def resolve(temperatures: Temperatures | Schedule | tuple[float, float], num_peers: int) -> Temperatures:
    """Return the pair for `num_peers`; a bare tuple is a `FixedSchedule`, `Temperatures` are taken as given.

    Raises:
        ValueError: as the schedule says.
    """
    if isinstance(temperatures, Temperatures):
        return temperatures
    if isinstance(temperatures, tuple):
        if len(temperatures) != 2:
            raise ValueError(f"temperatures = {temperatures!r}: need two numbers, tau^(N) and tau^(N-1)")
        return FixedSchedule(*temperatures).at(num_peers)
    return temperatures.at(num_peers)
