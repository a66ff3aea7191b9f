"""A package of somebody else, with filters."""
