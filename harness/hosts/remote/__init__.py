"""The judge's side of a kernel host: its process, its messages and the shared memory."""
