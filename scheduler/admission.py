"""What the engine refuses before it queues anything.

The API process validates every field for the user; this is the engine's own guard, because one
request with an id outside the vocabulary would fail the whole step it is computed in.
"""

from dataclasses import dataclass

from .grammar import GrammarCompiler, GrammarError, Matcher
from .messages import Submit


class Refused(Exception):
    """A request that cannot be served; the text is for its sender."""


class Overloaded(Refused):
    """The queue is full: the same request may be served later."""


class DuplicateId(Exception):
    """The id belongs to a request that is still alive, which an answer would end."""


@dataclass(frozen=True)
class Limits:
    """What a request must fit in.

    max_tokens: prompt and outputs together, by the context of the model or by the pages there are.
    """

    max_tokens: int
    vocab_size: int

    def verify(self, submit: Submit) -> None:
        """Raise Refused, naming the value and the limit, if the request can never be served."""
        prompt, params = submit.prompt_ids, submit.params
        if not prompt:
            raise Refused("the prompt holds no tokens")
        # The first output needs no room in the cache, but it counts against the context.
        if len(prompt) + min(params.max_tokens, 1) > self.max_tokens:
            raise Refused(
                f"the prompt holds {len(prompt)} tokens; at most {self.max_tokens} fit, "
                "output included"
            )
        if params.max_tokens < 0:
            raise Refused(f"max_tokens is {params.max_tokens}; it must not be negative")
        ids = [*params.stop_token_ids, *params.logit_bias, min(prompt), max(prompt)]
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise Refused(
                f"token ids run from 0 to {self.vocab_size - 1}; "
                f"the request names ids from {min(ids)} to {max(ids)}"
            )


def matcher_of(submit: Submit, grammars: GrammarCompiler | None) -> Matcher | None:
    """The matcher of a request that has a grammar; raises Refused where that cannot be used."""
    if submit.grammar is None:
        return None
    if grammars is None:
        raise Refused("the tokenizer of this model cannot be used with grammars")
    try:
        return grammars.compile(submit.grammar, submit.params)
    except GrammarError as error:
        raise Refused(f"the grammar cannot be used: {error}") from None
