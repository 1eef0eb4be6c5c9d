"""Tools of the project, run from its root."""
