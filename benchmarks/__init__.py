"""Benchmarks, all of one form (`benchmarks.form`). They measure, and assert no speed."""
