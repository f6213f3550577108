"""What the target says of itself, for checks and for those who ask what is served."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.target.v1 import target_pb2


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What the target says of itself. Caps and defaults concern `speculation` of requests."""

    model_id: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    fingerprint: str
    weight_version: str
    max_running_requests: int
    algorithm: str
    draft_model: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    max_steps: int
    max_topk: int
    max_nodes: int
    speculation_state: str

    @classmethod
    def from_proto(cls, reply: target_pb2.GetInfoReply) -> TargetInfo:
        """Read the reply of GetInfo."""
        speculation = reply.speculation
        return cls(
            model_id=reply.model_id,
            architecture=reply.architecture,
            vocab_size=reply.vocab_size,
            max_model_len=reply.max_model_len,
            eos_token_ids=frozenset(reply.eos_token_ids),
            dtype=reply.dtype,
            device=reply.device,
            fingerprint=reply.fingerprint,
            weight_version=reply.weight_version or "default",
            max_running_requests=reply.max_running_requests,
            algorithm=speculation.algorithm,
            draft_model=speculation.draft_model,
            num_steps=speculation.num_steps,
            topk=speculation.topk,
            num_draft_tokens=speculation.num_draft_tokens,
            max_steps=speculation.max_steps,
            max_topk=speculation.max_topk,
            max_nodes=speculation.max_nodes,
            speculation_state=speculation.state,
        )
