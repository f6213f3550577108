"""Runs the example in the docstring of every public kernel function, as a reader would see it.

An example runs twice: with the torch reference, and with the Triton version under the interpreter. Each run
must print exactly the text in the docstring. A public function without an example fails the test.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from triton.runtime.interpreter import GridExecutor

import outrider.kernels
from outrider.kernels._dispatch import Backend, force_backend

ROOT = "outrider.kernels."
REPOSITORY = Path(__file__).parents[2]
USERS = ("shared", "services", "train", "bench")
"""The parts of Outrider that may import kernels."""

HOST_ONLY = {
    "ahead.compile_ahead": "a CPU needs no compiled kernels; tests/gpu covers GPUs",
    "ahead.late.log_late_compilations": "sets a listener",
    "ahead.compiled_or_soon": "a CPU needs no compiled kernels; tests/gpu covers GPUs",
    "ahead.covers_all_sizes": "reads a flag",
    "ahead.rehearsing": "reads a flag",
    "ahead.state_of": "a CPU needs no compiled kernels; tests/gpu covers GPUs",
    "exchange_add.can_exchange": "integer arithmetic",
    "exchange_add.inbox_shape": "integer arithmetic",
    "logit_rules.make_rule_state": "allocates tensors",
    "path_attention.row_paths": "torch operations on any device",
    "peer_words.box_shape": "integer arithmetic",
    "peer_words.can_pass": "integer arithmetic",
    "skinny_gemm.candidates.candidates": "integer arithmetic",
    "skinny_gemm.choose_tile": "looks up a table",
    "skinny_gemm.kept.keep_tiles": "writes a file",
    "skinny_gemm.kept.read_tiles": "reads a file",
    "skinny_gemm.kept.tiles_file": "returns a path",
    "skinny_gemm.kept.trying_alone": "locks a file",
    "skinny_gemm.table.guess_tile": "integer arithmetic",
    "skinny_gemm.table.needs_trial": "looks up a table",
    "skinny_gemm.table.remember": "changes a table",
    "stream.normed_on_write": "compares a row count",
    "topk_expand.num_candidates": "integer arithmetic",
    "verify.filters.filter_logits": "torch operations on any device",
}
"""Public functions that launch no kernel on a CPU, with the reason.

All others must launch one in their example.
"""


def public_functions() -> dict[str, Callable[..., Any]]:
    """Return all public kernel functions by their names without the root package.

    The public functions are those in `__all__` of every package, those of modules directly below the root,
    and those that other parts of Outrider import from a module of an operation's folder. Names with a leading
    underscore are private.
    """
    found: dict[str, Callable[..., Any]] = {}
    for info in pkgutil.walk_packages(outrider.kernels.__path__, ROOT):
        path = info.name.removeprefix(ROOT)
        if path.split(".")[0].startswith("_") or not (info.ispkg or "." not in path):
            continue
        module = importlib.import_module(info.name)
        own = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        ]
        exported = getattr(module, "__all__", own)
        assert set(own) <= set(exported), f"{path}: __all__ lacks {sorted(set(own) - set(exported))}"
        for name in exported:
            if inspect.isfunction(getattr(module, name)):
                found[f"{path}.{name}"] = getattr(module, name)
    return found | imported_from_folders()


def imported_from_folders() -> dict[str, Callable[..., Any]]:
    """Return the functions that code outside `kernels` imports from modules of an operation's folder."""
    found: dict[str, Callable[..., Any]] = {}
    for part in USERS:
        for file in (REPOSITORY / part).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(ROOT):
                    continue
                module = str(node.module)
                path = module.removeprefix(ROOT)
                if "." not in path or path.startswith("_"):
                    continue
                for alias in node.names:
                    function = getattr(importlib.import_module(module), alias.name)
                    if inspect.isfunction(function):
                        found[f"{path}.{alias.name}"] = function
    return found


FUNCTIONS = public_functions()


def example_of(function: Callable[..., Any]) -> doctest.DocTest:
    """Return the example of a function; fail if it has none that calls the function and shows a result."""
    # Without globals, the example has to import all that it uses.
    (test,) = doctest.DocTestFinder(recurse=False, exclude_empty=False).find(
        function, function.__name__, globs={}
    )
    assert "\n    Example:\n" in (function.__doc__ or ""), f"{function.__name__} has no Example section"
    assert any(f"{function.__name__}(" in example.source for example in test.examples), (
        "no call in the example"
    )
    assert any(example.want for example in test.examples), "the example shows no result"
    return test


def failures_of(test: doctest.DocTest) -> str:
    """Run an example and return doctest's report of its failures."""
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("backend", Backend, ids=lambda backend: backend.value)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_prints_its_documented_output(name: str, backend: Backend) -> None:
    test = example_of(FUNCTIONS[name])
    launches = 0
    launch = GridExecutor.__call__

    def counted(self: GridExecutor, *arguments: Any, **named: Any) -> Any:
        nonlocal launches
        launches += 1
        return launch(self, *arguments, **named)

    with force_backend(backend), mock.patch.object(GridExecutor, "__call__", counted):
        failures = failures_of(test)
    assert not failures, failures
    launches_kernels = backend is Backend.TRITON and name not in HOST_ONLY
    assert bool(launches) == launches_kernels, f"{launches} kernels were launched"


def test_all_packages_are_found() -> None:
    assert set(HOST_ONLY) <= set(FUNCTIONS)
    assert {
        "verify.verify_tree",
        "verify.filters.filter_logits",
        "skinny_gemm.project",
        "ahead.state_of",
        "stream.normed_on_write",
    } <= set(FUNCTIONS)


def documented() -> int:
    """Return two.

    Example:
        >>> from builtins import abs as documented
        >>> documented(-2)
        3
    """
    return 2


def undocumented() -> None:
    """Has no example."""


def test_wrong_output_and_missing_examples_fail() -> None:
    assert "Expected:\n    3\nGot:\n    2\n" in failures_of(example_of(documented))
    with pytest.raises(AssertionError, match="undocumented has no Example section"):
        example_of(undocumented)
