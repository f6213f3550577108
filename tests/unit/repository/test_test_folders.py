"""tests/unit has the rooms of the code: a reader who knows the module also knows the folder of its tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
UNIT = Path("tests/unit")
SERVICES = ("target", "draft", "gateway")
CODE = ("services", "shared", "bench", "train", "kernels")


def room_of(test: Path) -> Path:
    """Return the room whose tests belong in the folder of `test`: both are relative to the repository."""
    parts = test.relative_to(UNIT).parent.parts
    return Path("services", *parts) if parts[0] in SERVICES else Path(*parts)


def area_of(room: Path) -> Path:
    return Path(*room.parts[: 2 if room.parts[0] == "services" else 1])


def rooms_by_name(files: list[Path]) -> dict[str, set[Path]]:
    """Return the rooms of each module name. The name of a package is a module name in its own folder."""
    rooms: dict[str, set[Path]] = {}
    for file in files:
        name = file.parent.name if file.stem == "__init__" else file.stem
        rooms.setdefault(name, set()).add(file.parent)
    return rooms


def misplaced(tests: list[Path], files: list[Path]) -> dict[str, str]:
    """Return the reason for each test that is in a wrong folder.

    A test with the name of a module belongs to the room of this module, if only one module in the same
    service or top folder has this name. If none there has it, the rule applies to the whole repository.
    """
    folders = {folder for file in files for folder in (file.parent, *file.parent.parents)}
    rooms = rooms_by_name(files)
    found = {}
    for test in tests:
        room = room_of(test)
        named = rooms.get(test.stem.removeprefix("test_"), set())
        expected = {one for one in named if area_of(one) == area_of(room)} or named
        if room not in folders:
            found[str(test)] = f"{room} does not exist"
        elif len(expected) == 1 and room not in expected:
            found[str(test)] = f"belongs to {next(iter(expected))}"
    return found


def _repository() -> tuple[list[Path], list[Path]]:
    tests = [path.relative_to(ROOT) for path in (ROOT / UNIT).rglob("test_*.py")]
    files = [path.relative_to(ROOT) for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    return tests, files


def test_unit_tests_are_in_the_folder_of_their_room() -> None:
    tests, files = _repository()
    assert len(tests) > 200
    assert misplaced([test for test in tests if test.parts[2] != "repository"], files) == {}


def test_names_of_unit_tests_are_unique() -> None:
    """The folders of tests are no packages, so pytest imports each file under its bare name."""
    counts = Counter(test.name for test in _repository()[0])
    assert [name for name, count in counts.items() if count > 1] == []


def test_a_misplaced_test_is_found() -> None:
    files = [
        Path(name)
        for name in (
            "services/gateway/guards/__init__.py",
            "services/gateway/guards/json_body.py",
            "services/gateway/options/__init__.py",
            "services/target/engine/engine.py",
            "services/draft/engine.py",
            "shared/nn/layers/rope.py",
        )
    ]
    right = (
        "gateway/guards/test_json_body.py",
        "gateway/test_large_bodies.py",
        "target/engine/test_engine.py",
        "draft/test_engine.py",
        "shared/test_engine.py",
    )
    wrong = {
        "gateway/test_json_body.py": "belongs to services/gateway/guards",
        "gateway/test_options.py": "belongs to services/gateway/options",
        "target/test_engine.py": "belongs to services/target/engine",
        "target/engine/test_rope.py": "belongs to shared/nn/layers",
        "gateway/parsers/test_answers.py": "services/gateway/parsers does not exist",
    }
    assert misplaced([UNIT / name for name in (*right, *wrong)], files) == {
        str(UNIT / name): reason for name, reason in wrong.items()
    }
