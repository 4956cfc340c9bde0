"""The engine's promises to one caller: stopping, order, sharing, seeds, errors, memory."""

import logging
import math
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MptConfig,
    MptForCausalLM,
)

import rollout.attention.backend
import rollout.capacity
import rollout.engine
import rollout.execution
import rollout.parallel
import rollout.scoring
from oracle import assert_greedy, assert_logprobs, oracle_greedy
from rollout import (
    DuplicateRequestError,
    EngineConfig,
    NonFiniteLogits,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    UnsupportedModelError,
)
from tiny_models import TINY_MODELS

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0)


def make(name: str = "llama", config: Any = None, **settings: Any) -> RolloutEngine:
    return RolloutEngine(TINY_MODELS[name](**settings), config=config)


class Letters:
    """A tokenizer whose token ``i`` is one or two letters: enough for stop strings."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i % 26) * (1 + i % 2) for i in ids)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 97 for letter in text]}


# --- stopping -----------------------------------------------------------------------------------


def test_eos_of_config_generation_config_and_tokenizer_all_end() -> None:
    """Several EOS ids were declared and only the tokenizer's used: runs clipped at full length."""
    tokens = oracle_greedy(TINY_MODELS["llama"](), PROMPT, 8)
    for place in ("config", "generation_config", "tokenizer"):
        model = TINY_MODELS["llama"]()
        model.config.eos_token_id = [90, 91]
        model.generation_config.eos_token_id = 92
        tokenizer = Letters()
        tokenizer.eos_token_id = 93
        if place == "tokenizer":
            tokenizer.eos_token_id = tokens[3]
        elif place == "config":
            model.config.eos_token_id = [90, tokens[3]]
        else:
            model.generation_config.eos_token_id = tokens[3]
        (completion,) = RolloutEngine(model, tokenizer).generate([PROMPT], GREEDY)
        assert completion.token_ids == tuple(tokens[: tokens.index(tokens[3]) + 1])
        assert completion.finish_reason == "eos" and completion.stop_match == tokens[3]
        assert len(completion.logprobs) == len(completion.token_ids)  # EOS keeps its logprob


def test_ignore_eos_goes_on_and_stop_ids_still_stop() -> None:
    tokens = oracle_greedy(TINY_MODELS["llama"](), PROMPT, 8)
    engine = make(eos_token_id=tokens[0])
    ignoring = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    assert engine.generate([PROMPT], ignoring)[0].token_ids == tuple(tokens)
    stopping = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=[tokens[2]])
    (completion,) = engine.generate([PROMPT], stopping)
    assert completion.finish_reason == "stop" and completion.stop_match == tokens[2]


def test_min_new_tokens_masks_every_stop_id_and_holds_stop_strings_back() -> None:
    model = TINY_MODELS["llama"]()
    tokens = oracle_greedy(model, PROMPT, 8)
    first_text = Letters().decode(tokens[:1])
    model.config.eos_token_id = tokens[0]
    engine = RolloutEngine(model, Letters())
    params = SamplingParams(
        max_new_tokens=8,
        min_new_tokens=4,
        temperature=0,
        stop_token_ids=[tokens[1]],
        stop_strings=[first_text],
    )
    (completion,) = engine.generate([PROMPT], params)
    assert len(completion.token_ids) >= 4
    assert tokens[0] not in completion.token_ids[:4] and tokens[1] not in completion.token_ids[:4]
    # the mask is in the distribution that was sampled, not in the policy's
    assert completion.policy_logprobs[0] < 0 and completion.logprobs[0] == 0.0


def test_stop_string_across_tokens_keeps_all_ids_and_tells_where() -> None:
    model = TINY_MODELS["llama"]()
    tokens = oracle_greedy(model, PROMPT, 8)
    text = Letters().decode(tokens)
    stop = text[1:4]  # begins inside the first or second token and ends inside another
    (completion,) = RolloutEngine(model, Letters()).generate(
        [PROMPT], SamplingParams(max_new_tokens=8, temperature=0, stop_strings=[stop])
    )
    assert completion.finish_reason == "stop" and completion.stop_match == stop
    assert completion.stop_offset == text.index(stop)
    count = next(i for i in range(9) if stop in Letters().decode(tokens[:i]))
    assert completion.token_ids == tuple(tokens[:count])
    assert len(completion.policy_logprobs) == count


def test_the_models_last_position_ends_a_completion() -> None:
    engine = make(max_position_embeddings=12)
    (completion,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=50, temperature=0))
    assert completion.finish_reason == "max_position"
    assert len(completion.prompt_ids) + len(completion.token_ids) == 12


def test_alone_in_a_full_cache_ends_with_cache_full_and_keeps_its_tokens() -> None:
    engine = make(config={"page_size": 4, "num_blocks": 4})
    (completion,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=100, temperature=0))
    assert completion.finish_reason == "cache_full"
    assert len(completion.token_ids) == 4 * 4 - len(PROMPT) + 1
    assert_greedy(TINY_MODELS["llama"](), completion)
    engine.check()


# --- order, sharing, seeds ------------------------------------------------------------------------


def test_order_is_that_of_the_input_and_n_samples_lie_together() -> None:
    engine = make()
    prompts = [[5], [6, 7], [8, 9, 10]]
    params = [SamplingParams(max_new_tokens=m, n=n) for m, n in ((9, 2), (1, 1), (4, 3))]
    batch = engine.generate(prompts, params)
    assert [len(c.prompt_ids) for c in batch] == [1, 1, 2, 3, 3, 3]
    assert [c.index for c in batch] == [0, 1, 0, 0, 1, 2]
    assert [len(c.token_ids) for c in batch] == [9, 9, 1, 4, 4, 4]


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 9])
def test_samples_of_a_prompt_compute_it_once(prompt_len: int) -> None:
    """Pages of 4: a prompt that ends inside a page is copied on write, one on the border is not."""
    engine = make(config={"page_size": 4})
    batch = engine.generate([PROMPT[:prompt_len]], SamplingParams(max_new_tokens=6, n=5, seed=3))
    assert batch.metrics.computed_tokens == prompt_len + 5 * 5
    assert [c.cached_tokens for c in batch] == [0] + [prompt_len] * 4
    alone = make(config={"allow_block_sharing": False}).generate(
        [PROMPT[:prompt_len]], SamplingParams(max_new_tokens=6, n=5, seed=3)
    )
    assert [c.token_ids for c in batch] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in batch}) > 1


def test_equal_prefixes_of_different_prompts_are_computed_once_even_in_one_step() -> None:
    engine = make(config={"page_size": 4})
    prompts = [[*PROMPT[:8], 20], [*PROMPT[:8], 30, 31]]
    batch = engine.generate(prompts, GREEDY)
    assert [c.cached_tokens for c in batch] == [0, 8]
    later = engine.generate(prompts, GREEDY)
    assert [c.cached_tokens for c in later] == [8, 8]
    assert [c.token_ids for c in later] == [c.token_ids for c in batch]


def test_a_seeded_request_does_not_depend_on_who_shares_the_batch() -> None:
    params = SamplingParams(max_new_tokens=8, n=2, seed=5)
    alone = make().generate([PROMPT], params)
    others = [SamplingParams(max_new_tokens=11, temperature=t, top_k=k) for t, k in ((0, 0), (2, 5), (1, 0))]
    crowd = make().generate([[7], [8, 9], PROMPT, [1, 2, 3]], [others[0], others[1], params, others[2]])
    assert [c.token_ids for c in crowd[2:4]] == [c.token_ids for c in alone]


def test_seeds_of_prompts_samples_and_calls_are_independent() -> None:
    engine = make()
    one = engine.generate([PROMPT], SamplingParams(max_new_tokens=8, n=4, seed=1))
    assert len({c.token_ids for c in one}) == 4
    # the same uniform number for every prompt would correlate a whole RL batch
    flat = SamplingParams(max_new_tokens=12, temperature=50.0, seed=1)
    two = engine.generate([[5], [6]], flat)
    assert two[0].token_ids != two[1].token_ids
    unseeded = SamplingParams(max_new_tokens=8)
    assert (
        engine.generate([PROMPT], unseeded)[0].token_ids != engine.generate([PROMPT], unseeded)[0].token_ids
    )
    again = [make().generate([PROMPT], unseeded)[0].token_ids for _ in range(2)]
    assert again[0] == again[1]  # a new engine repeats itself
    assert make(config={"seed": 1}).generate([PROMPT], unseeded)[0].token_ids != again[0]


def test_ranks_of_a_distributed_job_draw_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank seeded alike once meant identical completions everywhere: half the group was lost."""
    drawn = []
    for rank in (0, 1):
        monkeypatch.setattr(rollout.parallel, "global_rank", lambda rank=rank: rank)
        batch = make().generate([PROMPT], SamplingParams(max_new_tokens=8, n=4))
        drawn += [c.token_ids for c in batch]
    assert len(set(drawn)) == 8


def test_a_logits_processor_sees_the_whole_history_of_its_row() -> None:
    seen: list[list[int]] = []

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    engine = make(config={"page_size": 4, "max_batch_tokens": 4})  # chunks must not shorten it
    params = SamplingParams(max_new_tokens=3, temperature=0, logits_processors=[watch])
    (completion,) = engine.generate([PROMPT], params)
    assert seen == [PROMPT + list(completion.token_ids[:i]) for i in range(3)]


def test_a_transformers_processor_equals_our_own_parameter() -> None:
    model = TINY_MODELS["llama"]()
    eos = oracle_greedy(model, PROMPT, 1)[0]
    model.config.eos_token_id = eos
    engine = RolloutEngine(model)
    ours = SamplingParams(max_new_tokens=8, temperature=0, min_new_tokens=5)
    theirs = SamplingParams(
        max_new_tokens=8,
        temperature=0,
        logits_processors=[MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, eos)],
    )
    assert isinstance(theirs.logits_processors[0], LogitsProcessor)
    assert engine.generate([PROMPT], ours)[0].token_ids == engine.generate([PROMPT], theirs)[0].token_ids


# --- a request's fault stays in that request ---------------------------------------------------------


def bad_requests() -> dict[str, tuple[Any, SamplingParams, str]]:
    return {
        "empty": ([], GREEDY, "empty"),
        "outside the vocabulary": ([5, 97], GREEDY, "97"),
        "negative id": ([-1], GREEDY, "-1"),
        "longer than the model": ([1] * 256, GREEDY, "256"),
        "larger than the cache": ([1] * 60, GREEDY, "num_blocks=12"),
        "text without a tokenizer": ("hello", GREEDY, "tokenizer"),
        "chat without a tokenizer": ([{"role": "user", "content": "hello"}], GREEDY, "tokenizer"),
        "not a number": ([1, 2.5], GREEDY, "2.5"),
        "stop string without a tokenizer": ([1], SamplingParams(stop_strings=["x"]), "tokenizer"),
        "stop id outside": ([1], SamplingParams(stop_token_ids=[99]), "99"),
        "bias outside": ([1], SamplingParams(logit_bias={97: 1.0}), "97"),
    }


@pytest.mark.parametrize("fault", bad_requests())
def test_a_bad_request_ends_alone(fault: str) -> None:
    prompt, params, part = bad_requests()[fault]
    engine = make(config={"page_size": 4, "num_blocks": 12})
    good = make().generate([PROMPT, [7]], GREEDY)
    with pytest.raises(RolloutError, match="1 of 3 completions failed") as raised:
        engine.generate([PROMPT, prompt, [7]], [GREEDY, params, GREEDY])
    batch = raised.value.batch
    assert [c.finish_reason for c in batch] == ["length", "error", "length"]
    assert part in str(batch[1].error)
    assert [batch[0].token_ids, batch[2].token_ids] == [c.token_ids for c in good]
    returned = engine.generate([prompt, PROMPT], [params, GREEDY], on_error="return")
    assert len(returned) == 2 and returned[0].error is not None
    with pytest.raises((ValueError, TypeError)):
        engine.add_request(prompt, params)
    engine.check()


def test_nan_logits_end_that_request_alone() -> None:
    """NaN logits used to become token 0 with a NaN logprob, and runs went on collapsed."""
    model = TINY_MODELS["llama"](tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = float("nan")  # every prompt with token 50 gives NaN
    engine = RolloutEngine(model, config={"page_size": 4})
    batch = engine.generate([PROMPT, [50, 1, 2], [7]], GREEDY, on_error="return")
    assert [c.finish_reason for c in batch] == ["length", "error", "length"]
    assert isinstance(batch[1].error, NonFiniteLogits) and batch[1].token_ids == ()
    clean = make().generate([PROMPT, [7]], GREEDY)
    assert [batch[0].token_ids, batch[2].token_ids] == [c.token_ids for c in clean]
    # its pages go to others: the NaN inside must not be read through a masked slot
    for _ in range(4):
        after = engine.generate([[9] * 3, [8] * 6, [7]], GREEDY)
        assert all(math.isfinite(x) for c in after for x in c.policy_logprobs)


def test_a_raising_processor_fails_its_request_alone() -> None:
    def explode(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("my fault")

    batch = make().generate(
        [PROMPT, [7]], [SamplingParams(logits_processors=[explode]), GREEDY], on_error="return"
    )
    assert isinstance(batch[0].error, ZeroDivisionError)
    assert batch[1].finish_reason == "length"


def test_a_crash_in_a_step_fails_every_live_request_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(config={"page_size": 4, "max_requests_per_batch": 1})
    engine.add_request(PROMPT, GREEDY, request_id="running")
    engine.add_request(PROMPT, GREEDY, request_id="waiting")
    engine.step()

    def explode(*_: Any, **__: Any) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(rollout.execution, "forward", explode)
        done = engine.step()
    assert {c.request_id for c in done} == {"running", "waiting"}
    for completion in done:
        assert completion.finish_reason == "error"
        assert isinstance(completion.error.__cause__, MemoryError)
    engine.check()
    assert not engine.has_work
    # what the crashed step would have written is not found by anybody
    again = engine.generate([PROMPT], GREEDY)
    assert again[0].cached_tokens == 0
    assert again[0].token_ids == make().generate([PROMPT], GREEDY)[0].token_ids


def test_an_interrupt_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(config={"page_size": 4})

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rollout.execution, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT, [7]], GREEDY)
    engine.check()
    assert not engine.has_work
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == make().generate([PROMPT], GREEDY)[0].token_ids


def test_duplicate_ids_are_refused_while_live_and_free_afterwards() -> None:
    engine = make()
    engine.add_request(PROMPT, GREEDY, request_id="x")
    with pytest.raises(DuplicateRequestError, match="'x' is live"):
        engine.add_request([7], GREEDY, request_id="x")
    engine.cancel_request("x")
    engine.add_request([7], GREEDY, request_id="x")
    done = []
    while engine.has_work:
        done += engine.step()
    assert [(c.request_id, c.finish_reason) for c in done] == [("x", "cancelled"), ("x", "length")]


def test_cancelling_keeps_what_was_generated_and_others_go_on() -> None:
    engine = make()
    engine.add_request(PROMPT, SamplingParams(max_new_tokens=8, n=2, seed=1), request_id="a")
    engine.add_request([7], GREEDY, request_id="b")
    for _ in range(3):
        engine.step()
    assert engine.cancel_request("a") and not engine.cancel_request("unknown")
    done = engine.step()
    assert [(c.request_id, c.finish_reason, len(c.token_ids)) for c in done] == [("a", "cancelled", 3)] * 2
    assert not engine.cancel_request("a")
    while engine.has_work:
        done += engine.step()
    assert done[-1].token_ids == make().generate([[7]], GREEDY)[0].token_ids


def test_requests_added_by_hand_survive_a_generate_in_between() -> None:
    engine = make()
    engine.add_request([7], SamplingParams(max_new_tokens=2, temperature=0), request_id="mine")
    batch = engine.generate([PROMPT], GREEDY)
    assert len(batch) == 1
    (mine,) = engine.step()
    assert mine.request_id == "mine" and len(mine.token_ids) == 2


def test_calls_that_are_wrong_themselves_raise_at_once() -> None:
    engine = make()
    with pytest.raises(TypeError, match="one entry per prompt"):
        engine.generate("hello", GREEDY)
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        engine.generate([PROMPT], [GREEDY, GREEDY])
    with pytest.raises(TypeError, match="give SamplingParams"):
        engine.generate([PROMPT], [{"temperature": 0}])
    with pytest.raises(ValueError, match="on_error='ignore'"):
        engine.generate([PROMPT], GREEDY, on_error="ignore")
    assert len(engine.generate([], GREEDY)) == 0


# --- models ------------------------------------------------------------------------------------------


def test_models_that_cannot_be_served_are_refused_when_built() -> None:
    model = TINY_MODELS["llama"]()
    with pytest.raises(TypeError, match="unwrap"):
        RolloutEngine(torch.nn.DataParallel(model))
    with pytest.raises(TypeError, match="Unwrap"):
        RolloutEngine(torch.compile(model, backend="eager"))
    with pytest.raises(TypeError):
        RolloutEngine(torch.nn.Linear(2, 2))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match="layer 1 has type 'linear_attention'"):
        RolloutEngine(model)
    with pytest.raises(ValueError, match="known: auto, flash, varlen, native, sdpa, eager"):
        make(config={"attn_implementation": "flash_attention_2"})


def test_more_models_that_cannot_be_served_are_refused_with_the_reason() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=20, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError):
        RolloutEngine(bloom)
    model = TINY_MODELS["llama"]()
    model.config.sliding_window = 8  # set, and no layer says that it slides
    with pytest.raises(UnsupportedModelError, match="sliding_window=8"):
        RolloutEngine(model)


def test_a_whole_number_as_scaling_is_taken_as_it_is() -> None:
    """attention_multiplier=1 was read as "none given" and replaced by head_dim ** -0.5."""
    model = TINY_MODELS["llama"]()
    for layer in model.model.layers:
        layer.self_attn.scaling = 1
    for completion in RolloutEngine(model).generate([PROMPT, [7]], GREEDY):
        assert_greedy(model, completion)
        assert_logprobs(model, completion)


def test_a_model_that_ignores_logits_to_keep_never_mixes_rows() -> None:
    """Decode rows are packed by length: unselected logits would belong to other rows."""
    model = TINY_MODELS["llama"]()
    original = type(model).forward
    model.forward = MethodType(lambda self, *a, logits_to_keep=0, **k: original(self, *a, **k), model)
    engine = RolloutEngine(model)
    prompts = [[7], PROMPT, [1, 2, 3]]
    found = engine.generate(prompts, GREEDY)
    assert not engine._stepper.plan.keeps_logits
    assert [c.token_ids for c in found] == [c.token_ids for c in make().generate(prompts, GREEDY)]


# --- score ---------------------------------------------------------------------------------------------


def test_score_checks_what_it_is_given_and_changes_nothing_later() -> None:
    engine = make()
    for prompts, completions in (([[5]], [[1, 97]]), ([[]], [[1]]), ([[5]], [[]]), ([[5]], []), ("5", ["1"])):
        with pytest.raises((ValueError, TypeError)):
            engine.score(prompts, completions)
    unseeded = SamplingParams(max_new_tokens=8)
    engine.score([PROMPT, [7]], [[1, 2], [3]])
    engine.generate([[]], unseeded, on_error="return")  # a refused request takes no number either
    assert (
        engine.generate([PROMPT], unseeded)[0].token_ids == make().generate([PROMPT], unseeded)[0].token_ids
    )


def test_score_of_a_long_sequence_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    completions = [[3, 1, 4, 1, 5, 9] * 10, [2], [6, 5] * 8]
    expected = make("gemma3").score([PROMPT] * 3, completions)
    monkeypatch.setattr(rollout.scoring, "MAX_LOGITS", 97 * 20)
    found = make("gemma3").score([PROMPT] * 3, completions)
    assert [len(f) for f in found] == [60, 1, 16]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_score_with_requests_in_flight_leaves_them_alone() -> None:
    engine = make()
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    engine.score([PROMPT], [[1, 2]])
    done = []
    while engine.has_work:
        done += engine.step()
    assert done[0].token_ids == make().generate([PROMPT], GREEDY)[0].token_ids


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_scores_worked_through_in_slices_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make(name).generate([PROMPT * 3, [7]], GREEDY)
    monkeypatch.setattr(rollout.attention.backend, "MAX_SCORES", 100)
    found = make(name).generate([PROMPT * 3, [7]], GREEDY)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert found[0].policy_logprobs == pytest.approx(expected[0].policy_logprobs, abs=1e-4)


# --- memory -------------------------------------------------------------------------------------------


def test_release_memory_gives_pages_back_and_they_come_again() -> None:
    engine = make()
    first = engine.generate([PROMPT], GREEDY)
    assert engine.cache_bytes == first.metrics.cache_bytes > 0
    engine.release_memory()
    assert engine.cache_bytes == 0
    again = engine.generate([PROMPT], GREEDY)
    assert again[0].token_ids == first[0].token_ids and again[0].cached_tokens == 0
    assert engine.cache_bytes > 0


def test_release_memory_with_requests_in_flight_loses_nothing() -> None:
    engine = make()
    expected = engine.generate([PROMPT], SamplingParams(max_new_tokens=8, n=2, seed=1))
    engine.add_request(PROMPT, SamplingParams(max_new_tokens=8, n=2, seed=1))
    done = engine.step() + engine.step()
    engine.release_memory()
    while engine.has_work:
        done += engine.step()
        engine.check()
    assert sorted(c.token_ids for c in done) == sorted(c.token_ids for c in expected)


def test_the_cache_is_as_small_as_the_requests_allow_and_grows_without_losing_prefixes() -> None:
    engine = make(config={"page_size": 4})
    engine.generate([PROMPT], GREEDY)
    small = engine.cache_bytes
    assert small < 64 * 1024
    larger = engine.generate([PROMPT, [1] * 50, [2] * 90], GREEDY)
    assert engine.cache_bytes > small
    assert larger[0].cached_tokens == 8


def test_max_memory_bounds_the_cache_and_preemption_still_finishes_everything() -> None:
    bound = 40 * 2**10
    engine = make(config=EngineConfig(page_size=4, max_memory=bound))
    batch = engine.generate([[i] * 9 for i in range(12)], SamplingParams(max_new_tokens=20, temperature=0))
    assert batch.metrics.num_preemptions > 0
    assert engine.cache_bytes <= bound * 1.1  # the null page comes on top
    assert all(len(c.token_ids) == 20 for c in batch)


def test_the_chosen_size_is_logged_in_bytes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rollout"):
        make().generate([PROMPT], GREEDY)
    assert "2 pages of 32 tokens, 32768 bytes" in caplog.text


def test_everything_cut_short_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    engine.generate([PROMPT], SamplingParams(max_new_tokens=1, n=8))
    assert caplog.text.count("cut short") == 1
    assert engine.generate([PROMPT], SamplingParams(max_new_tokens=1)).metrics.truncated_fraction == 1.0


def test_metrics_count_what_happened() -> None:
    batch = make(config={"page_size": 4}).generate([PROMPT, [7]], SamplingParams(max_new_tokens=5, n=2))
    metrics = batch.metrics
    assert metrics.num_requests == 2 and metrics.num_completions == 4
    assert metrics.prompt_tokens == 20 and metrics.generated_tokens == 20
    assert metrics.computed_tokens == 10 + 4 * 4 and metrics.num_steps == 5
    assert set(metrics.seconds_by_stage) == {"weights", "schedule", "build", "forward", "sample", "commit"}
    assert metrics.tokens_per_second == pytest.approx(20 / metrics.seconds)
    assert metrics.as_dict()["seconds_forward"] > 0


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_max_memory_bounds_all_layer_groups_together(name: str) -> None:
    bound = 60 * 2**10
    engine = make(name, config=EngineConfig(page_size=4, max_memory=bound))
    null_pages = sum(engine._stepper.plan.layout.page_bytes(4))
    for prompts in ([[1] * 30] * 3, [[1] * 4] * 40, [[2] * 60], [[i] * 20 for i in range(20)]):
        batch = engine.generate(prompts, SamplingParams(max_new_tokens=20, temperature=0))
        assert engine.cache_bytes <= bound + null_pages
        assert all(len(c.token_ids) == 20 for c in batch)
        engine.check()


def test_the_budget_is_settled_once_and_does_not_creep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory counts pages that are taken but not yet touched: half of it again at every step."""
    monkeypatch.setattr(
        rollout.capacity.psutil, "virtual_memory", lambda: SimpleNamespace(available=80 * 2**10)
    )
    engine = make(config=EngineConfig(page_size=4, pack_weights=False))
    sizes = set()
    for i in range(20):
        engine.add_request([i + 1] * 9, SamplingParams(max_new_tokens=20))
    while engine.has_work:
        engine.step()
        sizes.add(engine.cache_bytes)
    (size,) = sizes
    assert size <= 40 * 2**10 + sum(engine._stepper.plan.layout.page_bytes(4))  # the null page comes on top


def test_an_interrupted_generate_keeps_other_peoples_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.add_request([7], GREEDY, request_id="theirs")
    engine.cancel_request("theirs")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rollout.execution, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT], GREEDY)
    assert engine.has_work
    assert [(c.request_id, c.finish_reason) for c in engine.step()] == [("theirs", "cancelled")]
    assert not engine.has_work


def test_a_call_that_breaks_while_queueing_leaves_no_orphans() -> None:
    class Breaks(list):
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    engine = make()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT, Breaks([1])], [GREEDY, GREEDY])
    assert not engine.has_work


def test_equal_prompts_under_one_seed_are_the_samples_of_one() -> None:
    """Trainers repeat a prompt instead of asking for n: equal copies would have zero advantage."""
    many = make().generate([PROMPT] * 4, SamplingParams(max_new_tokens=8, seed=3))
    one = make().generate([PROMPT], SamplingParams(max_new_tokens=8, seed=3, n=4))
    assert [c.token_ids for c in many] == [c.token_ids for c in one]
    assert len({c.token_ids for c in many}) == 4


def test_a_model_that_fails_in_its_own_way_is_refused_with_the_reason() -> None:
    """MPT (ALiBi) reads a mask that paged attention does not make, and raises AttributeError."""
    model = MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97, max_seq_len=64))
    with pytest.raises(UnsupportedModelError, match="MptForCausalLM with paged attention fails: Attr"):
        RolloutEngine(model)


def test_seconds_are_counted_where_they_are_spent() -> None:
    """Copies are derived while the engine is built, too: that is no part of any call's forward."""
    engine = RolloutEngine(TINY_MODELS["llama_wide"]())
    for _ in range(2):
        metrics = engine.generate([[5, 6]], SamplingParams(max_new_tokens=1, seed=0)).metrics
        assert all(seconds >= 0 for seconds in metrics.seconds_by_stage.values())
        assert sum(metrics.seconds_by_stage.values()) <= metrics.seconds
