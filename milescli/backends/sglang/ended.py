"""A response that ends by itself in the very pass in which it is given up has ended. Stock takes it
for given up, with all that the pass has made: whoever asks for the rest would go on behind its end,
and where a pass makes several tokens, may have been given too many. Installed by the plug-in."""

from __future__ import annotations


def install() -> None:
    """Around what decides after each pass whether a request is at its end."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

    ordinary = Req.update_finish_state

    def update_finish_state(self, *arguments, **settings):
        given_up = self.to_finish
        if not isinstance(given_up, FINISH_ABORT) or given_up.status_code is not None:
            return ordinary(self, *arguments, **settings)  # an error, or nothing
        self.to_finish = None
        ordinary(self, *arguments, **settings)
        if not self.finished():
            self.finished_reason = given_up
        return None

    Req.update_finish_state = update_finish_state
