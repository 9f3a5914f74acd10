"""Sends a run's metrics to experiment trackers, and to Prometheus. Each is one short file behind
`base.TRACKERS`; none steers a run, delays it or ends it."""
