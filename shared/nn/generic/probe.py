"""Runs a `transformers` model once without weights, to find out how each layer attends.

Attention that is not supported is rejected. The probe derives the sliding window of each layer from the mask
that the layer uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.generic.attention import PROBE, RECORDER, Call, MaskRule
from outrider.shared.nn.generic.layout import GenericLayout
from outrider.shared.nn.generic.output_head import OutputHead

ROWS = 5
MAX_CHECKED_DISTANCE = 1 << 18  # in tokens; no served context is longer, so a longer window has no effect
CHECKED_PAIRS = 4096
HONOURED = frozenset(
    (
        "scaling",
        "dropout",
        "sliding_window",
        "s_aux",
        "softcap",
        "position_ids",
        "position_embeddings",
        "is_causal",
    )
)
MEANINGLESS = frozenset(
    (
        "use_cache",
        "return_dict",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    )
)

Refuse = Callable[[str, str], CheckpointError]
"""A function that makes an error. It takes a key of config.json and a text that states the key's problem."""


def probe(model_class: Any, config: PreTrainedConfig, refuse: Refuse) -> GenericLayout:
    """Run a model without weights on torch's meta device, and return the layout that is found.

    Args:
        model_class: The class of a causal language model in `transformers`.
        config: The model's configuration.
        refuse: Function that creates the errors to raise; see `Refuse`.

    Raises:
        CheckpointError: The model bypasses the attention interface of `transformers`, or uses an unsupported
            option of this interface.
    """
    # 1. Record the calls of the attention interface in one pass. There must be one call for each layer.
    model, hidden = _run(model_class, config, refuse)
    calls, expected = list(RECORDER.calls), int(config.num_hidden_layers)
    RECORDER.calls.clear()
    name = model_class.__name__
    if len(calls) != expected or len({id(call.module) for call in calls}) != expected:
        raise refuse(
            "model_type",
            f"{name} has {expected} layers but calls the attention interface {len(calls)} times; "
            "only models with one attention per layer can be served",
        )
    # 2. All layers share one KV pool: their shapes must be equal, and values at most as wide as keys.
    paths = {id(module): path for path, module in model.named_modules()}
    shapes = {(tuple(call.q_shape), tuple(call.k_shape), tuple(call.v_shape)) for call in calls}
    if len(shapes) > 1:
        raise refuse(
            "model_type",
            f"the layers of {name} have heads of different shapes, but the KV pool has a single shape",
        )
    ((_, heads, _, head_dim), (_, kv_heads, _, key_dim), (_, _, _, value_dim)) = next(iter(shapes))
    if head_dim != key_dim or value_dim > key_dim:
        raise refuse(
            "model_type",
            f"values of {name} are {value_dim} wide and keys {key_dim}, "
            "but the KV pool needs values as wide as keys",
        )
    # 3. Read the layout from the recorded calls.
    attention_paths = tuple(paths[id(call.module)] for call in calls)
    return GenericLayout(
        class_name=name,
        attention_paths=attention_paths,
        layer_paths=_layer_paths(model, attention_paths, refuse),
        windows=tuple(_checked_window(index, call, config, refuse) for index, call in enumerate(calls)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden.shape[-1],
        max_positions=_max_positions(model),
        shapes=_shapes(model),
    )


def _run(model_class: Any, config: PreTrainedConfig, refuse: Refuse) -> tuple[PreTrainedModel, torch.Tensor]:
    """Run the model. Return the model on the meta device, and its final hidden states."""
    RECORDER.calls.clear()
    name = model_class.__name__
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, attn_implementation=PROBE).eval()
    except Exception as error:  # If a model class does not expect a file's content, it may raise any error.
        if error.args == (PROBE,):
            raise refuse(
                "model_type", f"{name} does not use the attention interface of transformers"
            ) from None
        raise refuse(
            "model_type", f"transformers cannot create {name} from this configuration ({error})"
        ) from error
    # A tree needs explicit positions, and tokens that see each other only through attention.
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise refuse(
            "model_type",
            f"{name} takes no explicit positions (it uses alibi or counts them), which a draft tree needs",
        )
    mixing = next((path for path, module in model.named_modules() if isinstance(module, nn.Conv1d)), None)
    if mixing is not None:
        raise refuse(
            "model_type",
            f"{name} mixes neighbouring tokens outside of its attention ({mixing}), "
            "which cannot be verified as a tree",
        )
    if model.get_output_embeddings() is None:
        raise refuse("model_type", f"{name} has no output head")
    model.set_experts_implementation("batched_mm")  # the only implementation without data-dependent shapes
    rows = torch.zeros(1, ROWS, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            output = model.base_model(
                input_ids=rows, attention_mask=torch.ones_like(rows), position_ids=rows, use_cache=False
            )
    except Exception as error:  # A model class may raise any error for tensors that have no values.
        raise refuse(
            "model_type",
            f"{name} computes with its attention mask or token values outside of the attention interface "
            f"({error})",
        ) from error
    hidden: torch.Tensor = output.last_hidden_state
    try:
        with torch.no_grad():
            OutputHead(model)(hidden[0])
    except Exception as error:  # The same is true for this call.
        raise refuse(
            "model_type", f"the output head of {name} cannot be run apart from its layers ({error})"
        ) from error
    return model, hidden


def _checked_window(layer: int, call: Call, config: PreTrainedConfig, refuse: Refuse) -> int:
    """Return the window of a layer. Reject the layer if its attention uses an unsupported option."""
    options: Mapping[str, Any] = {
        key: value for key, value in call.options.items() if value is not None and value is not False
    }
    unknown = sorted(set(options) - HONOURED - MEANINGLESS)
    if unknown:
        raise refuse(
            "model_type",
            f"the attention of layer {layer} needs {', '.join(unknown)}, which is not supported",
        )
    if options.get("dropout"):
        raise refuse("attention_dropout", "is applied outside of training; set it to 0")
    if call.options.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise refuse("is_causal", f"the attention of layer {layer} looks ahead, but targets must be causal")
    if not isinstance(call.mask, MaskRule):
        raise refuse("model_type", f"layer {layer} makes its own attention mask, which is not supported")
    window = _window(layer, call.mask, config, refuse)
    named = int(options.get("sliding_window") or 0)
    if named != window and not (window == 0 and named >= _reach(config)):
        raise refuse(
            "sliding_window",
            f"layer {layer} names a window of {named}, but its mask has a window of {window}",
        )
    return window


def _reach(config: PreTrainedConfig) -> int:
    """Return the longest distance between two tokens that the probe checks."""
    return min(
        int(getattr(config, "max_position_embeddings", None) or MAX_CHECKED_DISTANCE), MAX_CHECKED_DISTANCE
    )


def _window(layer: int, rule: MaskRule, config: PreTrainedConfig, refuse: Refuse) -> int:
    """Derive the window from the rule of a mask. Check random token pairs to exclude other kinds of masks."""
    reach = _reach(config)
    columns = torch.arange(reach + 1)
    seen = _visible(rule, torch.full_like(columns, reach), columns).nonzero().flatten()
    first = int(seen[0]) if len(seen) else reach + 1
    window = reach + 1 - first if first else 0
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(reach + 1, (CHECKED_PAIRS,), generator=random)
    near = rows - (window or reach // 2) + torch.randint(-3, 4, (CHECKED_PAIRS,), generator=random)
    ahead = rows + torch.randint(-2, 3, (CHECKED_PAIRS,), generator=random)
    anywhere = torch.randint(reach + 1, (CHECKED_PAIRS,), generator=random)
    for columns in (near.clamp(0, reach), ahead.clamp(0, reach), anywhere):
        wanted = (columns <= rows) & (columns > rows - (window or reach + 1))
        if not torch.equal(_visible(rule, rows, columns), wanted):
            raise refuse(
                "layer_types",
                f"the mask of layer {layer} is neither causal nor a sliding window "
                "(it is chunked or looks ahead)",
            )
    return window


def _visible(rule: MaskRule, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(rows)
    return torch.as_tensor(rule.visible(zero, zero, rows, columns)).expand(rows.shape).bool()


def _layer_paths(model: nn.Module, attention_paths: Sequence[str], refuse: Refuse) -> tuple[str, ...]:
    """Return, for each attention, the path of its decoder layer. The layers must form one module list."""
    lists = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == len(attention_paths)
    ]
    for path in lists:
        layers = tuple(f"{path}.{index}" for index in range(len(attention_paths)))
        if all(
            attention.startswith(f"{layer}.")
            for attention, layer in zip(attention_paths, layers, strict=True)
        ):
            return layers
    raise refuse("model_type", f"{type(model).__name__} does not run a single list of layers in order")


def _max_positions(model: PreTrainedModel) -> int | None:
    """Return the number of rows of the learned position table, or None if there is no such table.

    The learned position table is the smallest embedding table, not counting the table of the tokens.
    """
    parts: Any = model
    tokens = parts.get_input_embeddings()
    tables = [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not tokens
    ]
    return min(tables, default=None)


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors, if its files use the names of the model's parameters."""
    if any(
        hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter)
        for module in model.modules()
    ):
        return {}
    tied = set(model.all_tied_weights_keys)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
