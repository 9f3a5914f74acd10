"""Where a run's metrics go besides its own folder: experiment trackers, and Prometheus. Each is one
short file behind `base.TRACKERS`; none steers a run, delays it or ends it."""
