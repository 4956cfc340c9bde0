"""What is generated: prompts, and for each of their samples how it is drawn and how long it gets.

Lengths are given, not left to EOS, so that every peer generates the same number of tokens. They are
drawn once with a fixed seed; chat prompts have about 40 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout.types import SamplingParams

TOPICS = ("the sea", "a clock", "bread", "winter", "a bridge", "chess", "copper", "sleep")
ASKS = ("Tell me a short story about {}.", "What should a child know about {}?")
PLAIN = SamplingParams(ignore_eos=True)
MIXED = (
    PLAIN,
    replace(PLAIN, temperature=0.7, top_p=0.9),
    replace(PLAIN, temperature=0.8, top_k=50),
    replace(PLAIN, temperature=1.2, top_p=0.95, top_k=200),
)
"""Parameters that differ from request to request, all of kinds that every peer knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and, per prompt, the parameters of each sample (``max_new_tokens`` is its length)."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    samples: tuple[tuple[SamplingParams, ...], ...]
    num_rollouts: int = 1
    """How often all of it is generated, with a change of the weights in between."""

    @property
    def num_tokens(self) -> int:
        """Tokens that one run generates."""
        return self.num_rollouts * sum(params.max_new_tokens for row in self.samples for params in row)

    @property
    def requests(self) -> list[tuple[tuple[int, ...], int, SamplingParams]]:
        """(prompt, number of the sample of that prompt, parameters), in order."""
        pairs = zip(self.prompts, self.samples, strict=True)
        return [(prompt, i, params) for prompt, row in pairs for i, params in enumerate(row)]

    def shortened(self, cap: int, most_requests: int | None = None) -> "Workload":
        """The same requests once, or the first of them, with at most ``cap`` tokens each: for warming up."""
        return self._with_lengths(lambda length: min(length, cap), most_requests)

    def scaled_down(self, factor: int, most_prompt_tokens: int) -> "Workload":
        """The same requests once, as many of them as have so many prompt tokens together, with one of
        ``factor`` of their tokens: for choosing, since lengths differ as before."""
        ends = accumulate(len(prompt) for prompt, _, _ in self.requests)
        return self._with_lengths(
            lambda length: -(-length // factor), max(1, sum(end <= most_prompt_tokens for end in ends))
        )

    def _with_lengths(self, length_of: Callable[[int], int], most_requests: int | None) -> "Workload":
        samples = tuple(
            tuple(replace(params, max_new_tokens=length_of(params.max_new_tokens)) for params in row)
            for row in self.samples
        )
        if most_requests is not None:
            ends = list(accumulate(len(row) for row in samples))
            left = [max(0, most_requests - end + len(row)) for end, row in zip(ends, samples, strict=True)]
            samples = tuple(row[:n] for row, n in zip(samples, left, strict=True) if n > 0)
        return replace(self, prompts=self.prompts[: len(samples)], samples=samples, num_rollouts=1)


def chat_prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> tuple[tuple[int, ...], ...]:
    """Different short questions under the tokenizer's chat template."""
    prompts = []
    for i in range(count):
        text = ASKS[i // len(TOPICS) % len(ASKS)].format(TOPICS[i % len(TOPICS)]) + f" Part {i}."
        message = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        prompts.append(tuple(ids))
    return tuple(prompts)


def exponential(num_prompts: int, n: int, mean: int = 64, cap: int = 256) -> list[list[int]]:
    """Lengths [num_prompts][n], as rollouts have them: many short, a few long."""
    drawn = np.random.default_rng(0).exponential(mean, (num_prompts, n))
    lengths: list[list[int]] = np.clip(drawn.astype(int), 1, cap).tolist()
    return lengths


def grpo(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    num_prompts: int = 32,
    n: int = 4,
    kinds: tuple[SamplingParams, ...] = (PLAIN,),
    num_rollouts: int = 1,
) -> Workload:
    """Chat prompts with ``n`` samples each and exponential lengths; ``kinds`` go round the prompts."""
    samples = tuple(
        tuple(replace(kinds[i % len(kinds)], max_new_tokens=length) for length in row)
        for i, row in enumerate(exponential(num_prompts, n))
    )
    prompts = chat_prompts(tokenizer, num_prompts)
    return Workload(name=name, prompts=prompts, samples=samples, num_rollouts=num_rollouts)


def long_prompt(tokenizer: PreTrainedTokenizerBase, name: str) -> Workload:
    """8 prompts of 1,024 tokens, 8 samples each, 64 new tokens: prefill once per prompt pays."""
    ids = [token for prompt in chat_prompts(tokenizer, 32) for token in prompt]
    prompts = tuple(tuple((ids * 4)[i * 7 : i * 7 + 1024]) for i in range(8))
    sample = replace(PLAIN, max_new_tokens=64)
    return Workload(name=name, prompts=prompts, samples=((sample,) * 8,) * 8)


def tail(tokenizer: PreTrainedTokenizerBase, name: str) -> Workload:
    """64 requests, two of them 16 times as long as the others."""
    lengths = [24 * 16 if i in (20, 40) else 24 for i in range(64)]
    samples = tuple((replace(PLAIN, max_new_tokens=length),) for length in lengths)
    return Workload(name=name, prompts=chat_prompts(tokenizer, 64), samples=samples)


def scale(tokenizer: PreTrainedTokenizerBase, name: str, *, count: int) -> Workload:
    """``count`` requests of 32 tokens."""
    sample = replace(PLAIN, max_new_tokens=32)
    return Workload(name=name, prompts=chat_prompts(tokenizer, count), samples=((sample,),) * count)


def single(tokenizer: PreTrainedTokenizerBase, name: str) -> Workload:
    """One request of 64 tokens: latency per token."""
    sample = replace(PLAIN, max_new_tokens=64)
    return Workload(name=name, prompts=chat_prompts(tokenizer, 1), samples=((sample,),))


WORKLOADS: dict[str, Callable[[PreTrainedTokenizerBase, str], Workload]] = {
    "grpo": grpo,
    "grpo-16x16": partial(grpo, num_prompts=16, n=16),
    "grpo-top-p": partial(grpo, kinds=(replace(PLAIN, top_p=0.95),)),
    "grpo-mixed": partial(grpo, kinds=MIXED),
    "long-prompt": long_prompt,
    "tail": tail,
    "scale-16": partial(scale, count=16),
    "scale-64": partial(scale, count=64),
    "scale-256": partial(scale, count=256),
    "scale-512": partial(scale, count=512),
    "steps": partial(grpo, num_prompts=16, num_rollouts=5),
    "single": single,
}


def check_name(name: str) -> None:
    """Raises ValueError when there is no workload of this name."""
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r}; known: {', '.join(WORKLOADS)}")


def make_workload(name: str, tokenizer: PreTrainedTokenizerBase) -> Workload:
    """The workload of this name.

    Raises:
        ValueError: there is none.
    """
    check_name(name)
    return WORKLOADS[name](tokenizer, name)
