"""Configuration checks: architecture, algorithm, vocabulary, sizes, positions, aux layers and tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from outrider.services.doctor.finding import Finding
from outrider.services.doctor.pair import Pair
from outrider.services.draft.heads.files.aux_layers import AUX_KEY, NUM_AUX_KEY, AuxConvention
from outrider.services.draft.heads.files.eagle3_config import Eagle3Config
from outrider.services.draft.heads.files.head_config import plain_rope
from outrider.services.draft.heads.files.token_map import FIELD as MAP_FIELD
from outrider.shared.nn.checkpoint.tokenizer_file import TOKENIZER_FILE, read_vocabulary
from outrider.shared.nn.config.model_config import CONFIG_FILE, DEFAULT_ROPE_THETA, RopeConfig
from outrider.shared.spec.algorithm import FIELD, Algorithm

ANOTHER_DRAFT = "Serve the target that this draft was made for, or another --draft."
MAX_NAMED = 3


def check_target(pair: Pair) -> Iterator[Finding]:
    """Describe the target. Unknown architectures and custom code raise an error while parsing."""
    config = pair.target_config
    yield Finding.ok(
        "architectures",
        f"{config.architecture}: {config.num_layers} layers of {config.hidden_size}, {config.num_heads} "
        f"heads ({config.num_kv_heads} in the cache), vocabulary {config.vocab_size}, context "
        f"{config.max_position_embeddings}",
    )


def check_unused(pair: Pair) -> Iterator[Finding]:
    """Refuse --draft together with algorithm NONE. Serving refuses this combination too."""
    if pair.draft is not None and pair.algorithm is Algorithm.NONE:
        yield Finding.refused(
            FIELD,
            f"NONE decodes without a draft, but --draft {pair.draft} is given",
            "Remove one of the two flags. The draft was not examined.",
        )


def check_algorithm(pair: Pair) -> Iterator[Finding]:
    """Report the drafting algorithm and the folder of the draft."""
    choice = pair.choice
    if choice.algorithm is Algorithm.EAGLE:
        named = ", ".join(pair.head_reader.strings("architectures") or ("no architecture",))
        yield Finding.ok("speculative_algorithm", f"{pair.head.algorithm}, a draft head ({named})")
    else:
        yield Finding.ok(
            "speculative_algorithm",
            f"{choice.algorithm.value}" + (f" from {choice.folder}" if choice.folder else ""),
        )


def check_vocabulary(pair: Pair) -> Iterator[Finding]:
    """Compare the vocabulary sizes, because target and draft must give each token the same id."""
    theirs = pair.target_config.vocab_size
    if pair.choice.algorithm is Algorithm.STANDALONE:
        mine = pair.draft_model.vocab_size
        pair.standalone_vocabulary.check(mine, theirs)
        if mine != theirs:
            yield Finding.ok(
                "vocab_size",
                f"draft {mine}, target {theirs}: the same tokenizer with different padding",
            )
            return
    elif pair.choice.algorithm is Algorithm.EAGLE:
        mine = pair.head_config.vocab_size
    else:
        return
    if mine != theirs:
        yield Finding.refused("vocab_size", f"draft {mine}, target {theirs}", ANOTHER_DRAFT)
    else:
        yield Finding.ok("vocab_size", f"{mine}, the same for draft and target")


def check_hidden_size(pair: Pair) -> Iterator[Finding]:
    """Compare the feature width that the head expects with the target's hidden size."""
    if pair.choice.algorithm is not Algorithm.EAGLE:
        return
    layer, theirs = pair.head_config, pair.target_config.hidden_size
    reads = pair.head_reader.positive("target_hidden_size", layer.hidden_size)
    if reads != theirs:
        key = "target_hidden_size" if "target_hidden_size" in pair.head_reader.raw else "hidden_size"
        yield Finding.refused(
            key, f"the head expects features of width {reads}, but the target's have {theirs}", ANOTHER_DRAFT
        )
    else:
        yield Finding.ok(
            "hidden_size", f"head {layer.hidden_size}, its input features {reads}, target {theirs}"
        )


def check_rope(pair: Pair) -> Iterator[Finding]:
    """Compare the rotary bases. A head keeps its training's base, which may differ from the target's base."""
    if pair.choice.algorithm is not Algorithm.EAGLE:
        return
    mine, theirs = pair.head_config.rope, pair.target_config.rope
    raw = pair.head_reader.raw
    named = raw.get("rope_theta") is not None or raw.get("rope_parameters") is not None
    if not named and theirs.theta != DEFAULT_ROPE_THETA:
        yield Finding.ok(
            "rope_theta",
            f"not set in the head's config, so {DEFAULT_ROPE_THETA:g} is used; the target has "
            f"{theirs.theta:g}. Published heads are trained this way. --probe measures the effect",
        )
    else:
        yield Finding.ok("rope_theta", f"head {_rope(mine)}, target {_rope(theirs)}")
    if plain_rope(pair.head_reader) == "dynamic":
        yield Finding.ok(
            "rope_scaling",
            "dynamic: applied as trained up to max_position_embeddings; beyond that the base is fixed, and "
            "acceptance may drop",
        )
    table = raw.get("max_position_embeddings")  # not used for serving
    if isinstance(table, int) and table < pair.target_config.max_position_embeddings:
        yield Finding.ok(
            "max_position_embeddings",
            f"head {table}, target {pair.target_config.max_position_embeddings}: longer texts are drafted "
            "too, but the head was not trained on such positions",
        )


def check_aux_layers(pair: Pair) -> Iterator[Finding]:
    """Report which target layers are captured for the head, and how the head's config numbers the layers."""
    if pair.choice.algorithm is not Algorithm.EAGLE:
        return
    spec = pair.head.feature_spec(pair.target_info)
    if spec.final_hidden:
        yield Finding.ok(AUX_KEY, "none: the head reads the last hidden state only")
        return
    captured = list(spec.aux_layer_ids)
    config = Eagle3Config.parse(pair.draft_raw, pair.head_reader.source)
    aux, convention = config.aux, config.aux_convention(pair.target_info)
    family = pair.target_config.model_type
    if aux.contradicted is not None:
        yield Finding.warning(
            NUM_AUX_KEY,
            f"is {aux.count}, but {AUX_KEY} lists {len(aux.contradicted)} layers, {list(aux.contradicted)}. "
            f"The number takes precedence: outputs of layers {captured} are captured",
            f"List the layers that fc expects in the head's config.json. --probe measures {captured}.",
        )
    if convention is AuxConvention.DEFAULT:
        yield Finding.ok(
            AUX_KEY,
            f"not set: outputs of layers {captured} are captured, the default of the official code",
        )
    elif convention is AuxConvention.OUTPUTS:
        yield Finding.ok(AUX_KEY, f"{captured}, interpreted as outputs of these layers (target {family})")
    else:
        yield Finding.warning(
            AUX_KEY,
            f"{list(aux.ids or ())}: {convention.value} (target {family}, {pair.target_config.num_layers} "
            f"layers); outputs of layers {captured} are captured",
            "Run with --probe, which also measures the ids one lower and one higher.",
        )


def check_token_map_ids(pair: Pair) -> Iterator[Finding]:
    """Read the token map, and compare the ids in the map with the vocabulary from which the map selects."""
    if pair.token_map is None:
        return
    if not pair.drafts:
        yield Finding.refused(
            MAP_FIELD, "there is no draft whose vocabulary it could restrict", "Remove it, or give a --draft."
        )
        return
    yield Finding.ok(
        MAP_FIELD, f"{pair.drafted.size} of {pair.target_config.vocab_size} tokens can be drafted"
    )


def check_tokenizers(pair: Pair) -> Iterator[Finding]:
    """Compare the tokenizers of target and draft if both models have one.

    Also compare the vocabulary of the target's tokenizer with the target's vocabulary size.
    """
    file = pair.target / TOKENIZER_FILE
    theirs = read_vocabulary(pair.target)
    if theirs is None:
        yield Finding.warning(
            str(file),
            "does not exist, so the gateway can serve token ids only",
            f"Make it with `outrider convert tokenizer {pair.target}`, or serve with --skip-tokenizer.",
        )
        return
    size = pair.target_config.vocab_size
    beyond = sorted((number, token) for token, number in theirs.items() if number >= size)
    if beyond:  # in Gemma 3 checkpoints without vision, the image token has an id but no embedding row
        yield Finding.warning(
            TOKENIZER_FILE,
            f"the target's tokenizer has ids up to {beyond[-1][0]}, but its vocab_size is {size}: texts that "
            f"contain {beyond[0][1]!r}"
            + (f" or one of {len(beyond) - 1} other tokens" if len(beyond) > 1 else "")
            + " are refused",
            "If these are more than a few special tokens, download tokenizer and weights of the same "
            "revision.",
        )
    folder = pair.choice.folder if pair.drafts else None
    mine = read_vocabulary(folder) if folder is not None and folder != pair.target else None
    if folder is None or mine is None:
        yield Finding.ok(TOKENIZER_FILE, f"{len(theirs)} tokens; the draft has no tokenizer of its own")
        return
    yield _compare(theirs, mine, folder / TOKENIZER_FILE)


def _compare(theirs: Mapping[str, int], mine: Mapping[str, int], file: Path) -> Finding:
    different = sorted(
        (token for token in theirs.keys() | mine.keys() if theirs.get(token) != mine.get(token)),
        key=lambda token: min(theirs.get(token, 1 << 31), mine.get(token, 1 << 31)),
    )
    if not different:
        return Finding.ok(TOKENIZER_FILE, f"{len(theirs)} tokens, the same for target and draft")
    named = ", ".join(
        f"{token!r} is {_id(theirs, token)} and {_id(mine, token)}" for token in different[:MAX_NAMED]
    )
    return Finding.refused(
        TOKENIZER_FILE,
        f"{len(different)} tokens differ between the target's tokenizer and {file}: {named}",
        f"{ANOTHER_DRAFT} If only the file is outdated, remove it.",
    )


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "absent"


def _rope(rope: RopeConfig) -> str:
    return f"{rope.theta:g}" + (f" ({rope.kind.value}, factor {rope.factor:g})" if rope.factor != 1.0 else "")


__all__ = [
    "CONFIG_FILE",
    "check_algorithm",
    "check_aux_layers",
    "check_hidden_size",
    "check_rope",
    "check_target",
    "check_token_map_ids",
    "check_tokenizers",
    "check_unused",
    "check_vocabulary",
]
