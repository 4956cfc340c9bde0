"""Fixtures of all tests: the small real model, brought once, and the rule that it must not be missed.

Tests that use the real model carry the marker ``real_model`` by using one of these fixtures. A
machine that cannot bring the model skips them with the reason, unless ``ROLLOUT_REQUIRE_REAL_MODEL``
is 1, as in CI: then such a skip fails the session, since a green run would say too much.

torch and transformers are imported by the fixtures that need them, so that the tests of the host
rooms, which need neither, start at once.
"""

import os

# before anything imports transformers, which reads it once: no test asks a hub for anything
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from typing import Any

import pytest
from hypothesis import settings

# no deadline: a loaded machine is not a bug; in CI the same examples each time, at home new ones
settings.register_profile("rollout", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("rollout")

REAL_MODEL_FIXTURES = frozenset({"demo_model_path", "demo_tokenizer", "demo_model_fp32"})
REQUIRE_REAL_MODEL = "ROLLOUT_REQUIRE_REAL_MODEL"


class MissedTests:
    """Collects the tests that need the real model and were skipped, and fails the session for them."""

    def __init__(self) -> None:
        self.test_ids: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and "real_model" in report.keywords:
            self.test_ids.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.test_ids and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.test_ids:
            terminalreporter.write_line(
                f"{len(self.test_ids)} tests that need the real model were skipped, first "
                f"{self.test_ids[0]}, but {REQUIRE_REAL_MODEL}=1 wants them all to run: the session fails",
                red=True,
            )


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(REQUIRE_REAL_MODEL) == "1":
        config.pluginmanager.register(MissedTests(), "missed-real-model-tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and REAL_MODEL_FIXTURES & set(item.fixturenames):
            item.add_marker("real_model")


@pytest.fixture(scope="session")
def demo_model_path() -> str:
    """Folder of the small real model."""
    from rollout.demo_model import demo_model

    try:
        return demo_model()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model_path: str) -> Any:
    """The small real model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path)


@pytest.fixture(scope="session")
def demo_model_fp32(demo_model_path: str) -> Any:
    """The small real model in fp32, in ``eval()``. Shared: a test that changes it restores it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        demo_model_path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
