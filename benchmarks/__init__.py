"""Benchmarks, all in one form (`benchmarks.form`). They measure; they assert no speed."""
