"""Measure checkpoints/tiny-dsa and write benchmarks/results/tiny_dsa.json.

Everything the model card promises comes from here: perplexity dense against sparse, needle recall
and its two controls, attention mass, MTP agreement, sample answers. Run from the repository root:

    python -m benchmarks.tiny_dsa --device cuda
    python -m benchmarks.tiny_dsa --tasks --output benchmarks/results/tiny_dsa_tasks.json

The second form takes minutes on a CPU: exact answers per kind of task, how often each of four
drafts in a row is what the model says, and the least distance of the needles from their questions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path

import tokenizers
import torch
from tokenizers import Tokenizer

from training import evaluate, export
from training.corpus import EXCHANGES, Mix
from training.evaluate import CHAT

ROOT = Path(__file__).parent.parent

PROMPTS = (
    "Hello!",
    "Who are you?",
    "What is the capital of Norway?",
    "Oslo is the capital of which country?",
    "What is the opposite of early?",
    "What is a compass?",
    "How many legs does a spider have?",
    "What is the plural of goose?",
    "Which month comes after August?",
    "Tell me a story about Mira and a fox.",
    "Write a short story with Otto and a kettle.",
    "Repeat this: falcon marble zenith 4071 tulip",
    "Sort these words: pear, apple, lemon, fig",
    "How many words are in this list? drum, lamp, coin, rope, tent",
    "What is 7 + 5?",
    "What is 46 + 38?",
    "The kite is in the barn. Nora moves the kite to the mill. Where is the kite?",
    "Write a JSON object with name Emil, age 31, city Lyon",
    "The secret code of the rusty anchor is 5820. The secret code of the tiny harp is 1146. "
    "A sleepy otter slept beside the fern.\n\nWhat is the secret code of the rusty anchor?",
    "What will the weather be next year?",
)


def device_name(device: str) -> str:
    """What the figures were measured on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor()


def measure_all(bench: evaluate.Bench) -> tuple[dict[str, object], bool]:
    """Every figure with a gate, sample answers, and whether all gates were passed."""
    figures = evaluate.measure(bench)
    samples = [{"prompt": text, "answer": evaluate.answer(bench, text)} for text in PROMPTS]
    gates = evaluate.gates(figures, bench.model.config.max_position_embeddings)
    print(json.dumps(samples, indent=1, ensure_ascii=False))
    print("\n".join(str(gate) for gate in gates))
    checked = [
        {"name": g.name, "value": g.value, "limit": g.limit, "passed": g.passed} for g in gates
    ]
    found: dict[str, object] = {"gates": checked, "figures": figures, "samples": samples}
    return found, all(gate.passed for gate in gates)


def measure_tasks(bench: evaluate.Bench) -> tuple[dict[str, object], bool]:
    """Exact answers by kind of task (stories have none), drafts, the least distance of a needle."""
    exact = {
        make.__name__: evaluate.exact_answers(bench, make, bench.needle_chats)
        for make, _ in EXCHANGES
        if make.__name__ != "story"
    }
    least = {str(tokens): min(evaluate.needle_distances(bench, tokens)) for tokens in (1024, 3891)}
    found: dict[str, object] = {
        "exact_answers": exact,
        "needle_least_distance": least,
        "draft_agreement_chat": evaluate.draft_agreement(bench, 1024, CHAT, "sparse", 4),
        "draft_agreement_all": evaluate.draft_agreement(bench, 1024, Mix(), "sparse", 4),
    }
    print(json.dumps(found, indent=1))
    return found, True


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 when a gate is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints" / "tiny-dsa")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/tiny_dsa.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=16, help="held-out rows of 4096 tokens")
    parser.add_argument("--needle-chats", type=int, default=40, help="chats a needle test")
    parser.add_argument("--seed", type=int, default=9001)
    parser.add_argument(
        "--tasks", action="store_true", help="only the exact answers of tasks, and drafts"
    )
    args = parser.parse_args(argv)
    # TF32 products would blur the comparison of dense and sparse.
    torch.set_float32_matmul_precision("highest")
    try:
        model = export.load(args.checkpoint, args.device)
    except export.CheckpointError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    file = str(args.checkpoint / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    bench = evaluate.Bench(model, tokenizer, file, args.rows, args.needle_chats, args.seed)
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device_name(args.device),
        "versions": {"torch": torch.__version__, "tokenizers": tokenizers.__version__},
        "settings": {"rows": args.rows, "needle_chats": args.needle_chats, "seed": args.seed},
    }
    found, passed = measure_tasks(bench) if args.tasks else measure_all(bench)
    export.write_json(args.output, report | found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
