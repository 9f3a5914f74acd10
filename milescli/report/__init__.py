"""A run, or two compared, as one file for other people: HTML or Markdown. Only reads files, and
starts nothing; called by `miles report`."""
