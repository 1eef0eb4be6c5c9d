"""Measures this machine, fits a profile to the measurements, and compares its predictions with the product."""
