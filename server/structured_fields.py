"""The fields that ask for structured output, down to what is wrong about them without a grammar.

`response_format` is OpenAI's, `structured_outputs` vLLM's, `regex` and `ebnf` are SGLang's.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from .validation import Strict, wrong

MAX_CHOICES = 1000
NonEmpty = Annotated[str, Field(min_length=1)]


def _json_schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise wrong("must be a JSON schema, an object")
    return value


Schema = Annotated[
    dict[str, Any], BeforeValidator(_json_schema), WithJsonSchema({"type": "object"})
]


class JsonSchemaFormat(Strict):
    """A named schema; `strict` may be left out, as every schema is enforced."""

    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer: free text, some JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _agree(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema goes with the type 'json_schema', and with no other")
        return self


def _nothing_if_text(value: Any) -> Any:
    return None if value == {"type": "text"} else value


AnswerFormat = Annotated[ResponseFormat | None, BeforeValidator(_nothing_if_text)]


class StructuredOutputs(Strict):
    """Exactly one of the ways to say what the answer must look like."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool = False
    regex: NonEmpty | None = None
    choice: Annotated[list[str] | None, Field(min_length=1, max_length=MAX_CHOICES)] = None
    grammar: NonEmpty | None = None
