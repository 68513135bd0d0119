"""The machine: its cores and GPUs, the lock of a GPU, and where the time of a case goes."""
