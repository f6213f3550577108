"""The front door: REST (OpenAI's and SGLang's shapes) and gRPC over one core; owns text. Imports no torch."""
