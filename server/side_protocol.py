"""The bodies of the routes beside generation."""

from pydantic import Field

from .chat_protocol import ChatMessage, ChatPromptFields
from .validation import RequestModel


class PromptRequest(ChatPromptFields, RequestModel):
    """A prompt, or a chat as generation would encode it."""

    model: str = ""
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    add_special_tokens: bool = True


class TokenizeRequest(PromptRequest):
    """Body of POST /tokenize."""

    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Body of POST /detokenize."""

    model: str = ""
    tokens: list[int]


class AbortRequest(RequestModel):
    """Body of POST /abort: one answer's id, or all of them."""

    request_id: str | None = None
    all: bool = False
