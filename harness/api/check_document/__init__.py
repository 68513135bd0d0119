"""The document of `narrowgauge check`, and the JSON Schema of this document."""
