"""Runs child processes that answer calls over pipes: workers, pools of them, and guards that end
them."""
