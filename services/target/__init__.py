"""The target service: owns the model, its KV cache and verification. Token ids in, token ids out."""
