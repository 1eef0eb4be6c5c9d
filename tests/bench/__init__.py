"""Benchmarks, all in one form (`tests.bench.form`). They measure; they assert no speed."""
