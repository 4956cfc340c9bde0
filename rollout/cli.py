"""The command line: ``rollout generate`` turns a file of prompts into a file of completions.

This room reads, calls the engine and writes; it decides nothing about generation. A flag fills a
field of ``SamplingParams`` or ``EngineConfig`` and is passed on only when it was given: defaults and
rules stay theirs. What can be refused without the model is refused before it is loaded. stdout
carries completions and nothing else.

Exit status: 0 when done, 1 when completions failed (they are written nevertheless), 2 when what the
user gave is wrong, 130 when interrupted (nothing is written in both cases).
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rollout.attention import BACKENDS
from rollout.bench import DEFAULT_PEERS, PEERS, WORKLOADS, host_facts, run_bench
from rollout.config import SCHEDULER_SAFETY_MARGINS, EngineConfig
from rollout.demo_model import demo_model
from rollout.engine import RolloutEngine
from rollout.jsonl import STDIO, completion_record, named_error, open_output, read_prompts
from rollout.results import RolloutBatch
from rollout.types import SamplingParams

DEMO = "demo"
USER_ERRORS = (ValueError, TypeError, OSError)  # UnsupportedModelError is a ValueError
MEMORY_UNITS = {"": 2**30, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
MEMORY_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
MAX_BARE_GIB = 2**20  # a number without a unit above this was meant as bytes


def memory_size(text: str) -> int:
    """Bytes of ``"1.5"`` (GiB), ``"512MiB"``, ``"2GB"`` or ``"1000000B"``."""
    unit = text.lstrip("0123456789.")
    try:
        size, factor = float(text.removesuffix(unit)), MEMORY_UNITS[unit.strip().lower()]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; give GiB as a number, or a number with B, KiB, MiB, GiB, kB, MB or GB"
        ) from None
    if not unit and size > MAX_BARE_GIB:
        raise argparse.ArgumentTypeError(f"{text} without a unit is GiB; for bytes write {text}B")
    return int(size * factor)


@dataclass(frozen=True, slots=True)
class Option:
    """A flag for one field of a dataclass; without ``flag`` it is named like the field.

    Example::

        Option("top_k", "keep this many of the likeliest tokens", {"type": int})  # --top-k
    """

    name: str
    help: str
    settings: Mapping[str, Any]
    flag: str | None = None

    def add_to(self, parser: argparse._ArgumentGroup, owner: type) -> None:
        """Add the flag; its help shows the default of ``owner``'s field where that says something."""
        default = next(f.default for f in fields(owner) if f.name == self.name)
        shown = "" if default is None or default is False or default == () else f" (default: {default})"
        flag = self.flag or "--" + self.name.replace("_", "-")
        parser.add_argument(
            flag, dest=self.name, default=argparse.SUPPRESS, help=self.help + shown, **self.settings
        )


INT: Mapping[str, Any] = {"type": int, "metavar": "N"}
FLOAT: Mapping[str, Any] = {"type": float, "metavar": "X"}
SAMPLING_OPTIONS = (
    Option("n", "samples per prompt", INT),
    Option("max_new_tokens", "tokens to generate at the most", INT),
    Option("min_new_tokens", "tokens before which nothing ends a completion", INT),
    Option("temperature", "divides the logits; 0 is greedy", FLOAT),
    Option("top_k", "keep this many of the likeliest tokens", INT),
    Option("top_p", "keep the likeliest tokens up to this mass", FLOAT),
    Option("min_p", "keep tokens with this share of the likeliest one's probability", FLOAT),
    Option("repetition_penalty", "scales logits of tokens seen in prompt or completion", FLOAT),
    Option("presence_penalty", "subtracted once from every generated token's logit", FLOAT),
    Option("frequency_penalty", "subtracted for each time a token was generated", FLOAT),
    Option("stop_strings", "ends a completion; repeatable", {"action": "append", "metavar": "STR"}, "--stop"),
    Option("stop_token_ids", "ends a completion; repeatable", {"action": "append", **INT}, "--stop-token-id"),
    Option("ignore_eos", "do not end at the model's EOS tokens", {"action": "store_true"}),
)
ENGINE_OPTIONS = (
    # not SamplingParams.seed: under that one equal lines would draw equal samples
    Option("seed", "same seed, prompts and settings: same completions", INT),
    Option("page_size", "tokens per page of the cache", INT),
    Option("num_blocks", "pages of the cache per layer group", INT),
    Option("max_memory", "bound of the cache: GiB, or 512MiB, 2GB, 1000000B", {"type": memory_size}),
    Option("max_batch_tokens", "tokens per step at the most", INT),
    Option("scheduler_type", "whom to serve", {"choices": tuple(SCHEDULER_SAFETY_MARGINS)}, "--scheduler"),
    Option("attn_implementation", "attention backend", {"choices": tuple(BACKENDS)}, "--attn"),
)
CHOICES = (
    ("--dtype", ("auto", "float32", "bfloat16"), "type of the weights; auto: as the checkpoint"),
    ("--device", ("auto", "cpu", "cuda"), "auto: cuda where there is one"),
    ("--on-error", ("raise", "return"), "raise: failed completions, though written, end in exit status 1"),
)


class Parser(argparse.ArgumentParser):
    """argparse that complains in one sentence and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (see the top of this file)."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except USER_ERRORS as error:
        _complain(_sentence(error))
        return 2
    except KeyboardInterrupt:
        _complain("interrupted; nothing was written")
        return 130
    return status


def _parser() -> Parser:
    parser = Parser(prog="rollout", description="Rollouts for reinforcement learning.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="complete the prompts of a JSONL file"))
    _add_bench(commands.add_parser("bench", help="measure beside transformers' continuous batching"))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Complete the prompts of a JSONL file. A line is an object with one of prompt (text), prompt_ids "
        "or messages (chat), and optionally id (copied to the output; else the line's number) and params "
        "(sampling parameters of this line)."
    )
    parser.set_defaults(run=_generate)
    parser.add_argument("--model", required=True, help=f"folder, hub id, or {DEMO!r}: a small real model")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL to read; - is stdin")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL to write; - is stdout")
    for flag, choices, words in CHOICES:  # the first one is the default
        parser.add_argument(
            flag, default=choices[0], choices=choices, help=f"{words} (default: {choices[0]})"
        )
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    for options, owner in ((SAMPLING_OPTIONS, SamplingParams), (ENGINE_OPTIONS, EngineConfig)):
        group = parser.add_argument_group(f"fields of {owner.__name__}")
        for option in options:
            option.add_to(group, owner)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Generate the same workloads on the CPU with this engine, with transformers' continuous batching "
        "and with its generate in turn, several rounds in one process; prints tables (stderr) and JSON "
        "(stdout), with the least time that this machine's arithmetic and memory need."
    )
    parser.set_defaults(run=_bench)
    parser.add_argument(
        "--model", default=DEMO, help=f"folder or hub id (default: {DEMO}, a small real model)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of the weights")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured rounds (default: 3)")
    for name, default, known in (("--workloads", ("grpo",), WORKLOADS), ("--peers", DEFAULT_PEERS, PEERS)):
        parser.add_argument(
            name, default=default, nargs="+", metavar="NAME", help=f"any of: {', '.join(known)}"
        )


def _bench(args: argparse.Namespace) -> int:
    records = run_bench(
        lambda: load_model(args.model, args.dtype, "cpu"),
        workloads=args.workloads,
        peers=args.peers,
        rounds=args.rounds,
    )
    facts = {"model": args.model, "dtype": args.dtype, "host": host_facts()}
    print(json.dumps(facts | {"workloads": records}))
    return 0


def _given(args: argparse.Namespace, options: Sequence[Option]) -> dict[str, Any]:
    return {option.name: getattr(args, option.name) for option in options if option.name in args}


def _generate(args: argparse.Namespace) -> int:
    config = EngineConfig(**_given(args, ENGINE_OPTIONS))
    base = _given(args, SAMPLING_OPTIONS)
    SamplingParams(**base)  # refused here, a wrong flag is not blamed on line 1
    lines = read_prompts(args.prompts, base)
    if STDIO != args.out and Path(args.prompts).resolve() == Path(args.out).resolve():
        raise ValueError(f"--prompts and --out are both {args.out}; the prompts would be lost")
    with open_output(args.out) as out:  # opened first: an hour's work must not end at a wrong folder
        if args.no_progress:
            transformers_logging.disable_progress_bar()
        model, tokenizer = load_model(args.model, args.dtype, args.device)
        batch = RolloutEngine(model, tokenizer, config).generate(
            [line.prompt for line in lines],
            [line.params for line in lines],
            progress=not args.no_progress,
            on_error="return",
        )
        sources = [line for line in lines for _ in range(line.params.n)]
        for line, completion in zip(sources, batch, strict=True):
            text = tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            out.write(json.dumps(completion_record(line.id, completion, text), allow_nan=False) + "\n")
    Console(stderr=True).print(_summary(batch))
    if not batch.failed or args.on_error == "return":
        return 0
    where, error = next((line.where, c.error) for line, c in zip(sources, batch, strict=True) if c.error)
    _complain(
        f"{len(batch.failed)} of {len(batch)} completions failed, first {where}: {named_error(error)} "
        "(all are written; --on-error return accepts that)"
    )
    return 1


def load_model(name: str, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in ``eval()`` on its device, and tokenizer of a folder, a hub id or ``demo``.

    Raises:
        ValueError: there is no such device or model, or the model has no tokenizer.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here; use --device cpu or auto")
    try:
        source = demo_model() if name == DEMO else name
        tokenizer = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        missing = "" if name == DEMO or Path(name).is_dir() else " is no local folder and"
        raise ValueError(f"--model {name}{missing} cannot be loaded: {_sentence(error)}") from error
    return model.to(device).eval(), tokenizer


def _summary(batch: RolloutBatch) -> Table:
    metrics, lengths = batch.metrics, [len(completion.token_ids) for completion in batch]
    reasons = Counter(str(completion.finish_reason) for completion in batch)
    mean_len = sum(lengths) / len(lengths)
    rows = {
        "completions": f"{len(batch)}",
        "generated tokens": f"{metrics.generated_tokens}",
        "tokens/s": f"{metrics.tokens_per_second:.1f}",
        "seconds": f"{metrics.seconds:.3f}",
        "mean / min / max length": f"{mean_len:.1f} / {min(lengths)} / {max(lengths)}",
        "finish reasons": "\n".join(f"{reason} {count}" for reason, count in reasons.most_common()),
        "cached tokens": f"{metrics.cached_tokens}",
        "preemptions": f"{metrics.num_preemptions}",
        "steps": f"{metrics.num_steps}",
        "cache size in MiB": f"{metrics.cache_bytes / 2**20:.2f}",
    }
    rows |= {f"seconds in {stage}": f"{s:.3f}" for stage, s in metrics.seconds_by_stage.items()}
    table = Table("what", "value", title="rollout generate", show_header=False)
    for what, value in rows.items():
        table.add_row(what, value)
    return table


def _sentence(error: Exception) -> str:
    """An error on one line; libraries also write paragraphs, of which the first line says it."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _complain(sentence: str) -> None:
    print(f"rollout: {sentence}", file=sys.stderr)
