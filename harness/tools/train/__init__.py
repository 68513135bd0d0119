"""End-to-end test: a small transformer is trained under every recipe, and every stage of every step is judged."""
