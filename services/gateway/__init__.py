"""The gateway service: serves REST (OpenAI, Anthropic and SGLang formats) and gRPC over one shared core.

The gateway does all text handling: tokenization, chat templates, detokenization, stop strings, and parsing of
the model's output. It does not import torch.
"""

import os

# grpc's own log contains unescaped text from peers. grpc reads this variable while it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
