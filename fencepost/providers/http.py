"""The HTTP client that a worker's provider requests share."""

from __future__ import annotations

import httpx2


def make_client(max_connections: int = 1000, max_keepalive_connections: int = 100) -> httpx2.AsyncClient:
    """Give a client with one connection pool, for as long as a worker lives; the caller closes it.

    A stream holds its connection for its whole time, so the pool is large. Nothing is repeated here: whether a request
    may be made again depends on what of the step is durable already, and that is decided elsewhere. Time-outs come with
    each request; proxies and certificates come from the environment.
    """
    limits = httpx2.Limits(
        max_connections=max_connections, max_keepalive_connections=max_keepalive_connections, keepalive_expiry=30
    )
    return httpx2.AsyncClient(limits=limits, timeout=httpx2.Timeout(60), follow_redirects=False)
