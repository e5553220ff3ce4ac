"""`python -m training`: make a checkpoint folder from nothing, or continue one.

Prints the losses as it goes and the gates at the end; exit status 1 says that a gate was missed
(the checkpoint is written all the same).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from . import evaluate, export, tokenizer
from .config import PRESETS
from .corpus import DataError, read_extra_text
from .network import TinyDsa
from .phases import Run, Trainer, plan

# Seconds kept back for the export and the gates.
RESERVE = 75.0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--minutes", type=float, default=9.5, help="wall clock, gates included")
    parser.add_argument("--steps", type=int, default=0, help="at most so many steps a phase")
    parser.add_argument(
        "--phases",
        default="dense:0.35,long:0.55,warmup:0.63,sparse:1",
        help="phase:progress at which it ends",
    )
    parser.add_argument("--resume", type=Path, help="start from this checkpoint folder")
    parser.add_argument("--tokenizer", type=Path, help="take tokenizer.json from this folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--index-lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="processes that make data")
    parser.add_argument("--extra-text", type=Path, help="folder of .txt files to mix in")
    parser.add_argument("--extra-licence", default="", help="their licence, see README.md")
    parser.add_argument("--no-gates", action="store_true", help="write the checkpoint and stop")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> tuple[TinyDsa, str]:
    """The model to train and the tokenizer file, already in the output folder."""
    torch.manual_seed(args.seed)
    source = args.resume or args.tokenizer
    model = export.load(args.resume) if args.resume else TinyDsa(PRESETS[args.preset])
    config = model.config
    file = args.out / "tokenizer.json"
    if source:
        known = Tokenizer.from_file(str(source / "tokenizer.json"))
    else:
        count = 12000 if args.preset == "tiny" else 600
        known = tokenizer.train(config.vocab_size, args.seed, count)
    if known.get_vocab_size() != config.vocab_size:
        size = known.get_vocab_size()
        raise DataError(f"{file}: {size} tokens, the model has {config.vocab_size}; train it anew")
    tokenizer.write(known, args.out, config.max_position_embeddings)
    return model.to(args.device), str(file)


def train(args: argparse.Namespace) -> TinyDsa:
    """All phases, then the export."""
    extra = read_extra_text(args.extra_text, args.extra_licence) if args.extra_text else ()
    model, file = prepare(args)
    cuda = args.device.startswith("cuda")
    run = Run(
        tokenizer_file=file,
        seed=args.seed,
        workers=args.workers,
        batch_tokens=args.batch_tokens,
        lr=args.lr,
        index_lr=args.index_lr,
        minutes=max(args.minutes - (0 if args.no_gates else RESERVE / 60), 0.1),
        extra_text=extra,
        compiled=cuda,
    )
    trainer = Trainer(model, run)
    phases = plan(model.config.max_position_embeddings, 0.06 if extra else 0.0)
    for item in args.phases.split(","):
        name, until = item.split(":")
        trainer.run_phase(phases[name], float(until), args.steps)
        size = export.export(model, args.out)
        print(f"after {name}: {size / 1e6:.1f} MB written to {args.out}", flush=True)
    if cuda:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    (args.out / "training_log.json").write_text(json.dumps(run.log), encoding="utf-8")
    return model


def check(args: argparse.Namespace) -> bool:
    """Measure the exported folder and print the gates."""
    file = str(args.out / "tokenizer.json")
    model = export.load(args.out, args.device)
    rows, chats = (8, 40) if args.preset == "tiny" else (1, 2)
    bench = evaluate.Bench(model, Tokenizer.from_file(file), file, rows, chats)
    figures = evaluate.measure(bench)
    gates = evaluate.gates(figures, model.config.max_position_embeddings)
    print("\n".join(str(gate) for gate in gates))
    return all(gate.passed for gate in gates)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: every gate passed; 1: one was missed; 2: nothing could be trained."""
    args = arguments(argv)
    # Workers are processes already; threads inside them would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    try:
        train(args)
        return 0 if args.no_gates or check(args) else 1
    except torch.cuda.OutOfMemoryError:
        print(
            f"error: out of GPU memory; try --batch-tokens {args.batch_tokens // 2}",
            file=sys.stderr,
        )
    except (DataError, export.CheckpointError, FileNotFoundError) as problem:
        print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
