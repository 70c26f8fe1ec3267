"""Models, providers and agents as configured, and the request that is made of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fencepost.domain.permissions import Rule
from fencepost.domain.stream import ProviderMetadata
from fencepost.domain.tools import ToolDefinition
from fencepost.domain.wire import WireModel


class Configured(BaseModel):
    """A part of the configuration file: an unknown key is an error, so that a typing mistake is seen."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelRef(WireModel):
    """A model by name, as sessions and messages store it."""

    id: str = Field(min_length=1)
    provider_id: str = Field(min_length=1)
    variant: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """Read `provider/model`; the model's part may hold slashes. Raises ValueError without a provider."""
        provider, slash, model = text.partition("/")
        if not slash or not provider or not model:
            raise ValueError(f"{text!r} is no model name: write it as provider/model, such as openai/gpt-4o-mini")
        return cls(id=model, provider_id=provider)

    def __str__(self) -> str:
        return f"{self.provider_id}/{self.id}"


class ModelConfig(Configured):
    """One model of a provider. Limits are in tokens, costs in US dollars per million tokens."""

    context: int | None = Field(default=None, gt=0)
    output: int | None = Field(default=None, gt=0)
    temperature: float | None = Field(default=None, ge=0)
    cost_input: float = Field(default=0, ge=0)
    cost_output: float = Field(default=0, ge=0)
    cost_cache_read: float | None = Field(default=None, ge=0)
    cost_cache_write: float | None = Field(default=None, ge=0)
    options: dict[str, Any] = Field(default_factory=dict, description="further fields of the request body")


class ProviderConfig(Configured):
    """One provider. `api_key_env` names an environment variable; the key itself is never configured or stored."""

    protocol: Literal["openai-chat"] = "openai-chat"
    base_url: str
    api_key_env: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    first_chunk_timeout: float = Field(default=120, gt=0, description="seconds to the first byte of an answer")
    idle_timeout: float = Field(default=120, gt=0, description="seconds between two chunks")
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    any_model: bool = Field(default=True, description="serve models that are not listed, without known limits")

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return value.rstrip("/")


class AgentConfig(Configured):
    """An agent: its instructions, and optionally its own model, step limit, tools and permission rules."""

    system: str = ""
    model: str | None = None
    steps: int | None = Field(default=None, gt=0)
    tools: tuple[str, ...] | None = None
    permissions: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class TextContent:
    text: str


@dataclass(frozen=True, slots=True)
class MediaContent:
    """A file for the model; `uri` is a data URI or a URL."""

    uri: str
    mime: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningContent:
    text: str
    provider_metadata: ProviderMetadata | None = None


@dataclass(frozen=True, slots=True)
class ToolCallContent:
    id: str
    name: str
    input: Any
    provider_executed: bool = False
    provider_metadata: ProviderMetadata | None = None


@dataclass(frozen=True, slots=True)
class ToolResultContent:
    """`result` is {type: json|text|error|content, value}; for content, value is a list of tool content items."""

    id: str
    name: str
    result: dict[str, Any]
    provider_executed: bool = False
    provider_metadata: ProviderMetadata | None = None


Content: TypeAlias = TextContent | MediaContent | ReasoningContent | ToolCallContent | ToolResultContent


@dataclass(frozen=True, slots=True)
class ModelMessage:
    """One message of a request; tool results have messages of their own, with role `tool`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: tuple[Content, ...]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request of a model, independent of any provider's wire format."""

    model: ModelRef
    provider: ProviderConfig
    config: ModelConfig
    messages: tuple[ModelMessage, ...]
    system: tuple[str, ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    cache_key: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
