"""The gateway service: OpenAI- and SGLang-compatible REST routes and a gRPC API over one shared core.

All text handling is here: tokenization, chat templates, detokenization and stop strings. The gateway imports
no torch.
"""

import os

# grpc's own log contains unescaped text of any peer. grpc reads this variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
