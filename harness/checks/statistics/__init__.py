"""Statistical tests, and the false alarms that a run is allowed."""
