"""Tiny random causal LMs, one per trait of an architecture that an engine can get wrong.

Each builder returns a fresh fp32 model in ``eval()`` with the same weights for the same seed, and
neither reads nor changes the global random state. The usual init (std 0.02) gives nearly equal
logits whatever the attention does; these weights are large enough that one wrong key shows.

Example::

    model = TINY_MODELS["mistral"](seed=1, eos_token_id=3)
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 97  # a prime, so that no padding to a multiple of anything stays unseen
MAX_POSITIONS = 256
WINDOW = 8  # short enough that every test prompt slides out of it
SLIDING, FULL = "sliding_attention", "full_attention"


def tiny_llama(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Grouped-query attention: 4 query heads on 2 key/value heads, untied head."""
    settings = _common(eos_token_id, changes, tie_word_embeddings=False)
    return _build(LlamaForCausalLM, LlamaConfig(**settings), seed)


def tiny_llama_wide(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Heads that the compiled kernels know, four of them on one key/value head."""
    traits = {"head_dim": 32, "num_key_value_heads": 1}
    return _build(LlamaForCausalLM, LlamaConfig(**_common(eos_token_id, changes, **traits)), seed)


def tiny_llama_mha_tied(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """One key/value head per query head; the output head is the embedding."""
    settings = _common(eos_token_id, changes, num_key_value_heads=4, tie_word_embeddings=True)
    return _build(LlamaForCausalLM, LlamaConfig(**settings), seed)


def tiny_qwen2(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Biases on the query, key and value projections."""
    settings = _common(eos_token_id, changes, tie_word_embeddings=True, head_dim=32)
    return _build(Qwen2ForCausalLM, Qwen2Config(**settings), seed)


def tiny_qwen3(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Norms on queries and keys; a head dimension that is not hidden size / heads."""
    settings = _common(eos_token_id, changes, head_dim=24)
    return _build(Qwen3ForCausalLM, Qwen3Config(**settings), seed)


def tiny_qwen3_wide(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """The same with heads that the compiled kernels know, three of them on one key/value head."""
    traits = {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
    return _build(Qwen3ForCausalLM, Qwen3Config(**_common(eos_token_id, changes, **traits)), seed)


def tiny_mistral(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """A sliding window on every layer."""
    settings = _common(eos_token_id, changes, sliding_window=WINDOW, head_dim=32)
    return _build(MistralForCausalLM, MistralConfig(**settings), seed)


def tiny_gemma2(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Sliding and full layers in turn, soft-capped scores and logits, a scale of its own."""
    settings = _common(
        eos_token_id,
        changes,
        num_hidden_layers=4,
        head_dim=16,
        tie_word_embeddings=False,  # tied, this size only repeats its last token
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    )
    return _build(Gemma2ForCausalLM, Gemma2Config(**settings), seed)


def tiny_gemma3(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Mostly sliding layers, rotary bases that differ by layer type, query and key norms."""
    settings = _common(
        eos_token_id,
        changes,
        num_hidden_layers=4,
        head_dim=16,
        tie_word_embeddings=False,  # as for gemma2
        layer_types=[SLIDING, SLIDING, FULL, SLIDING],
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
    )
    return _build(Gemma3ForCausalLM, Gemma3TextConfig(**settings), seed)


def tiny_phi3(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Queries, keys and values in one projection, a window on every layer."""
    settings = _common(eos_token_id, changes, sliding_window=WINDOW, bos_token_id=None)
    settings["original_max_position_embeddings"] = MAX_POSITIONS
    return _build(Phi3ForCausalLM, Phi3Config(**settings), seed)


def tiny_gpt2(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Learned positions instead of rotary ones, Conv1D weights, tied head."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "n_positions": MAX_POSITIONS,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        **changes,
    }
    return _build(GPT2LMHeadModel, GPT2Config(**settings), seed)


def tiny_qwen3_moe(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Four experts, two per token."""
    settings = _common(
        eos_token_id,
        changes,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    return _build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**settings), seed)


def tiny_gpt_oss(*, seed: int = 0, eos_token_id: int | None = None, **changes: Any) -> PreTrainedModel:
    """Attention sinks that matter, sliding and full layers, experts, yarn positions."""
    settings = _common(
        eos_token_id,
        changes,
        num_hidden_layers=4,
        head_dim=16,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": MAX_POSITIONS // 4,
        },
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return _build(GptOssForCausalLM, GptOssConfig(**settings), seed)


TINY_MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "llama_wide": tiny_llama_wide,
    "llama_mha_tied": tiny_llama_mha_tied,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3_wide": tiny_qwen3_wide,
    "mistral": tiny_mistral,
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
    "phi3": tiny_phi3,
    "gpt2": tiny_gpt2,
    "qwen3_moe": tiny_qwen3_moe,
    "gpt_oss": tiny_gpt_oss,
}


def _common(eos_token_id: int | None, changes: dict[str, Any], **traits: Any) -> dict[str, Any]:
    """Settings of all, then the builder's traits, then what the caller changes."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }
    return settings | traits | changes


def _build(model_class: Any, config: Any, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _roughen(name, parameter)
    return model


def _roughen(name: str, parameter: torch.Tensor) -> None:
    """Give norms, biases and sinks, which start at 1 or 0, values that would be missed."""
    if name.endswith("sinks"):
        parameter.normal_(mean=1.0, std=1.0)
    elif name.endswith("bias") or "norm" in name or ".ln_" in name:
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
