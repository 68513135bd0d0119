"""The gate: a finished run against the baseline that was accepted before, in integers and exact figures alone."""
