"""The gateway service: OpenAI- and SGLang-compatible REST routes and a gRPC API over one shared core.

All text handling is here: tokenization, chat templates, detokenization and stop strings. The gateway imports
no torch.
"""
