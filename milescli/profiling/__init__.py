"""Where the time of a running run goes, on request: `miles profile`."""
