"""The stages that operations share, and the outcome that they add up to."""
