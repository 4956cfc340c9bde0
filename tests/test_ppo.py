"""PPO: the arithmetic against slow twins, and the trainer on tiny models.

Letters: B completions, T longest completion.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    ProcessorMixin,
)

from rollout import RolloutError, RolloutTensors
from rollout.integrations import ppo, ppo_math
from rollout.integrations.ppo import PPOConfig, PPOTrainer
from tiny_models import TINY_MODELS
from tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer

PROMPTS = ["Hello", "The sea is", "Count: 1 2 3", "abc"]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)  # [B, T]


@pytest.fixture(autouse=True)
def own_accelerator_state() -> Iterator[None]:
    """accelerate keeps one state per process; each test begins with none (bf16 or not, say)."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def tiny_model(name: str = "llama", **changes: Any) -> Any:
    return TINY_MODELS[name](vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID, **changes)


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(char in "aeiou" for char in text)) for text in completions]


def settings(folder: Path, **changes: Any) -> PPOConfig:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 2,
        "batch_size": 4,
        "per_device_train_batch_size": 2,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "response_length": 6,
        "learning_rate": 1e-3,
        "value_backbone": "shared",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return PPOConfig(**(values | changes))


class Run:
    """A trainer and the logs of its steps."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Any = None,
        rewards: Any = vowels,
        rows: Any = None,
        tokenizer: Any = None,
        more: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.logs: list[dict[str, float]] = []
        self.trainer = PPOTrainer(
            tiny_model() if model is None else model,
            settings(folder, **changes),
            Dataset.from_dict({"prompt": PROMPTS}) if rows is None else rows,
            rewards,
            tokenizer or tiny_tokenizer(),
            callbacks=[lambda step, logs: self.logs.append({"step": step, **logs})],
            **(more or {}),
        )

    def train(self, **kwargs: Any) -> "Run":
        self.trainer.train(**kwargs)
        return self

    def log(self, name: str) -> list[float]:
        return [entry[name] for entry in self.logs]


def weights(trainer: PPOTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer._bare.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


# the trainer


def test_a_step_logs_its_numbers_and_changes_policy_and_value(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = weights(run.trainer)
    run.train()
    after = weights(run.trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    first, second = run.logs
    assert (first["step"], first["episode"], second["step"], second["episode"]) == (1, 4, 2, 8)
    assert {
        "objective/scores",
        "objective/kl",
        "objective/non_score_reward",
        "objective/rlhf_reward",
        "objective/entropy",
        "policy/approxkl_avg",
        "policy/clipfrac_avg",
        "loss/policy_avg",
        "loss/value_avg",
        "val/ratio",
        "val/clipfrac_avg",
        "completions/mean_length",
        "kl_coef",
        "lr",
        "episode",
        "seconds_training",
        "rollout/tokens_per_second",
        "rollout/cached_tokens",
        "rollout/seconds",
        "rollout/truncated",
        "rollout/weight_version",
        "rollout/logprob_gap_mean",
        "rollout/logprob_gap_max",
        "rollout/logprobs_recomputed",
    } == set(first) - {"step"}
    assert all(math.isfinite(value) for entry in run.logs for value in entry.values())
    assert second["rollout/weight_version"] == first["rollout/weight_version"] + 1
    assert 0 < first["objective/entropy"] < math.log(VOCAB_SIZE)
    assert first["objective/rlhf_reward"] == first["objective/scores"] - 0.05 * first["objective/kl"]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_is_zero_until_the_policy_has_moved(tmp_path: Path, estimator: str) -> None:
    kl = Run(tmp_path, kl_estimator=estimator, learning_rate=1e-2, max_steps=3).train().log("objective/kl")
    assert abs(kl[0]) < 1e-4 < abs(kl[1]) and abs(kl[2]) > 1e-4


def test_a_given_reference_is_where_kl_is_measured_from(tmp_path: Path) -> None:
    other = tiny_model(seed=5)
    kl = Run(tmp_path, more={"ref_model": other}, max_steps=1).train().log("objective/kl")
    assert kl[0] > 1
    assert not any(p.requires_grad for p in other.parameters())
    with pytest.raises(ValueError, match="ref_model is the model itself"):
        model = tiny_model()
        Run(tmp_path, model=model, more={"ref_model": model})


def test_without_kl_no_reference_is_made(tmp_path: Path) -> None:
    run = Run(tmp_path, kl_coef=0.0).train()
    assert run.trainer._reference is None
    assert run.log("objective/kl") == run.log("objective/non_score_reward") == [0.0, 0.0]


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_the_reward_rises(tmp_path: Path, backbone: str) -> None:
    """Of 257 tokens 64 are wanted: chance gives a quarter of them, what is learned far more."""
    run = Run(
        tmp_path,
        model=tiny_model(initializer_range=0.02),
        rewards=lambda completion_ids, **_: [
            sum(token < 64 for token in ids) / len(ids) for ids in completion_ids
        ],
        value_backbone=backbone,
        max_steps=14,
        batch_size=32,
        per_device_train_batch_size=32,
        learning_rate=4e-3,
        kl_coef=0.0,
        lam=0.9,
    ).train()
    scores = run.log("objective/scores")
    assert scores[0] < 0.35 and min(scores[-3:]) > 0.65


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_the_value_function_learns_a_constant_return(tmp_path: Path, backbone: str) -> None:
    """Every completion scores 1 at its end: with gamma 1 each state is worth 1, and the loss falls."""
    run = Run(
        tmp_path,
        rewards=lambda completions, **_: [1.0] * len(completions),
        value_backbone=backbone,
        vf_coef=1.0,
        max_steps=8,
        learning_rate=3e-3,
        cliprange_value=10.0,
        kl_coef=0.0,
    ).train()
    losses = run.log("loss/value_avg")
    assert losses[-1] < 0.3 * losses[0]


def test_a_value_model_brings_its_body_and_score_layer(tmp_path: Path) -> None:
    value_model = reward_model()
    run = Run(tmp_path, value_backbone="own", more={"value_model": value_model})
    bare = run.trainer._bare
    assert bare.body is value_model.model
    assert torch.equal(bare.head.weight, value_model.score.weight)
    run.train()
    assert not torch.equal(bare.head.weight, value_model.score.weight)


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_lora_trains_the_adapter_and_measures_kl_without_it(tmp_path: Path, backbone: str) -> None:
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = Run(
        tmp_path, model=model, more={"peft_config": LORA}, value_backbone=backbone, learning_rate=1e-2
    ).train()
    assert run.trainer._reference is None
    kl = run.log("objective/kl")
    assert abs(kl[0]) < 1e-4 < abs(kl[1])
    assert max(run.log("rollout/logprob_gap_max")) < 1e-3  # adapter on in generation
    after = {name: p for name, p in run.trainer.model.named_parameters() if "lora" not in name}
    assert len(after) == len(before)
    for name, parameter in after.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(parameter, before[plain])
    run.trainer.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    trained = {n: p for n, p in run.trainer.model.named_parameters() if "lora" in n}
    assert trained and all(torch.equal(p, trained[n]) for n, p in loaded.named_parameters() if "lora" in n)


def test_a_peft_model_is_taken_as_it_is(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model(), LORA)
    run = Run(tmp_path, model=model, value_backbone="own").train()
    assert run.trainer.model is model
    assert not any("lora" in name for name, _ in run.trainer._bare.body.named_parameters())
    with pytest.raises(ValueError, match="peft_config is given too"):
        Run(tmp_path, model=model, more={"peft_config": LORA})


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", {"value_backbone": "own", "lr_scheduler_type": "linear"}),
        ("llama_mha_tied", {"target_kl": 0.5, "kl_horizon": 40.0, "kl_coef": 0.5}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    changes |= {"max_steps": 4, "save_steps": 2, "save_total_limit": 2, "learning_rate": 1e-2}
    straight = Run(tmp_path, model=tiny_model(name), **changes).train()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    resumed = Run(tmp_path, model=tiny_model(name), **changes)
    assert not same(weights(straight.trainer), weights(resumed.trainer))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(straight.trainer), weights(resumed.trainer))
    for left, right in zip(straight.logs[2:], resumed.logs, strict=True):
        for key in ("step", "episode", "objective/scores", "objective/kl", "kl_coef", "lr", "val/ratio"):
            assert left[key] == right[key], key
    if "target_kl" in changes:
        assert len(set(straight.log("kl_coef"))) == 4
    else:
        assert straight.log("lr") == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_checkpoints_rotate_and_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=3, save_steps=1, save_total_limit=1).train()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]
    (tmp_path / "checkpoint-9").mkdir()  # as if killed while saving
    again = Run(tmp_path, max_steps=4).train(resume_from_checkpoint=True)
    assert again.log("step") == [4]
    with pytest.raises(ValueError, match="no complete checkpoint"):
        run.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_the_saved_policy_loads_with_transformers(tmp_path: Path) -> None:
    run = Run(tmp_path).train()
    run.trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    trained = dict(run.trainer.model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters())
    assert (tmp_path / "model" / "tokenizer.json").exists()


# rewards


def reward_model() -> Any:
    config = tiny_model().config.to_dict() | {"num_labels": 1, "pad_token_id": EOS_ID}
    config = LlamaForSequenceClassification.config_class(**config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForSequenceClassification(config).float().eval()


CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]


@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
def test_a_reward_model_scores_prompt_and_completion(tmp_path: Path, kind: str) -> None:
    model, tokenizer = reward_model(), tiny_tokenizer()
    prompts = {"text": PROMPTS, "chat": CHATS, "ids": [tokenizer(p)["input_ids"] for p in PROMPTS]}[kind]
    seen: list[tuple[Any, Any]] = []

    def watch(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    run = Run(
        tmp_path,
        rewards=[model, watch],
        rows=[{"prompt": p} for p in prompts],
        more={"reward_processing_class": tokenizer},
        max_steps=1,
    ).train()
    expected = 0.0
    for prompt, completion in seen:
        if kind == "chat":
            text = f"<user>{prompt[0]['content']}<assistant>{completion[0]['content']}"
        else:
            text = (prompt if kind == "text" else tokenizer.decode(prompt)) + completion
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        expected += float(model(input_ids=ids).logits) / len(seen)
    assert run.log("objective/scores") == [pytest.approx(expected, abs=1e-4)]
    assert expected != 0


def test_reward_functions_get_columns_and_are_added_up(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def first(**given: Any) -> list[float]:
        calls.append(given)
        return [1.0] * len(given["prompts"])

    def second(answer: list[str], **_: Any) -> Tensor:
        return torch.tensor([float(len(a)) for a in answer])

    rows = [{"prompt": chat, "answer": "x" * i} for i, chat in enumerate(CHATS)]
    run = Run(tmp_path, rewards=[first, second], rows=rows, max_steps=1).train()
    (given,) = calls
    assert set(given) == {"prompts", "completions", "completion_ids", "answer"}
    assert sorted(map(str, given["prompts"])) == sorted(map(str, CHATS))
    assert all(len(a) == CHATS.index(p) for a, p in zip(given["answer"], given["prompts"], strict=True))
    assert all(c[0]["role"] == "assistant" and len(c) == 1 for c in given["completions"])
    assert all(1 <= len(ids) <= 6 for ids in given["completion_ids"])
    assert run.log("objective/scores") == [1.0 + 1.5]


@pytest.mark.parametrize(
    "given, message",
    [
        ([1.0], "gave 1 values for 4 completions"),
        (None, "gave a NoneType for 4 completions"),
        ([1.0, "good", 0.0, 0.0], "gave 'good' for completion 1 of 4"),
        ([1.0, 0.0, float("nan"), 0.0], "gave nan for completion 2 of 4"),
        ([1.0, 0.0, 0.0, None], "gave None for completion 3 of 4"),
    ],
)
def test_a_reward_that_is_no_number_per_completion_is_named(tmp_path: Path, given: Any, message: str) -> None:
    def odd_reward(**_: Any) -> Any:
        return given

    with pytest.raises(ValueError, match=f"odd_reward {message}"):
        Run(tmp_path, rewards=odd_reward).train()


def test_after_a_reward_that_raised_the_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    faults = [False, True, False, False]

    def moody(completions: list[str], **_: Any) -> list[float]:
        if faults.pop(0):
            raise ConnectionError("the judge is out")
        return vowels(completions)

    run = Run(tmp_path, rewards=moody, max_steps=3)
    with pytest.raises(ConnectionError):
        run.train()
    run.train()
    calm = Run(tmp_path, max_steps=3).train()
    assert run.log("step") == [1, 2, 3]
    assert same(weights(run.trainer), weights(calm.trainer))


def test_a_failing_rollout_names_the_prompt_and_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, rows=[{"prompt": [5, 6]}, {"prompt": [VOCAB_SIZE + 5]}], batch_size=2)
    before = weights(run.trainer)
    place = ppo_math.prompt_places(0, 2, 2, seed=0).index(1)
    with pytest.raises(RolloutError, match=rf"prompts at \[{place}\] of 2"):
        run.train()
    assert same(before, weights(run.trainer)) and run.trainer.state.step == 0
    run.trainer.engine.check()


def test_missing_eos_costs_where_the_model_did_not_end_by_itself(tmp_path: Path) -> None:
    """EOS, which also pads, and the stop string are ends; the last token alone would not say it."""
    ends: list[str] = []

    def watch(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        for text, ids in zip(completions, completion_ids, strict=True):
            ends.append("eos" if ids[-1] == EOS_ID else "stop" if text.endswith("a") else "length")
        return [1.0] * len(completions)

    model = tiny_model()
    with torch.no_grad():  # every token is equally likely: most completions meet neither end
        model.lm_head.weight.zero_()
    changes = {"stop_strings": ["a"], "missing_eos_penalty": 4.0, "batch_size": 48, "response_length": 80}
    run = Run(tmp_path, model=model, rewards=watch, max_steps=1, num_ppo_epochs=1, **changes).train()
    assert set(ends) == {"eos", "stop", "length"}
    assert run.log("objective/scores") == [pytest.approx(1 - 4 * ends.count("length") / 48)]
    assert run.log("rollout/truncated") == [pytest.approx(ends.count("length") / 48)]


# the old logprobs


def test_the_engines_logprobs_are_used_where_they_are_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_seen: list[int] = []
    forward = ppo_math.forward_logprobs

    def count(model: Any, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows_seen.append(len(ids))
        return forward(model, ids, *args, **kwargs)

    monkeypatch.setattr(ppo_math, "forward_logprobs", count)
    run = Run(tmp_path, max_steps=1, kl_coef=0.0).train()
    assert sum(rows_seen) == ppo.GAP_ROWS
    assert 0 < run.log("rollout/logprob_gap_max")[0] < 1e-4
    assert run.log("rollout/logprobs_recomputed") == [0.0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_bound_of_zero_computes_them_all(tmp_path: Path, temperature: float) -> None:
    made = []
    run = Run(tmp_path, max_steps=1, logprob_gap_bound=0.0, temperature=temperature)
    update = run.trainer._update
    run.trainer._update = lambda experience: (made.append(experience), update(experience))[1]
    model = tiny_model()
    run.train()
    assert run.log("rollout/logprobs_recomputed") == [1.0]
    (experience,) = made
    length = experience.mask.shape[1]
    for row in range(4):
        ids = experience.ids[row][experience.attention_mask[row].bool()]
        num_drawn = int(experience.mask[row].sum())
        logits = model(ids[None]).logits[0, -num_drawn - 1 : -1] / temperature
        own = torch.log_softmax(logits, -1).gather(1, ids[-num_drawn:, None])[:, 0]
        torch.testing.assert_close(experience.logprobs[row, :num_drawn], own, atol=2e-5, rtol=0)
        assert not experience.logprobs[row, num_drawn:length].any()


# ranks


def test_dummies_fill_up_and_take_no_part(tmp_path: Path) -> None:
    run = Run(tmp_path)
    batch = run.trainer.engine.generate(PROMPTS, run.trainer.args.sampling_params(seed=0))
    plain = batch.to_tensors(EOS_ID)
    filled: RolloutTensors = ppo_math.with_dummies(batch, 6, EOS_ID).to_tensors(EOS_ID)
    assert torch.equal(filled.completion_ids[:4], plain.completion_ids)
    assert not filled.completion_mask[4:].any()
    assert filled.prompt_mask[4:].sum(1).tolist() == [1, 1]  # attention over nothing is undefined
    one, logs_one = run.trainer._experience(batch, [0.0, 1.0, 2.0, 3.0])
    more, _ = with_rows(run.trainer, batch, 6)
    for name in ("logprobs", "values", "advantages", "returns"):
        left, right = getattr(one, name), getattr(more, name)
        torch.testing.assert_close(left, right[:4], atol=1e-5, rtol=1e-5)
        assert not right[4:].any()
    # the update's gradient is that of the four rows
    run.trainer._model.train()
    gradients = []
    for rows in (one, more):
        loss, stats = ppo_math.ppo_loss(
            rows,
            *run.trainer._model(rows.ids, rows.attention_mask, rows.mask.shape[1]),
            cliprange=0.2,
            cliprange_value=0.2,
            vf_coef=0.1,
        )
        gradients.append(torch.autograd.grad(loss, list(run.trainer._bare.parameters())))
        assert float(stats["tokens"]) == logs_one["completions/mean_length"] * 4
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)


def with_rows(trainer: PPOTrainer, batch: Any, num_rows: int) -> Any:
    """``_experience`` as if another rank held ``num_rows`` rows."""
    real = ppo.over_ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ppo,
            "over_ranks",
            lambda accelerator, *, sums, maxima: (
                {"rows": num_rows} if "rows" in maxima else real(accelerator, sums=sums, maxima=maxima)
            ),
        )
        return trainer._experience(batch, [0.0, 1.0, 2.0, 3.0])


def test_a_rank_without_prompts_takes_its_steps_and_learns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ppo, "share_of_rank", lambda items, accelerator: [])
    run = Run(tmp_path, num_mini_batches=1)
    before = weights(run.trainer)
    real = ppo.over_ranks
    monkeypatch.setattr(  # the other rank has one row
        ppo,
        "over_ranks",
        lambda accelerator, *, sums, maxima: (
            {"rows": 1.0} if "rows" in maxima else real(accelerator, sums=sums, maxima=maxima)
        ),
    )
    run.train()
    assert same(before, weights(run.trainer))  # AdamW without weight decay: no gradient, no change
    assert all(math.isfinite(value) for entry in run.logs for value in entry.values())
    assert run.log("completions/mean_length") == [0.0, 0.0]


# settings


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True},
        {"whiten_rewards": True, "whiten_advantages": False},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
        {"stop_strings": ["a", "e"]},
        {"max_grad_norm": None},
        {"num_mini_batches": 3, "per_device_train_batch_size": 1},
        {"batch_size": 1},
        {"batch_size": 7},
        {"batch_size": None, "gradient_accumulation_steps": 2, "num_mini_batches": 1},
        {"max_steps": None, "total_episodes": 7},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_settings_that_touch_the_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = Run(tmp_path, **changes).train()
    assert run.log("step") == [1, 2]
    assert all(p.dtype == torch.float32 for p in run.trainer.model.parameters())
    assert all(torch.isfinite(p).all() for p in run.trainer.model.parameters())


@pytest.mark.parametrize("size", [4, 3, 1])
def test_an_update_follows_the_gradient_of_the_mean_over_tokens(tmp_path: Path, size: int) -> None:
    """In parts of any size, with completions of unequal length: a mean of means would differ."""
    run = Run(
        tmp_path,
        max_steps=1,
        num_ppo_epochs=1,
        num_mini_batches=1,
        per_device_train_batch_size=size,
        max_grad_norm=None,
        stop_strings=list("aeiouAE123 tr"),
        response_length=12,
        more={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})},
    )
    expected = {}
    update, bare = run.trainer._update, run.trainer._bare

    def watch(rows: Any) -> dict[str, float]:
        assert len(set(rows.mask.sum(1).tolist())) > 1
        now = bare(rows.ids, rows.attention_mask, rows.mask.shape[1])
        loss, _ = ppo_math.ppo_loss(rows, *now, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1)
        gradients = torch.autograd.grad(loss / rows.mask.sum(), list(bare.parameters()))
        for (name, parameter), gradient in zip(bare.named_parameters(), gradients, strict=True):
            expected[name] = parameter.detach() - 0.5 * gradient
        return update(rows)

    run.trainer._update = watch
    run.train()
    for name, parameter in weights(run.trainer).items():
        torch.testing.assert_close(parameter, expected[name], atol=1e-5, rtol=1e-4)
    assert run.log("lr") == [0.5]


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_value_is_of_the_state_before_its_token(tmp_path: Path, backbone: str) -> None:
    bare = Run(tmp_path, value_backbone=backbone).trainer._bare
    torch.nn.init.ones_(bare.head.weight[:, ::2])
    ids = torch.tensor([[EOS_ID, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    logprobs, _, values = bare(ids, mask, 3)
    assert torch.equal(values, bare.values(ids, mask, 3))
    assert torch.equal(logprobs, bare.logprobs(ids, mask, 3))
    for place in range(3):  # another token there changes its logprob, and values only after it
        other = ids.clone()
        other[:, 3 + place] = 50
        changed_logprobs, _, changed = bare(other, mask, 3)
        assert (changed[:, : place + 1] == values[:, : place + 1]).all()
        assert (changed[:, place + 1 :] != values[:, place + 1 :]).all()
        assert (changed_logprobs[:, place] != logprobs[:, place]).all()
    alone, _, alone_values = bare(ids[:1, 1:], mask[:1, 1:], 3)  # padding on the left is not seen
    torch.testing.assert_close(alone, logprobs[:1], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone_values, values[:1], atol=1e-4, rtol=1e-5)


def test_steps_go_through_the_dataset(tmp_path: Path) -> None:
    seen: list[str] = []

    def watch(prompts: list[str], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [0.0] * len(prompts)

    rows = [{"prompt": f"number {i}"} for i in range(8)]
    Run(tmp_path, rewards=watch, rows=rows).train()
    assert sorted(seen) == [row["prompt"] for row in rows]


def test_gradient_checkpointing_changes_no_number(tmp_path: Path) -> None:
    trained, calls = [], [0, 0]
    for is_on in (False, True):
        model = tiny_model()
        if is_on:
            model.activation_checkpointing_enable()
        run = Run(tmp_path, model=model)

        def count(*_: Any, is_on: bool = is_on) -> None:
            calls[is_on] += 1

        model.model.layers[0].mlp.register_forward_pre_hook(count)
        run.train()
        trained.append(weights(run.trainer))
    assert calls[True] > calls[False] > 0  # layers are computed again in the backward pass
    for name, left in trained[0].items():
        torch.testing.assert_close(left, trained[1][name], atol=1e-6, rtol=1e-5)


def test_dropout_is_off_so_that_the_ratio_starts_at_one(tmp_path: Path) -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    run = Run(tmp_path, model=model, num_ppo_epochs=1, num_mini_batches=1, max_steps=1).train()
    assert run.log("val/ratio") == [pytest.approx(1.0, abs=1e-4)]


def test_a_tokenizer_without_pad_token_stays_as_it_is(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    run = Run(tmp_path, tokenizer=tokenizer).train()
    assert tokenizer.pad_token is None and run.trainer.model.config.pad_token_id is None


def test_trackers_get_settings_and_logs(tmp_path: Path) -> None:
    class Notes(GeneralTracker):
        name = "notes"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.config: dict[str, Any] = {}
            self.steps: dict[int, dict[str, float]] = {}

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.config = values

        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            assert step is not None
            self.steps[step] = values

    notes = Notes()
    run = Run(tmp_path, report_to=notes).train()
    assert notes.config["kl_coef"] == 0.05
    assert [notes.steps[step]["objective/scores"] for step in (1, 2)] == run.log("objective/scores")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_steps": None}, "max_steps=None and total_episodes=None"),
        ({"total_episodes": 8}, "exactly one"),
        ({"kl_coef": 0.0, "target_kl": 1.0}, "target_kl=1.0 multiplies kl_coef"),
        ({"kl_estimator": "k2"}, "kl_estimator='k2'; allowed: 'k1', 'k3'"),
        ({"value_backbone": "none"}, "value_backbone='none'; allowed: 'own', 'shared'"),
        ({"lr_scheduler_type": "cosine"}, "allowed: 'constant', 'linear'"),
        ({"temperature": 0.0}, "temperature=0.0 is out of range"),
        ({"lam": 1.5}, "lam=1.5 is out of range"),
        ({"num_ppo_epochs": 0}, "num_ppo_epochs=0 is out of range"),
        ({"batch_size": 0}, "batch_size=0 is out of range"),
        ({"cliprange": -0.1}, "cliprange=-0.1 is out of range"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **changes)


class Processor(ProcessorMixin):
    """A vision model's processor, as far as the trainer looks."""

    def __init__(self) -> None: ...


def test_what_cannot_work_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vision models are not supported"):
        Run(tmp_path, tokenizer=Processor())
    with pytest.raises(ValueError, match="'prompt'"):
        Run(tmp_path, rows=[{"text": "abc"}])
    with pytest.raises(ValueError, match="no rows"):
        Run(tmp_path, rows=[])
    with pytest.raises(ValueError, match="reward_processing_class"):
        Run(tmp_path, rewards=reward_model())
    with pytest.raises(ValueError, match="give a function, a reward model"):
        Run(tmp_path, rewards="accuracy")
    with pytest.raises(ValueError, match=r"bfloat16.*dtype=torch.float32"):
        Run(tmp_path, model=tiny_model().bfloat16())
    with pytest.raises(ValueError, match="value_backbone='shared'"):
        Run(tmp_path, more={"value_model": reward_model()})
    with pytest.raises(TypeError, match="PreTrainedModel"):
        Run(tmp_path, model=torch.nn.Linear(2, 2))


def test_a_new_runs_checkpoint_outlives_an_older_runs_later_one(tmp_path: Path) -> None:
    """By number, the limit would delete the checkpoint that was just saved."""
    Run(tmp_path, max_steps=3, save_steps=3).train()
    run = Run(tmp_path, max_steps=2, save_steps=2, save_total_limit=1).train()
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    again = Run(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    assert again.logs == [] and same(weights(again.trainer), weights(run.trainer))


def test_dropout_that_layers_call_as_a_function_is_off_too(tmp_path: Path) -> None:
    """OPT keeps the rate as a plain number on its layers."""
    config = OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        dropout=0.5,
        layerdrop=0.5,
        eos_token_id=EOS_ID,
    )
    run = Run(tmp_path, model=OPTForCausalLM(config), max_steps=1, num_ppo_epochs=1, num_mini_batches=1)
    run.train()
    assert run.log("val/ratio") == pytest.approx([1.0], abs=1e-4)
