"""What there is to choose from, as data: families, models, recipes. Takes no device."""
