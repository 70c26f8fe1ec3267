"""Benchmarks: ratios and counts within one run, beside their bounds. They promise nothing about machines."""
