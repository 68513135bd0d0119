"""The content security policy of a page: this style and this script run, and nothing else, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib


def policy(style: str, script: str = "") -> str:
    """What stands in the page's meta element, whatever comes from a record into the page besides."""
    allowed = f"default-src 'none'; style-src '{_digest(style)}'"
    return f"{allowed}; script-src '{_digest(script)}'" if script else allowed


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
