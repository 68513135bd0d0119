"""The gate: comparison of a finished run with its accepted baseline, in integers and exact figures only."""
