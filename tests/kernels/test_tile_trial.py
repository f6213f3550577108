"""Tile trials: candidates, stored results and coverage of all passes. Times are measured in tests/gpu."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from guards import Guards
from layer_cases import check_project, check_project_add, check_project_gated, check_project_rotated
from support.models.family_models import Sequences, save

from outrider.kernels import skinny_gemm
from outrider.kernels._dispatch import Backend, force_backend
from outrider.kernels.ahead import Compiled
from outrider.kernels.skinny_gemm import Epilogue, Method, Tile, choose_tile, table
from outrider.kernels.skinny_gemm.candidates import candidates
from outrider.kernels.skinny_gemm.kept import Tried, keep_tiles, read_tiles, sources, tiles_file, trying_alone
from outrider.kernels.skinny_gemm.table import (
    Product,
    forget_trials,
    guess_tile,
    measured_tile,
    needs_trial,
    remember,
)
from outrider.kernels.skinny_gemm.types import LIBRARY
from outrider.shared.nn.fused import FusedForward, blocks, trial
from outrider.shared.nn.fused.products import ProductUse, uses_of
from outrider.shared.nn.fused.trial import BETTER, ROW_COUNTS, pick
from outrider.shared.nn.layers import linear
from outrider.shared.nn.layers.modules import Attention, GatedMLP
from outrider.shared.nn.open import load_decoder

BF16 = torch.bfloat16
OTHER, H200, H100 = "Some other GPU", "NVIDIA H200", "NVIDIA H100 80GB HBM3"
SMS = 132
LLAMA_O = Product(Epilogue.ADD, 4096, 4096, 16, BF16)
UNKNOWN = Product(Epilogue.ADD, 2048, 2048, 16, BF16)
TILE = Tile(Method.DOT, 32, 64, 2, 4, 5)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget_trials()
    yield
    forget_trials()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_candidates_begin_with_the_rule_and_differ(rows: int, dtype: torch.dtype) -> None:
    for epilogue in Epilogue:
        for out, columns in ((6144, 4096), (2048, 2048), (2048, 8192), (151936, 1024), (96, 64)):
            product = Product(epilogue, out, columns, rows, dtype)
            tiles = candidates(product, SMS)
            assert tiles[0] == guess_tile(epilogue, out, columns, rows, dtype.itemsize)
            assert 2 <= len(tiles) == len(set(tiles)) <= 8
            assert (LIBRARY in tiles) == (dtype is not torch.float8_e4m3fn)
            for tile in tiles:
                assert tile.block_n >= 1
                assert tile.stages >= 1
                assert tile.method is not Method.STAY or (rows == 1 and tile.programs <= 4 * SMS)
                assert tile.splits == 1 or epilogue in (Epilogue.PLAIN, Epilogue.ADD)


@pytest.mark.parametrize("rows", [1, 5])
def test_every_candidate_computes_the_product(rows: int) -> None:
    for tile in candidates(Product(Epilogue.PLAIN, 72, 700, rows, torch.float32), 2):
        check_project("cpu", torch.float32, rows, 72, 700, tile, Guards())
    for tile in candidates(Product(Epilogue.ADD, 72, 700, rows, torch.float32), 2):
        check_project_add("cpu", torch.float32, rows, 72, 700, tile, Guards())
    for tile in candidates(Product(Epilogue.GATED, 80, 70, rows, torch.float32), 2):
        check_project_gated("cpu", torch.float32, rows, 40, 70, tile, Guards(), bias=False, gelu=False)
    for tile in candidates(Product(Epilogue.ROTATED, 128, 70, rows, torch.float32), 2):
        check_project_rotated("cpu", torch.float32, rows, 2, 1, 32, 70, tile, Guards())


def test_what_was_measured_for_this_package_stays_on_its_gpu() -> None:
    before = measured_tile(LLAMA_O, H200)
    assert before is not None
    assert not needs_trial(LLAMA_O, H200)
    remember(H200, [(LLAMA_O, TILE)])
    assert measured_tile(LLAMA_O, H200) == before


@pytest.mark.parametrize("gpu", [H200, H100])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_tried_for_the_8b_shape_and_its_head(ranks: int, gpu: str) -> None:
    """On its GPU models, the package's tables cover the most common configurations, on one GPU and on two."""
    layer = _layer(4096, 4096, 32 // ranks, 8 // ranks, 14336 // ranks)
    uses = uses_of([layer], _empty(128256 // ranks, 4096), BF16, reduced=ranks > 1)
    if ranks == 1:
        for width in (4096, 8192):  # inputs of the head's q-k-v: the state alone, or with the embedding
            uses += uses_of([_layer(4096, width, 32, 8, 14336)], _empty(32000, 4096), BF16, reduced=False)
    assert {use.of(rows) for use in uses for rows in range(1, 65) if needs_trial(use.of(rows), gpu)} == set()


def test_each_gpu_model_uses_its_own_table_first() -> None:
    halves = [Product(Epilogue.ROTATED, 6144, 4096, 2, BF16), Product(Epilogue.GATED, 28672, 4096, 2, BF16)]
    assert any(measured_tile(one, H100) != measured_tile(one, H200) for one in halves)
    wide = Product(Epilogue.PLAIN, 32000, 4096, 128, BF16)  # only in the table of the H200
    assert measured_tile(wide, H100) == measured_tile(wide, H200) == measured_tile(wide, OTHER)


def test_the_q_k_v_of_a_pair_of_states_keeps_the_rules_tiles() -> None:
    for rows in range(1, 65):
        product = Product(Epilogue.ROTATED, 6144, 8192, rows, BF16)
        assert measured_tile(product, H200) == guess_tile(*product.shape, rows)


def _empty(out: int, columns: int) -> linear.Linear:
    return linear.Linear(torch.empty(out, columns, dtype=BF16, device="meta"))


def _layer(
    hidden: int, width: int, heads: int, kv_heads: int, intermediate: int
) -> tuple[Attention, GatedMLP]:
    qkv, o = _empty((heads + 2 * kv_heads) * 128, width), _empty(hidden, heads * 128)
    return Attention(qkv, o, heads, kv_heads, 128, 0), GatedMLP(
        _empty(2 * intermediate, hidden), _empty(hidden, intermediate)
    )


def test_another_gpu_tries_it_anew_and_falls_back_to_it() -> None:
    assert measured_tile(LLAMA_O, OTHER) == measured_tile(LLAMA_O, H200)
    assert needs_trial(LLAMA_O, OTHER)
    remember(OTHER, [(LLAMA_O, TILE)])
    assert measured_tile(LLAMA_O, OTHER) == TILE
    assert measured_tile(replace(LLAMA_O, rows=9), OTHER) == TILE
    assert not needs_trial(LLAMA_O, OTHER)
    assert measured_tile(LLAMA_O, H200) != TILE


def test_a_trial_is_of_its_shape_type_and_row_count() -> None:
    assert needs_trial(UNKNOWN, H200)
    remember(H200, [(UNKNOWN, TILE)])
    assert measured_tile(replace(UNKNOWN, rows=5), H200) == TILE
    for other in (
        replace(UNKNOWN, rows=17),
        replace(UNKNOWN, rows=65),
        replace(UNKNOWN, dtype=torch.float16),
        replace(UNKNOWN, in_features=4096),
        replace(UNKNOWN, epilogue=Epilogue.PLAIN),
    ):
        assert measured_tile(other, H200) is None


@pytest.mark.parametrize("device", [H200, OTHER])
def test_a_trial_that_was_cut_goes_on_at_the_next_start(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, tiles of more rows are used for fewer rows, but do not count as a trial of them."""
    path, starts = tmp_path / "tiles.json", list[list[int]]()
    monkeypatch.setattr(trial, "device_name", lambda _: device)
    monkeypatch.setattr(trial, "tiles_file", lambda name: path)

    def three(work: list[tuple[ProductUse, int]], *_: object) -> list[Tried]:
        starts.append([rows for _, rows in work])
        return keep_tiles(path, [Tried(use.of(rows), TILE, 4.0) for use, rows in work[:3]], device)

    monkeypatch.setattr(trial, "_run", three)
    for _ in range(3):
        forget_trials()
        trial.try_products([USE], torch.device("cuda"))
    assert starts == [list(ROW_COUNTS), list(ROW_COUNTS[3:])]
    assert measured_tile(replace(UNKNOWN, rows=20), device) == TILE


def test_other_kernels_or_another_torch_keep_tiles_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {f"{file.parent.name}/{file.name}" for file in sources()}
    assert {
        "kernels/stream.py",
        "add_norm/triton.py",
        "rope_store/triton.py",
        "wide/triton.py",
        "skinny_gemm/tiles_h100.json",
        "skinny_gemm/tiles_h200.json",
    } <= run
    before = tiles_file(OTHER)
    assert tiles_file(OTHER) == before
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert tiles_file(OTHER) != before


def test_a_choice_that_was_made_before_a_trial_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "device_name", lambda device: OTHER)
    x, weight = torch.empty(16, 2048, dtype=BF16), torch.empty(2048, 2048, dtype=BF16)
    assert choose_tile(Epilogue.ADD, x, weight) == guess_tile(Epilogue.ADD, 2048, 2048, 16)
    remember(OTHER, [(UNKNOWN, TILE)])
    assert choose_tile(Epilogue.ADD, x, weight) == TILE


def test_the_rule_gives_way_to_what_is_faster_by_more_than_chance() -> None:
    rule = guess_tile(*UNKNOWN.shape, UNKNOWN.rows)
    assert pick(UNKNOWN, {rule: 10.0, TILE: 9.9, LIBRARY: 12.0}) == Tried(UNKNOWN, rule, 10.0, 10.0, 12.0)
    assert pick(UNKNOWN, {rule: 10.0, TILE: 10 * BETTER - 0.1}).tile == TILE
    assert pick(UNKNOWN, {rule: 10.0, LIBRARY: 5.0}) == Tried(UNKNOWN, LIBRARY, 5.0, 10.0, 5.0)
    assert pick(UNKNOWN, {LIBRARY: 5.0}) == Tried(UNKNOWN, LIBRARY, 5.0, None, 5.0)


def test_tiles_are_kept_and_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tiles.json"
    tried = [
        Tried(UNKNOWN, TILE, 4.25, 5.0, 6.5),
        Tried(replace(UNKNOWN, rows=1), Tile(Method.STAY, 2, warps=8, programs=528), 2.0),
    ]
    assert read_tiles(path) == []
    assert keep_tiles(path, tried, OTHER) == tried
    assert read_tiles(path) == tried
    assert json.loads(path.read_text())["device"] == OTHER
    assert [entry.name for entry in path.parent.iterdir() if entry.suffix not in (".json", ".lock")] == []


def test_who_keeps_a_tile_first_decides_for_all(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    first, second = Tried(UNKNOWN, TILE, 4.0), Tried(UNKNOWN, LIBRARY, 3.0)
    keep_tiles(path, [first], OTHER)
    assert keep_tiles(path, [second], OTHER) == [first]
    assert read_tiles(path) == [first]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"tiles": [{"product": 1}]}',
        '{"tiles": [{"product": ["ADD", 1, 1, 1, "no"], "tile": []}]}',
    ],
)
def test_a_file_that_is_none_is_tried_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    assert read_tiles(path) == []
    assert keep_tiles(path, [Tried(UNKNOWN, TILE, 4.0)], OTHER) == [Tried(UNKNOWN, TILE, 4.0)]


@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen2-tied-yarn"])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_trial_covers_what_passes_ask_for(
    case: str, reduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    decoder = load_decoder(save(case, tmp_path))
    fused = decoder.fused = FusedForward(
        decoder.layers, decoder.embedding, decoder.norm, linear.Linear(decoder.lm_head)
    )
    if reduced:
        fused.reduce = _Adds()
    asked: set[Product] = set()
    choose = skinny_gemm.choose_tile

    def noting(epilogue: Epilogue, x: torch.Tensor, weight: torch.Tensor) -> Tile:
        asked.add(Product(epilogue, *weight.shape, x.shape[0], weight.dtype))
        return choose(epilogue, x, weight)

    for module in (blocks, skinny_gemm):
        monkeypatch.setattr(module, "choose_tile", noting)
    with force_backend(Backend.TRITON):
        Sequences(decoder, 1, backend="triton").run([0], [[1, 2, 3]])
    uses = fused.uses()
    assert {use.of(3) for use in uses} == asked
    assert sum(len(use.linears) for use in uses) == 4 * len(decoder.layers) + 1
    with force_backend(Backend.TRITON):
        for use in uses:
            for tile in candidates(use.of(3), 2)[:2]:
                use.prepare(3)(use.linears[0].weight, None, tile)


class _Adds:
    def add(self, *arguments: object, **named: object) -> object:
        from outrider.kernels.add_norm import add_sums

        return add_sums(*arguments, **named)  # type: ignore[arg-type]


class _Properties:
    multi_processor_count = SMS
    L2_cache_size = 1000


def test_what_is_left_when_the_time_is_up_is_the_next_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties)
    limits: list[float] = []
    monkeypatch.setattr(
        trial, "compile_ahead", lambda device, works, tell, *, limit_s: limits.append(limit_s)
    )
    now = iter(range(100))
    tries = trial._Trial(torch.device("cpu"), lambda: float(next(now)), 4.0)
    use = ProductUse(
        Epilogue.ADD, (linear.Linear(torch.empty(2048, 2048, dtype=BF16)),), lambda rows: lambda *_: None
    )
    times = {16: {TILE: 1.0, guess_tile(*use.of(16).shape, 16): 2.0}, 32: {}, 64: {TILE: 3.0}, 8: {TILE: 4.0}}
    monkeypatch.setattr(tries, "_times", lambda use, rows: times[rows])
    tried = tries.run([(use, rows) for rows in times], None)
    # At 32 rows nothing ran, and time ran out before 8.
    assert tried == [
        Tried(use.of(16), TILE, 1.0, 2.0),
        Tried(use.of(64), TILE, 3.0),
    ]
    assert limits == [3.0]


USE = ProductUse(
    Epilogue.ADD, (linear.Linear(torch.empty(2048, 2048, dtype=BF16)),), lambda rows: lambda *_: None
)


class _FakeSpan:
    def around(self, work: Callable[[], object]) -> None:
        work()

    def microseconds(self) -> float:
        return 10.0


class _FakeGraph:
    def replay(self) -> None:
        pass


class _Bench:
    """A trial whose clock advances with each recording, and whose kernels are in given states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, states: dict[int, Compiled], deadline: float) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(trial, "_Span", _FakeSpan)
        asked = iter(range(100))
        monkeypatch.setattr(trial, "state_of", lambda device, work: states.get(next(asked), Compiled.YES))
        self.now, self.recorded = 0.0, list[Tile]()
        self.trial = trial._Trial(torch.device("cpu"), lambda: self.now, deadline)
        self.tiles = self.trial._tiles(USE, 16)
        monkeypatch.setattr(self.trial, "_record", self._record)
        monkeypatch.setattr(self.trial, "_warm_up", lambda graphs: None)

    def _record(self, run: object, tile: Tile, ring: object) -> _FakeGraph:
        self.recorded.append(tile)
        self.now += 1.0
        return _FakeGraph()


def test_the_time_is_looked_at_before_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _Bench(monkeypatch, {}, deadline=2.0)
    assert bench.trial._times(USE, 16) == {}, "times of half of the tiles must not decide"
    assert bench.recorded == bench.tiles[:2]
    bench = _Bench(monkeypatch, {}, deadline=100.0)
    assert list(bench.trial._times(USE, 16)) == bench.recorded == bench.tiles


def test_no_product_is_measured_while_a_tile_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _Bench(monkeypatch, {1: Compiled.NO, 2: Compiled.NOT_YET}, deadline=100.0)
    assert bench.trial._times(USE, 16) == {}
    assert bench.recorded == []


def test_a_tile_that_cannot_be_compiled_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _Bench(monkeypatch, {1: Compiled.NO}, deadline=100.0)
    assert list(bench.trial._times(USE, 16)) == [bench.tiles[0], *bench.tiles[2:]]


def test_one_process_tries_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, runs = tmp_path / "deep" / "tiles.json", list[int]()
    monkeypatch.setattr(trial, "device_name", lambda device: OTHER)
    monkeypatch.setattr(trial, "tiles_file", lambda name: path)

    def run(work: list[object], *_: object) -> list[Tried]:
        runs.append(len(work))
        return keep_tiles(path, [Tried(UNKNOWN, TILE, 4.0)], OTHER)  # uses a lock of its own

    monkeypatch.setattr(trial, "_run", run)
    with trying_alone(path) as alone:
        assert alone
        assert trial.try_products([USE], torch.device("cuda")) == []
        assert runs == []
        assert measured_tile(UNKNOWN, OTHER) is None
    assert trial.try_products([USE], torch.device("cuda")) == [Tried(UNKNOWN, TILE, 4.0)]
    assert runs == [len(ROW_COUNTS)]


def test_who_cannot_write_is_kept_off_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with trying_alone(tmp_path / "file" / "tiles.json") as alone:
        assert alone


@pytest.mark.parametrize(("matrices", "wanted"), [(1, 8), (3, 8), (20, 8)])
def test_matrices_are_more_than_caches_hold(
    matrices: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties)
    tries = trial._Trial(torch.device("cpu"), lambda: 0.0, 1.0)
    ring = tries._ring(
        [linear.Linear(torch.full((10, 20), float(index), dtype=BF16)) for index in range(matrices)]
    )
    assert len(ring) == wanted
    assert len({weight.data_ptr() for weight, _ in ring}) == wanted
    assert sum(weight.nbytes for weight, _ in ring) >= 3 * _Properties.L2_cache_size
    assert [float(weight[0, 0]) for weight, _ in ring] == [float(index % matrices) for index in range(wanted)]
