"""Keys that NVIDIA's ModelOpt writes into ``eagle_config``: what they switch in its layers, and which of that no head here computes.

Source: ModelOpt's Eagle modules and its export to Hugging Face names, where the first layer's input norm becomes ``hidden_norm`` of an
EAGLE-3 head and ``layers.0.input_layernorm`` of an EAGLE-1 head.
"""

from __future__ import annotations

from outrider.shared.nn.config.model_config import ConfigReader

FIRST_NORM = "use_input_layernorm_in_first_layer"
LAST_NORM = "use_last_layernorm"
MTP_NORMS = "use_mtp_layernorm"
PARALLEL = "parallel_draft_step"
REGULAR = "next_layer_regular"


def check_eagle3(reader: ConfigReader, num_layers: int, *, final_hidden: bool) -> None:
    """Refuse what would make an EAGLE-3 head compute something else than it does here.

    Args:
        reader: The head's configuration, its sections merged.
        num_layers: Of the head.
        final_hidden: It reads the last hidden state. With aux layers ModelOpt does not look at ``use_mtp_layernorm``.

    Raises:
        CheckpointError: `field` names the key.
    """
    if not reader.flag(FIRST_NORM, True):
        raise reader.error(
            FIRST_NORM,
            "false means features without hidden_norm, and heads here norm them; export the head with it",
        )
    if not reader.flag(LAST_NORM, True):
        raise reader.error(
            LAST_NORM,
            "false means an lm_head without a norm before it, and heads here have one; export the head with it",
        )
    if num_layers > 1 and not reader.flag(REGULAR, True):
        raise reader.error(
            REGULAR,
            "false means that every layer reads the embedding, and heads here read it in the first only",
        )
    _check_both(reader, joins=final_hidden)


def check_eagle(reader: ConfigReader, *, ends_with_norm: bool) -> None:
    """Refuse what would make an EAGLE-1/2 head compute something else than it does here; `ends_with_norm`: its kind has a last norm.

    Raises:
        CheckpointError: `field` names the key.
    """
    if reader.flag(LAST_NORM, ends_with_norm) and not ends_with_norm:
        raise reader.error(
            LAST_NORM,
            "true is not supported in EAGLE-1/2 heads, whose states go to the target's lm_head as they are",
        )
    _check_both(reader, joins=True)


def _check_both(reader: ConfigReader, *, joins: bool) -> None:
    if joins and reader.flag(MTP_NORMS, False):
        raise reader.error(
            MTP_NORMS,
            "true means norms of token and state before fc (enorm, hnorm), which heads here have not",
        )
    if reader.positive(PARALLEL, 1) > 1:
        raise reader.error(
            PARALLEL,
            f"{reader.raw[PARALLEL]} means several tokens a pass by further heads, which is not supported; export the head with 1",
        )
