"""Checks of agents, models and their provider: named rightly, with a key, and there. No request costs anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from fencepost import services
from fencepost.cli.findings import Check, ok, warning, wrong
from fencepost.config import Settings
from fencepost.domain.errors import ModelUnavailableError, UnavailableError
from fencepost.domain.models import ModelRef, ProviderConfig
from fencepost.providers.catalog import Catalog

_SECONDS: Final = 4.0


def models(settings: Settings, environ: Mapping[str, str], *, here: bool) -> list[Check]:
    """Check the default agent's model and those of the other agents. `here` says that workers get this environment:
    then a key that the default model needs has to be in it."""
    default = default_model(settings)
    found = _model("model", f"agent {settings.default_agent}, model {default}", default, settings, environ, here=here)
    for name, agent in sorted(settings.agents.items()):
        if agent.model is not None and name != settings.default_agent:
            ref = ModelRef.parse(agent.model)
            others = _model(f"agent {name}", f"model {ref}", ref, settings, environ, here=False)
            found += [check for check in others if check.status != "ok"]
    return found


def default_model(settings: Settings) -> ModelRef:
    """Give the model of a session that names none."""
    return ModelRef.parse(settings.agents[settings.default_agent].model or settings.default_model)


def _model(
    name: str, detail: str, ref: ModelRef, settings: Settings, environ: Mapping[str, str], *, here: bool
) -> list[Check]:
    try:
        provider, _ = Catalog(settings.providers).resolve(ref)
    except ModelUnavailableError as error:
        return wrong(name, error.message, "name another model, or add this one to the configuration")
    variable = provider.api_key_env
    if variable is None:
        return ok(name, f"{detail}, without a key")
    if environ.get(variable, "").strip():
        return ok(name, f"{detail}, its key is in {variable}")
    if here:
        return wrong(name, f"{detail}: {variable} is not set", f"export {variable}=... before a worker is started")
    return warning(name, f"{detail}: {variable} is not set here", f"set {variable} for the workers")


async def provider(settings: Settings, *, here: bool) -> list[Check]:
    """Check that the default model's provider answers at all. `here` says that workers run on this machine."""
    ref = default_model(settings)
    config = settings.providers[ref.provider_id]  # settings that name another one are refused
    where = _shown(config)
    try:
        await services.answers_http(config.base_url, _SECONDS)
    except UnavailableError as error:
        detail = f"{ref.provider_id} at {where} does not answer: {error.message}"
        mend = "check the network, a proxy (HTTPS_PROXY) and base_url; a server of your own may not run"
        if here:
            return wrong("provider", detail, mend, unreachable=True)
        return warning("provider", f"{detail}; workers elsewhere may reach it", mend)
    return ok("provider", f"{ref.provider_id} answers at {where}")


def _shown(config: ProviderConfig) -> str:
    """Give host and port of an address: what stands before or after them may be secret."""
    parts = urlsplit(config.base_url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
