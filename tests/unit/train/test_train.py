"""The trainer at toy sizes: corpus, tokenizer, loss masks, training-time test, export, reference drafter."""

import contextlib
import io
import json
import re
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
from jinja2.sandbox import SandboxedEnvironment
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.services.gateway.parsers.registry import ParserNames
from outrider.shared.obs import progress
from outrider.train import eagle3, evaluate, prompts, target
from outrider.train.corpus import gsm8k
from outrider.train.corpus.base import CorpusSplit
from outrider.train.corpus.conversations import (
    TOPICS,
    QuestionAnswer,
    TopicMix,
    conversation,
    heldout_prompts,
)
from outrider.train.corpus.country_table import COUNTRIES, HELDOUT_COUNTRIES, TRAIN_COUNTRIES
from outrider.train.corpus.noise import perturb
from outrider.train.data import build_rows, read_rows
from outrider.train.head import TrainableEagle3Head
from outrider.train.model import LlamaShape, read_trained_target, rope_tables
from outrider.train.reference import (
    ReferenceHead,
    ReferenceTarget,
    Sampling,
    TreeShape,
    generate_without_draft,
    speculate,
)
from outrider.train.tokenizer import BOS, BOS_ID, CHAT_TEMPLATE, render_prompt, segments

TREES = [TreeShape(5, 4, 16), TreeShape(4, 1, 5), TreeShape(3, 3, 8)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a toy pair with the real commands."""
    out = tmp_path_factory.mktemp("pair")
    questions = out / "gsm8k.jsonl"
    questions.write_text(
        json.dumps(
            {"question": "How much is half of 48?", "answer": "Half is 48/2 = <<48/2=24>>24.\n#### 24"}
        )
        + "\n"
    )
    lines = io.StringIO()
    with mock.patch.object(progress, "LINE_S", 0.0), contextlib.redirect_stderr(lines):
        target.main(["--smoke", "--out", str(out / "target"), "--gsm8k", str(questions)])
        head = ["--smoke", "--target", str(out / "target"), "--out", str(out / "eagle3")]
        eagle3.main([*head, "--draft-vocab", "256", "--schema-rows", "32"])
    (out / "progress.txt").write_text(lines.getvalue())
    return out


def _reference(pair: Path) -> tuple[ReferenceTarget, ReferenceHead]:
    reference = ReferenceTarget(pair / "target")
    return reference, ReferenceHead(pair / "eagle3", reference.model.get_input_embeddings().weight.detach())


def test_training_tells_its_progress_and_the_time_left(pair: Path) -> None:
    told = re.findall(r"^(.+): (\d+) %, about \d+ s left$", (pair / "progress.txt").read_text(), re.M)
    assert {title for title, _percent in told} == {"training", "generating text"}
    # 30 steps of the target, then 20 steps of the head. No line follows the last step.
    steps = [int(percent) for title, percent in told if title == "training"]
    assert steps[:29] == [100 * step // 30 for step in range(1, 30)]
    assert steps[29:] == [100 * step // 20 for step in range(1, 20)]


def test_countries_are_complete_and_split() -> None:
    assert len(COUNTRIES) >= 190
    assert len({c.name for c in COUNTRIES}) == len(COUNTRIES)
    assert all(c.capital and c.currency and c.language for c in COUNTRIES)
    assert not set(HELDOUT_COUNTRIES) & set(TRAIN_COUNTRIES)
    assert {"France", "Japan"} <= {c.name for c in TRAIN_COUNTRIES}


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
def test_heldout_questions_never_appear_in_training(topic: object) -> None:
    make = topic.make  # type: ignore[attr-defined]
    held, train = Random(3), Random(4)
    heldout = {make(held, CorpusSplit.HELDOUT)[0][0] for _ in range(200)}
    training = {make(train, CorpusSplit.TRAIN)[0][0] for _ in range(2000)}
    assert len(heldout) >= 5
    assert not heldout & training


def test_heldout_countries_are_absent_from_training_text() -> None:
    rng = Random(8)
    mix = TopicMix(CorpusSplit.TRAIN)
    text = " ".join(m.question + " " + m.answer for _ in range(60) for m in conversation(rng, mix, 4000)[1])
    assert "Zambia" in text or "Kenya" in text
    for country in HELDOUT_COUNTRIES:
        assert f"The capital of {country.name} is" not in text


def test_corpus_is_a_function_of_the_seed() -> None:
    mix = TopicMix(CorpusSplit.TRAIN)
    assert conversation(Random(1), mix, 2000) == conversation(Random(1), mix, 2000)
    assert conversation(Random(1), mix, 2000) != conversation(Random(2), mix, 2000)


def test_rewording_keeps_numbers_and_content() -> None:
    rng = Random(0)
    for _ in range(200):
        text = perturb(
            rng,
            "How many meters are in 7 kilometers?",
            "There are 1000 meters in one kilometer. So 7 kilometers are 7000 meters.",
        )
        assert "7 kilometers" in text
        assert "meters" in text.lower()


def test_gsm8k_is_cleaned_and_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "g.jsonl"
    file.write_text(json.dumps({"question": "A  b?", "answer": "It is 2+2 = <<2+2=4>>4.\n#### 4"}) + "\n")
    assert gsm8k.load(file) == [("A b?", "It is 2+2 = 4.\nThe answer is 4.")]
    file.write_text("{}\n")
    with pytest.raises(ValueError, match=r"g\.jsonl:1.*question"):
        gsm8k.load(file)


def test_reworded_questions_carry_no_loss() -> None:
    parts = segments("S", [QuestionAnswer("seen", "A", True), QuestionAnswer("hidden", "B", False)])
    assert ("hidden", False) in parts
    assert "seen" in "".join(text for text, predict in parts if predict)


def test_rows_do_not_depend_on_the_number_of_workers(pair: Path) -> None:
    file = pair / "target" / "tokenizer.json"
    one, two = (build_rows(file, 700, 48, 5, CorpusSplit.TRAIN, None, 0.0, workers) for workers in (1, 2))
    assert torch.equal(one, two)
    ids, predict = read_rows(one)
    assert ids.min() >= 0
    assert (ids[:, 0] == BOS_ID).all()
    assert 0 < float(predict.float().mean()) < 1


def test_target_loads_in_transformers_with_equal_logits(pair: Path) -> None:
    ids = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()
    with torch.no_grad():
        ours, features = read_trained_target(pair / "target")(ids)
        out = theirs(ids, output_hidden_states=True)
    torch.testing.assert_close(ours, out.logits, rtol=1e-4, atol=1e-5)
    n = theirs.config.num_hidden_layers
    expected = torch.cat([out.hidden_states[i] for i in (2, n // 2, n - 3)], -1)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_chat_template_equals_the_training_text(pair: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi é 日本"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == render_prompt("Hi é 日本", "Be short.")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"


def test_head_is_written_in_the_published_layout(pair: Path) -> None:
    config = json.loads((pair / "eagle3" / "config.json").read_text())
    weights = load_file(str(pair / "eagle3" / "model.safetensors"))
    hidden, draft = config["hidden_size"], config["draft_vocab_size"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert weights["fc.weight"].shape == (hidden, 3 * hidden)
    assert weights["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * hidden
    assert weights["lm_head.weight"].shape == (draft, hidden)
    target_ids = torch.arange(draft) + weights["d2t"]
    assert torch.equal(target_ids, weights["t2d"].nonzero().flatten())
    assert not any("embed" in k for k in weights)


def test_a_head_is_trained_further_with_its_draft_vocabulary(pair: Path, tmp_path: Path) -> None:
    flags = ["--smoke", "--steps", "2", "--target", str(pair / "target"), "--init", str(pair / "eagle3")]
    numbers = eagle3.main([*flags, "--out", str(tmp_path)])
    before, after = (load_file(str(folder / "model.safetensors")) for folder in (pair / "eagle3", tmp_path))
    assert before.keys() == after.keys()
    assert torch.equal(before["d2t"], after["d2t"])
    change = (after["fc.weight"] - before["fc.weight"]).float().norm() / before["fc.weight"].float().norm()
    assert 0 < change < 0.2
    assert "accuracy_per_step_under_schemas" not in numbers
    assert len(json.loads((pair / "eagle3" / "training.json").read_text())["accuracy_per_step_under_schemas"])


def test_training_time_test_equals_step_by_step_drafting() -> None:
    """Row t of unrolled step i equals a drafter's own result.

    The drafter has then drafted a chain of i tokens after the prefix of length t+1.
    """
    torch.manual_seed(0)
    shape = LlamaShape(64, 32, 8, 4, 2, 8, 48)
    head = TrainableEagle3Head(shape, torch.arange(40))
    features, embeddings = torch.randn(1, 9, 96), torch.randn(1, 11, 32)
    steps = head.unroll(features, embeddings, 3)
    for t in (0, 3, 8):
        # The reference appends chain rows to rows 0..t and runs an ordinary causal pass over all of them.
        logits = _sequential(head, features[:, : t + 1], embeddings[:, : t + 3], 3)
        for i in range(3):
            torch.testing.assert_close(steps[i][0, t], logits[i], rtol=1e-4, atol=1e-5)


def _sequential(
    head: TrainableEagle3Head, features: torch.Tensor, embeddings: torch.Tensor, steps: int
) -> list[torch.Tensor]:
    rows = head.fc(features)
    length = rows.shape[1]
    out = []
    for i in range(steps):
        hidden = _causal(head, rows, embeddings[:, : length + i])
        out.append(head.lm_head(head.norm(hidden[:, -1]))[0])
        rows = torch.cat((rows, hidden[:, -1:]), 1)
    return out


def _causal(head: TrainableEagle3Head, rows: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    layer = head.midlayer
    cos, sin = rope_tables(torch.arange(rows.shape[1]), layer.self_attn.dim, head.shape.rope_theta)
    x = torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(rows)), -1)
    h = rows + layer.self_attn(x, cos, sin, None, 0)
    return h + layer.mlp(layer.post_attention_layernorm(h))


@pytest.mark.parametrize("shape", TREES, ids=str)
@pytest.mark.parametrize(
    "sampling", [Sampling(0.0, 0), Sampling(1.0, 5), Sampling(1.0, 5, coupled=True)], ids=str
)
def test_reference_speculation_emits_the_plain_tokens(
    pair: Path, shape: TreeShape, sampling: Sampling
) -> None:
    reference, head = _reference(pair)
    prompt = [0, 1, 30, 40, 50, 60, 2]
    run = speculate(reference, head, prompt, 24, shape, sampling)
    assert run.tokens == generate_without_draft(reference, prompt, 24, sampling)
    assert all(1 <= n <= shape.num_steps + 1 for n in run.emitted)


def test_reference_tree_is_connected_and_of_the_asked_size(pair: Path) -> None:
    reference, head = _reference(pair)
    _, features = reference.forward([0, 5, 6, 7], torch.arange(4), torch.ones(4, 4, dtype=torch.bool).tril())
    for shape in TREES:
        head.reset()
        tree = head.grow(head.extend(features, [5, 6, 7, 8]), shape, Sampling(0.0, 0))
        assert len(tree) == shape.num_draft_tokens - 1
        for i, node in enumerate(tree):
            assert node.parent < i
            assert node.depth == (1 if node.parent < 0 else tree[node.parent].depth + 1)
            assert node.parent < 0 or node.score <= tree[node.parent].score


def test_evaluate_writes_its_numbers(pair: Path, tmp_path: Path) -> None:
    prompts.main(["--out", str(tmp_path / "p.jsonl"), "--per-topic", "1"])
    out = tmp_path / "r.json"
    arguments = [
        "--target",
        str(pair / "target"),
        "--head",
        str(pair / "eagle3"),
        "--prompts",
        str(tmp_path / "p.jsonl"),
    ]
    evaluate.main(
        [*arguments, "--limit", "2", "--max-new", "8", "--modes", "T=0", "--check", "--out", str(out)]
    )
    numbers = json.loads(out.read_text())["heldout"]["T=0"]
    assert numbers["equal_to_plain"] == 2
    assert numbers["accept_length"] >= 1
    with pytest.raises(SystemExit, match="num-draft-tokens"):
        evaluate.main([*arguments, "--num-draft-tokens", "500"])


def test_committed_heldout_prompts_are_the_generated_ones() -> None:
    file = Path(__file__).parents[3] / "bench" / "prompts" / "heldout.jsonl"
    committed = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(committed) >= 40
    assert {(r["topic"], r["prompt"]) for r in committed} == set(heldout_prompts(2024, 7))


@pytest.mark.parametrize("command", [target, eagle3, evaluate, prompts], ids=lambda m: m.__name__)
def test_help_is_printed(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])  # type: ignore[attr-defined]
    assert stop.value.code == 0
    assert "--" in capsys.readouterr().out


def test_tools_change_the_chat_template_only_where_they_are_used() -> None:
    template = SandboxedEnvironment().from_string(CHAT_TEMPLATE)
    saved = json.loads(
        (Path(__file__).parents[3] / "models" / "demo" / "target" / "tokenizer_config.json").read_text()
    )
    assert saved["chat_template"] == CHAT_TEMPLATE
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    plain = template.render(messages=messages, bos_token=BOS, add_generation_prompt=True)
    assert plain == render_prompt("Hi", "S")
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = template.render(messages=[*messages, called], tools=tools, bos_token=BOS)
    assert text.endswith('<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call><|im_end|>\n')
    assert '{"name": "f"}' in text
    assert ParserNames.choose("auto", "auto", CHAT_TEMPLATE) == ParserNames("hermes", "none")
