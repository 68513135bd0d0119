"""Certificates: every number of a dtype under every scale of a block, and trials of the assumption behind the proof."""
