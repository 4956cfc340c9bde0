"""Tokens per second of the attention backends on this GPU, as a small table.

A Llama of 1.2 billion random weights in bf16, 64 prompts of 40 tokens with 4 samples each, lengths
exponential around 128 at 512 at the most: what a GRPO step generates, once to warm up and once timed.
"""

import time
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollout import RolloutEngine, SamplingParams
from rollout.bench.workloads import PLAIN, exponential

BACKENDS = ("flash", "varlen", "sdpa")
NUM_PROMPTS, NUM_SAMPLES, PROMPT_LEN, VOCAB_SIZE = 64, 4, 40, 32_000


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    draw = torch.Generator().manual_seed(0)
    prompts, params = [], []
    for lengths in exponential(NUM_PROMPTS, NUM_SAMPLES, mean=128, cap=512):
        prompt = torch.randint(VOCAB_SIZE, (PROMPT_LEN,), generator=draw).tolist()
        prompts += [prompt] * NUM_SAMPLES
        params += [replace(PLAIN, max_new_tokens=length) for length in lengths]
    return prompts, params


def main() -> None:
    model = make_model()
    prompts, params = requests()
    num_tokens = sum(each.max_new_tokens for each in params)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {num_tokens} tokens")
    for name in BACKENDS:
        try:
            engine = RolloutEngine(model, config={"attn_implementation": name})
        except ValueError as reason:
            print(f"{name:8} {reason}")
            continue
        engine.generate(prompts, [replace(each, max_new_tokens=8) for each in params])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        metrics = engine.generate(prompts, params).metrics
        torch.cuda.synchronize()
        rate = num_tokens / (time.perf_counter() - begin)
        print(f"{name:8} {rate:9.0f} tokens/s  {metrics.num_steps} steps")
        engine.release_memory()


if __name__ == "__main__":
    main()
