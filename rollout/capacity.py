"""How many pages the cache gets: what the requests at hand can fill, within the memory bound."""

import logging
from collections.abc import Iterable

import psutil
import torch

from rollout.config import DEFAULT_MEMORY_SHARE, EngineConfig
from rollout.kv_cache import CacheLayout
from rollout.sequence import Request
from rollout.tables import pages_to_hold

logger = logging.getLogger("rollout")


class CapacityPlanner:
    """Sizes the page pools of every layer group.

    Example::

        planner = CapacityPlanner(EngineConfig(max_memory=2**30), layout, page_size=32, position_limit=8192)
        planner.refuse_unfit(request)
        num_pages = planner.num_pages([request], current=(0,))
    """

    def __init__(
        self, config: EngineConfig, layout: CacheLayout, *, page_size: int, position_limit: int
    ) -> None:
        self._config = config
        self._layout = layout
        self._page_size = page_size
        self._page_bytes = layout.page_bytes(page_size)
        self._position_limit = position_limit
        self._budget: int | None = None
        self._is_stale = False

    def budget(self) -> int:
        """Bytes that the cache may take: settled when it is first asked for and kept until
        :meth:`renew`, since free memory says little once the cache lies in it."""
        if self._budget is None:
            self.settle(self._measure_budget())
            assert self._budget is not None
        return self._budget

    def offer(self) -> int:
        """What this rank could give: the budget, measured again after :meth:`renew`."""
        return self._measure_budget() if self._is_stale else self.budget()

    def settle(self, budget: int) -> None:
        """Keep to ``budget``: what every rank of a divided model can give."""
        self._budget, self._is_stale = budget, False

    def renew(self) -> None:
        """Have :meth:`offer` measure anew: the cache gave its memory back."""
        self._is_stale = True

    def _measure_budget(self) -> int:
        if self._config.max_memory is not None:
            return self._config.max_memory
        share = self._config.max_memory_percent or DEFAULT_MEMORY_SHARE
        if self._layout.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._layout.device)
        else:
            free = psutil.virtual_memory().available
        return int(share * free)

    def swap_bytes(self) -> int:
        """Bytes of host memory for pages of preempted sequences."""
        config = self._config
        if config.cpu_offload_space == 0:
            return 0
        most = int(config.cpu_offload_space_safety_threshold * psutil.virtual_memory().available)
        if config.cpu_offload_space is None:
            return most
        wanted = int(config.cpu_offload_space * 2**30)
        if wanted > most:
            logger.warning(
                "cpu_offload_space=%s GiB is more than cpu_offload_space_safety_threshold=%s of the "
                "available memory; %.2f GiB are used",
                config.cpu_offload_space,
                config.cpu_offload_space_safety_threshold,
                most / 2**30,
            )
        return min(wanted, most)

    def refuse_unfit(self, request: Request) -> None:
        """Refuse a prompt that does not fit even with the whole cache to itself.

        Raises:
            ValueError: says how many pages or bytes it needs and how many there are.
        """
        pages = self._pages_of_prompt(request)
        if self._config.num_blocks is not None:
            if max(pages) > self._config.num_blocks:
                raise ValueError(
                    f"the prompt of {len(request.prompt_ids)} tokens needs {max(pages)} pages of "
                    f"{self._page_size} tokens and num_blocks={self._config.num_blocks}; "
                    "raise num_blocks or shorten the prompt"
                )
            return
        needed, budget = self._bytes(pages), self.budget()
        if needed > budget:
            raise ValueError(
                f"the prompt of {len(request.prompt_ids)} tokens needs {needed} bytes of cache and at most "
                f"{budget} are allowed; raise max_memory or shorten the prompt"
            )

    def num_pages(self, requests: Iterable[Request], current: tuple[int, ...]) -> tuple[int, ...]:
        """Pages per group that serve the requests without preemption, if the bound allows it.

        At least ``current`` pages where that fits into the bound. If it does not (another mix of
        long and windowed sequences), the answer is smaller somewhere and the cache must be remade.
        """
        if self._config.num_blocks is not None:
            return tuple(self._config.num_blocks for _ in self._layout.groups)
        requests = list(requests)
        if not requests:
            return current
        least = self._least(requests)
        wanted = [max(low, self._wanted(g, requests)) for g, low in enumerate(least)]
        grown = tuple(map(max, wanted, current))
        if self._bytes(grown) <= self.budget():
            return grown
        # the longest one fits alone; what is left is divided in proportion to what more is wanted
        more = [high - low for low, high in zip(least, wanted, strict=True)]
        left = max(0, self.budget() - self._bytes(least))
        scale = min(1.0, left / max(1, self._bytes(more)))
        bounded = tuple(low + int(scale * extra) for low, extra in zip(least, more, strict=True))
        if all(now >= then for now, then in zip(current, bounded, strict=True)):
            return current
        return bounded

    def log(self, num_pages: tuple[int, ...]) -> None:
        """Tell the chosen size."""
        logger.info(
            "key/value cache: %s pages of %d tokens, %d bytes (%.1f MiB) of %s on %s",
            " + ".join(map(str, num_pages)),
            self._page_size,
            self._bytes(num_pages),
            self._bytes(num_pages) / 2**20,
            self._layout.dtype,
            self._layout.device,
        )

    def _least(self, requests: list[Request]) -> list[int]:
        """Pages with which each request can run alone to its end, or if that is too much, begin."""
        page_size = self._page_size
        to_the_end = [
            max(pages_to_hold(self._total_len(r), window, page_size, chunk=page_size) for r in requests)
            for window in self._layout.windows
        ]
        if self._bytes(to_the_end) <= self.budget():
            return to_the_end
        return [max(counts) for counts in zip(*map(self._pages_of_prompt, requests), strict=True)]

    def _total_len(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.params.max_new_tokens, self._position_limit)

    def _bytes(self, pages: Iterable[int]) -> int:
        return sum(count * size for count, size in zip(pages, self._page_bytes, strict=True))

    def _pages_of_prompt(self, request: Request) -> list[int]:
        page_size = self._page_size
        return [
            pages_to_hold(len(request.prompt_ids), window, page_size, chunk=page_size)
            for window in self._layout.windows
        ]

    def _wanted(self, group: int, requests: list[Request]) -> int:
        """Pages for as many samples as may run together, the longest ones, plus the margin."""
        config, window = self._config, self._layout.windows[group]
        page_size, chunk = self._page_size, config.resolved_max_batch_tokens
        per_sample: list[int] = []
        shared = 0
        for request in requests:
            prompt, params = len(request.prompt_ids), request.params
            pages = pages_to_hold(self._total_len(request), window, page_size, chunk=min(chunk, prompt))
            saved = 0
            if config.allow_block_sharing and window is None and params.n > 1:
                saved = prompt // page_size
                shared += saved
            per_sample += [pages - saved] * params.n
        running = sorted(per_sample, reverse=True)[: config.resolved_max_requests]
        margin = min(config.resolved_safety_margin, 0.5)
        return int((sum(running) + shared) / (1 - margin)) + 1
