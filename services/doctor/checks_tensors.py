"""Tensor checks: missing or misshaped tensors, damaged or untrained weights, d2t, head embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outrider.services.doctor.finding import Finding
from outrider.services.doctor.generic_tensors import check_generic
from outrider.services.doctor.judge_tensors import DOWNLOAD, NamedStatistics, judge
from outrider.services.doctor.pair import ANYTHING, Pair, expected_of
from outrider.services.doctor.statistics import tensor_statistics
from outrider.services.doctor.vocabulary_map import D2tMeaning, d2t_meaning
from outrider.services.draft.strategies.mtp_copies import compare_copies
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.expert_files import MXFP4_SCALES, check_mxfp4_scales
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.algorithm import Algorithm

MAX_SAMPLED = 2000
"""Maximum number of tensors of a model to sample."""
EMBEDDING_ENDING = "embed_tokens.weight"


def check_target_tensors(pair: Pair) -> Iterator[Finding]:
    """Compare the headers of all shards with the configuration. Check a sample of the stored numbers."""
    config = pair.target_config
    with CheckpointReader(pair.target) as reader:
        names = _compare(reader, config)
        faults = list(check_generic(reader, pair.target)) if ANYTHING in config.ignored else []
        yield from faults
        if not faults:
            yield Finding.ok(
                "tensors",
                f"{len(names)} in {len(reader.files)} file{'s' if len(reader.files) > 1 else ''}, all as "
                "expected",
            )
        yield from judge(
            _statistics(reader, names, "the target", whole=False),
            "the target",
            sampled=True,
            norms_about_one=ANYTHING not in config.ignored,
        )


def check_draft_tensors(pair: Pair) -> Iterator[Finding]:
    """Read the draft as serving does, and check its numbers. A draft model's numbers are only sampled."""
    choice = pair.choice
    if choice.algorithm is Algorithm.STANDALONE:
        config = pair.draft_model
        with CheckpointReader(choice.require_folder()) as reader:
            names = _compare(reader, config)
            faults = (
                list(check_generic(reader, choice.require_folder())) if ANYTHING in config.ignored else []
            )
            yield from faults
            if not faults:
                yield Finding.ok("tensors", f"{len(names)}, all as expected")
            about_one = ANYTHING not in config.ignored
            yield from judge(
                _statistics(reader, names, "the draft model", whole=False),
                "the draft model",
                sampled=True,
                norms_about_one=about_one,
            )
    if choice.algorithm is Algorithm.MTP:
        count = len(pair.mtp.layers)
        with CheckpointReader(choice.require_folder()) as reader:
            names = [name for name in reader.names if name.startswith(pair.mtp.prefixes)]
            statistics = _statistics(reader, names, "the MTP layers", whole=True)
            yield from judge(statistics, "the MTP layers", sampled=False)
        yield Finding.ok(
            "tensors",
            f"{count} MTP layer{'s' if count > 1 else ''} of {choice.require_folder().name}, all as expected",
        )
    if choice.algorithm is not Algorithm.EAGLE:
        return
    with CheckpointReader(choice.require_folder()) as reader:
        statistics = _statistics(reader, list(reader.names), "the head", whole=True)
        yield from judge(statistics, "the head", sampled=False)
        yield from _file_format(reader)
    # Read the head last, because reading may raise an error. The statistics above may explain the error.
    missing = ", ".join(pair.head.missing())
    yield Finding.ok(
        "tensors",
        "all used, or ignored by name" + (f"; {missing} comes from the target" if missing else ""),
    )


def check_d2t(pair: Pair) -> Iterator[Finding]:
    """Infer from the values of ``d2t``, the map from draft ids to target ids, whether it stores offsets."""
    if pair.choice.algorithm is not Algorithm.EAGLE:
        return
    with CheckpointReader(pair.choice.require_folder()) as reader:
        stored = _read_all(reader, ("d2t", "model.d2t", "t2d", "model.t2d"))
    d2t, t2d = stored.get("d2t"), stored.get("t2d")
    if d2t is None:
        return
    if d2t.is_floating_point() or d2t.dim() != 1:
        yield Finding.refused(
            "d2t", f"is {d2t.dtype} {list(d2t.shape)}, but must be a vector of integers", DOWNLOAD
        )
        return
    size = pair.head_config.vocab_size
    meaning = d2t_meaning(d2t, t2d, size)
    if meaning is D2tMeaning.OFFSETS:
        share = f"{d2t.shape[0]} of {size} tokens"
        yield Finding.ok("d2t", f"{meaning.value}: {share}" + ("" if t2d is None else ", as in t2d"))
    elif meaning is D2tMeaning.TARGET_IDS:
        yield Finding.refused(
            "d2t",
            "contains target ids, not offsets: "
            + ("t2d marks exactly these" if t2d is not None else "as offsets, they exceed the vocabulary"),
            "Rewrite it with `outrider convert head`, which stores offsets.",
        )
    elif meaning is D2tMeaning.EITHER:
        yield Finding.warning(
            "d2t",
            "could contain offsets or target ids; it is read as offsets",
            "Check the accept length, which --probe measures.",
        )
    else:
        yield Finding.refused(
            "d2t", f"contains neither offsets nor token ids below {size}, or it contradicts t2d", DOWNLOAD
        )


def check_embedding(pair: Pair) -> Iterator[Finding]:
    """Compare the embedding tables of a draft and its target, and report suspicious differences.

    Some exported drafts contain an untrained embedding table. MTP layers come with copies of the target's
    embedding table and lm_head. If these copies differ from the target's tensors, the MTP layers belong to
    another model.
    """
    if pair.choice.algorithm is Algorithm.MTP:
        copies = compare_copies(pair.mtp, pair.choice.require_folder(), pair.target)
        for copy in copies:
            if not copy.same:
                fix = "Take the MTP layers of the target that you serve. --probe measures the acceptance."
                yield Finding.warning(copy.name, copy.warning, fix)
        if copies and all(copy.same for copy in copies):
            names = ", ".join(copy.name for copy in copies)
            yield Finding.ok(names, "equal to the target's")
        return
    if pair.choice.algorithm is not Algorithm.EAGLE:
        return
    with CheckpointReader(pair.choice.require_folder()) as head, CheckpointReader(pair.target) as target:
        mine = next((name for name in head.names if name.endswith(EMBEDDING_ENDING)), None)
        theirs = next((name for name in target.names if name.endswith(EMBEDDING_ENDING)), None)
        if mine is None or theirs is None or head.tensors[mine].shape != target.tensors[theirs].shape:
            return
        rows = slice(0, None, max(1, head.tensors[mine].shape[0] // 512))
        own, original = (
            _file(reader, name)[rows].float() for reader, name in ((head, mine), (target, theirs))
        )
        likeness = float(torch.nn.functional.cosine_similarity(own, original, dim=-1).mean())
    if likeness > 0.99:
        yield Finding.ok(mine, "the head's own copy equals the target's")
    else:
        yield Finding.warning(
            mine,
            f"the head's own embedding differs from the target's (mean cosine {likeness:.2f})",
            "If the head was trained with the target's embedding, remove this tensor. --probe measures the "
            "acceptance.",
        )


def _compare(reader: CheckpointReader, config: ModelConfig) -> list[str]:
    """Check the stored tensors of a model in the same way as the model loader, and return their names.

    Raises:
        CheckpointError: A tensor is missing, unexpected, or has the wrong shape or type.
    """
    expected = expected_of(reader, config)
    reader.check(expected.shapes, ignored=config.ignored, dtypes=expected.dtypes)
    for name, dtype in expected.dtypes.items():
        if dtype is torch.uint8 and name.endswith(MXFP4_SCALES):
            check_mxfp4_scales(name, _file(reader, name))
    return list(expected.shapes) or list(reader.names)


def _statistics(
    reader: CheckpointReader, names: Sequence[str], whose: str, *, whole: bool
) -> list[NamedStatistics]:
    """Return the statistics of the floating-point tensors with these names, and show the progress."""
    floating = [
        name for name in names if reader.tensors[name].dtype.is_floating_point and reader.tensors[name].shape
    ]
    if not whole:
        # A sample is enough, because a model with experts has tens of thousands of similar tensors. Serving
        # reads the whole target anyway.
        floating = floating[:: 1 + len(floating) // MAX_SAMPLED]
    found = []
    with Progress(f"reading tensors of {whose}", len(floating)) as progress:
        for name in floating:
            found.append(NamedStatistics(name, tensor_statistics(_file(reader, name), whole=whole)))
            progress.advance()
    return found


def _file_format(reader: CheckpointReader) -> Iterator[Finding]:
    file = reader.files[0].path
    if file.suffix != ".safetensors":
        yield Finding.ok(
            file.name, "unpickled with weights_only; `outrider convert head` writes it as safetensors"
        )


def _read_all(reader: CheckpointReader, names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("model."): _file(reader, name).clone() for name in names if name in reader.names
    }


def _file(reader: CheckpointReader, name: str) -> torch.Tensor:
    """Return a stored tensor that shares memory with the mapped file."""
    file = next(file for file in reader.files if name in file.tensors)
    return file.read(name)
