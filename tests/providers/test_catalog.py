"""The catalogue: names to providers and models, adapters, keys, tokens and their price."""

from __future__ import annotations

import pytest

from fencepost.domain.errors import ModelUnavailableError, ProviderError
from fencepost.domain.messages import CacheTokens, Tokens
from fencepost.domain.models import ModelConfig, ModelRef, ProviderConfig
from fencepost.domain.stream import Finish, Usage
from fencepost.providers.catalog import Catalog, adapter, api_key, cost, tokens
from fencepost.providers.http import make_client
from fencepost.providers.scripted import Say, ScriptedProvider
from tests.providers.wire import KEY, request

SMALL = ModelConfig(context=1000, output=100)
OPEN = ProviderConfig(base_url="http://open.test/v1", models={"small": SMALL})
CLOSED = ProviderConfig(base_url="http://closed.test/v1", models={"small": SMALL, "large": SMALL}, any_model=False)
CATALOG = Catalog({"open": OPEN, "closed": CLOSED})


def test_a_configured_model() -> None:
    assert CATALOG.resolve(ModelRef.parse("closed/small")) == (CLOSED, SMALL)


def test_a_model_that_is_not_listed() -> None:
    assert CATALOG.resolve(ModelRef.parse("open/vendor/new")) == (OPEN, ModelConfig())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("opn/small", ["no provider 'opn'", "'opn/small'", "Did you mean 'open'?", "closed, open"]),
        ("closed/smal", ["'closed' has no model 'smal'", "Did you mean 'small'?", "large, small"]),
        ("zzz/x", ["no provider 'zzz'", "closed, open"]),
    ],
)
def test_what_is_not_there_is_told_with_what_is(name: str, parts: list[str]) -> None:
    with pytest.raises(ModelUnavailableError) as raised:
        CATALOG.resolve(ModelRef.parse(name))

    for part in parts:
        assert part in raised.value.message


def test_nothing_configured() -> None:
    with pytest.raises(ModelUnavailableError, match="Configured providers: none"):
        Catalog({}).resolve(ModelRef.parse("a/b"))


def test_a_long_list_is_shortened() -> None:
    many = Catalog({f"p{n:02}": OPEN for n in range(20)})

    with pytest.raises(ModelUnavailableError, match=r"p11 and 8 more$"):
        many.resolve(ModelRef.parse("x/y"))


@pytest.mark.conformance("MDL-01")
async def test_the_configured_protocol_picks_the_adapter() -> None:
    """A compatible endpoint under any name is spoken to in the protocol that is configured for it."""
    async with ScriptedProvider([[Say("hello")]]) as compatible, make_client() as client:
        config = ProviderConfig(protocol="openai-chat", base_url=compatible.base_url)
        provider, _ = Catalog({"house": config}).resolve(ModelRef.parse("house/any"))
        stream = adapter(provider.protocol)(client, request(base_url=provider.base_url), None)
        events = [event async for event in stream]

    assert isinstance(events[-1], Finish)
    assert compatible.requests[0]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.conformance("MDL-01")
def test_an_unknown_protocol_has_no_adapter() -> None:
    with pytest.raises(ModelUnavailableError, match=r"no protocol 'telegraph'.*openai-chat"):
        adapter("telegraph")


def test_keys_come_from_the_environment() -> None:
    keyed = ProviderConfig(base_url="http://a.test", api_key_env="ACME_KEY")

    assert api_key("acme", keyed, {"ACME_KEY": f" {KEY}\n"}) == KEY
    assert api_key("acme", OPEN, {"ACME_KEY": KEY}) is None


@pytest.mark.parametrize("environ", [{}, {"ACME_KEY": " "}, {"OTHER_KEY": KEY}])
def test_a_missing_key_names_the_variable(environ: dict[str, str]) -> None:
    keyed = ProviderConfig(base_url="http://a.test", api_key_env="ACME_KEY")

    with pytest.raises(ProviderError, match="ACME_KEY") as raised:
        api_key("acme", keyed, environ)

    assert (raised.value.reason, raised.value.transient) == ("Authentication", False)
    assert KEY not in raised.value.message


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, Tokens()),
        (Usage(), Tokens()),
        (Usage(10, 9, 3, 6, 1, 5), Tokens(input=3, output=4, reasoning=5, cache=CacheTokens(read=6, write=1))),
        (Usage(10, 9, None, 6, 1), Tokens(input=3, output=9, cache=CacheTokens(read=6, write=1))),
        (Usage(2, 3, None, 6, None, 5), Tokens(input=0, output=0, reasoning=5, cache=CacheTokens(read=6))),
        (Usage(-4, -1, -2), Tokens()),
        (Usage(float("nan"), float("inf"), float("-inf")), Tokens()),  # type: ignore[arg-type]
    ],
)
def test_tokens(usage: Usage | None, expected: Tokens) -> None:
    assert tokens(usage) == expected


def test_the_price_of_a_step() -> None:
    usage = Usage(1_000_000, 300_000, 700_000, 200_000, 100_000, 100_000)

    assert cost(ModelConfig(cost_input=2, cost_output=8), usage) == pytest.approx(2 + 0.3 * 8)
    priced = ModelConfig(cost_input=2, cost_output=8, cost_cache_read=0.5, cost_cache_write=3)
    assert cost(priced, usage) == pytest.approx(0.7 * 2 + 0.3 * 8 + 0.2 * 0.5 + 0.1 * 3)
    assert cost(ModelConfig(), usage) == 0
    assert cost(priced, None) == 0
