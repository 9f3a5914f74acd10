"""`summary`: what `miles status RUN --json` prints."""

from __future__ import annotations

from milescli.web.asked import Asked, Json
from milescli.web.states import state_of


def summary(asked: Asked) -> Json:
    """Of a run or an adapter, as of now."""
    with asked.history() as history:
        return {
            "name": history.name,
            "state": state_of(asked.with_logs),
            "phase": history.phase,
            "phase_detail": history.phase_detail,
            "phase_s": history.phase_s,
            "step": history.step,
            "num_steps": history.num_steps,
            "share_done": history.share_done,
            "learns_from_rows": history.learns_from_rows,
            "restarts": history.restarts,
            "last_s": history.last_s,
        }
