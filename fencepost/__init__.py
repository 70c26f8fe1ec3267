"""fencepost: durable LLM-agent sessions on Temporal, fenced by an ownership token in PostgreSQL."""

__version__ = "0.1.0"
