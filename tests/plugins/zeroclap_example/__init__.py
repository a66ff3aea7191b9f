"""A package of somebody else, with an objective, trackers and filters."""
