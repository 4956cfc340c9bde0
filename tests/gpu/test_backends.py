"""The paged backends on a GPU: the real kernels against the slow twin, whole runs against sdpa.

Short: tests/gpu/run.sh runs this file and then the table of speeds. Everything that needs no GPU is
tested elsewhere, with kernels in plain torch.
"""

import random

import pytest
import torch

from rollout import RolloutBatch, RolloutEngine, SamplingParams
from rollout.attention import AttentionCall, EagerAttention, find_kernel
from rollout.attention.paged import KernelUnavailable, PagedAttention, PagedKernel
from rollout.batch import GroupBatch, build_batch
from rollout.kv_cache import CacheLayout, KVCache, LayerShape
from rollout.runs import RunRules
from test_batch import Shape, random_plan
from tiny_models import TINY_MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PAGE_SIZE = 256
DEVICE = torch.device("cuda", 0)
# long and short decode rows, whole prompts, continued ones; first pages that are full, or hold one token
ROWS = {
    "decode": [Shape(start, 1, 1) for start in (2100, 700, 256, 255, 31, 0)],
    "prompts": [Shape(0, length, 1) for length in (700, 257, 256, 3)],
    "mixed": [
        *(Shape(start, 1, 1) for start in (1500, 511, 40)),
        Shape(0, 300, 1),
        Shape(0, 2, 1),
        Shape(512, 128, 1),
        Shape(130, 129, 1),
    ],
}
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 1e-2}
SHARPNESS = 4.0  # of the scores' distribution: few keys of a row count, so other keys are another answer


@pytest.fixture(params=["varlen", "flash"])
def kernel(request: pytest.FixtureRequest) -> PagedKernel:
    try:
        return find_kernel(request.param, DEVICE)
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


def step(rows: list[Shape], window: int | None, rules: RunRules | None) -> GroupBatch:
    batch = build_batch(
        random_plan(rows, (window,), PAGE_SIZE),
        page_size=PAGE_SIZE,
        windows=(window,),
        dtype=torch.float32,
        device=DEVICE,
        masks=False,
        run_rules=rules,
    )
    batch.check()
    return batch.groups[0]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 128), (4, 4, 64), (6, 1, 256)])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("limit", [None, 0, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_the_kernel_computes_what_the_slow_twin_does(
    rows: str,
    limit: int | None,
    window: int | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kernel: PagedKernel,
) -> None:
    """From equal pages, in fp32 for the twin; a row that was not written, or two mixed up, is far off."""
    rules = RunRules(0 if window is not None else limit)
    batch = step(ROWS[rows], window, rules)
    plain = step(ROWS[rows], window, None)
    shape = LayerShape(num_kv_heads, head_dim, head_dim, window)
    backend = PagedAttention("flash", kernel, rules)
    num_pages = 1 + max(max(row.pages) for row in batch.rows)
    cache = KVCache(CacheLayout.from_layers((shape,), dtype, DEVICE), PAGE_SIZE, backend.page_order)
    twin = KVCache(CacheLayout.from_layers((shape,), torch.float32, DEVICE), PAGE_SIZE)
    for each in (cache, twin):
        each.resize((num_pages,))
    draw = torch.Generator(DEVICE).manual_seed(0)
    tokens = int(batch.slots.numel())
    for of_cache, of_twin in zip(
        (cache.layer(0).keys, cache.layer(0).values), (twin.layer(0).keys, twin.layer(0).values), strict=True
    ):
        of_cache.copy_(torch.randn(of_cache.shape, generator=draw, device=DEVICE))
        of_twin.copy_(of_cache)
    query, key, value = (
        torch.randn(tokens, heads, head_dim, generator=draw, device=DEVICE).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    scaling = SHARPNESS * head_dim**-0.5
    call = AttentionCall(query=query, key=key, value=value, scaling=scaling, softcap=None, sinks=None)
    exact = AttentionCall(
        query=query.float(), key=key.float(), value=value.float(), scaling=scaling, softcap=None, sinks=None
    )
    out = backend.attend(call, cache.layer(0), batch)
    expected = EagerAttention().attend(exact, twin.layer(0), plain)
    assert out.dtype == dtype and out.shape == expected.shape
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def generate(engine: RolloutEngine) -> RolloutBatch:
    rng = random.Random(5)
    shared = [rng.randrange(97) for _ in range(60)]
    prompts = [
        shared[:cut] + [rng.randrange(97) for _ in range(more)] for cut, more in ((60, 3), (60, 90), (0, 7))
    ]
    return engine.generate(prompts, SamplingParams(max_new_tokens=40, temperature=0.7, n=3, seed=1))


@pytest.mark.parametrize("config", [{}, {"max_batch_tokens": 64}, {"max_blocks_per_request": 1}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_wide", "gemma3", "gemma2"])
def test_whole_runs_score_as_they_were_drawn(
    name: str, config: dict[str, int], kernel: PagedKernel, request: pytest.FixtureRequest
) -> None:
    """sdpa, teacher-forced, gives the tokens the logprobs that the kernel drew them with, up to bf16."""
    backend = request.node.callspec.params["kernel"]
    if name == "gemma2" and not kernel.limits.softcap:
        pytest.skip(f"{kernel.name} has no soft caps")
    model = TINY_MODELS[name]().to(DEVICE, torch.bfloat16)
    engine = RolloutEngine(model, config={**config, "attn_implementation": backend})
    batch = generate(engine)
    engine.check()
    twin = RolloutEngine(model, config={"attn_implementation": "sdpa"})
    scored = twin.score([c.prompt_ids for c in batch], [c.token_ids for c in batch], temperature=0.7)
    gaps = [
        abs(a - b)
        for c, numbers in zip(batch, scored, strict=True)
        for a, b in zip(c.policy_logprobs, numbers, strict=True)
    ]
    assert len(gaps) == 9 * 40
    # these models are rough: a wrong key moves logprobs by whole nats, bf16 by hundredths of one
    assert sum(gaps) / len(gaps) < 0.05 and max(gaps) < 1.0


def test_auto_takes_a_paged_backend_for_half_precision_and_sdpa_for_fp32(kernel: PagedKernel) -> None:
    model = TINY_MODELS["qwen3_wide"]().to(DEVICE)
    assert not isinstance(RolloutEngine(model)._stepper.backend, PagedAttention)
    assert isinstance(RolloutEngine(model.to(torch.float16))._stepper.backend, PagedAttention)
