"""Rejects heads whose ModelOpt options in ``eagle_config`` would change the network in unsupported ways.

Source: the Eagle modules of NVIDIA's ModelOpt, and ModelOpt's export to Hugging Face names. The export
renames the first layer's input norm: to ``hidden_norm`` in an EAGLE-3 head, and to
``layers.0.input_layernorm`` in an EAGLE-1 head.
"""

from __future__ import annotations

from outrider.shared.nn.config.model_config import ConfigReader

FIRST_NORM = "use_input_layernorm_in_first_layer"
LAST_NORM = "use_last_layernorm"
MTP_NORMS = "use_mtp_layernorm"
PARALLEL = "parallel_draft_step"
REGULAR = "next_layer_regular"


def check_eagle3(reader: ConfigReader, num_layers: int, *, final_hidden: bool) -> None:
    """Reject ModelOpt options that need another EAGLE-3 network than the one that this service implements.

    Args:
        reader: The head's configuration, with its sections merged.
        num_layers: Number of the head's layers.
        final_hidden: True if the head reads the target's last hidden state. False if it reads aux layers;
            ModelOpt then ignores ``use_mtp_layernorm``.

    Raises:
        CheckpointError: An option is not supported. The `field` of the error names the key.
    """
    if not reader.flag(FIRST_NORM, True):
        raise reader.error(
            FIRST_NORM,
            "false is not supported: the head would read features without hidden_norm. Export it "
            "with the norm",
        )
    if not reader.flag(LAST_NORM, True):
        raise reader.error(
            LAST_NORM,
            "false is not supported: the lm_head would read states without a norm. Export the head with "
            "the norm",
        )
    if num_layers > 1 and not reader.flag(REGULAR, True):
        raise reader.error(
            REGULAR,
            "false is not supported: layers after the first would read the embedding. Export the head with "
            "true",
        )
    _check_both(reader, joins=final_hidden)


def check_eagle(reader: ConfigReader, *, ends_with_norm: bool) -> None:
    """Reject ModelOpt options that need another EAGLE-1/2 network than the one that this service implements.

    Args:
        reader: The head's configuration, with its sections merged.
        ends_with_norm: True if a norm follows the head's last layer.

    Raises:
        CheckpointError: An option is not supported. The `field` of the error names the key.
    """
    if reader.flag(LAST_NORM, ends_with_norm) and not ends_with_norm:
        raise reader.error(
            LAST_NORM,
            "true is not supported for EAGLE-1/2 heads: the target's lm_head reads their states without a "
            "norm. Export the head with false",
        )
    _check_both(reader, joins=True)


def _check_both(reader: ConfigReader, *, joins: bool) -> None:
    if joins and reader.flag(MTP_NORMS, False):
        raise reader.error(
            MTP_NORMS,
            "true is not supported: fc would read token and state through norms (enorm, hnorm). "
            "Export the head with false",
        )
    if reader.positive(PARALLEL, 1) > 1:
        raise reader.error(
            PARALLEL,
            f"{reader.raw[PARALLEL]} is not supported: further heads would draft several tokens per pass. "
            "Export the head with 1",
        )
