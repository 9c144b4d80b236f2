"""Limits of what a migration may leave in an engine. docs/http-api.md lists them, and a test compares."""

from __future__ import annotations

GROWTH_TOKENS = 512  # that every running sample keeps room for when slots are reserved
RESERVED_SECONDS = 180.0  # for which slots and files are kept for a sample that does not come
