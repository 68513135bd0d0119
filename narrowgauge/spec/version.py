"""The version of the project: of the package, of `narrowgauge --version`, and of CHANGELOG.md."""

VERSION = "0.1.0"
