"""Adapters for serving engines, a thin package for each. No other package imports them."""
