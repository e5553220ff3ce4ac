"""Scripts for the scripted engine: a model that writes given texts, and a tool call to write."""

from scripted_engine import VOCAB, Script
from tokenizers_small import small_tokenizer

CALL = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="true">{note}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>"
)


def write(*parts: str | int) -> Script:
    """A script whose model writes texts, control tokens as such where a part names one."""
    tokenizer = small_tokenizer(VOCAB)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            # The full tokenizer reads markers as the control tokens that a model writes.
            ids += tokenizer.encode_text(part, add_bos=False)
    return lambda submit: ids
