"""The proof from end to end: a small transformer that learns under every recipe, every stage of every step judged."""
