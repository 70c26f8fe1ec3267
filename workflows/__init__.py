"""Deterministic orchestration. Imports the domain and temporalio, nothing else.

Empty on purpose: the sandbox imports this package anew for every run.
"""
