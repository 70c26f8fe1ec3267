"""The pure core: values, events and decisions. Imports the standard library and pydantic, nothing else."""
