"""A public class or function of services, shared code and benchmarks has a name of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("services", "shared", "bench")
BOTH_ENDS = "the two ends of the connection between target and draft, which carry the same states and trees"
COMMAND = "a command of `outrider` and a route of the gateway, each named as users call it"
ALLOWED: Mapping[str, tuple[int, str]] = {
    "Exchange": (2, BOTH_ENDS),
    "MailboxExchange": (2, BOTH_ENDS),
    "StreamExchange": (2, BOTH_ENDS),
    "generate": (2, COMMAND),
    "health": (2, COMMAND),
    "main": (5, "the first function of a program"),
    "run": (3, "runs one of the three services; each `app` module has one"),
}
"""Names with several definitions: the number of definitions, and the reason."""


def _definitions(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the files of each public class or module-level function that several files define."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found[node.name].append(str(path.relative_to(folder.parent)))
    return {name: files for name, files in found.items() if name[0] != "_" and len(set(files)) > 1}


def test_no_public_name_has_two_meanings() -> None:
    found = _definitions(ROOT / folder for folder in FOLDERS)
    unexpected = {name: files for name, files in found.items() if len(files) != ALLOWED.get(name, (0,))[0]}
    assert unexpected == {}, "rename all definitions of a name but one"
    assert found.keys() == ALLOWED.keys()


def test_a_second_definition_is_found(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "shared" / "spec").mkdir(parents=True)
    (tmp_path / "services" / "answers.py").write_text(
        "class Verdict:\n    pass\n\n\ndef check():\n    pass\n"
    )
    (tmp_path / "shared" / "spec" / "tree.py").write_text(
        "class Verdict:\n    class Part:\n        pass\n\n    def check(self):\n        pass\n\n\n"
        "class _Row:\n    pass\n\n\nasync def send():\n    pass\n"
    )
    (tmp_path / "services" / "sender.py").write_text(
        "from outrider.shared.spec.tree import Verdict\n\n\nclass _Row:\n    pass\n\n\ndef send(): ...\n"
    )
    assert _definitions([tmp_path / "services", tmp_path / "shared"]) == {
        "Verdict": ["services/answers.py", "shared/spec/tree.py"],
        "send": ["services/sender.py", "shared/spec/tree.py"],
    }
