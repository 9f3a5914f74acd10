"""Lists the families, models and recipes to choose from, as data. Takes no device."""
