"""The operation layernorm-linear."""
