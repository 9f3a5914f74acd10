"""An entropy bonus whose weight follows a target."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.recipe.train import Train


class EntropyControl:
    """c rises by `entropy_delta` after a step whose entropy is below `entropy_target`, else falls;
    it stays between 0 and `entropy_max`, and acts only while the entropy is below the target
    (Skywork-OR1, arXiv 2505.22312). Without a target, c is `entropy_coef`."""

    def __init__(self, settings: Train) -> None:
        self._settings = settings
        self._coef = settings.entropy_coef
        self._is_low = True

    @property
    def weight(self) -> float:
        """Of the bonus in the next step."""
        return self._coef if self._is_low else 0.0

    @property
    def state(self) -> dict[str, float]:
        """All that changes."""
        if self._settings.entropy_target is None:
            return {}
        return {"entropy_coef": self._coef, "entropy_is_low": float(self._is_low)}

    def observe(self, entropy: float | None) -> None:
        """`entropy`: nats, mean over the trained tokens of the step."""
        target, delta = self._settings.entropy_target, self._settings.entropy_delta
        if target is None or entropy is None:
            return
        self._is_low = entropy < target
        moved = self._coef + (delta if self._is_low else -delta)
        self._coef = min(max(moved, 0.0), self._settings.entropy_max)

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` said."""
        self._coef = state.get("entropy_coef", self._coef)
        self._is_low = bool(state.get("entropy_is_low", self._is_low))
