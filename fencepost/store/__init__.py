"""PostgreSQL: the event log, its projection, the inbox, and who may write. No row leaves this package undecoded."""
