"""The catalogue: which provider and model a name means, what speaks to it, and what its tokens cost."""

from __future__ import annotations

import difflib
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import httpx2

from fencepost.domain.errors import ModelUnavailableError, ProviderError
from fencepost.domain.messages import CacheTokens, Tokens
from fencepost.domain.models import ModelConfig, ModelRef, ModelRequest, ProviderConfig
from fencepost.domain.stream import StreamEvent, Usage
from fencepost.providers import openai_chat

Adapter: TypeAlias = Callable[[httpx2.AsyncClient, ModelRequest, str | None], AsyncGenerator[StreamEvent, None]]
"""One request of a provider as a stream of events; see `fencepost.providers.openai_chat.stream`."""

_ADAPTERS: Final[Mapping[str, Adapter]] = MappingProxyType({"openai-chat": openai_chat.stream})
_LISTED = 12


class Catalog:
    """The providers as configured, by their ids."""

    def __init__(self, providers: Mapping[str, ProviderConfig]) -> None:
        self.providers = MappingProxyType(dict(providers))

    def resolve(self, ref: ModelRef) -> tuple[ProviderConfig, ModelConfig]:
        """Give the provider and the model that a name means. Raises ModelUnavailableError, which lists what there is.

        A model that is not listed is served by a provider with `any_model`, without known limits and costs.
        """
        provider = self.providers.get(ref.provider_id)
        if provider is None:
            raise ModelUnavailableError(
                f"There is no provider {ref.provider_id!r} for the model {str(ref)!r}."
                + _choice("Configured providers", ref.provider_id, self.providers)
            )
        config = provider.models.get(ref.id)
        if config is not None:
            return provider, config
        if provider.any_model:
            return provider, ModelConfig()
        raise ModelUnavailableError(
            f"The provider {ref.provider_id!r} has no model {ref.id!r}."
            + _choice("Configured models", ref.id, provider.models)
        )


def adapter(protocol: str) -> Adapter:
    """Give the adapter of a provider's configured protocol. Raises ModelUnavailableError for one that is not known."""
    found = _ADAPTERS.get(protocol)
    if found is None:
        raise ModelUnavailableError(f"There is no protocol {protocol!r}." + _choice("Protocols", protocol, _ADAPTERS))
    return found


def api_key(provider_id: str, provider: ProviderConfig, environ: Mapping[str, str]) -> str | None:
    """Give the key from the provider's environment variable, None for a provider that needs none.

    Raises ProviderError, reason Authentication, when the variable is not set; its message names the variable.
    """
    if provider.api_key_env is None:
        return None
    key = environ.get(provider.api_key_env, "").strip()  # a line break at its end is common, and never meant
    if not key:
        raise ProviderError(
            f"The provider {provider_id!r} needs an API key: set the environment variable {provider.api_key_env}"
            " for the worker and start it again",
            reason="Authentication",
            transient=False,
        )
    return key


def tokens(usage: Usage | None) -> Tokens:
    """Give the counts of a step as its durable event has them: no token is counted twice, nothing is below 0."""
    usage = usage or Usage()
    read, write = _count(usage.cache_read_input_tokens), _count(usage.cache_write_input_tokens)
    reasoning = _count(usage.reasoning_tokens)
    plain = usage.non_cached_input_tokens
    return Tokens(
        input=max(0, _count(usage.input_tokens) - read - write) if plain is None else _count(plain),
        output=max(0, _count(usage.output_tokens) - reasoning),
        reasoning=reasoning,
        cache=CacheTokens(read=read, write=write),
    )


def cost(config: ModelConfig, usage: Usage | None) -> float:
    """Give the price of a step in US dollars.

    Reasoning costs what output does; a cache price that is not configured is that of input.
    """
    counts = tokens(usage)
    cache_read = config.cost_input if config.cost_cache_read is None else config.cost_cache_read
    cache_write = config.cost_input if config.cost_cache_write is None else config.cost_cache_write
    total = (
        counts.input * config.cost_input
        + (counts.output + counts.reasoning) * config.cost_output
        + counts.cache.read * cache_read
        + counts.cache.write * cache_write
    )
    return total / 1_000_000


def _count(value: float | None) -> int:
    return int(value) if value is not None and math.isfinite(value) and value > 0 else 0


def _choice(title: str, wanted: str, names: Iterable[str]) -> str:
    known = sorted(names)
    close = difflib.get_close_matches(wanted, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"{hint} {title}: {', '.join(known[:_LISTED]) or 'none'}{more}"
