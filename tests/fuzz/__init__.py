"""Fuzzers: malformed and hostile bytes for each parser of data that others wrote."""
