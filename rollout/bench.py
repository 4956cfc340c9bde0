"""Speed beside the peers: the engine and transformers' continuous batching, interleaved, one process.

The workload is that of GRPO: chat prompts, several samples each, output lengths exponential. Both
sides get the same token ids, the same lengths and the same dtype; the peer keeps its manager
between rounds and computes no logprobs, the engine always does.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.types import RolloutMetrics, SamplingParams

TOPICS = ("the sea", "a clock", "bread", "winter", "a bridge", "chess", "copper", "sleep")
WARM_UP_TOKENS = 4
ASKS = ("Tell me a short story about {}.", "What should a child know about {}?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and how many tokens each sample of each prompt generates."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    temperature: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Tokens that one run generates."""
        return sum(map(sum, self.lengths))

    def shortened(self, cap: int) -> "Workload":
        """The same requests with at most ``cap`` tokens each, for warming up."""
        return replace(self, lengths=tuple(tuple(min(length, cap) for length in row) for row in self.lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One peer's rounds on one workload."""

    name: str
    tokens_per_second: tuple[float, ...]
    metrics: RolloutMetrics | None = None

    @property
    def median(self) -> float:
        """Median tokens per second over the rounds."""
        return statistics.median(self.tokens_per_second)


def grpo_workload(
    tokenizer: PreTrainedTokenizerBase, *, num_prompts: int = 32, n: int = 4, mean: int = 64, cap: int = 256
) -> Workload:
    """Chat prompts of about 40 tokens; lengths exponential with ``mean``, at most ``cap``."""
    rng = np.random.default_rng(0)
    prompts = []
    for i in range(num_prompts):
        text = ASKS[i // len(TOPICS) % len(ASKS)].format(TOPICS[i % len(TOPICS)]) + f" Part {i}."
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        prompts.append(tuple(ids))
    lengths = np.clip(rng.exponential(mean, (num_prompts, n)).astype(int), 1, cap)
    return Workload(prompts=tuple(prompts), lengths=tuple(tuple(map(int, row)) for row in lengths))


class EnginePeer:
    """This engine; each sample is a request of its own where lengths differ within a prompt."""

    name = "rollout"

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self._engine = RolloutEngine(model, config=config)
        self._seed = 0
        self.metrics: RolloutMetrics | None = None

    def run(self, workload: Workload) -> int:
        """Generate the workload once; returns the tokens generated."""
        self._seed += 1
        params = SamplingParams(temperature=workload.temperature, ignore_eos=True, seed=self._seed)
        prompts, all_params = [], []
        for prompt, lengths in zip(workload.prompts, workload.lengths, strict=True):
            for index, length in enumerate(lengths):
                prompts.append(list(prompt))
                all_params.append(replace(params, max_new_tokens=length, seed=self._seed * 1000 + index))
        batch = self._engine.generate(prompts, all_params)
        self.metrics = batch.metrics
        return batch.metrics.generated_tokens

    def close(self) -> None:
        """Give memory back."""
        self._engine.release_memory()


class TransformersPeer:
    """transformers' continuous batching with a manager that is kept between the rounds."""

    name = "transformers continuous batching"

    def __init__(self, model: PreTrainedModel, page_size: int = 256) -> None:
        self._model = model
        self._attention = model.config._attn_implementation
        self._manager: Any = model.init_continuous_batching(  # type: ignore[operator]
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(page_size=page_size, max_memory_percent=0.2),
        )
        self._manager.start()

    def run(self, workload: Workload) -> int:
        """Generate the workload once; returns the tokens generated."""
        expected = 0
        for prompt, lengths in zip(workload.prompts, workload.lengths, strict=True):
            for length in lengths:
                self._manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=-1)
                expected += 1
        tokens = 0
        while expected:
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
                tokens += len(result.generated_tokens)
                expected -= 1
        return tokens

    def close(self) -> None:
        """Stop the manager's thread and put the model's attention back."""
        self._manager.stop(block=True)
        self._model.config._attn_implementation = self._attention


Peer = EnginePeer | TransformersPeer


def measure(
    peers: Sequence[tuple[str, Callable[[], Peer]]], workload: Workload, rounds: int
) -> list[Measurement]:
    """Run the peers in turn, ``rounds`` times after a short warm-up each."""
    made = [(name, make()) for name, make in peers]
    speeds: dict[str, list[float]] = {name: [] for name, _ in made}
    with tqdm(total=(rounds + 1) * len(made), unit="run") as bar:
        for round_number in range(rounds + 1):
            for name, peer in made:
                bar.set_description(name)
                load = workload if round_number > 0 else workload.shortened(WARM_UP_TOKENS)
                started = time.perf_counter()
                tokens = peer.run(load)
                seconds = time.perf_counter() - started
                if tokens != load.num_tokens:
                    raise RuntimeError(f"{name} generated {tokens} tokens, {load.num_tokens} were asked")
                if round_number > 0:
                    speeds[name].append(tokens / seconds)
                bar.update()
    for _, peer in made:
        peer.close()
    return [
        Measurement(
            name=name,
            tokens_per_second=tuple(speeds[name]),
            metrics=peer.metrics if isinstance(peer, EnginePeer) else None,
        )
        for name, peer in made
    ]


def host_facts() -> dict[str, Any]:
    """What a reader of the figures must know about the machine."""
    capabilities = torch.cpu.get_capabilities()
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": capabilities.get("cpu_name"),
        "avx512_bf16": capabilities.get("avx512_bf16", False),
        "amx_bf16": capabilities.get("amx_bf16", False),
    }
