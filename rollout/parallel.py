"""The ranks that compute one model together, and how they keep in step.

A model that transformers loaded with ``DistributedConfig(tp_size=N)`` lies in shards on N ranks. Each
rank runs an engine of its own on its shards. An engine is deterministic, so all of them plan the same
steps as long as they are told the same, in the same order, and go on from the same tokens::

    rank 0 (driver)   told: a, b ---- meet ---- plan, forward <-sums-> ---- draw ---> tokens --- commit
    rank 1            told: a, b ---- meet ---- plan, forward <-sums-> ------------->  ...   --- commit

``meet`` compares a digest of all that was told so far, so that ranks which were told different things
stop with a sentence instead of computing garbage. Only the driver draws: tokens cannot differ. Every
wait is bounded by ``cpu_group_timeout``; a rank that fails leaves, which ends the others' waits at once.
"""

import hashlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from rollout.sequence import Request
from rollout.types import DrawnToken, RankError, SamplingParams, UnsupportedModelError

T = TypeVar("T")
Draws: TypeAlias = tuple[DrawnToken | Exception, ...]

ENDLESS = timedelta(days=3650)
"""What ``cpu_group_timeout=None`` becomes: torch would put its own default, 30 minutes, in place of None."""
DIGEST_BYTES = 7
"""So that a digest and its negative are 64-bit integers."""
NUM_NUMBERS = 4
"""Numbers that ranks agree on in one round; the same in every round, so that ranks which are at
different places still understand each other."""
LONGEST_QUOTE = 400
"""Characters of a command that an error quotes."""
OTHER_SIZES = ("pp_size", "fsdp_size", "dp_replicate_size", "ep_size")
"""Ways of ``DistributedConfig`` to divide a model that are not served."""
NEUTRAL = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


class Ranks:
    """The ranks of one model: here a single one, which agrees with itself at no cost.

    Args:
        noise_rank: ranks that generate for themselves draw differently; this is the one's number.
    """

    size = 1
    local_rank = 0

    def __init__(self, noise_rank: int) -> None:
        self.noise_rank = noise_rank

    @property
    def is_driver(self) -> bool:
        """Whether this rank draws, and decides where only one can."""
        return self.local_rank == 0

    def note(self, command: str, *facts: object) -> None:
        """Remember what the engine was told, for the others to compare."""

    def note_request(self, request: Request) -> None:
        """The same for a request."""

    def meet(self, doing: str, level: int, budget: int) -> tuple[int, int]:
        """Wait until all ranks are here; the highest ``level`` and the smallest ``budget`` of all.

        Raises:
            RankError: the ranks were told different things, or one is missing.
        """
        return level, budget

    def agree(self, doing: str, numbers: Sequence[int]) -> list[int]:
        """Wait until all ranks are here; the largest of each of up to four numbers."""
        return list(numbers)

    def from_driver(self, value: T) -> T:
        """The driver's value, on every rank."""
        return value

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        return [value]

    def share_draws(self, draw: Callable[[], Draws], num_rows: int) -> Draws:
        """What ``draw()`` gives on the driver; it is not called elsewhere."""
        return draw()

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors; may be computed in place."""
        return part

    def join(self, part: Tensor, full_len: int) -> Tensor:
        """All ranks' slices of the last dimension, side by side: ``[..., part] -> [..., full_len]``."""
        return part

    def lockstep(self) -> AbstractContextManager[object]:
        """Around what all ranks do together: one that fails in it leaves the others at once."""
        return nullcontext()

    def leave(self, reason: str) -> None:
        """Close the connections, for good: whoever waits for this rank hears of it at once."""

    def fork(self) -> "Ranks":
        """The same ranks with conversations of their own, for another thread. All ranks must call it."""
        return self


class TensorParallelRanks(Ranks):
    """The ranks of a model that is divided among them, and the groups they talk through.

    Example::

        ranks = ranks_of(model, timeout=300.0)
        ranks.note("cancel_request", "req_0")
        ranks.meet("a step", level=0, budget=2**30)     # raises unless all noted the same
        logits = ranks.join(local_logits, vocab_size)

    Args:
        members: their global ranks; the first one drives.
        device_group: for sums and joins of the model's tensors; ``None`` takes the CPU group.
        timeout: seconds to wait for another rank; ``None`` for any time.
    """

    def __init__(self, members: list[int], device_group: Any, timeout: float | None) -> None:
        super().__init__(noise_rank=members[0])
        self.size, self.local_rank = len(members), members.index(global_rank())
        self.timeout = timeout
        self._members = members
        self._device_group = device_group
        self._left: str | None = None  # why this rank is out
        self._ledger = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._last = "nothing"
        self._group: Any = None
        with self._talking("the first call"):
            group = dist.new_group(
                ranks=members,
                backend="gloo",
                timeout=ENDLESS if timeout is None else timedelta(seconds=timeout),
                use_local_synchronization=len(members) < dist.get_world_size(),
            )
        self._group = group
        self._close = weakref.finalize(self, _destroy, group)
        self._close.atexit = False

    def fork(self) -> "TensorParallelRanks":
        """See the base class."""
        return TensorParallelRanks(self._members, self._device_group, self.timeout)

    def note(self, command: str, *facts: object) -> None:
        """See the base class."""
        told = repr(facts)
        self._last = f"{command} {told[:LONGEST_QUOTE]}{'...' if len(told) > LONGEST_QUOTE else ''}"
        self._ledger.update(f"{command} {told}".encode())

    def note_request(self, request: Request) -> None:
        """See the base class."""
        self.note("add_request", *_facts(request))

    def meet(self, doing: str, level: int, budget: int) -> tuple[int, int]:
        """See the base class."""
        level, least = self.agree(doing, (level, -budget))
        return level, -least

    def agree(self, doing: str, numbers: Sequence[int]) -> list[int]:
        """See the base class."""
        told = self._ledger.copy()
        told.update(doing.encode())
        digest = int.from_bytes(told.digest(), "little")
        padding = [0] * (NUM_NUMBERS - len(numbers))
        table = torch.tensor([digest, -digest, *numbers, *padding], dtype=torch.int64)
        with self._talking(doing):
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._group)
        highest, lowest, *agreed = table.tolist()
        if highest != -lowest:
            self._stop_apart(doing)
        return [int(number) for number in agreed[: len(numbers)]]

    def from_driver(self, value: T) -> T:
        """See the base class."""
        box = [value]
        with self._talking("a value of the driver"):
            dist.broadcast_object_list(
                box, src=self._members[0], group=self._group, device=torch.device("cpu")
            )
        return box[0]

    def gather(self, value: T) -> list[T]:
        """See the base class."""
        box: list[Any] = [None] * self.size
        with self._talking("values of all ranks"):
            dist.all_gather_object(box, value, group=self._group)
        return box

    def share_draws(self, draw: Callable[[], Draws], num_rows: int) -> Draws:
        """See the base class."""
        drawn = draw() if self.is_driver else ()
        errors = {i: _portable(each) for i, each in enumerate(drawn) if isinstance(each, Exception)}
        table = torch.zeros((num_rows, 5), dtype=torch.float64)  # failed, token, its three numbers
        if drawn:
            table.copy_(torch.tensor([_as_numbers(each) for each in drawn], dtype=torch.float64))
        with self._talking("drawn tokens"):
            dist.broadcast(table, src=self._members[0], group=self._group)
        if table[:, 0].any():
            errors = self.from_driver(errors)
        if self.is_driver:
            return drawn
        rows = enumerate(table.tolist())
        return tuple(errors[i] if i in errors else DrawnToken(int(row[1]), *row[2:]) for i, row in rows)

    def sum(self, part: Tensor) -> Tensor:
        """See the base class."""
        part = part.contiguous()
        with self._talking("a sum in the model"):
            dist.all_reduce(part, group=self._device_group or self._group)
        return part

    def join(self, part: Tensor, full_len: int) -> Tensor:
        """See the base class."""
        share = share_len(full_len, self.size)
        rows = pad(part, (0, share - part.shape[-1])).reshape(-1, share)  # the last slices may be shorter
        slices = part.new_empty((self.size, len(rows), share))
        with self._talking("a join in the model"):
            dist.all_gather(list(slices), rows.contiguous(), group=self._device_group or self._group)
        joined = slices.transpose(0, 1).reshape(len(rows), -1)
        return joined[:, :full_len].reshape(*part.shape[:-1], full_len)

    @contextmanager
    def lockstep(self) -> Iterator[None]:
        """See the base class."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def leave(self, reason: str) -> None:
        """See the base class."""
        if self._left is None:
            self._left = reason
            if self._group is not None:
                self._group = None
                self._close()

    @contextmanager
    def _talking(self, doing: str) -> Iterator[None]:
        if self._left is not None:
            raise RankError(
                f"rank {self.local_rank} is out of step with the other ranks since: {self._left}. Build the "
                "engine anew on all ranks, or restart the job if one has died"
            )
        try:
            yield
        except RuntimeError as error:  # what torch raises for a timeout, a reset and a closed connection
            limit = "no limit" if self.timeout is None else f"cpu_group_timeout={self.timeout:g} s"
            self.leave(f"{doing} was not answered")
            raise RankError(
                f"rank {self.local_rank} of {self.size} got no answer from the other ranks for {doing} "
                f"({limit}): one has died, has failed, or is stuck elsewhere. First cause: {error}"
            ) from error

    def _stop_apart(self, doing: str) -> None:
        """All ranks see that they differ, so each can still say where it is."""
        places = self.gather(f"doing {doing}, told last {self._last}")
        told = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
        self.leave("the ranks were told different things")
        raise RankError(
            f"the ranks of a tensor-parallel model were told different things ({told}). Make the same calls "
            "with the same arguments and the same config on every rank, in the same order"
        )


def ranks_of(model: nn.Module, timeout: float | None) -> Ranks:
    """The ranks among which transformers divided ``model`` (the base model, of a PEFT model).

    All of them must call this at the same point. A model that is whole has one rank.

    Raises:
        UnsupportedModelError: it is divided in a way that is not served, or its kv heads cannot be
            divided by the number of ranks.
    """
    # transformers' own objects: what is there depends on how the model was loaded
    mesh: Any = getattr(model, "_device_mesh", None)
    config = getattr(model, "config", None)
    divided = getattr(config, "distributed_config", None)
    for name in OTHER_SIZES:
        if (getattr(divided, name, None) or 1) > 1 and mesh is not None:
            raise UnsupportedModelError(
                f"the model was loaded with DistributedConfig({name}={getattr(divided, name)}); only tp_size "
                "is served: load it with tp_size alone"
            )
    size = 1 if mesh is None else int(getattr(model, "_tp_size", None) or 1)
    if size == 1:
        return Ranks(global_rank())
    _refuse_odd_heads(model, size)
    tp_group = (mesh["tp"] if mesh.mesh_dim_names else mesh).get_group()
    on_cpu = mesh.device_type == "cpu"
    return TensorParallelRanks(dist.get_process_group_ranks(tp_group), None if on_cpu else tp_group, timeout)


def global_rank() -> int:
    """This process's number in a distributed job; 0 outside one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def share_len(full_len: int, size: int) -> int:
    """How many of ``full_len`` the first ranks hold; the last ones may have fewer."""
    return -(-full_len // size)


def _refuse_odd_heads(model: Any, size: int) -> None:
    """Pages hold whole kv heads, so each rank must have as many.

    A plan that leaves keys whole (or gathers them) divides none, so any number is fine there.
    """
    is_divided = any(
        key.rpartition(".")[2] in KEY_PROJECTIONS and style == "colwise"
        for key, style in (model.tp_plan or {}).items()
    )
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if is_divided and heads % size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise UnsupportedModelError(
            f"tp_size={size} does not divide num_key_value_heads={heads}: every rank's pages hold whole kv "
            f"heads; load the model with a tp_size of {', '.join(map(str, fitting))}"
        )


def _facts(request: Request) -> tuple[object, ...]:
    """What must be the same on all ranks. Logits processors need not: they run on the driver alone."""
    params = {f.name: getattr(request.params, f.name) for f in fields(SamplingParams)}
    del params["logits_processors"]
    params["logit_bias"] = dict(sorted(request.params.logit_bias.items()))
    changed = {name: value for name, value in params.items() if value != NEUTRAL[name]}
    return (
        request.request_id,
        changed,
        request.ordinal,
        request.noise_key,
        request.first_index,
        sorted(request.eos_ids),
        request.prompt_ids,
    )


def _as_numbers(drawn: DrawnToken | Exception) -> tuple[float, ...]:
    if isinstance(drawn, Exception):
        return (1.0, 0.0, 0.0, 0.0, 0.0)
    return (0.0, drawn.token_id, drawn.logprob, drawn.policy_logprob, drawn.log_kept_mass)


def _portable(error: Exception) -> Exception:
    """The error itself if it can be sent, else its words."""
    with suppress(Exception):  # an exception's class may do anything when it is pickled
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _destroy(group: Any) -> None:
    if dist.is_initialized():
        with suppress(ValueError):  # destroyed already, with everything else of the job
            dist.destroy_process_group(group)
