"""GRPO without a trainer library: the engine's API in one readable loop.

The same task as ``grpo_quickstart.py``: additions, answered with the number only. A step generates
eight samples of each prompt, scores them, normalises the scores within each group (Shao et al. 2024,
"DeepSeekMath", section 4.1) and takes one policy-gradient step. The engine notices the step by
itself; ``policy_logprobs`` are the old logprobs, so no extra forward is needed for the ratio.

    python recipes/grpo_plain.py --steps 12

Left out: several epochs per batch, KL to a reference, checkpoints, more than one process.
"""

import argparse
import random
import time

import torch
from rich.console import Console
from torch import Tensor
from tqdm.auto import trange
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollout import RolloutEngine, RolloutTensors, SamplingParams
from rollout.demo_model import demo_model

CLIP = 0.2


def make_questions(rng: random.Random, count: int) -> tuple[list[list[dict[str, str]]], list[str]]:
    """Chat prompts and right answers."""
    system = {"role": "system", "content": "Answer with the number only."}
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
    prompts = [[system, {"role": "user", "content": f"What is {a} + {b}?"}] for a, b in pairs]
    return prompts, [str(a + b) for a, b in pairs]


def reward(text: str, right: str) -> float:
    """Half for the share of digits in the answer, half for the right number and nothing else."""
    text = text.strip().rstrip(".")
    digits = sum(char.isdigit() for char in text) / max(len(text), 1)
    return 0.5 * digits + 0.5 * (text == right)


def group_advantages(rewards: Tensor, n: int) -> Tensor:
    """``[B]`` -> ``[B]``: each reward against its group of ``n`` samples of one prompt."""
    groups = rewards.view(-1, n)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def new_logprobs(model: PreTrainedModel, batch: RolloutTensors) -> Tensor:
    """Logprobs ``[B, T]`` of the completion tokens under the weights as they are, with gradients."""
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    length = batch.completion_ids.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=length + 1
    ).logits[:, :-1]
    return torch.log_softmax(logits.float(), -1).gather(2, batch.completion_ids[..., None])[..., 0]


def policy_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Clipped surrogate (Schulman et al. 2017), mean over all completion tokens."""
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -(gain * mask).sum() / mask.sum()


def main() -> None:
    """Generate, score, learn, repeat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="folder or hub id (default: the demo model)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    args = parser.parse_args()
    source = args.model or demo_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    engine = RolloutEngine(model, tokenizer=tokenizer)
    params = SamplingParams(n=args.samples, max_new_tokens=args.max_new_tokens)
    rng, console = random.Random(0), Console()
    for step in trange(args.steps, unit="step"):
        prompts, right = make_questions(rng, args.prompts)
        batch = engine.generate(prompts, params)
        texts = tokenizer.batch_decode([list(c.token_ids) for c in batch], skip_special_tokens=True)
        answers = [answer for answer in right for _ in range(args.samples)]
        rewards = torch.tensor([reward(*pair) for pair in zip(texts, answers, strict=True)])
        tensors = batch.to_tensors(tokenizer.pad_token_id)
        engine.release_memory()  # pages and packed weights back before the backward pass
        started = time.perf_counter()
        new = new_logprobs(model, tensors)
        gap = ((new.detach() - tensors.policy_logprobs).abs() * tensors.completion_mask).max()
        loss = policy_loss(
            new, tensors.policy_logprobs, group_advantages(rewards, args.samples), tensors.completion_mask
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        console.print(
            f"step {step + 1:3d}  reward {rewards.mean():.3f}"
            f"  length {tensors.completion_mask.sum(1).float().mean():.1f}"
            f"  {batch.metrics.tokens_per_second:.0f} tokens/s  logprob gap {gap:.1e}"
            f"  {batch.metrics.seconds:.1f} s generating  {time.perf_counter() - started:.1f} s training",
            soft_wrap=True,
        )


if __name__ == "__main__":
    main()
