"""The bodies of the routes beside generation."""

from pydantic import Field

from .chat_protocol import ChatMessage, ChatPromptFields
from .errors import unsupported
from .validation import RequestModel


class PromptRequest(ChatPromptFields, RequestModel):
    """A prompt, or a chat as generation would encode it."""

    model: str = ""
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    add_special_tokens: bool | None = None

    def check_form(self) -> None:
        """Raise ApiError for a field that the other form has: here it could not act."""
        if self.messages:
            if self.add_special_tokens:
                message = "add_special_tokens: a chat has those of its format, and no others on top"
                raise unsupported("add_special_tokens", message)
            return
        for name, field in ChatPromptFields.model_fields.items():
            if getattr(self, name) != field.get_default(call_default_factory=True):
                raise unsupported(name, f"{name} needs messages")


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
