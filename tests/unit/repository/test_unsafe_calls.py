"""The sources contain no call that could run code from a file or a peer, and the gateway fetches nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("kernels", "shared", "services", "train", "bench")
# `pickle` itself is imported only for the names of its errors.
UNSAFE_MODULES = {"dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "Unpickler"}
PICKLE_CALLS = {"load", "loads", "dump", "dumps"}
SUSPICIOUS = re.compile(
    r"torch\.load|pickle|pyobj|dill|marshal|shelve|joblib|multiprocessing|remote_code|\b(eval|exec)\("
)
"""Only files with one of these words are parsed."""
FETCHING_MODULES = {"httpx", "requests", "aiohttp", "urllib3", "http.client", "urllib.request"}


def calls_and_imports(tree: ast.AST) -> Iterator[tuple[int, str, ast.Call | None]]:
    """Yield line, dotted name and call of each call and each imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module, None


def problems_of(source: str) -> list[str]:
    """Return the unsafe calls and imports of a file."""
    found: list[str] = []
    if not SUSPICIOUS.search(source):
        return found
    for line, name, call in calls_and_imports(ast.parse(source)):
        keywords = {} if call is None else {one.arg: ast.unparse(one.value) for one in call.keywords}
        last = name.rpartition(".")[2]
        if call is None:
            unsafe = name in UNSAFE_MODULES or name == "torch.multiprocessing"
        elif last == "load" and name.startswith("torch."):
            unsafe = keywords.get("weights_only") != "True"
        elif name in ("eval", "exec") or last in UNSAFE_CALLS - {"eval", "exec"}:
            unsafe = True
        else:
            unsafe = name.startswith("pickle.") and last in PICKLE_CALLS
        if unsafe or keywords.get("trust_remote_code", "False") != "False":
            found.append(f"{line}: {name}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import marshal",
        "from torch.multiprocessing import Queue",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.loads(data)",
        "pickle.Unpickler(file).load()",
        "eval(text)",
        "socket.recv_pyobj()",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_an_unsafe_call_is_found(source: str) -> None:
    assert problems_of(source)


def test_no_source_file_unpickles_or_evaluates_anything() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    found = {str(path.relative_to(ROOT)): problems_of(path.read_text()) for path in files}
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_the_gateway_target_and_draft_fetch_no_url() -> None:
    for service in ("gateway", "target", "draft"):
        for path in (ROOT / "services" / service).rglob("*.py"):
            names = {name for _, name, call in calls_and_imports(ast.parse(path.read_text())) if call is None}
            assert not names & FETCHING_MODULES, path
