"""Base class of every kind of session: its HTTP address (`base_url`, `api_key`), and the refusal of
roles with models of their own. It serves nothing itself."""

from __future__ import annotations

from milescli.core.errors import AgentError
from milescli.rollout.base import Session, SessionAddress


class SessionBase:
    """Implements milescli.rollout.base.Session for a session that may be served at a URL."""

    address: SessionAddress | None = None
    """None: the session is not served over HTTP."""

    @property
    def base_url(self) -> str:
        """Return the URL of the session."""
        return self._require_address.base_url

    @property
    def api_key(self) -> str:
        """Return the key of the session at its URL."""
        return self._require_address.api_key

    def played_by(self, role: str) -> Session:
        """Return the session of the model that plays `role`."""
        raise AgentError(
            f"the role `{role}` has no model of its own here",
            why="`rollout.roles.NAME.policy` only works for the agent `multi_agent` in a run",
            fix="--set rollout.agent=multi_agent",
        )

    @property
    def _require_address(self) -> SessionAddress:
        if self.address is None:
            raise AgentError(
                "this session is not served over HTTP",
                why="the agent used session.base_url, but sessions are not served here",
                fix="call session.chat or session.generate",
            )
        return self.address
