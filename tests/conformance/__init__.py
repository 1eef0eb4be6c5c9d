"""One suite for every backend of triggered operations: what is promised of one is asked of all."""
