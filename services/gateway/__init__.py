"""The gateway service: REST in the formats of OpenAI, Anthropic and SGLang, and gRPC, over one shared core.

All text handling is here: tokenization, chat templates, detokenization, stop strings and output parsers. The
gateway imports no torch.
"""
