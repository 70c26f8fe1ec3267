"""Which agent and model a command asks for, checked where the worker is ours and has the same settings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from fencepost.config import PREFIX, Settings, external_services
from fencepost.domain.errors import (
    AgentNotFoundError,
    ConfigurationError,
    InvalidInputError,
    ModelUnavailableError,
)
from fencepost.domain.models import ModelRef, ProviderConfig

SCRIPTED = "scripted"
"""The provider that needs no key: started for a command that asks for a model of it, unless it is configured."""

_CLOSE = 0.75  # so that a name is suggested for a typing mistake, not for any name with some of its letters


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings with the choice in them, and the environment that gives a worker the same settings.

    `model` is None when the session's or the agent's own is meant. `is_overridden` says that a provider's address came
    from the command line, `is_ephemeral` that a provider of these settings lives no longer than the command.
    """

    settings: Settings
    environ: Mapping[str, str]
    model: ModelRef | None = None
    agent: str | None = None
    is_overridden: bool = False
    is_ephemeral: bool = False

    def effective_model(self) -> ModelRef:
        """Give the model that a new session's steps run with."""
        agent = self.settings.agents.get(self.agent or self.settings.default_agent)
        return self.model or ModelRef.parse((agent.model if agent else None) or self.settings.default_model)

    def needs_scripted(self) -> bool:
        """Say whether the scripted provider has to be started for it."""
        return self.effective_model().provider_id == SCRIPTED and SCRIPTED not in self.settings.providers


def parse_model(text: str) -> ModelRef:
    """Read the name of a model. Raises InvalidInputError."""
    try:
        return ModelRef.parse(text)
    except ValueError as error:
        raise InvalidInputError(f"--model: {error}") from None


def choose(
    settings: Settings, environ: Mapping[str, str], *, model: str | None, agent: str | None, base_url: str | None
) -> Choice:
    """Give the choice for the options of a command; `base_url` is where the model's provider is. Checks the model's
    spelling only. Raises InvalidInputError or ConfigurationError.
    """
    ref = parse_model(model) if model is not None else None
    choice = Choice(settings, environ, ref, agent)
    if base_url is None:
        return choice
    return with_provider(choice, choice.effective_model().provider_id, base_url)


def with_provider(choice: Choice, name: str, base_url: str) -> Choice:
    """Give the choice with a provider at another address. A key that is not set is then not needed."""
    old = choice.settings.providers.get(name)
    key = old.api_key_env if old is not None and choice.environ.get(old.api_key_env or "") else None
    values = {**(old.model_dump() if old is not None else {}), "base_url": base_url, "api_key_env": key}
    try:
        provider = ProviderConfig.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InvalidInputError(f"--base-url: {problem}, not {base_url!r}") from None
    settings = choice.settings.model_copy(update={"providers": {**choice.settings.providers, name: provider}})
    variable = f"{PREFIX}PROVIDERS"
    # A variable for one key of this provider would win over what is written here.
    own = f"{variable}__{name}__".upper()
    environ = {key: value for key, value in choice.environ.items() if not key.upper().startswith(own)}
    before = json.loads(environ.get(variable) or "{}")
    environ[variable] = json.dumps(
        {**before, name: {**before.get(name, {}), "base_url": provider.base_url, "api_key_env": key}}
    )
    return Choice(settings, environ, choice.model, choice.agent, is_overridden=True)


def is_local(choice: Choice) -> bool:
    """Say whether the command starts services and worker itself, so that its settings are the worker's too."""
    given = external_services(choice.settings, choice.environ)
    return not (given.temporal and given.postgresql)


def check_remote(choice: Choice) -> None:
    """Refuse a model that no worker elsewhere has: the scripted provider lives and dies with a local command.

    Raises ModelUnavailableError.
    """
    model = choice.model
    if model is not None and model.provider_id == SCRIPTED and SCRIPTED not in choice.settings.providers:
        raise ModelUnavailableError(
            f"model {model} is there on this machine's own services only: configure a provider named {SCRIPTED} here "
            "and for the workers, or unset FENCEPOST_DATABASE_URL and TEMPORAL_ADDRESS"
        )


def check_names(choice: Choice) -> ProviderConfig | None:
    """Check that agent and model are there, and give the model's provider, None for the scripted one.

    Raises AgentNotFoundError or ModelUnavailableError.
    """
    settings = choice.settings
    name = choice.agent or settings.default_agent
    if name not in settings.agents:
        close = difflib.get_close_matches(name, settings.agents, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise AgentNotFoundError(
            f"there is no agent {name!r}{hint}: configured are {', '.join(sorted(settings.agents))}"
        )
    wanted = choice.effective_model()
    if wanted.provider_id == SCRIPTED and SCRIPTED not in settings.providers:
        return None
    if wanted.provider_id not in settings.providers:
        close = difflib.get_close_matches(wanted.provider_id, [*settings.providers, SCRIPTED], 1, _CLOSE)
        hint = f" (did you mean {close[0]}?)" if close else ""
        known = ", ".join(sorted({*settings.providers, SCRIPTED}))
        raise ModelUnavailableError(
            f"model {wanted}: there is no provider {wanted.provider_id!r}{hint}: there are {known}, and --base-url or "
            f"[providers.{wanted.provider_id}] in fencepost.toml makes another one"
        )
    from fencepost.providers.catalog import Catalog  # noqa: PLC0415 - brings the whole HTTP client with it

    return Catalog(settings.providers).resolve(wanted)[0]


def check(choice: Choice, *, is_new: bool = True) -> None:
    """Check that agent, model and key are there; a session that is not new keeps its model.

    Raises AgentNotFoundError, ModelUnavailableError or ConfigurationError.
    """
    provider, wanted = check_names(choice), choice.effective_model()
    if (
        provider is not None
        and provider.api_key_env is not None
        and not choice.environ.get(provider.api_key_env, "").strip()
    ):
        other = f", or choose another model with --model ({SCRIPTED}/demo needs none)" if is_new else ""
        raise ConfigurationError(f"model {wanted} needs a key: set {provider.api_key_env}{other}")
