"""Which room may import which: the table is kept true, without circles and without hidden imports.

Read from the source, not from ``sys.modules``: importing any room runs ``rollout/__init__.py``, which
brings everything.
"""

import ast
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ALLOWED: dict[str, set[str]] = {
    # host rooms: no torch, no transformers, not even through one another
    "types": set(),
    "noise": set(),
    "text": set(),
    "paths": set(),
    "pages": set(),
    "config": {"types"},
    "sampling_row": {"types"},
    "sequence": {"sampling_row", "types"},
    "tables": {"pages", "sequence"},
    "swap": {"sequence"},
    "scheduler": {"config", "sequence", "swap", "tables", "types"},
    "meter": {"types"},
    # lists become tensors
    "transfer": set(),
    "kv_cache": set(),
    "runs": set(),
    "layout": {"runs", "sequence"},
    "batch": {"layout", "runs", "sequence"},
    "results": {"types"},
    "processing": {"sampling_row"},
    "spread": set(),
    "truncation": {"spread"},
    "drawing": {"native", "noise", "sampling_row", "spread", "transfer", "truncation"},
    "sampling": {"drawing", "native", "processing", "sampling_row", "transfer", "types"},
    "capacity": {"config", "kv_cache", "sequence", "tables"},
    # the model
    "packing": {"native"},
    "weights": {"types"},
    "parallel": {"sequence", "types"},
    "sharding": {"parallel", "types", "weights"},
    "demo_model": {"paths"},
    "native.build": {"paths"},
    "native.library": set(),
    "native.products": {"native.library"},
    "native.layers": {"native.library", "native.products"},
    "native.decode": {"native.layers", "native.library"},
    "native.draws": {"native.library"},
    "native.kernels": {
        "native.build",
        "native.decode",
        "native.draws",
        "native.layers",
        "native.library",
        "native.products",
    },
    "native": {
        "native.build",
        "native.decode",
        "native.draws",
        "native.kernels",
        "native.layers",
        "native.library",
        "native.products",
    },
    "attention.backend": {"batch", "kv_cache", "native", "runs"},
    "attention.eager": {"attention.backend", "batch", "kv_cache", "runs"},
    "attention.sdpa": {"attention.backend", "batch", "kv_cache"},
    "attention.native": {"attention.backend", "attention.sdpa", "batch", "kv_cache", "native"},
    "attention.paged": {"attention.backend", "batch", "kv_cache", "runs"},
    "attention.flash": {"attention.backend", "attention.paged", "runs"},
    "attention.varlen": {"attention.backend", "attention.paged", "runs"},
    "attention.trial": {"attention.backend", "attention.eager", "attention.paged", "kv_cache", "runs"},
    "attention": {
        "attention.backend",
        "attention.eager",
        "attention.flash",
        "attention.native",
        "attention.paged",
        "attention.sdpa",
        "attention.trial",
        "attention.varlen",
        "kv_cache",
        "native",
        "runs",
    },
    "fused": {"attention", "native", "packing", "types"},
    "stacked": {"attention", "fused", "native", "packing", "types"},
    "probe": {"attention", "kv_cache", "types"},
    "runner": {"attention", "batch", "kv_cache", "native", "probe", "transfer"},
    "compiled": {"config"},
    "static": {"batch", "runs", "transfer"},
    "graphs": {"attention", "batch", "kv_cache", "probe", "runner", "static"},
    "execution": {
        "attention",
        "batch",
        "compiled",
        "config",
        "graphs",
        "kv_cache",
        "probe",
        "runner",
        "sequence",
        "static",
    },
    "ahead": {"batch", "commit", "sampling", "sequence", "transfer", "types"},
    "requests": {"sequence", "text", "types"},
    "scoring": {
        "attention",
        "batch",
        "kv_cache",
        "probe",
        "requests",
        "runner",
        "sampling",
        "sequence",
        "tables",
        "types",
    },
    # all of it wired together, and what stands in front of it
    "warmup": {
        "batch",
        "compiled",
        "config",
        "execution",
        "kv_cache",
        "sequence",
        "tables",
        "types",
    },
    "stepper": {
        "ahead",
        "attention",
        "batch",
        "capacity",
        "commit",
        "config",
        "execution",
        "kv_cache",
        "meter",
        "native",
        "packing",
        "parallel",
        "probe",
        "sampling",
        "scheduler",
        "sequence",
        "swap",
        "tables",
        "types",
    },
    "engine": {
        "compiled",
        "config",
        "fused",
        "meter",
        "native",
        "packing",
        "parallel",
        "probe",
        "requests",
        "results",
        "runner",
        "scoring",
        "sharding",
        "stacked",
        "stepper",
        "types",
        "warmup",
        "weights",
    },
    "outputs": {"types"},
    "turns": {"parallel", "requests", "types"},
    "tickets": {"outputs", "requests", "results", "turns", "types"},
    "gate": set(),
    "desk": {"outputs", "tickets", "types"},
    "loop": {"desk", "engine", "gate", "tickets", "turns", "types"},
    "manager": {"desk", "engine", "gate", "loop", "outputs", "requests", "tickets", "types"},
    "generation_config": {"types"},
    "drop_in": {
        "config",
        "engine",
        "generation_config",
        "manager",
        "outputs",
        "requests",
        "types",
        "weights",
    },
    "": {"config", "drop_in", "engine", "results", "types"},  # rollout/__init__.py
    "bench.workloads": {"types"},
    "bench.limits": {"bench.workloads"},
    "bench.peers": {"bench.workloads", "engine", "types"},
    "bench.measure": {"bench.peers", "bench.workloads", "native"},
    "bench.report": {"bench.limits", "bench.measure", "bench.peers", "bench.workloads"},
    "bench": {"bench.measure", "bench.report", "bench.workloads"},
    "commit": {"scheduler", "sequence", "types"},
    "jsonl": {"requests", "types"},
    "cli": {"attention", "bench", "config", "demo_model", "engine", "jsonl", "results", "types"},
    "__main__": {"cli"},
}
HOST_ROOMS = ["types", "noise", "text", "pages", "config", "sequence", "swap", "tables", "scheduler", "meter"]
MAY_IMPORT_TRANSFORMERS = {
    "attention",
    "bench.limits",
    "bench.peers",
    "bench.report",
    "bench.workloads",
    "cli",
    "compiled",
    "demo_model",
    "drop_in",
    "engine",
    "generation_config",
    "outputs",
    "probe",
    "requests",
    "weights",
}


@dataclass(frozen=True)
class Imports:
    """What one file imports: rooms of ours, top names of others, and lines inside functions."""

    rooms: frozenset[str]
    others: frozenset[str]
    hidden: tuple[int, ...]


def room_of(path: Path) -> str:
    """``rollout/attention/eager.py`` -> ``attention.eager``; a package is its folder's name."""
    parts = path.relative_to(ROOT / "rollout").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {room_of(path): path for path in sorted((ROOT / "rollout").rglob("*.py"))}


def read_imports(source: str, rooms: frozenset[str]) -> Imports:
    tree = ast.parse(source)
    ours, others = set(), set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"line {node.lineno}: a relative import"
            # `from rollout.attention import eager` imports a room, `... import BACKENDS` a name
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("rollout.") in rooms else node.module for name in whole]
        for name in names:
            if name.split(".")[0] == "rollout":
                ours.add(name.removeprefix("rollout").removeprefix("."))
            else:
                others.add(name.split(".")[0])
    hidden = {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(node)
        if isinstance(inner, (ast.Import, ast.ImportFrom))
    }
    return Imports(frozenset(ours), frozenset(others), tuple(sorted(hidden)))


@cache
def imports_of(room: str) -> Imports:
    return read_imports(FILES[room].read_text(), frozenset(FILES))


def all_below(room: str) -> set[str]:
    """The room and every room that it imports, through others too."""
    seen: set[str] = set()
    todo = [room]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += imports_of(current).rooms
    return seen


def test_every_file_is_in_the_table_and_every_entry_has_a_file() -> None:
    assert set(ALLOWED) == set(FILES)


@pytest.mark.parametrize("room", sorted(FILES))
def test_a_room_imports_what_the_table_says(room: str) -> None:
    imported, allowed = set(imports_of(room).rooms), ALLOWED.get(room, set())
    assert imported <= allowed, f"{room} imports {sorted(imported - allowed)}, which the table does not allow"
    assert imported == allowed, f"{room} no longer imports {sorted(allowed - imported)}: shorten the table"


def test_the_rooms_have_no_circles() -> None:
    for room in FILES:
        for imported in imports_of(room).rooms:
            assert room not in all_below(imported), f"{room} and {imported} import each other"


@pytest.mark.parametrize("room", HOST_ROOMS)
def test_host_rooms_need_only_the_standard_library_and_numpy(room: str) -> None:
    third_parties = {
        name for below in all_below(room) for name in imports_of(below).others
    } - sys.stdlib_module_names
    assert third_parties <= {"numpy"}
    assert "numpy" not in third_parties or room == "noise"


def test_transformers_is_known_to_few_rooms() -> None:
    assert {room for room in FILES if "transformers" in imports_of(room).others} == MAY_IMPORT_TRANSFORMERS


def test_the_engine_knows_no_trainer() -> None:
    for room in FILES:
        imports = imports_of(room)
        assert not any(name.split(".")[0] == "integrations" for name in imports.rooms), room
        assert not imports.others & {"trl", "accelerate", "peft", "datasets", "integrations"}, room


@pytest.mark.parametrize(
    "path",
    [*FILES.values(), *sorted((ROOT / "integrations").rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_imports_stand_at_the_top_and_none_is_for_the_type_checker_alone(path: Path) -> None:
    source = path.read_text()
    assert read_imports(source, frozenset(FILES)).hidden == (), "imports inside functions"
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert "TYPE_CHECKING" not in names


def test_the_reader_sees_all_kinds_of_imports() -> None:
    source = """
import os.path, torch.nn as nn
import rollout.pages
from rollout import RolloutEngine
from rollout.attention import BACKENDS
from rollout.attention import eager
def function():
    from rollout.text import StopTextFinder
    class Local:
        import transformers
"""
    found = read_imports(source, frozenset({"", "attention", "attention.eager", "pages", "text"}))
    assert found.rooms == {"pages", "", "attention", "attention.eager", "text"}
    assert found.others == {"os", "torch", "transformers"}
    assert found.hidden == (8, 10)
    with pytest.raises(AssertionError, match="line 1: a relative import"):
        read_imports("from .pages import PagePool", frozenset())
