"""Strict request models: what every field must look like, and how a mistake is told.

Three classes of fields. A field of the model works. One of `IGNORED` cannot change the answer and
is dropped. Everything else is refused by name, unless its value is the neutral one of `NEUTRAL`,
which asks for nothing. An explicit null always equals absence: common clients send nulls for most
fields.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from .errors import ApiError, shown

IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "early_stopping": (False,),
        "return_tokens_as_token_ids": (False,),
        "return_hidden_states": (False,),
        "bad_words": ([],),
        "logits_processors": ([],),
    }
)
MAX_PROBLEMS = 10
# What is wrong, by the type of a problem; braces take what the problem says of itself.
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "int_type": "must be an integer",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be a string",
        "list_type": "must be a list",
        "dict_type": "must be an object",
        "model_type": "must be an object",
        "model_attributes_type": "must be an object",
        "none_required": "must be null",
        "finite_number": "must be a finite number",
        "literal_error": "must be {expected}",
        "union_tag_invalid": "must be one of {expected_tags}",
        "greater_than": "must be greater than {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than": "must be less than {lt}",
        "less_than_equal": "must be at most {le}",
        "string_too_short": "must have at least {min_length} characters",
        "string_too_long": "must have at most {max_length} characters",
        "string_pattern_mismatch": "must match {pattern}",
        "too_short": "must have at least {min_length} entries",
        "too_long": "must have at most {max_length} entries",
    }
)

_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """Types are not converted, unknown keys are refused, null keys are dropped."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class RequestModel(Strict):
    """The top of a request body: here the lists of ignored and neutral fields apply too."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if not cls._is_harmless(key, value)}

    @classmethod
    def _is_harmless(cls, key: str, value: Any) -> bool:
        if key in IGNORED:
            return True
        return any(type(value) is type(n) and value == n for n in cls.neutral.get(key, ()))


def refuse(message: str) -> PydanticCustomError:
    """For validators: the value is well formed, but this server does not do that."""
    return PydanticCustomError("unsupported", "{reason}", {"reason": message})


def wrong(message: str) -> PydanticCustomError:
    """For validators: the value is not what the field takes."""
    return PydanticCustomError("invalid", "{reason}", {"reason": message})


def validate(model: type[_Model], document: Mapping[str, Any]) -> _Model:
    """The document as a model; raises ApiError 400 that names up to ten problems."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _api_error(error, model) from None


def without_unknown(model: type[BaseModel], document: dict[str, Any]) -> dict[str, Any]:
    """The document without the fields that the model does not know; it is changed in place."""
    try:
        model.model_validate(document)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False):
            if problem["type"] == "extra_forbidden":
                _drop(document, problem["loc"])
    return document


def _drop(document: dict[str, Any], path: Sequence[int | str]) -> None:
    *parents, last = path
    node: Any = document
    for part in parents:
        if isinstance(part, str) and part.startswith("<"):
            continue
        node = node[part]
    del node[last]


def _api_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    problems = error.errors(include_url=False, include_context=True)
    texts = [_problem(problem, model) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        texts.append(f"and {len(problems) - MAX_PROBLEMS} more")
    first = problems[0]
    refused = first["type"] in {"extra_forbidden", "unsupported"}
    return ApiError(
        400,
        "; ".join(texts),
        code="unsupported_parameter" if refused else "invalid_value",
        param=_path(first),
    )


def _path(problem: ErrorDetails) -> str:
    """Where the field stands; tags of unions, which are in angle brackets, are no fields."""
    *parents, last = map(str, problem["loc"] or ("",))
    fields = [part for part in parents if not part.startswith("<")]
    return ".".join(part[:64] for part in (*fields, last))


def _problem(problem: ErrorDetails, model: type[BaseModel]) -> str:
    path = _path(problem)
    match problem["type"]:
        case "missing":
            return f"{path} is required"
        case "extra_forbidden":
            near = _nearest(path, model) if "." not in path else ""
            return f"{path} is not supported by this server{near}"
        case "unsupported" | "invalid":
            return f"{path}: {problem['msg']}"
    words = _WORDS.get(problem["type"], "has a value that is not taken")
    text = words.format_map(problem.get("ctx", {}))
    return f"{path} {text}, not {shown(problem['input'])}"


def _nearest(name: str, model: type[BaseModel]) -> str:
    """A hint for a field that is misspelled."""
    near = get_close_matches(name, model.model_fields, 1, 0.8)
    return f"; did you mean {near[0]}?" if near else ""
