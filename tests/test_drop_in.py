"""Code written for transformers' continuous batching, unchanged after ``attach``."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import rollout
from oracle import assert_greedy
from rollout import RolloutEngine, RolloutError, SamplingParams
from rollout.drop_in import NAMES
from rollout.generation_config import HONOURED, NEUTRAL, NO_EFFECT, params_from
from rollout.types import FinishReason
from tiny_models import TINY_MODELS

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7, 10, 11]]
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=-1)
SECONDS = 30.0


def attached() -> torch.nn.Module:
    return rollout.attach(TINY_MODELS["llama"]())


def test_generate_batch_gives_an_ordered_dict_of_outputs() -> None:
    model = attached()
    outputs = model.generate_batch(PROMPTS, generation_config=GREEDY, record_timestamps=True)
    assert [output.prompt_ids for output in outputs.values()] == PROMPTS
    expected = TINY_MODELS["llama"]()
    for request_id, output in outputs.items():
        assert output.request_id == request_id and output.is_finished() and output.error is None
        assert len(output.generated_tokens) == len(output.logprobs) == len(output.timestamps) == 6
        assert_greedy(expected, output.completion)
    assert model.generate_batch([], generation_config=GREEDY) == {}


def test_max_new_tokens_goes_before_the_config_and_the_models_config_serves() -> None:
    model = attached()
    model.generation_config = GREEDY
    (output,) = model.generate_batch([[5, 6]], max_new_tokens=3).values()
    assert len(output.generated_tokens) == 3


def test_children_come_before_their_parent_as_there() -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=4, num_return_sequences=3, eos_token_id=-1)
    outputs = attached().generate_batch([[5], [6]], generation_config=config)
    assert len(outputs) == 6
    first = list(outputs)[:3]
    assert first == [f"{first[2]}__child#0", f"{first[2]}__child#1", first[2]]
    assert len({tuple(outputs[each].generated_tokens) for each in first}) > 1


def test_a_failure_raises_unless_asked_otherwise() -> None:
    model = attached()
    with pytest.raises(RolloutError, match="1 of 2 outputs failed") as caught:
        model.generate_batch([[5], [5000]], generation_config=GREEDY)
    assert len(caught.value.batch) == 2
    good, bad = model.generate_batch([[5], [5000]], generation_config=GREEDY, on_error="return").values()
    assert good.error is None and "5000" in bad.error and bad.generated_tokens == []


@pytest.mark.parametrize(
    "give_back", [rollout.detach, lambda model: model.destroy_cached_continuous_batching_manager()]
)
def test_memory_of_a_persistent_batch_can_be_given_back(give_back: Any) -> None:
    model = attached()
    attachment = model.generate_batch.__self__
    model.generate_batch(PROMPTS, generation_config=GREEDY, persistent_manager=True)
    assert attachment._engine.cache_bytes > 0
    give_back(model)
    assert attachment._engine.cache_bytes == 0


def test_a_change_of_weights_is_noticed_by_the_next_call() -> None:
    model = attached()
    model.generate_batch(PROMPTS, generation_config=GREEDY, persistent_manager=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    later = list(model.generate_batch(PROMPTS, generation_config=GREEDY, persistent_manager=True).values())
    fresh = RolloutEngine(model).generate(
        PROMPTS, SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    )
    assert [output.generated_tokens for output in later] == [list(c.token_ids) for c in fresh]


def test_the_context_manager_runs_and_stops() -> None:
    model = attached()
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        ids = [manager.add_request(prompt) for prompt in PROMPTS]
        outputs = [manager.get_result(each, timeout=SECONDS) for each in ids]
    assert [output.prompt_ids for output in outputs] == PROMPTS
    assert not manager.is_running()
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_a_persistent_manager_is_found_again() -> None:
    model = attached()
    with model.continuous_batching_context_manager(GREEDY, persistent_manager=True) as first:
        first.get_result(first.add_request([5]), timeout=SECONDS)
    assert model.init_continuous_batching() is first
    with model.continuous_batching_context_manager(GREEDY) as again:
        assert again is first and again.get_result(again.add_request([6]), timeout=SECONDS).error is None
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching(GREEDY) is not first


def test_a_kept_manager_that_was_used_up_is_forgotten() -> None:
    model = attached()
    managers = []
    for keep in (True, False, False, True):
        with model.continuous_batching_context_manager(GREEDY, persistent_manager=keep) as manager:
            assert manager.get_result(manager.add_request([5]), timeout=SECONDS).error is None
        managers.append(manager)
    assert managers[0] is managers[1] and len(set(map(id, managers))) == 3


def test_a_kept_manager_is_not_given_out_while_it_runs() -> None:
    model = attached()
    with model.continuous_batching_context_manager(GREEDY, persistent_manager=True):
        pass
    with model.continuous_batching_context_manager(GREEDY, persistent_manager=True) as outer:
        with model.continuous_batching_context_manager(GREEDY) as inner:
            assert inner is not outer and inner.engine is not outer.engine
        assert outer.get_result(outer.add_request([5]), timeout=SECONDS).error is None


def test_two_managers_of_a_model_do_not_share_an_engine() -> None:
    model = attached()
    managers = [model.init_continuous_batching(GREEDY) for _ in range(2)]
    for manager in managers:
        manager.start()
    ids = [(manager, manager.add_request([5, i])) for i in range(6, 9) for manager in managers]
    outputs = [manager.get_result(each, timeout=SECONDS) for manager, each in ids]
    assert all(output.error is None for output in outputs)
    rollout.detach(model)
    assert not any(manager.is_running() for manager in managers)


def test_a_kept_manager_takes_another_generation_config_and_hinders_no_batch() -> None:
    model = attached()
    with model.continuous_batching_context_manager(GREEDY, persistent_manager=True) as manager:
        manager.get_result(manager.add_request([5]), timeout=SECONDS)
    (output,) = model.generate_batch([[5]], generation_config=GREEDY).values()
    assert len(output.generated_tokens) == 6
    shorter = GenerationConfig(max_new_tokens=2, eos_token_id=-1)
    with model.continuous_batching_context_manager(shorter) as again:
        assert again is manager
        output = again.get_result(again.add_request([5]), timeout=SECONDS)
    assert len(output.generated_tokens) == 2


def test_a_kept_manager_ends_when_another_config_is_asked_for() -> None:
    model = attached()
    pages = [ContinuousBatchingConfig(page_size=size) for size in (8, 16)]
    managers = []
    for config in (pages[0], pages[0], None, pages[1], pages[0]):
        with model.continuous_batching_context_manager(
            GREEDY, continuous_batching_config=config, persistent_manager=True
        ) as manager:
            assert manager.get_result(manager.add_request([5]), timeout=SECONDS).error is None
        managers.append(manager)
    first, again, unasked, other, back = managers
    assert first is again is unasked and len({first, other, back}) == 3
    assert (first.engine.config.page_size, other.engine.config.page_size) == (8, 16)
    with pytest.raises(RuntimeError, match="destroyed"):
        first.start()


def test_batches_beside_a_running_manager_and_from_several_threads() -> None:
    model = attached()
    with model.continuous_batching_context_manager(GREEDY, persistent_manager=True) as manager:
        ids = [manager.add_request([5, i], max_new_tokens=60) for i in range(6, 10)]
        with ThreadPoolExecutor(4) as pool:
            batches = list(
                pool.map(lambda i: model.generate_batch([[5, i]], generation_config=GREEDY), range(6, 10))
            )
        running = [manager.get_result(each, timeout=SECONDS) for each in ids]
        assert manager.is_running()
    for batch, output in zip(batches, running, strict=True):
        (single,) = batch.values()
        assert len(output.generated_tokens) == 60
        assert_greedy(TINY_MODELS["llama"](), single.completion)
    rollout.detach(model)


def test_detach_ends_a_running_manager() -> None:
    model = attached()
    manager = model.init_continuous_batching(GREEDY)
    manager.start()
    rollout.detach(model)
    assert not manager.is_running()


def test_init_start_add_stop() -> None:
    model = attached()
    manager = model.init_continuous_batching(
        generation_config=GREEDY,
        continuous_batching_config=ContinuousBatchingConfig(page_size=8, num_blocks=64),
    )
    manager.start()
    request_id = manager.add_request([5, 6, 7], max_new_tokens=4, streaming=True)
    lengths = [len(output.generated_tokens) for output in manager.request_id_iter(request_id)]
    assert lengths[-1] == 4
    manager.stop(timeout=SECONDS)


def test_attach_leaves_names_only_and_detach_takes_them_away() -> None:
    model = TINY_MODELS["llama"]()
    before = set(vars(model))
    assert rollout.attach(model) is model
    assert set(vars(model)) - before == set(NAMES)
    with pytest.raises(ValueError, match="attached already"):
        rollout.attach(model)
    model.train()
    model.generate_batch([[5]], generation_config=GREEDY)
    assert model.training
    rollout.detach(model)
    assert set(vars(model)) == before
    with pytest.raises(ValueError, match="not attached"):
        rollout.detach(model)


def test_copies_and_pickles_have_engines_of_their_own() -> None:
    model = attached()
    (before,) = model.generate_batch([[5, 6]], generation_config=GREEDY).values()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(-1)
        (changed,) = other.generate_batch([[5, 6]], generation_config=GREEDY).values()
        assert changed.completion.policy_logprobs != before.completion.policy_logprobs
    (after,) = model.generate_batch([[5, 6]], generation_config=GREEDY).values()
    assert after.completion.policy_logprobs == before.completion.policy_logprobs


DRAWN = GenerationConfig(do_sample=True, max_new_tokens=8, eos_token_id=-1)


def drawn(seed: int | None, torch_seed: int, *page_sizes: int) -> list[list[int]]:
    """What an attached model draws, call by call."""
    torch.manual_seed(torch_seed)
    before = torch.get_rng_state()
    model, tokens = attached(), []
    for page_size in page_sizes:
        config = ContinuousBatchingConfig(seed=seed, page_size=page_size)
        (output,) = model.generate_batch(
            [[5]], generation_config=DRAWN, continuous_batching_config=config
        ).values()
        tokens.append(output.generated_tokens)
    assert torch.equal(torch.get_rng_state(), before)
    return tokens


def test_without_a_seed_draws_follow_torchs_and_no_two_calls_draw_the_same() -> None:
    first = drawn(None, 1, 8, 8, 16, 8)
    assert len(set(map(tuple, first))) == 4, "a new config must not start the same noise again"
    assert drawn(None, 1, 8, 8, 16, 8) == first
    assert drawn(None, 2, 8, 8, 16, 8) != first
    assert drawn(7, 1, 8) == drawn(7, 2, 8) != first[:1]


def test_without_a_config_draws_follow_torchs_seed_too() -> None:
    def draw(torch_seed: int) -> list[list[int]]:
        torch.manual_seed(torch_seed)
        model = attached()
        configs = [None, {"page_size": 8}, None, {}]
        return [
            output.generated_tokens
            for config in configs
            for output in model.generate_batch(
                [[5]], generation_config=DRAWN, continuous_batching_config=config
            ).values()
        ]

    assert draw(1) == draw(1) != draw(2)
    assert len(set(map(tuple, draw(1)))) == 4


def test_a_batch_larger_than_the_queue_and_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = attached().generate_batch(
        PROMPTS,
        generation_config=GREEDY,
        continuous_batching_config=ContinuousBatchingConfig(max_queue_size=2),
        progress_bar=True,
    )
    assert len(outputs) == 3 and "3/3" in capsys.readouterr().err


def test_prompts_of_a_batch_may_be_tensors_and_a_wrong_one_fails_alone() -> None:
    outputs = attached().generate_batch(
        [torch.tensor([5, 6]), "no tokenizer is there", []], generation_config=GREEDY, on_error="return"
    )
    good, text, empty = outputs.values()
    assert good.error is None and good.prompt_ids == [5, 6]
    assert "tokenizer" in text.error and "empty" in empty.error


def test_a_config_is_refused_before_anything_is_queued() -> None:
    model = attached()
    with pytest.raises(ValueError, match="not offered here: num_beams=2"):
        model.init_continuous_batching(GenerationConfig(num_beams=2))
    with pytest.raises(ValueError, match="prompt has 3 tokens and max_length=2 leaves none"):
        model.generate_batch([[5], [5, 6, 7]], generation_config=GenerationConfig(max_length=2))


# ---- generation config


def params(**fields: object) -> SamplingParams:
    config = GenerationConfig(**fields)
    return params_from(config, prompt_len=10, position_limit=100, device=torch.device("cpu"))


REFUSED = set(
    """assistant_early_exit assistant_ensemble_weight constraints dola_layers force_words_ids
    forced_bos_token_id
    max_time output_attentions output_hidden_states output_logits output_scores prompt_lookup_num_tokens
    remove_invalid_values return_dict_in_generate speculation_type token_healing top_h use_mtp
    watermarking_config""".split()
)


def test_every_field_of_the_config_is_placed() -> None:
    """A field that transformers adds must be looked at: honoured, without effect, or refused."""
    names = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    assert names == HONOURED | NO_EFFECT | set(NEUTRAL) | REFUSED
    placed = [HONOURED, NO_EFFECT, set(NEUTRAL), REFUSED]
    assert sum(map(len, placed)) == len(set().union(*placed)), "in two places"


def test_fields_become_parameters() -> None:
    drawn = params(do_sample=True, temperature=0.7, top_k=20, top_p=0.9, min_p=0.1, max_new_tokens=5)
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.7, 20, 0.9, 0.1)
    assert drawn.max_new_tokens == 5 and not drawn.ignore_eos
    assert params(temperature=0.7, top_k=20).is_greedy  # do_sample is not set
    assert params().max_new_tokens == 90 and params(max_length=30).max_new_tokens == 20
    assert params(min_length=14, max_length=30).min_new_tokens == 4
    ended = params(
        do_sample=True,
        eos_token_id=[3, 4],
        stop_strings="end",
        num_return_sequences=2,
        suppress_tokens=[7],
    )
    assert ended.ignore_eos and ended.stop_token_ids == (3, 4) and ended.stop_strings == ("end",)
    assert ended.n == 2 and ended.logit_bias == {7: float("-inf")}
    assert params(eos_token_id=-1).ignore_eos and params(eos_token_id=-1).stop_token_ids == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 2},
        {"typical_p": 0.9},
        {"guidance_scale": 1.5},
        {"penalty_alpha": 0.6},
        {"prompt_lookup_num_tokens": 3},
        {"output_scores": True},
        {"remove_invalid_values": True},
    ],
    ids=str,
)
def test_what_is_not_offered_is_refused_by_name(fields: dict[str, object]) -> None:
    (name,) = fields
    with pytest.raises(ValueError, match=f"not offered here: .*{name}="):
        params(do_sample=True, **fields)


def test_wrong_combinations_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence_bias comes before repetition_penalty"):
        params(sequence_bias=[[[5], 2.0]], repetition_penalty=1.2)
    with pytest.raises(ValueError, match="raises the EOS token; set eos_token_id"):
        params(exponential_decay_length_penalty=(3, 1.5), eos_token_id=-1)
    assert params(eos_token_id=[-2, 4]).stop_token_ids == (4,)


def test_transformers_processors_serve_where_we_have_no_field() -> None:
    config = GenerationConfig(max_new_tokens=20, no_repeat_ngram_size=1, eos_token_id=-1)
    (output,) = attached().generate_batch([[5, 6]], generation_config=config).values()
    assert len(set(output.generated_tokens) | {5, 6}) == 22  # no token twice
    config = GenerationConfig(max_new_tokens=5, forced_eos_token_id=3, eos_token_id=3, bad_words_ids=[[40]])
    (output,) = attached().generate_batch([[5, 6]], generation_config=config).values()
    assert output.generated_tokens[-1] == 3 and output.completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "fields",
    [
        {"begin_suppress_tokens": [0]},
        {"sequence_bias": [[[0], -50.0]]},
        {"repetition_penalty": 0.1},
        {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 1},
        {"suppress_tokens": [0]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_do_what_they_do_in_transformers_generate(fields: dict[str, Any]) -> None:
    """Against the model's own ``generate``; id 0 stands for the first greedy token."""
    model = attached()
    (plain,) = model.generate_batch([[5, 6, 7]], generation_config=GREEDY).values()
    first, second = plain.generated_tokens[:2]
    names = {0: first, 1: second}
    given = {
        "begin_suppress_tokens": lambda: [first],
        "sequence_bias": lambda: [[[first], -50.0]],
        "suppress_tokens": lambda: [first],
        "eos_token_id": lambda: names[1],
    }
    config = GenerationConfig(
        max_new_tokens=6, **{name: given.get(name, lambda v=value: v)() for name, value in fields.items()}
    )
    config.eos_token_id = config.eos_token_id if "eos_token_id" in fields else -1
    (output,) = model.generate_batch([[5, 6, 7]], generation_config=config).values()
    config.pad_token_id = 0
    theirs = TINY_MODELS["llama"]().generate(torch.tensor([[5, 6, 7]]), generation_config=config)
    assert output.generated_tokens == theirs[0, 3:].tolist()
    assert output.generated_tokens != plain.generated_tokens


def test_forced_eos_comes_at_the_requests_own_length() -> None:
    config = GenerationConfig(max_new_tokens=9, forced_eos_token_id=3, eos_token_id=3)
    (output,) = attached().generate_batch([[5, 6]], generation_config=config, max_new_tokens=4).values()
    assert len(output.generated_tokens) == 4 and output.generated_tokens[-1] == 3
