"""What a start prints: the model, the choices made for it, the room it has, how to call it."""

from ..configs.quantities import shown_bytes, shown_count
from .service import Service

MTP_WORDS = (
    ("none", ""),
    ("loaded", " with the MTP layer"),
    ("unused", " without the MTP layer, which is not used"),
)


def loaded_lines(service: Service) -> list[str]:
    """Lines for the operator, once the checkpoint is loaded."""
    info = service.info
    parameters = shown_count(info.num_parameters)
    cache = info.num_cache_tokens * info.cache_bytes_per_token
    mtp = dict(MTP_WORDS)[info.mtp_layer]
    places = info.num_cache_tokens // service.max_tokens
    return [
        f"loaded {service.model_name}: {info.model_type}, {parameters} parameters{mtp} "
        f"in {info.dtype} on {info.device}, "
        f"attention by {info.attention_backend}",
        *(f"  {note}" for note in (*info.notes, *service.notes)),
        f"cache: {info.num_cache_tokens} tokens in pages of {info.page_size} "
        f"({shown_bytes(cache)}); room for {places} requests of full length, "
        f"{info.max_num_seqs} run at once",
        f"longest request: {service.max_tokens} tokens, prompt and output together",
    ]


def ready_line(model_name: str, host: str, port: int) -> str:
    """The one line that scripts wait for; it begins with "ready" and is the last of a start."""
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    return (
        f"ready: {url} serves {model_name}; open {url}/ or try: curl {url}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
