"""GrammarCompiler: the cache, shared compilations, and the caps on time and memory of its process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.grammars.grammar_rig import FILE

from outrider.services.target.grammar import compiler as module
from outrider.services.target.grammar.backend import GrammarBackend
from outrider.services.target.grammar.compiler import GrammarCompiler
from outrider.shared.base.constraint import MAX_SOURCE_BYTES, Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError, OverloadedError


def regex(source: str, field: str = "regex") -> Constraint:
    return Constraint(ConstraintKind.REGEX, source, field=field)


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(FILE, 4096, frozenset([2]), compile_s=20)
    yield made
    made.close()


async def test_a_known_constraint_is_not_compiled_again(compiler: GrammarCompiler) -> None:
    first, second, other = await asyncio.gather(
        *(compiler.compile(one) for one in (regex("a+"), regex("a+", "guided_regex"), regex("b+")))
    )
    assert first is second
    assert other is not first
    assert await compiler.compile(regex("a+")) is first


async def test_the_least_recently_used_grammar_is_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_GRAMMARS", 2)
    first = await compiler.compile(regex("a+"))
    second = await compiler.compile(regex("b+"))
    assert await compiler.compile(regex("a+")) is first
    await compiler.compile(regex("c+"))
    assert await compiler.compile(regex("a+")) is first
    assert await compiler.compile(regex("b+")) is not second


async def test_an_error_of_the_process_names_the_field_and_is_not_kept(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="unclosed group") as caught:
            await compiler.compile(regex("(a"))
        assert caught.value.field == "regex"
    await compiler.compile(regex("a"))


async def test_a_client_that_leaves_does_not_end_the_compilation_of_others(compiler: GrammarCompiler) -> None:
    leaving = asyncio.create_task(compiler.compile(regex("a+")))
    staying = asyncio.create_task(compiler.compile(regex("a+")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying is await compiler.compile(regex("a+"))


async def test_a_slow_compilation_ends_with_an_error_and_the_next_one_works() -> None:
    compiler = GrammarCompiler(FILE, 4096, frozenset([2]), compile_s=0.0)
    with pytest.raises(InvalidRequestError, match="takes longer than 0 s"):
        await compiler.compile(regex("a+"))
    compiler._compile_s = 20
    await compiler.compile(regex("a+"))
    compiler.close()


async def test_a_process_that_dies_ends_one_compilation(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MODULE", "outrider.services.target.grammar.matcher")
    with pytest.raises(InvalidRequestError, match="needs too much memory"):
        await compiler.compile(regex("a+"))
    monkeypatch.undo()
    await compiler.compile(regex("a+"))


async def test_the_number_of_compilations_is_capped(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STARTED", 1)
    first = asyncio.create_task(compiler.compile(regex("a+")))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await compiler.compile(regex("b+"))
    await first


@pytest.mark.parametrize(
    ("compiler_of", "reason"),
    [
        (lambda: GrammarCompiler(FILE.parent / "missing.json", 4096, frozenset([2])), "missing.json"),
        (lambda: GrammarCompiler(FILE, 4096, frozenset()), "no end-of-sequence token"),
    ],
)
async def test_a_model_without_a_tokenizer_or_an_end_refuses(compiler_of: object, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        await compiler_of().compile(regex("a"))  # type: ignore[operator]


async def test_a_source_that_is_too_large_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="bytes"):
        await compiler.compile(regex("a" * (MAX_SOURCE_BYTES + 1)))


async def test_the_process_loads_xgrammar_and_still_has_memory_for_compilations() -> None:
    compiler = GrammarCompiler(FILE, 4096, frozenset([2]), GrammarBackend.XGRAMMAR, compile_s=20)
    first = await compiler.compile(regex("[ab]+"))
    with pytest.raises(InvalidRequestError, match="not supported"):
        await compiler.compile(regex(r"\w+"))
    assert await compiler.compile(regex("[ab]+")) is first
    compiler.close()
