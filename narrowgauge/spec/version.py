"""The version of the package, shown by `narrowgauge --version` and in CHANGELOG.md."""

VERSION = "0.1.0"
