"""Settings: built-in presets, then `fencepost.toml`, then FENCEPOST_* variables; the later one wins, key by key.

Keys of providers are never part of the settings: a provider names the environment variable that holds its key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import platformdirs
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError
from temporalio.envconfig import ClientConfig, ClientConfigProfile, ClientConnectConfig

from fencepost import presets
from fencepost.config_errors import explain, misspelt_variable
from fencepost.domain.errors import ConfigurationError
from fencepost.domain.models import AgentConfig, Configured, ModelRef, ProviderConfig
from fencepost.domain.permissions import Rule
from fencepost.telemetry import LogFormat, LogLevel

FILE_NAME: Final = "fencepost.toml"
PREFIX: Final = "FENCEPOST_"
"""Of every variable that is a setting; two underscores go one level down: FENCEPOST_LIMITS__LEASE_SECONDS."""

_DRIVER = "postgresql+asyncpg"
_SCHEMES = ("postgres", "postgresql", _DRIVER)
_TEMPORAL_VARIABLES = ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE", "TEMPORAL_CONFIG_FILE")


class LimitsConfig(Configured):
    """Bounds of a turn. What ends in `_seconds` is in seconds."""

    lease_seconds: float = Field(default=60, gt=0, description="how long a claim holds without being renewed")
    renew_seconds: float = Field(default=10, gt=0, validate_default=True, description="how often a claim is renewed")
    heartbeat_timeout_seconds: float = Field(
        default=10, gt=0, description="silence after which a worker counts as lost"
    )
    heartbeat_seconds: float = Field(
        default=0.5,
        gt=0,
        validate_default=True,
        description="how often an activity says that it lives; an interrupt reaches it with the answer",
    )
    max_continuations: int = Field(
        default=3, ge=0, description="how often a turn goes on after one cut answer upon another"
    )
    max_provider_attempts: int = Field(default=5, ge=1, description="requests for one step while nothing was shown")
    max_run_events: int = Field(
        default=4_000, ge=1, description="history events of a run, after which its turn goes on in a new run"
    )
    max_recovery_attempts: int = Field(default=5, ge=1, description="recoveries of one turn before it is put aside")
    provider_timeout_seconds: float = Field(default=3600, gt=0, description="the longest model call")
    tool_timeout_seconds: float = Field(default=900, gt=0, description="the longest tool call")
    drain_grace_seconds: float = Field(default=10, ge=0, description="what a stopping worker leaves running work")
    workspace_wait_seconds: float = Field(
        default=30, gt=0, le=50, description="how long a tool call waits for its workspace's worker before that is told"
    )
    workspace_absent: Literal["wait", "fail"] = Field(
        default="wait", description="what becomes of the call then: it goes on waiting, or it fails"
    )
    live_seconds: float = Field(default=0.03, ge=0, description="how long streamed text gathers before it is shown")
    prompt_bytes: int = Field(default=1_000_000, ge=1, description="the largest prompt, in bytes of JSON")

    @field_validator("renew_seconds")
    @classmethod
    def _within_lease(cls, value: float, info: ValidationInfo) -> float:
        if value >= info.data.get("lease_seconds", float("inf")):
            raise ValueError("must be less than lease_seconds, or the lease ends between two renewals")
        return value

    @field_validator("heartbeat_seconds")
    @classmethod
    def _within_timeout(cls, value: float, info: ValidationInfo) -> float:
        if value >= info.data.get("heartbeat_timeout_seconds", float("inf")):
            raise ValueError("must be less than heartbeat_timeout_seconds, or a healthy worker counts as lost")
        return value


class WorkspaceConfig(Configured):
    """Where this worker's tools run. With an id, it also serves sessions whose location names that workspace."""

    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    directory: Path | None = Field(default=None, description="for sessions that name none; None: the client's own")


class WorkerConfig(Configured):
    """How much one worker process takes on at a time, and whether it looks for work that was lost."""

    max_concurrent_activities: int = Field(default=200, ge=1)
    max_concurrent_local_activities: int = Field(default=100, ge=1)
    # More of them at once only take turns on one core, each for longer, until Temporal gives them to others as lost.
    max_concurrent_workflow_tasks: int = Field(default=32, ge=2)
    max_cached_workflows: int = Field(default=1000, ge=0)
    database_pool_size: int = Field(default=20, ge=1, description="connections to PostgreSQL kept open")
    recover: bool = Field(default=True, description="set sessions going again that nobody works on, on this task queue")


def database_dsn(value: object) -> object:
    """Give a PostgreSQL URL as SQLAlchemy wants it for asyncpg, from any usual spelling; other types pass unchanged.

    libpq's `sslmode` becomes asyncpg's `ssl`, and `channel_binding`, which asyncpg settles by itself, is dropped.
    Raises ValueError for a URL of another database.
    """
    if not isinstance(value, str):
        return value
    parts = urlsplit(value)
    if parts.scheme not in _SCHEMES or "://" not in value:
        raise ValueError("must be a URL that starts with postgresql://, postgres:// or postgresql+asyncpg://")
    query = [
        ("ssl" if name == "sslmode" else name, text)
        for name, text in parse_qsl(parts.query, keep_blank_values=True)
        if name != "channel_binding"
    ]
    # Put together by hand: urlunsplit drops the empty authority of `postgresql:///name?host=/socket`.
    path = urlunsplit(("", "", parts.path, urlencode(query, safe="/:,"), parts.fragment))
    return f"{_DRIVER}://{parts.netloc}{path}"


def default_home() -> Path:
    """Give the directory for state: the platform's data directory, or for root one outside any person's home."""
    if os.geteuid() == 0:
        return Path("/var/lib/fencepost")  # servers there run as an unprivileged user, who must be able to enter it
    return platformdirs.user_data_path("fencepost")


def _expanded(value: object) -> object:
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) and str(value) else value


class ToolOutputConfig(Configured):
    """How much text of one tool call a model gets; more of it goes into a file, and the model is told its name."""

    max_lines: int = Field(default=2000, ge=10)
    max_bytes: int = Field(default=51_200, ge=1024, description="in UTF-8")
    days: float = Field(default=7, gt=0, description="how long a file is kept")
    directory: Annotated[Path | None, BeforeValidator(_expanded)] = Field(
        default=None, description="where the files are; None: tool-output under home"
    )


def _providers() -> dict[str, ProviderConfig]:
    return {name: ProviderConfig.model_validate(entry) for name, entry in presets.PROVIDERS.items()}


def _agents() -> dict[str, AgentConfig]:
    return {name: AgentConfig.model_validate(entry) for name, entry in presets.AGENTS.items()}


def _permissions() -> tuple[Rule, ...]:
    return tuple(Rule.model_validate(entry) for entry in presets.PERMISSIONS)


class Settings(BaseSettings):
    """Everything that can be set. `Settings()` is the defaults; `load_settings` reads the file and the environment."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True
    )

    database_url: Annotated[str | None, BeforeValidator(database_dsn)] = None
    mixed: bool = Field(default=False, description="allow one service to be given and the other to be local")
    home: Annotated[Path, BeforeValidator(_expanded)] = Field(default_factory=default_home)
    task_queue: str = Field(default="fencepost", min_length=1, max_length=200)
    deployment: str = Field(
        default="default", min_length=1, pattern=r"^[^.]+$", description="name for worker versioning"
    )
    providers: dict[str, ProviderConfig] = Field(default_factory=_providers)
    default_model: str = "openai/gpt-4o-mini"
    agents: dict[str, AgentConfig] = Field(default_factory=_agents)
    default_agent: str = "build"
    permissions: tuple[Rule, ...] = Field(default_factory=_permissions)
    workspace: WorkspaceConfig = WorkspaceConfig()
    limits: LimitsConfig = LimitsConfig()
    worker: WorkerConfig = WorkerConfig()
    tool_output: ToolOutputConfig = ToolOutputConfig()
    log_level: LogLevel = "info"
    log_format: LogFormat = "auto"

    @property
    def tool_output_directory(self) -> Path:
        """Where tool output goes that is too long for a model."""
        return self.tool_output.directory or self.home / "tool-output"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values only as given: `load_settings` merges the sources, so that it can name them in errors."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings  # pydantic passes them by name
        return (init_settings,)

    @field_validator("providers")
    @classmethod
    def _no_slash(cls, value: dict[str, ProviderConfig]) -> dict[str, ProviderConfig]:
        for name in value:
            if "/" in name or not name:
                raise ValueError(f"{name!r} cannot name a provider: it must have no slash and not be empty")
        return value

    @field_validator("permissions")
    @classmethod
    def _after_presets(cls, value: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """Put given rules after the built-in ones: of all that match, the last one counts."""
        return (*_permissions(), *value)

    @field_validator("default_model")
    @classmethod
    def _known_model(cls, value: str, info: ValidationInfo) -> str:
        _check_model(value, info.data.get("providers"))
        return value

    @field_validator("agents")
    @classmethod
    def _known_models(cls, value: dict[str, AgentConfig], info: ValidationInfo) -> dict[str, AgentConfig]:
        for name, agent in value.items():
            if agent.model is not None:
                try:
                    _check_model(agent.model, info.data.get("providers"))
                except ValueError as error:
                    raise ValueError(f"{name}: model: {error}") from None
        return value

    @field_validator("default_agent")
    @classmethod
    def _known_agent(cls, value: str, info: ValidationInfo) -> str:
        agents = info.data.get("agents")
        if agents is not None and value not in agents:
            raise ValueError(f"there is no agent {value!r}; configured: {', '.join(sorted(agents))}")
        return value


def _check_model(name: str, providers: Mapping[str, ProviderConfig] | None) -> None:
    provider = ModelRef.parse(name).provider_id
    if providers is not None and provider not in providers:
        raise ValueError(f"there is no provider {provider!r}; configured: {', '.join(sorted(providers))}")


class _Environment(EnvSettingsSource):
    """The variables of a given environment instead of the process's own."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._environ.items() if value}


def find_config_file(config: Path | None, environ: Mapping[str, str], start: Path | None = None) -> Path | None:
    """Give the configuration file to read, or None when there is none.

    Looked for in this order: `config`, FENCEPOST_CONFIG, `fencepost.toml` in `start` (the current directory) and
    above it up to the root of its git checkout, the platform's configuration directory.
    Raises ConfigurationError when a file that was asked for by name is not there.
    """
    named = config or (Path(environ[f"{PREFIX}CONFIG"]) if environ.get(f"{PREFIX}CONFIG") else None)
    if named is not None:
        named = named.expanduser()
        if not named.is_file():
            raise ConfigurationError(f"{named}: there is no such file; --config and {PREFIX}CONFIG name a {FILE_NAME}")
        return named
    here = (start or Path.cwd()).absolute()
    above = [here, *here.parents]
    root = next((folder for folder in above if (folder / ".git").exists()), here)
    for folder in above[: above.index(root) + 1]:
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    default = platformdirs.user_config_path("fencepost") / FILE_NAME
    return default if default.is_file() else None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from None


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another, key by key through nested mappings; anything else is replaced whole."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


@dataclass(frozen=True, slots=True)
class Sources:
    """What was given from outside and where: the values of the file, and over them those of the environment."""

    file: Path | None
    from_file: Mapping[str, Any]
    from_environment: Mapping[str, Any]

    def settings(self) -> Settings:
        """Lay them over the defaults. Raises ConfigurationError for a wrong one."""
        values = _merge({"providers": presets.PROVIDERS, "agents": presets.AGENTS}, self.from_file)
        try:
            return Settings(**_merge(values, self.from_environment))
        except ValidationError as error:
            raise ConfigurationError(explain(error, Settings, self.file, self.from_environment, PREFIX)) from None


def read_sources(config: Path | None, environ: Mapping[str, str]) -> Sources:
    """Read the file and the environment. Raises ConfigurationError as `load_settings` does."""
    file = find_config_file(config, environ)
    from_file = _read(file) if file is not None else {}
    misspelt = misspelt_variable(Settings, environ, PREFIX)
    if misspelt is not None:
        raise ConfigurationError(misspelt)
    try:
        return Sources(file, from_file, _Environment(environ)())
    except SettingsError as error:
        name = re.search(r'field "(\w+)"', str(error))
        variable = f"environment variable {PREFIX}{name[1].upper()}" if name else "the environment"
        raise ConfigurationError(f"{variable}: must be valid JSON") from None


def load_settings(config: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings for this process. `environ` is the process's environment when it is None.

    Raises ConfigurationError: one line that names the file or variable, the key, and what is allowed there.
    """
    return read_sources(config, os.environ if environ is None else environ).settings()


def _temporal_profile(environ: Mapping[str, str]) -> ClientConfigProfile:
    try:
        return ClientConfigProfile.load(override_env_vars=dict(environ))
    except RuntimeError as error:
        raise ConfigurationError(f"the Temporal client's configuration: {error}".replace("\n", " ")) from None


def is_temporal_configured(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether a Temporal address is given, by TEMPORAL_* variables or a profile of Temporal's own file."""
    return bool(_temporal_profile(os.environ if environ is None else environ).address)


def temporal_connect_options(environ: Mapping[str, str] | None = None) -> ClientConnectConfig:
    """Give the keyword arguments for `temporalio.client.Client.connect`: address, namespace, TLS, API key.

    They come from Temporal's own TEMPORAL_* variables and configuration file. Raises ConfigurationError when these
    cannot be read.
    """
    environ = os.environ if environ is None else environ
    try:
        return ClientConfig.load_client_connect_config(override_env_vars=dict(environ))
    except RuntimeError as error:
        raise ConfigurationError(f"the Temporal client's configuration: {error}".replace("\n", " ")) from None


@dataclass(frozen=True, slots=True)
class ExternalServices:
    """Which services are given; those that are not are started on this machine."""

    temporal: bool
    postgresql: bool


def external_services(settings: Settings, environ: Mapping[str, str] | None = None) -> ExternalServices:
    """Say which services are given from outside: both, or none; one of them only with the setting `mixed`.

    A profile that merely exists in Temporal's default configuration file counts once a database is given too.
    Raises ConfigurationError for one without the other: state of one session would be split over two places that
    live and die separately.
    """
    environ = os.environ if environ is None else environ
    postgresql = settings.database_url is not None
    asked = any(environ.get(name) for name in _TEMPORAL_VARIABLES)
    temporal = (asked or postgresql) and is_temporal_configured(environ)
    if temporal != postgresql and not settings.mixed:
        given, missing = ("Temporal", f"{PREFIX}DATABASE_URL") if temporal else ("PostgreSQL", "TEMPORAL_ADDRESS")
        raise ConfigurationError(
            f"only {given} is given: set {missing} too, or {PREFIX}MIXED=true to start the other one on this machine"
        )
    return ExternalServices(temporal=temporal, postgresql=postgresql)
