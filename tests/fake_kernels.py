"""Paged attention kernels in plain torch, with the signatures of the real ones.

Each checks what its original demands (types, shapes, order, page size, tables that lead to pages) and
then computes the answer from the pages alone, as the original's documentation defines it. They stand
in for the kernels where there is no GPU; whether the kernels keep their word is for tests/gpu.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout.attention.flash import FlashKernel
from rollout.attention.paged import KernelLimits
from rollout.attention.varlen import VarlenKernel

PAGE_MULTIPLE = 4


@dataclass(frozen=True)
class Call:
    """What a kernel was asked for."""

    entry: str
    num_rows: int
    max_q: int
    table_width: int
    window_size: tuple[int, int]


@dataclass
class Calls:
    """Calls of one kernel, in order."""

    all: list[Call] = field(default_factory=list)

    def entries(self) -> set[str]:
        return {call.entry for call in self.all}


def attend_by_table(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    cu_q: Tensor,
    lengths: Tensor,
    table: Tensor,
    scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, row by row: of ``q`` queries and ``k`` keys, query ``i`` lies at key ``i + k - q``."""
    left, right = window_size
    right = 0 if causal else right
    out = torch.empty_like(query)
    groups = query.shape[1] // keys.shape[2]
    for row, length in enumerate(lengths.tolist()):
        begin, end = cu_q[row : row + 2].tolist()
        key, value = (
            x[table[row].long()].flatten(0, 1)[:length].repeat_interleave(groups, dim=1)
            for x in (keys, values)
        )
        scores = torch.einsum("qnh,knh->nqk", query[begin:end].float(), key.float()) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(end - begin)[:, None] + length - (end - begin)
        key_at = torch.arange(length)[None]
        seen = torch.ones(end - begin, length, dtype=torch.bool)
        if right >= 0:
            seen &= key_at <= at + right
        if left >= 0:
            seen &= key_at >= at - left
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, end - begin, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        out[begin:end] = torch.einsum("nqk,knh->qnh", weights, value.float()).to(out.dtype)
    return out


def check_paged(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, table: Tensor, page_multiple: int
) -> None:
    """What every kernel demands of queries ``[.., N, H]``, pages ``[P, S, K, H]``, lengths and table."""
    assert query.dtype == keys.dtype == values.dtype
    assert query.stride(-1) == 1 and keys.is_contiguous() and values.is_contiguous()
    assert keys.shape == values.shape and keys.shape[-1] == query.shape[-1]
    assert query.shape[-2] % keys.shape[2] == 0
    num_pages, page_size = keys.shape[:2]
    assert page_size % page_multiple == 0
    assert lengths.dtype == table.dtype == torch.int32 and lengths.is_contiguous() and table.stride(-1) == 1
    assert table.dim() == 2 and len(table) == len(lengths)
    for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
        needed = -(-length // page_size)
        assert 1 <= length <= len(row) * page_size
        used = row[:needed]
        assert len(set(used)) == needed and all(0 < page < num_pages for page in used)
        assert not any(row[needed:]), "padding leads away from the null page"


def check_cumulative(cu: Tensor, total: int, longest: int, rows: int) -> None:
    """Where rows begin: ``[R + 1]`` int32 from 0 to the total, and the longest as a plain int."""
    assert cu.dtype == torch.int32 and cu.is_contiguous() and cu.shape == (rows + 1,)
    assert int(cu[0]) == 0 and int(cu[-1]) == total and bool((cu.diff() > 0).all())
    assert type(longest) is int and longest >= int(cu.diff().max())


class FakeVarlen:
    """``torch.nn.attention.varlen.varlen_attn`` on flash attention 2, or on 3 (``is_fa3``)."""

    def __init__(self, *, is_fa3: bool = False, page_multiple: int = PAGE_MULTIPLE) -> None:
        self.calls = Calls()
        self.is_fa3 = is_fa3
        self.page_multiple = page_multiple

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert seqused_k is not None and block_table is not None and return_aux is None
        assert num_splits == 1, "split keys of paged rows come out wrong"
        assert enable_gqa or query.shape[1] == key.shape[2]
        assert type(scale) is float and len(window_size) == 2
        check_paged(query, key, value, seqused_k, block_table, self.page_multiple)
        rows = len(seqused_k)
        check_cumulative(cu_seq_q, len(query), max_q, rows)
        assert type(max_k) is int and int(seqused_k.max()) <= max_k <= block_table.shape[1] * key.shape[1]
        if self.is_fa3:
            assert cu_seq_k is None, "flash attention 3 takes no cu_seqlens_k beside a table"
        else:
            assert cu_seq_k is not None and torch.equal(cu_seq_k.diff(), seqused_k)
            check_cumulative(cu_seq_k, int(seqused_k.sum()), max_k, rows)
        self.calls.all.append(Call("varlen", rows, max_q, block_table.shape[1], window_size))
        return attend_by_table(
            query,
            key,
            value,
            cu_q=cu_seq_q,
            lengths=seqused_k,
            table=block_table,
            scale=scale,
            causal=window_size == (-1, 0),
            window_size=window_size,
        )

    def kernel(self) -> VarlenKernel:
        return VarlenKernel(self.varlen_attn, cpu_limits(), takes_cu_k=not self.is_fa3)


class FakeFlash2:
    """Flash attention 2: ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``."""

    def __init__(self, page_multiple: int = PAGE_MULTIPLE) -> None:
        self.calls = Calls()
        self.page_multiple = page_multiple

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert causal and block_table is not None and type(softmax_scale) is float
        lengths = cu_seqlens_k.diff()
        check_paged(q, k, v, lengths, block_table, self.page_multiple)
        check_cumulative(cu_seqlens_q, len(q), max_seqlen_q, len(lengths))
        check_cumulative(cu_seqlens_k, int(lengths.sum()), max_seqlen_k, len(lengths))
        self.calls.all.append(Call("varlen", len(lengths), max_seqlen_q, block_table.shape[1], window_size))
        return attend_by_table(
            q,
            k,
            v,
            cu_q=cu_seqlens_q,
            lengths=lengths,
            table=block_table,
            scale=softmax_scale,
            causal=True,
            window_size=window_size,
            softcap=softcap,
        )

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Any = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert k is None and v is None, "keys and values are stored already"
        assert cache_seqlens is not None and block_table is not None and type(softmax_scale) is float
        rows, length = q.shape[:2]
        assert rows == len(cache_seqlens) and length == 1
        check_paged(q, k_cache, v_cache, cache_seqlens, block_table, self.page_multiple)
        self.calls.all.append(Call("kvcache", rows, 1, block_table.shape[1], window_size))
        out = attend_by_table(
            q[:, 0],
            k_cache,
            v_cache,
            cu_q=torch.arange(rows + 1),
            lengths=cache_seqlens,
            table=block_table,
            scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
        )
        return out.unsqueeze(1)

    def kernel(self) -> FlashKernel:
        limits = cpu_limits(softcap=True)
        return FlashKernel("fake 2", self.flash_attn_with_kvcache, self.flash_attn_varlen_func, limits)


class FakeFlash3:
    """Flash attention 3 of a build with sinks: rows of any length in ``flash_attn_with_kvcache``."""

    def __init__(self) -> None:
        self.calls = Calls()

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 0,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        assert k is None and v is None and causal, "keys and values are stored already"
        assert cache_seqlens is not None and page_table is not None and type(softmax_scale) is float
        assert s_aux is None or (s_aux.dtype == q.dtype and s_aux.shape == q.shape[-2:-1])
        rows = len(cache_seqlens)
        check_paged(q, k_cache, v_cache, cache_seqlens, page_table, 1)
        packed = q
        if cu_seqlens_q is None:
            assert q.dim() == 4 and q.shape[:2] == (rows, 1) and max_seqlen_q is None
            packed, cu_q, entry = q[:, 0], torch.arange(rows + 1), "kvcache"
        else:
            assert q.dim() == 3 and max_seqlen_q is not None
            check_cumulative(cu_seqlens_q, len(q), max_seqlen_q, rows)
            cu_q, entry = cu_seqlens_q, "varlen"
        self.calls.all.append(Call(entry, rows, max_seqlen_q or 1, page_table.shape[1], window_size))
        out = attend_by_table(
            packed,
            k_cache,
            v_cache,
            cu_q=cu_q,
            lengths=cache_seqlens,
            table=page_table,
            scale=softmax_scale,
            causal=True,
            window_size=window_size,
            softcap=softcap,
            sinks=s_aux,
        )
        return out.view_as(q)

    def kernel(self) -> FlashKernel:
        limits = cpu_limits(softcap=True, sinks=True, page_multiple=1)
        return FlashKernel("fake 3", self.flash_attn_with_kvcache, None, limits)


def cpu_limits(
    *, softcap: bool = False, sinks: bool = False, page_multiple: int = PAGE_MULTIPLE
) -> KernelLimits:
    """What the fakes serve: this machine, in fp32 and bf16."""
    return KernelLimits(
        page_multiple=page_multiple,
        softcap=softcap,
        sinks=sinks,
        device_type="cpu",
        dtypes=(torch.float32, torch.bfloat16),
    )
