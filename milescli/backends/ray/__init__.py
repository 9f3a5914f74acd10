"""Ray: processes and placement. The only place that imports it."""
