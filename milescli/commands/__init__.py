"""The doors: one file per verb. Declare options, call one function, show one result."""
