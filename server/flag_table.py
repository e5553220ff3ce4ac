"""The named flags of `minidsa serve`: a dozen settings, in the groups that `--help` shows.

The commands that load a checkpoint without serving it take those of the engine.

Names are vLLM's where they mean the same. Every other setting is reached by its path.
"""

from dataclasses import dataclass

KEY_VARIABLE = "MINIDSA_API_KEY"


@dataclass(frozen=True)
class Flag:
    """A named flag and the setting it writes; `unset` says what no value means."""

    name: str
    target: str
    help: str
    unset: str = ""


Group = tuple[str, tuple[Flag, ...]]
GROUPS: tuple[Group, ...] = (
    (
        "address and access",
        (
            Flag("--host", "host", "address to listen on"),
            Flag("--port", "port", "port to listen on; 0 takes any free one"),
            Flag(
                "--served-model-name",
                "served_model_name",
                "name of the model in requests and answers",
                "the folder's name",
            ),
            Flag("--api-key", "api_key", "key that requests must carry", KEY_VARIABLE),
            Flag(
                "--allow-unknown-fields",
                "allow_unknown_fields",
                "drop fields of requests that are not known",
            ),
            Flag(
                "--log-format",
                "engine.log_format",
                "text, or json: one object a line, also one for each request that generates",
            ),
            Flag(
                "--otlp-traces-endpoint",
                "otlp_traces_endpoint",
                "URL of a collector for OpenTelemetry's spans, such as "
                "http://localhost:4318/v1/traces",
                "none",
            ),
            Flag("--drain-seconds", "drain_seconds", "time for open requests to finish at the end"),
        ),
    ),
    (
        "model and machine",
        (
            Flag("--chat-format", "chat_format", "how chats are encoded and answers are read"),
            Flag(
                "--load-format",
                "engine.load_format",
                "dummy makes random weights of the model's shape: to measure, not to answer",
            ),
            Flag("--dtype", "engine.dtype", "number format of the computation"),
            Flag("--device", "engine.device", "where to compute"),
            Flag("--num-threads", "engine.num_threads", "CPU threads of one operation", "by cores"),
            Flag(
                "--attention-backend",
                "engine.attention_backend",
                "auto, torch, triton, or dsa, which insists on an indexer",
            ),
            Flag(
                "--enforce-eager",
                "engine.enforce_eager",
                "no CUDA graphs or recorded layers",
            ),
            Flag(
                "--profile-dir",
                "engine.profile_dir",
                "folder for profiles of the engine, and the routes that take them",
                "none",
            ),
            Flag("--seed", "engine.seed", "where seeds of requests without one are drawn from"),
        ),
    ),
    (
        "speculative decoding",
        (
            Flag("--speculative", "engine.speculative.method", "who drafts tokens"),
            Flag(
                "--num-speculative-tokens",
                "engine.speculative.num_tokens",
                "drafts of a request in one step, at most",
                "by who drafts",
            ),
        ),
    ),
    (
        "sizes",
        (
            Flag(
                "--kv-cache-dtype",
                "engine.cache.row_dtype",
                "format of cached rows; auto is that of the computation",
            ),
            Flag(
                "--max-model-len",
                "engine.max_model_len",
                "longest prompt plus output, in tokens",
                "the model's context",
            ),
            Flag(
                "--session-dir",
                "engine.cache.session_dir",
                "folder for saved prefixes, and the routes that save and restore them",
                "none",
            ),
            Flag("--max-num-seqs", "engine.scheduler.max_num_seqs", "requests that run at once"),
            Flag(
                "--max-num-batched-tokens",
                "engine.scheduler.max_num_batched_tokens",
                "tokens computed in one step, prompts and outputs together",
                "by device",
            ),
        ),
    ),
)
FLAGS = tuple(flag for _, flags in GROUPS for flag in flags)

# Of commands that load a checkpoint and serve nobody: what has routes has no use there. Nor has a
# comparison with transformers, whose texts have seeds of their own, for a source of seeds or for
# random weights.
_WITH_ROUTES = ("--session-dir", "--profile-dir")


def _engine_groups(left_out: tuple[str, ...], taken_in: tuple[str, ...] = ()) -> tuple[Group, ...]:
    return tuple(
        (title, tuple(f for f in flags if f.name in taken_in or _is_for_engine(f, left_out)))
        for title, flags in GROUPS
        if title != "address and access"
    )


def _is_for_engine(flag: Flag, left_out: tuple[str, ...]) -> bool:
    return flag.target.startswith("engine.") and flag.name not in left_out


GENERATE_GROUPS = _engine_groups(_WITH_ROUTES, ("--chat-format",))
VERIFY_GROUPS = _engine_groups((*_WITH_ROUTES, "--load-format", "--seed"))
