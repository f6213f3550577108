"""How many tokens to draft. Pure logic without tensors."""
