"""Adapters for serving engines: one thin package each, imported by no other package."""
