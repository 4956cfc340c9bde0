"""The code blocks of transformers' continuous-batching guide, on the small real model after ``attach``.

The calls are the guide's own; what differs is the model's name and device, shorter outputs, and that each
block is followed by what must have come of it. The block on tensor parallelism is run by
``test_tensor_parallel.py``, which starts the processes.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import RequestStatus

import rollout
from oracle import assert_greedy
from rollout.manager import ContinuousBatchingManager

PROMPTS = ["Whats up?", "Name a cat breed.", "Write a detailed history of quantum mechanics."]
SECONDS = 60.0
NEW_TOKENS = 12

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def model(demo_model_fp32: Any) -> Any:
    """The guide's ``from_pretrained(...)``, and the one line that is ours."""
    yield rollout.attach(demo_model_fp32)
    rollout.detach(demo_model_fp32)


@pytest.fixture(scope="module")
def generation_config(demo_tokenizer: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW_TOKENS, eos_token_id=demo_tokenizer.eos_token_id)


@pytest.fixture(scope="module")
def inputs(demo_tokenizer: Any) -> list[list[int]]:
    chats = [  # the guide's model completes bare text; this one is made for chats
        demo_tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in PROMPTS
    ]
    return [demo_tokenizer.encode(p) for p in chats]


@pytest.fixture(scope="module")
def expected(model: Any, generation_config: Any, inputs: Any) -> list[list[int]]:
    """Greedy tokens, which are held against plain forwards of the model once."""
    outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)
    for output in outputs.values():
        assert_greedy(model, output.completion)
    return [output.generated_tokens for output in outputs.values()]


@pytest.fixture
def manager(model: Any, generation_config: Any) -> Any:
    """``init_continuous_batching`` and ``start``, as the guide writes it."""
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.start()
    yield manager
    manager.destroy()


def test_generate_batch(model: Any, demo_tokenizer: Any, generation_config: Any, inputs: Any) -> None:
    outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)
    texts = []
    for request_id, output in outputs.items():
        text = demo_tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        texts.append(f"[{request_id}] {text}")
    assert [output.prompt_ids for output in outputs.values()] == inputs
    assert [text[:8] for text in texts] == ["[req_0] ", "[req_1] ", "[req_2] "] and len(texts[2]) > 20


def test_context_manager_and_iteration(
    model: Any, demo_tokenizer: Any, generation_config: Any, inputs: Any, expected: Any
) -> None:
    lengths = {"long": NEW_TOKENS, "short_0": 4, "short_1": 5}
    with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
        manager.add_request(input_ids=inputs[2], request_id="long", max_new_tokens=lengths["long"])
        manager.add_request(input_ids=inputs[0], request_id="short_0", max_new_tokens=lengths["short_0"])
        manager.add_request(input_ids=inputs[1], request_id="short_1", max_new_tokens=lengths["short_1"])
        results = {}
        for result in manager:
            results[result.request_id] = result.generated_tokens
    for name, tokens in zip(("short_0", "short_1", "long"), expected, strict=True):
        assert results[name] == tokens[: lengths[name]]


def test_init_start_and_stop(manager: ContinuousBatchingManager, inputs: Any, expected: Any) -> None:
    ids = manager.add_requests(inputs=inputs)
    manager.stop()
    assert not manager.is_running()
    assert [manager.get_result(each).generated_tokens for each in ids] == expected
    assert manager.add_request(input_ids=inputs[0]) is None, "stopped: a warning and no request"


def test_hard_stop_and_another_session(manager: ContinuousBatchingManager, inputs: Any) -> None:
    ids = manager.add_requests(inputs=inputs, max_new_tokens=500)
    manager.stop(hard_stop=True)
    results = [manager.get_result(each) for each in ids]
    assert any(result.status == RequestStatus.FAILED and "stopped" in result.error for result in results)
    manager.start()
    again = manager.get_result(manager.add_request(input_ids=inputs[0]), timeout=SECONDS)
    assert again.status == RequestStatus.FINISHED


def test_destroy(manager: ContinuousBatchingManager) -> None:
    manager.destroy()
    manager.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_add_and_cancel(manager: ContinuousBatchingManager, inputs: Any, expected: Any) -> None:
    input_ids = inputs[2]
    manager.add_request(input_ids=input_ids, request_id="my_request", max_new_tokens=5000, streaming=True)
    assert manager.get_result("my_request", timeout=SECONDS).status == RequestStatus.DECODING
    manager.cancel_request(request_id="my_request")
    *_, last = manager.request_id_iter("my_request")
    assert last.is_finished() and last.generated_tokens[:1] == expected[2][:1]
    assert manager.add_requests(inputs=inputs) == ["req_0", "req_1", "req_2"]
    assert {result.request_id for result in manager} == {"req_0", "req_1", "req_2"}


def test_per_request_sampling_parameters(model: Any, generation_config: Any, inputs: Any) -> None:
    cb_config = ContinuousBatchingConfig(per_request_processors=True)
    manager = model.init_continuous_batching(
        generation_config=generation_config, continuous_batching_config=cb_config
    )
    manager.start()
    creative = manager.add_request(input_ids=inputs[0], temperature=0.9, top_p=0.95)
    precise = manager.add_request(input_ids=inputs[1], temperature=0.1, top_k=10)
    drawn, sharp = (manager.get_result(each, timeout=SECONDS) for each in (creative, precise))
    assert any(mass < -1e-3 for mass in drawn.completion.log_kept_mass), "top-p cut nothing"
    assert sum(sharp.logprobs) > sum(drawn.logprobs)
    manager.destroy()


def test_get_result_of_any_or_of_one(manager: ContinuousBatchingManager, inputs: Any) -> None:
    manager.add_request(input_ids=inputs[0], request_id="other", max_new_tokens=2)
    manager.add_request(input_ids=inputs[1], request_id="my_request", max_new_tokens=6)
    result = manager.get_result(request_id="my_request")
    assert result.request_id == "my_request", "others are not in its way"
    result = manager.get_result()
    assert result.request_id == "other"


def test_streaming(
    manager: ContinuousBatchingManager, demo_tokenizer: Any, inputs: Any, expected: Any
) -> None:
    input_ids = inputs[2]
    manager.add_request(input_ids=input_ids, request_id="streamed", streaming=True)
    tokens = []
    for chunk in manager.request_id_iter(request_id="streamed"):
        token = demo_tokenizer.decode(chunk.generated_tokens[-1:], skip_special_tokens=True)
        assert isinstance(token, str)
        tokens.append(chunk.generated_tokens[-1])
        if chunk.status == RequestStatus.FINISHED:
            break
    assert tokens[:-1] == expected[2][:-1] or tokens == expected[2], "a token at a time"
    assert chunk.generated_tokens == expected[2]


# ---- the configuration's sections

CONFIGS: dict[str, dict[str, Any]] = {
    "the first example": {"max_memory_percent": 0.8, "block_size": 256, "scheduler_type": "fifo"},
    "cache block size": {"block_size": 128},
    "prefill batch size": {"max_batch_tokens": 16384},
    "batch limits": {"max_requests_per_batch": 256},
    "scheduling limits": {"safety_margin": 0.15},
    "cuda graphs": {"use_cuda_graph": True},
    "padding intervals": {
        "use_cuda_graph": True,
        "q_padding_interval_size": 64,
        "kv_padding_interval_size": 16384,
    },
    "async batching": {"use_cuda_graph": True, "use_async_batching": True},
    "decode fast path": {"max_blocks_per_request": 64},
    "no decode fast path": {"max_blocks_per_request": 0},
    "cpu offloading": {"cpu_offload_space": 8.0},
    "tensor parallel timeout": {"cpu_group_timeout": 600.0},
    "prefix caching": {"allow_block_sharing": True},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS.keys())
def test_config(
    model: Any, generation_config: Any, inputs: Any, expected: Any, settings: dict[str, Any]
) -> None:
    cb_config = ContinuousBatchingConfig(**settings)
    outputs = model.generate_batch(
        inputs=inputs, generation_config=generation_config, continuous_batching_config=cb_config
    )
    assert len(outputs) == len(expected)
    for output in outputs.values():
        assert_greedy(model, output.completion)


def test_small_blocks_are_refused(model: Any, generation_config: Any, inputs: Any) -> None:
    with pytest.raises(ValueError, match=r"page_size=3 is out of range; allowed: >= 4"):
        model.generate_batch(
            inputs=inputs,
            generation_config=generation_config,
            continuous_batching_config=ContinuousBatchingConfig(block_size=3),
        )


def test_logprobs(model: Any, demo_tokenizer: Any, inputs: Any) -> None:
    cb_config = ContinuousBatchingConfig(return_logprobs=True)
    outputs = model.generate_batch(
        inputs=inputs,
        generation_config=GenerationConfig(max_new_tokens=4, do_sample=True),
        continuous_batching_config=cb_config,
    )
    for output in outputs.values():
        assert len(output.generated_tokens) == len(output.logprobs) > 0
        for token_id, log_prob in zip(output.generated_tokens, output.logprobs, strict=True):
            assert isinstance(demo_tokenizer.decode([token_id]), str) and log_prob < 0


# "paged|sdpa", which the guide also names, is deprecated by transformers itself
def test_paged_attention_implementation(demo_model_path: str, inputs: Any, expected: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_path, attn_implementation="paged|eager", dtype=torch.float32
    )
    outputs = rollout.attach(model).generate_batch(
        inputs=inputs, generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS)
    )
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert model.config._attn_implementation == "paged|eager"


def test_sliding_window(tmp_path: Any) -> None:
    from tiny_models import TINY_MODELS

    TINY_MODELS["gemma2"]().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.sliding_window = 8
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="paged|eager", dtype=torch.float32
    )
    inputs = [list(range(5, 25)), [5, 6, 7]]
    outputs = rollout.attach(model).generate_batch(
        inputs=inputs, generation_config=GenerationConfig(max_new_tokens=10, eos_token_id=-1)
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32).eval()
    for output in outputs.values():
        assert_greedy(plain, output.completion)
