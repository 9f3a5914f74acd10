"""Where a run's figures go beside its own folder: trackers of experiments, and Prometheus. Each is
one short file behind `base.TRACKERS`; none steers a run, holds it up or ends it."""
