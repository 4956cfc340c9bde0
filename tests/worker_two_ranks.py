"""Run by ``test_two_processes.py`` in two gloo processes; rank 0 writes what both saw as JSON.

The engine sits below DDP; the first rollout has one prompt, so that rank 1 has none.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from rollout import RolloutEngine, SamplingParams
from rollout.integrations.accelerate import (
    LogprobGap,
    generate,
    innermost_model,
    rollout_logs,
    rollout_seed,
    share_of_rank,
)
from tiny_models import TINY_MODELS
from tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer

NO_GAP = LogprobGap(0.0, 0, 0.0)


def main(out: Path) -> None:
    """A few rollouts and one DDP update."""
    accelerator = Accelerator(cpu=True)
    inner = TINY_MODELS["llama"](vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    assert type(model).__name__ == "DistributedDataParallel"
    engine = RolloutEngine(innermost_model(model, accelerator), tiny_tokenizer())
    seen: dict[str, Any] = {"rank": accelerator.process_index}

    def roll(prompts: list[str], step: int, **params: Any) -> Any:
        seed = rollout_seed(0, accelerator, step)
        mine = share_of_rank(prompts, accelerator)
        return generate(engine, mine, SamplingParams(max_new_tokens=8, seed=seed, **params), accelerator)

    alone = roll(["Hello"], 0, n=3)
    seen["num_alone"] = len(alone)
    seen["logs"] = rollout_logs([alone.metrics] if len(alone) else [], NO_GAP, accelerator)
    seen["tokens_alone"] = alone.metrics.generated_tokens
    seen["shares"] = [share_of_rank(list("abc"), accelerator), share_of_rank([], accelerator)]
    seen["same_prompt"] = [list(c.token_ids) for c in roll(["Hello", "Hello"], 1)]
    # every rank's own data, so that only DDP can keep the weights alike
    ids = torch.tensor([[5 + accelerator.process_index, 6, 7]])
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    after = roll(["abc", "abc"], 2, temperature=0)
    seen["greedy"] = [list(c.token_ids) for c in after]
    seen["version"] = after.metrics.weight_version
    everyone = gather_object([seen])
    if accelerator.is_main_process:
        out.write_text(json.dumps(everyone))
    accelerator.wait_for_everyone()
    # not through the interpreter's own end: there a thread of torch's gloo, joined by nobody, now and
    # then aborts the process, which is not what is tested
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
