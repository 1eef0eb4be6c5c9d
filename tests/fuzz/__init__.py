"""Fuzzers: bytes that nobody would send who means well, into whatever reads what others wrote."""
