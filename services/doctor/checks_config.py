"""Checks of what the configurations say: architecture, algorithm, vocabulary, sizes, positions, aux layers, tokenizers."""

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
    """Say what the target is; an unknown architecture or one that runs code is refused by the configuration itself."""
    config = pair.target_config
    yield Finding.ok(
        "architectures",
        f"{config.architecture}: {config.num_layers} layers of {config.hidden_size}, {config.num_heads} heads "
        f"({config.num_kv_heads} in the cache), vocabulary {config.vocab_size}, context {config.max_position_embeddings}",
    )


def check_unused(pair: Pair) -> Iterator[Finding]:
    """Refuse a draft beside an algorithm that drafts without any, as serving does."""
    if pair.draft is not None and pair.algorithm is Algorithm.NONE:
        yield Finding.refused(
            FIELD,
            f"NONE decodes without a draft, and --draft {pair.draft} names one",
            "Leave one of the two out; the draft was not looked at.",
        )


def check_algorithm(pair: Pair) -> Iterator[Finding]:
    """Say how drafts would be made, and how the checkpoint spells it."""
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
    """Compare the sizes of the vocabularies: target ids mean the same on both sides or nothing fits."""
    theirs = pair.target_config.vocab_size
    if pair.choice.algorithm is Algorithm.STANDALONE:
        mine = pair.draft_model.vocab_size
        pair.standalone_vocabulary.check(mine, theirs)
        if mine != theirs:
            yield Finding.ok(
                "vocab_size",
                f"the draft's is {mine}, the target's {theirs}: one tokenizer, padded differently",
            )
            return
    elif pair.choice.algorithm is Algorithm.EAGLE:
        mine = pair.head_config.vocab_size
    else:
        return
    if mine != theirs:
        yield Finding.refused("vocab_size", f"the draft's is {mine}, the target's {theirs}", ANOTHER_DRAFT)
    else:
        yield Finding.ok("vocab_size", f"{mine} on both sides")


def check_hidden_size(pair: Pair) -> Iterator[Finding]:
    """Compare the width of the features that a head reads with the target's states."""
    if pair.choice.algorithm is not Algorithm.EAGLE:
        return
    layer, theirs = pair.head_config, pair.target_config.hidden_size
    reads = pair.head_reader.positive("target_hidden_size", layer.hidden_size)
    if reads != theirs:
        key = "target_hidden_size" if "target_hidden_size" in pair.head_reader.raw else "hidden_size"
        yield Finding.refused(
            key, f"the head reads features of width {reads}, the target's states have {theirs}", ANOTHER_DRAFT
        )
    else:
        yield Finding.ok("hidden_size", f"head {layer.hidden_size}, its features {reads}, target {theirs}")


def check_rope(pair: Pair) -> Iterator[Finding]:
    """Compare rotary bases; a head keeps what it was trained with, which often is not the target's."""
    if pair.choice.algorithm is not Algorithm.EAGLE:
        return
    mine, theirs = pair.head_config.rope, pair.target_config.rope
    raw = pair.head_reader.raw
    named = raw.get("rope_theta") is not None or raw.get("rope_parameters") is not None
    if not named and theirs.theta != DEFAULT_ROPE_THETA:
        yield Finding.ok(
            "rope_theta",
            f"the head names none, which means {DEFAULT_ROPE_THETA:g}; the target has {theirs.theta:g}. Published heads are trained so; "
            "--probe measures it",
        )
    else:
        yield Finding.ok("rope_theta", f"head {_rope(mine)}, target {_rope(theirs)}")
    if plain_rope(pair.head_reader) == "dynamic":
        yield Finding.ok(
            "rope_scaling",
            "dynamic: as trained up to max_position_embeddings; beyond it the base stays, and drafts may be accepted less",
        )
    table = raw.get("max_position_embeddings")  # serving does not look at it
    if isinstance(table, int) and table < pair.target_config.max_position_embeddings:
        yield Finding.ok(
            "max_position_embeddings",
            f"head {table}, target {pair.target_config.max_position_embeddings}: longer texts are drafted too, but the head was not "
            "trained on such positions",
        )


def check_aux_layers(pair: Pair) -> Iterator[Finding]:
    """Say which layers' outputs the target captures, and how the head's file counts them."""
    if pair.choice.algorithm is not Algorithm.EAGLE:
        return
    spec = pair.head.feature_spec(pair.target_info)
    if spec.final_hidden:
        yield Finding.ok(AUX_KEY, "none: the head reads the last hidden state")
        return
    captured = list(spec.aux_layer_ids)
    config = Eagle3Config.parse(pair.draft_raw, pair.head_reader.source)
    aux, convention = config.aux, config.aux_convention(pair.target_info)
    family = pair.target_config.model_type
    if aux.contradicted is not None:
        yield Finding.warning(
            NUM_AUX_KEY,
            f"is {aux.count}, but {AUX_KEY} names {len(aux.contradicted)} layers, {list(aux.contradicted)}: the number goes first, and "
            f"outputs of layers {captured} are captured",
            f"Write as many layers as fc takes into the head's config.json; --probe measures {captured}.",
        )
    if convention is AuxConvention.DEFAULT:
        yield Finding.ok(
            AUX_KEY,
            f"not named: outputs of layers {captured}, the inputs of the default triple of the official code",
        )
    elif convention is AuxConvention.OUTPUTS:
        yield Finding.ok(AUX_KEY, f"{captured}, read as outputs of these layers (target {family})")
    else:
        yield Finding.warning(
            AUX_KEY,
            f"{list(aux.ids or ())}: {convention.value} (target {family}, {pair.target_config.num_layers} layers): outputs of {captured} "
            "are captured",
            "--probe measures the ids one lower and one higher too.",
        )


def check_token_map(pair: Pair) -> Iterator[Finding]:
    """Read the token map, and compare it with the vocabulary that it cuts."""
    if pair.token_map is None:
        return
    if not pair.drafts:
        yield Finding.refused(
            MAP_FIELD, "nothing drafts that it could restrict", "Leave it out, or give a --draft."
        )
        return
    yield Finding.ok(MAP_FIELD, f"{pair.drafted.size} of {pair.target_config.vocab_size} tokens are drafted")


def check_tokenizers(pair: Pair) -> Iterator[Finding]:
    """Compare the folders' tokenizers, where both have one, and the target's with its vocabulary."""
    file = pair.target / TOKENIZER_FILE
    theirs = read_vocabulary(pair.target)
    if theirs is None:
        yield Finding.warning(
            str(file),
            "does not exist; the gateway needs it for anything but token ids",
            f"Make it by `outrider convert tokenizer {pair.target}`, or serve with --skip-tokenizer.",
        )
        return
    size = pair.target_config.vocab_size
    beyond = sorted((number, token) for token, number in theirs.items() if number >= size)
    if beyond:  # Gemma 3 without vision is published so: the token of images has no row
        yield Finding.warning(
            TOKENIZER_FILE,
            f"the target's tokenizer has ids up to {beyond[-1][0]}, its vocab_size is {size}: texts that hold {beyond[0][1]!r}"
            + (f" or one of {len(beyond) - 1} more" if len(beyond) > 1 else "")
            + " are refused",
            "If there are more than a few special tokens, download tokenizer and weights of the same revision.",
        )
    folder = pair.choice.folder if pair.drafts else None
    mine = read_vocabulary(folder) if folder is not None and folder != pair.target else None
    if folder is None or mine is None:
        yield Finding.ok(TOKENIZER_FILE, f"{len(theirs)} tokens; the draft has none of its own")
        return
    yield _compare(theirs, mine, folder / TOKENIZER_FILE)


def _compare(theirs: Mapping[str, int], mine: Mapping[str, int], file: Path) -> Finding:
    different = sorted(
        (token for token in theirs.keys() | mine.keys() if theirs.get(token) != mine.get(token)),
        key=lambda token: min(theirs.get(token, 1 << 31), mine.get(token, 1 << 31)),
    )
    if not different:
        return Finding.ok(TOKENIZER_FILE, f"{len(theirs)} tokens, the same on both sides")
    named = ", ".join(
        f"{token!r} is {_id(theirs, token)} and {_id(mine, token)}" for token in different[:MAX_NAMED]
    )
    return Finding.refused(
        TOKENIZER_FILE,
        f"{len(different)} tokens differ between the target's tokenizer and {file}: {named}",
        f"{ANOTHER_DRAFT} If only the file is stale, remove it.",
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
    "check_token_map",
    "check_tokenizers",
    "check_unused",
    "check_vocabulary",
]
