"""Settings: where they come from, which one wins, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.config import (
    ExternalServices,
    Settings,
    database_dsn,
    external_services,
    find_config_file,
    is_temporal_configured,
    load_settings,
    temporal_connect_options,
)
from fencepost.domain.errors import ConfigurationError
from fencepost.domain.permissions import evaluate


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a configuration file of this test goes."""
    return tmp_path / "fencepost.toml"


def _wrong(file: Path, text: str, **environ: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(file, environ)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_without_any_configuration_there_is_a_model_an_agent_and_a_home() -> None:
    """A first run needs no file."""
    settings = Settings()

    assert settings.default_model == "openai/gpt-4o-mini"
    assert settings.providers["openai"].api_key_env == "OPENAI_API_KEY"
    assert settings.agents[settings.default_agent].system
    assert settings.home.is_absolute()
    assert settings.database_url is None


def test_the_environment_wins_over_the_file_and_the_file_over_presets(file: Path) -> None:
    """Sources are laid over one another key by key, not table by table."""
    file.write_text(
        'task_queue = "from-file"\n'
        "[limits]\nlease_seconds = 30\nrenew_seconds = 5\n"
        '[providers.openai]\nbase_url = "http://127.0.0.1:9/v1/"\n'
        '[agents.review]\nsystem = "Review."\n'
    )

    settings = load_settings(file, {"FENCEPOST_LIMITS__LEASE_SECONDS": "45", "FENCEPOST_LOG_LEVEL": "debug"})

    assert (settings.task_queue, settings.log_level) == ("from-file", "debug")
    assert (settings.limits.lease_seconds, settings.limits.renew_seconds) == (45, 5)
    assert settings.providers["openai"].base_url == "http://127.0.0.1:9/v1"
    assert "gpt-4o-mini" in settings.providers["openai"].models
    assert settings.agents.keys() == {"build", "plan", "review"}


def test_tool_output_is_kept_under_the_home_unless_a_directory_is_given(file: Path, tmp_path: Path) -> None:
    """A relative directory is one of the current directory, as the home is."""
    home = {"FENCEPOST_HOME": str(tmp_path)}
    file.write_text("[tool_output]\nmax_lines = 50\n")

    settings = load_settings(file, home)

    assert settings.tool_output.model_dump(exclude={"directory"}) == {"max_lines": 50, "max_bytes": 51_200, "days": 7}
    assert settings.tool_output_directory == tmp_path / "tool-output"
    named = load_settings(file, {**home, "FENCEPOST_TOOL_OUTPUT__DIRECTORY": "kept"})
    assert named.tool_output_directory == Path.cwd() / "kept"


def test_a_provider_can_come_from_the_environment_alone() -> None:
    """Two underscores lead into tables."""
    settings = load_settings(
        environ={
            "FENCEPOST_PROVIDERS__LOCAL__BASE_URL": "http://127.0.0.1:9/v1",
            "FENCEPOST_DEFAULT_MODEL": "local/some/model",
        }
    )

    assert settings.providers["local"].base_url == "http://127.0.0.1:9/v1"
    assert settings.default_model == "local/some/model"


def test_rules_of_the_file_count_more_than_the_built_in_ones(file: Path) -> None:
    """The last matching rule wins, and the file's come last."""
    file.write_text('[[permissions]]\naction = "shell"\nresource = "rm *"\neffect = "deny"\n')

    rules = load_settings(file, {}).permissions

    assert evaluate(rules, "shell", ["rm -r x"]) == "deny"
    assert evaluate(rules, "shell", ["ls"]) == "allow"
    assert evaluate(rules, "read", [".env"]) == "ask"


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ("[limits]\nlease_second = 3", "limits.lease_second", "did you mean lease_seconds? allowed: "),
        ("[limits]\nlease_seconds = 0", "limits.lease_seconds", "must be greater than 0, not 0"),
        ("[limits]\nlease_seconds = 5", "limits.renew_seconds", "must be less than lease_seconds"),
        ("[limits]\nheartbeat_seconds = 60", "limits.heartbeat_seconds", "must be less than heartbeat_timeout_seconds"),
        ('[providers.x]\nbase_url = "ftp://x"', "providers.x.base_url", "http:// or https://"),
        (
            '[providers.x]\nprotocol = "soap"\nbase_url = "http://x"',
            "providers.x.protocol",
            "'openai-chat', not 'soap'",
        ),
        ("[providers.x]", "providers.x.base_url", "is missing"),
        ('log_level = "loud"', "log_level", "'debug', 'info', 'warning' or 'error', not 'loud'"),
        ('default_model = "x/y"', "default_model", "there is no provider 'x'; configured: openai"),
        ('default_model = "gpt"', "default_model", "write it as provider/model"),
        ('default_agent = "x"', "default_agent", "there is no agent 'x'; configured: build, plan"),
        ('[agents.x]\nmodel = "y/z"', "agents", "x: model: there is no provider 'y'"),
        ('database_url = "mysql://u:secret@x"', "database_url", "postgresql://"),
        ('[[permissions]]\naction = "a"\neffect = "no"', "permissions[0].effect", "'allow', 'deny' or 'ask', not 'no'"),
        ('colour = "red"', "colour", "there is no such key; allowed: "),
        ("[tool_output]\nmax_line = 3", "tool_output.max_line", "max_lines? allowed: days, directory, max_by"),
        ("[tool_output]\nmax_lines = 3", "tool_output.max_lines", "must be greater than or equal to 10, not 3"),
        ("[tool_output]\nmax_bytes = 100", "tool_output.max_bytes", "must be greater than or equal to 1024, not 100"),
        ("[tool_output]\ndays = 0", "tool_output.days", "must be greater than 0, not 0"),
        ("[[[", "not valid TOML", "line 1"),
    ],
)
def test_an_error_names_file_key_and_what_is_allowed(file: Path, text: str, key: str, allowed: str) -> None:
    """Whoever reads the line knows where to look and what to write."""
    message = _wrong(file, text)

    assert message.startswith(f"{file}: {key}")
    assert allowed in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FENCEPOST_LIMITS__LEASE_SECONDS", "soon", "must be a number"),
        ("FENCEPOST_PERMISSIONS", "{", "must be valid JSON"),
        ("FENCEPOST_DATABASE_URI", "x", "did you mean FENCEPOST_DATABASE_URL?"),
    ],
)
def test_an_error_in_the_environment_names_the_variable(file: Path, name: str, value: str, allowed: str) -> None:
    """The file is not blamed for what the environment says."""
    message = _wrong(file, "[limits]\nlease_seconds = 20", **{name: value})

    assert message.startswith(f"environment variable {name}: ")
    assert allowed in message


def test_a_key_in_the_file_is_refused_and_not_repeated(file: Path) -> None:
    """A provider names a variable; the key itself has no place in a file, nor in a message."""
    message = _wrong(file, '[providers.openai]\napi_key = "do-not-show"')

    assert "did you mean api_key_env?" in message
    assert "do-not-show" not in message


def test_the_file_is_looked_for_up_to_the_root_of_the_checkout(tmp_path: Path) -> None:
    """A file above the checkout belongs to something else."""
    checkout = tmp_path / "checkout"
    inner = checkout / "a" / "b"
    inner.mkdir(parents=True)
    (checkout / ".git").mkdir()
    (tmp_path / "fencepost.toml").touch()

    assert find_config_file(None, {}, inner) is None
    (checkout / "fencepost.toml").touch()
    assert find_config_file(None, {}, inner) == checkout / "fencepost.toml"
    assert find_config_file(None, {"FENCEPOST_CONFIG": str(tmp_path / "fencepost.toml")}, inner) == (
        tmp_path / "fencepost.toml"
    )


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    """Only a file that was not asked for may be missing."""
    with pytest.raises(ConfigurationError, match="there is no such file"):
        load_settings(environ={"FENCEPOST_CONFIG": str(tmp_path / "nothing.toml")})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postgres://u:p%40@h:5/d?sslmode=require", "postgresql+asyncpg://u:p%40@h:5/d?ssl=require"),
        ("postgresql://h/d", "postgresql+asyncpg://h/d"),
        ("postgresql+asyncpg:///d?host=/a/b", "postgresql+asyncpg:///d?host=/a/b"),
        ("postgresql://u@/d?host=/a/b&channel_binding=require", "postgresql+asyncpg://u@/d?host=/a/b"),
    ],
)
def test_usual_spellings_of_a_database_url_are_understood(given: str, expected: str) -> None:
    """What other tools accept works here too."""
    assert database_dsn(given) == expected


_ADDRESS = {"TEMPORAL_ADDRESS": "127.0.0.1:7233"}
_DATABASE = {"FENCEPOST_DATABASE_URL": "postgresql://h/d"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ExternalServices(temporal=False, postgresql=False)),
        ({**_ADDRESS, **_DATABASE}, ExternalServices(temporal=True, postgresql=True)),
        ({**_ADDRESS, "FENCEPOST_MIXED": "true"}, ExternalServices(temporal=True, postgresql=False)),
        ({**_DATABASE, "FENCEPOST_MIXED": "true"}, ExternalServices(temporal=False, postgresql=True)),
    ],
)
def test_services_are_given_together_or_not_at_all(environ: dict[str, str], expected: ExternalServices) -> None:
    """Both from outside, or both local, unless a mixture is asked for."""
    assert external_services(load_settings(environ=environ), environ) == expected


@pytest.mark.parametrize(
    ("environ", "missing"), [(_ADDRESS, "set FENCEPOST_DATABASE_URL"), (_DATABASE, "set TEMPORAL_ADDRESS")]
)
def test_one_service_without_the_other_is_refused(environ: dict[str, str], missing: str) -> None:
    """The message says which one is missing and how to ask for a mixture."""
    with pytest.raises(ConfigurationError) as caught:
        external_services(load_settings(environ=environ), environ)

    assert missing in caught.value.message
    assert "FENCEPOST_MIXED=true" in caught.value.message


def test_temporal_is_configured_by_its_own_variables_and_profiles(tmp_path: Path) -> None:
    """An environment or a file made for other Temporal programs serves this one unchanged."""
    profiles = tmp_path / "temporal.toml"
    profiles.write_text('[profile.cloud]\naddress = "example:7233"\nnamespace = "prod"\n')
    environ = {"TEMPORAL_CONFIG_FILE": str(profiles), "TEMPORAL_PROFILE": "cloud"}

    assert is_temporal_configured(environ)
    assert temporal_connect_options(environ) == {"target_host": "example:7233", "namespace": "prod"}
    assert not is_temporal_configured({})


def test_a_profile_that_does_not_exist_is_a_configuration_error(tmp_path: Path) -> None:
    """Temporal's own complaint is passed on as one line."""
    with pytest.raises(ConfigurationError, match="Temporal client's configuration"):
        temporal_connect_options({"TEMPORAL_PROFILE": "nobody", "TEMPORAL_CONFIG_FILE": str(tmp_path / "none.toml")})
