"""Local mode: PostgreSQL and a Temporal dev server for one machine, started when needed and shared while in use."""

from fencepost.local.stack import LocalStack, sweep

__all__ = ["LocalStack", "sweep"]
