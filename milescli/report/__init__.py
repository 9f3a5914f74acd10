"""A run, or two compared, as one file for other people: HTML or Markdown. Reads files alone, and
starts nothing; called by `miles report`."""
