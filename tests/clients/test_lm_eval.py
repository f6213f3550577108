"""lm-evaluation-harness scores a local task of each kind. Speculation changes no answer and no score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager
from support.services.stack import DEMO_TARGET, Stack

DOCUMENTS = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "Oslo"], "answer": 0},
    {"question": "The capital of Italy is", "choices": ["Paris", "Rome", "Oslo"], "answer": 1},
    {"question": "2 plus 3 is", "choices": ["4", "7", "5"], "answer": 2},
    {"question": "There are 100 centimetres in a", "choices": ["metre", "litre", "gram"], "answer": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n", "?", "a.", "b.", "c.", "d."], "max_gen_toks": 24},
        "filter_list": [
            {"name": "word", "filter": [{"function": "regex", "regex_pattern": r"(\w+)"}]},
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks and their documents."""
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    for name, fields in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(documents)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **fields,
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return tmp_path


def evaluate(stack: Stack, model: str, route: str, tasks: Path, names: list[str]) -> dict[str, Any]:
    """Return the scores of each task, and the answers or log-likelihoods of each of its documents."""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={
            "model": "outrider-demo",
            "base_url": f"{stack.base_url}/v1/{route}",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(DEMO_TARGET),
            "num_concurrent": 4,
            "max_length": 2048,
        },
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
    )
    answers = {name: [one["resps"] for one in found["samples"][name]] for name in names}
    return {"scores": found["results"], "answers": answers}


def test_speculation_changes_no_score(stacks: tuple[Stack, Stack], tasks: Path) -> None:
    speculating, plain = (
        evaluate(stack, "local-completions", "completions", tasks, list(TASKS)) for stack in stacks
    )
    assert speculating["scores"] == plain["scores"]
    assert speculating["answers"]["answers"] == plain["answers"]["answers"]
    for one, other in zip(speculating["answers"]["choices"], plain["answers"]["choices"], strict=True):
        for scored, scored_plain in zip(one, other, strict=True):
            assert scored[0][0] == pytest.approx(scored_plain[0][0], abs=1e-3)
            assert scored[0][1] == scored_plain[0][1]
    # The embedded model knows some of the answers, so the scores are not zero in both runs.
    assert speculating["scores"]["choices"]["acc,none"] == 0.75
    assert speculating["scores"]["answers"]["exact_match,word"] > 0


def test_chats_are_scored(stacks: tuple[Stack, Stack], tasks: Path) -> None:
    speculating, plain = (
        evaluate(stack, "local-chat-completions", "chat/completions", tasks, ["answers"]) for stack in stacks
    )
    assert speculating == plain
    assert any(text for (text,) in speculating["answers"]["answers"][0])
