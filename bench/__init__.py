"""Benchmarks. Every figure stands beside the floor of the same run: these are ratios, not promises about machines."""
