"""The environment of all trials that have one. Its steps take a while, so that there is time to do
harm within them."""

from __future__ import annotations

import time

from tests.agents.user_environments import Count

STEP_S = 0.05


class Paced(Count):
    """The same steps, later."""

    def step(self, action: str):
        """See the class."""
        time.sleep(STEP_S)
        return super().step(action)
