"""Child processes that answer calls over pipes: workers, pools of them, and what guards them."""
