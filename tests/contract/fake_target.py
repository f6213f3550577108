"""A scripted target: a real gRPC server whose tokens the test chooses."""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.common.v1 import common_pb2
from outrider.shared.base.errors import OutriderError
from outrider.shared.rpc.common_messages import error_to_proto
from outrider.shared.rpc.server import SyncServer, sync_server
from outrider.target.v1 import target_pb2, target_pb2_grpc

TARGET_SERVICE = "outrider.target.v1.Target"
EOS_ID = 1
MAX_MODEL_LEN = 512
WAIT_S = 20
HIDDEN_SIZE, LAYERS, TOP_K = 4, 3, 2


@dataclass(slots=True)
class Script:
    """The answer to one request.

    Attributes:
        steps: The tokens of each step, cut at the request's limit of new tokens.
        error: If set, the request fails with this error after the steps.
        gate: If set, each step after the first acquires this semaphore.
        finish: Whether to finish the sequence. If False, it runs until it is cancelled.
        overrun: Number of rounds that the statistics count although no message contains their tokens.
    """

    steps: Sequence[Sequence[int]]
    error: OutriderError | None = None
    gate: threading.Semaphore | None = None
    finish: bool = True
    overrun: int = 0


@dataclass(slots=True)
class _Running:
    request: target_pb2.GenerateRequest
    cancelled: threading.Event = field(default_factory=threading.Event)
    active: threading.Event = field(default_factory=threading.Event)
    keep_tokens: int | None = None


def chain_tokens(request: target_pb2.GenerateRequest, count: int) -> list[int]:
    """Return plain ASCII ids of the toy vocabulary, determined by prompt, seed and choice index."""
    noise = (
        request.sampling.seed * 17 + request.sampling.choice_index * 7 if request.sampling.temperature else 0
    )
    state = (sum(request.prompt_ids) * 31 + noise) % 997
    tokens = []
    for _ in range(count):
        state = (state * 61 + 13) % 997
        tokens.append(5 + state % 90)
    return tokens


def token_logprob(token: int, index: int, top: int) -> common_pb2.TokenLogprob:
    """Return a logprob that tells the place of a token in its answer: -1 for the first token, then -2."""
    others = [(token + rank) % 90 + 5 for rank in range(1, top)]
    logprobs = [-1.0 - index - rank for rank in range(top)]
    return common_pb2.TokenLogprob(
        logprob=-1.0 - index, top_ids=[token, *others][:top], top_logprobs=logprobs
    )


def token_states(
    request: target_pb2.GenerateRequest, first: int, count: int
) -> common_pb2.TokenStates | None:
    """Return states that tell the index of each token. None if the request wants none of these tokens."""
    wanted = request.states
    indices = range(max(first, wanted.start), first + count)
    if not indices or not (wanted.hidden_states or wanted.routed_experts):
        return None
    states = common_pb2.TokenStates(first=indices[0], count=len(indices))
    for index in indices:
        hidden = [index + column / 8 for column in range(HIDDEN_SIZE)]
        if wanted.hidden_states:
            states.hidden_states += struct.pack(f"<{HIDDEN_SIZE}f", *hidden)
        if wanted.routed_experts:
            states.routed_experts += struct.pack(f"<{LAYERS * TOP_K}i", *[index] * LAYERS * TOP_K)
    return states


class FakeTarget(target_pb2_grpc.TargetServicer):
    """Serves the target's protocol.

    `script` maps a request to its answer. `seen`, `cancels`, `pauses` and `resumes` record incoming messages.
    """

    def __init__(
        self,
        vocab_size: int,
        prometheus_text: str = "",
        max_model_len: int = MAX_MODEL_LEN,
        trace_nodes: int = 0,
        model_id: str = "toy",
        fingerprint: str = "",
    ) -> None:
        self.model_id = model_id
        self.fingerprint = fingerprint
        self.features = [
            target_pb2.TARGET_FEATURE_RESUME,
            target_pb2.TARGET_FEATURE_CONSTRAINT,
            target_pb2.TARGET_FEATURE_STATES,
        ]
        self.address = ""
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.trace_nodes = trace_nodes
        self.prometheus_text = prometheus_text
        self.reports_drafts = True
        self.script: Callable[[target_pb2.GenerateRequest], Script] = self.default_script
        self.on_flush: Callable[[], object] = lambda: None
        self.seen: list[target_pb2.GenerateRequest] = []
        self.cancels: queue.Queue[target_pb2.Cancel] = queue.Queue()
        self.pauses: queue.Queue[str] = queue.Queue()
        self.resumes: queue.Queue[str] = queue.Queue()
        self._running: dict[str, _Running] = {}
        self._server: SyncServer | None = None

    @staticmethod
    def default_script(request: target_pb2.GenerateRequest) -> Script:
        tokens = chain_tokens(request, min(request.max_new_tokens, 24))
        return Script([tokens[:1], *[tokens[at : at + 2] for at in range(1, len(tokens), 2)]])

    def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = sync_server(
            address, [(target_pb2_grpc.add_TargetServicer_to_server, self)], [TARGET_SERVICE], max_workers=4
        )
        self._server.start()
        self._server.set_serving(True)
        self.address = self._server.address
        return self.address

    def set_serving(self, serving: bool) -> None:
        assert self._server
        self._server.set_serving(serving)

    def stop(self) -> None:
        if self._server:
            self._server.stop(0)
            self._server = None
        # No client is connected any more, so the threads can end.
        for running in list(self._running.values()):
            running.cancelled.set()
            running.active.set()

    @property
    def live(self) -> int:
        return len(self._running)

    def Session(self, request_iterator, context) -> Iterator[target_pb2.SessionReply]:
        # Bounded, like an engine's steps, so that a pause takes effect before the whole script is sent.
        replies: queue.Queue[target_pb2.GenerateReply | None] = queue.Queue(maxsize=4)

        def read() -> None:
            try:
                for message in request_iterator:
                    self._take(message, replies)
            except Exception:
                pass  # the stream broke; the writer ends with it
            replies.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (reply := replies.get()) is not None:
            yield target_pb2.SessionReply(replies=[reply])

    def _take(self, message: target_pb2.SessionRequest, replies: queue.Queue) -> None:
        match message.WhichOneof("message"):
            case "generate":
                self.seen.append(message.generate)
                running = _Running(message.generate)
                running.active.set()
                self._running[message.generate.request_id] = running
                threading.Thread(target=self._generate, args=(running, replies), daemon=True).start()
            case "cancel":
                self.cancels.put(message.cancel)
                if running := self._running.get(message.cancel.request_id):
                    if message.cancel.HasField("keep_tokens"):
                        running.keep_tokens = message.cancel.keep_tokens
                    running.cancelled.set()
                    running.active.set()
            case "pause":
                if running := self._running.get(message.pause.request_id):
                    running.active.clear()
                self.pauses.put(message.pause.request_id)
            case "resume":
                if running := self._running.get(message.resume.request_id):
                    running.active.set()
                self.resumes.put(message.resume.request_id)

    def _generate(self, running: _Running, replies: queue.Queue) -> None:
        request = running.request
        script = self.script(request)
        steps = rest_of(script.steps, len(request.resume_ids))
        emitted = len(request.resume_ids)
        rounds = 0
        reason = common_pb2.FINISH_REASON_STOP
        matched = None
        base_len = len(request.prompt_ids)
        try:
            if found := token_states(request, 0, base_len + emitted):
                states = target_pb2.TokenDelta(states=found)
                replies.put(target_pb2.GenerateReply(request_id=request.request_id, delta=states))
            for number, step in enumerate(steps):
                if number and script.gate:
                    script.gate.acquire(timeout=WAIT_S)
                running.active.wait(WAIT_S)
                if running.cancelled.is_set():
                    break
                tokens = list(step)[: request.max_new_tokens - emitted]
                stops = set(request.stop_token_ids) | (set() if request.ignore_eos else {EOS_ID})
                cut = next((at for at, token in enumerate(tokens) if token in stops), None)
                if cut is not None:
                    tokens, matched = tokens[: cut + 1], tokens[cut]
                delta = target_pb2.TokenDelta(token_ids=tokens)
                if number and self.reports_drafts:
                    delta.draft_tokens, delta.accepted_tokens = 3, 1
                if request.logprobs.HasField("top"):
                    delta.logprobs.extend(
                        token_logprob(token, emitted + index, request.logprobs.top)
                        for index, token in enumerate(tokens)
                    )
                if number and request.speculation.trace:
                    delta.rounds.append(trace_round(rounds, base_len + emitted, tokens, self.trace_nodes))
                if number and (found := token_states(request, base_len + emitted - 1, len(tokens))):
                    delta.states.CopyFrom(found)
                rounds += number > 0
                emitted += len(tokens)
                replies.put(target_pb2.GenerateReply(request_id=request.request_id, delta=delta))
                if matched is not None:
                    break
                if emitted >= request.max_new_tokens:
                    reason = common_pb2.FINISH_REASON_LENGTH
                    break
            if script.error:
                replies.put(
                    target_pb2.GenerateReply(
                        request_id=request.request_id, error=error_to_proto(script.error)
                    )
                )
                return
            rounds += script.overrun
            if not script.finish:
                running.cancelled.wait(WAIT_S)
            if running.cancelled.is_set() and running.keep_tokens is None:
                reason = common_pb2.FINISH_REASON_CANCELLED
            finish = target_pb2.Finish(
                reason=reason,
                matched_token=matched,
                usage=common_pb2.Usage(
                    prompt_tokens=len(request.prompt_ids),
                    completion_tokens=running.keep_tokens or emitted,
                    cached_tokens=0,
                ),
                speculation=common_pb2.SpeculationStats(
                    accept_length=2.0,
                    rounds=rounds,
                    draft_tokens=3 * rounds,
                    accepted_tokens=rounds,
                    accepted_histogram=[0, rounds],
                ),
                queue_ms=1.0,
            )
            replies.put(target_pb2.GenerateReply(request_id=request.request_id, finish=finish))
        finally:
            del self._running[request.request_id]

    def Generate(self, request, context):
        raise OutriderError("the gateway uses Session")

    def GetTensor(self, request, context):
        raise OutriderError("the gateway needs no tensors")

    def GetInfo(self, request, context) -> target_pb2.GetInfoReply:
        return target_pb2.GetInfoReply(
            model_id=self.model_id,
            fingerprint=self.fingerprint,
            features=self.features,
            architecture="LlamaForCausalLM",
            vocab_size=self.vocab_size,
            hidden_size=HIDDEN_SIZE,
            routed_layers=LAYERS,
            experts_per_token=TOP_K,
            max_model_len=self.max_model_len,
            eos_token_ids=[EOS_ID],
            dtype="float32",
            device="cpu",
            max_running_requests=16,
            model_path="/models/toy",
            tp_size=2,
            page_size=16,
            speculation=target_pb2.SpeculationInfo(
                algorithm="EAGLE3",
                num_steps=5,
                topk=4,
                num_draft_tokens=16,
                max_steps=16,
                max_topk=16,
                max_nodes=128,
                state="on",
            ),
        )

    def FlushPrefixCache(self, request, context) -> target_pb2.FlushPrefixCacheReply:
        self.on_flush()
        return target_pb2.FlushPrefixCacheReply(pages=3)

    def GetStats(self, request, context) -> target_pb2.GetStatsReply:
        return target_pb2.GetStatsReply(
            auto=target_pb2.AutoDecision(reason="idle"),
            running=self.live,
            draft_state="on",
            prometheus_text=self.prometheus_text,
            uptime_s=185.5,
            resources=target_pb2.ResourceStats(
                weight_bytes=2**30,
                graphs_recorded=7,
                draft_transport="ipc",
                draft_on_device=True,
                draft_features=["mailbox"],
                draft_uptime_s=61.5,
                draft_connections_lost=2,
            ),
        )


@contextlib.contextmanager
def target_process(vocab_size: int, script: str = "FakeTarget.default_script") -> Iterator[subprocess.Popen]:
    """Run a scripted target in a process of its own, which can be suspended.

    Args:
        vocab_size: Size of its vocabulary.
        script: Expression for its script.

    Yields:
        The process. Its first line of output is its address.
    """
    code = (
        "import sys, signal\n"
        "from fake_target import FakeTarget, Script, chain_tokens\n"
        "target = FakeTarget(int(sys.argv[1]))\n"
        f"target.script = {script}\n"
        "print(target.start(), flush=True)\n"
        "signal.pause()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(vocab_size)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def rest_of(steps: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Return the steps without their first `count` tokens."""
    rest = []
    for step in steps:
        if tokens := step[count:]:
            rest.append(tokens)
        count = max(0, count - len(step))
    return rest


def trace_round(
    number: int, base_len: int, emitted: Sequence[int], rejected: int = 0
) -> common_pb2.RoundTrace:
    """Return a round whose tree is one chain of accepted nodes plus `rejected` children of the root.

    The chain contains every emitted token except the last.
    """
    nodes = [common_pb2.TraceNode(token=9, parent=-1, depth=0)]
    nodes += [
        common_pb2.TraceNode(token=token, parent=at, depth=at + 1, logprob=-0.5)
        for at, token in enumerate(emitted[:-1])
    ]
    accepted = range(1, len(nodes))
    nodes += [common_pb2.TraceNode(token=10, parent=0, depth=1, logprob=-4.5)] * rejected
    return common_pb2.RoundTrace(
        round=number,
        base_len=base_len,
        nodes=nodes,
        accepted=accepted,
        emitted=emitted,
        draft_ms=1.0,
        verify_ms=2.0,
    )
