"""Random sessions under random faults, and a check of every promise at the end: `make chaos N=200 SEED=7`."""
