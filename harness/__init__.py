"""The harness: cases in, records out."""
