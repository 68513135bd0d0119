"""Running cases: one at a time, in worker processes, in shards; failures are shrunk and saved."""
