"""Limits of what a client may send to an engine and leave in it. docs/http-api.md lists them, and a test compares."""

from __future__ import annotations

MEGABYTE = 1 << 20

# Bodies
JSON_BYTES = 8 * MEGABYTE  # of a command; a cost table has one or two
# of bodies that hold token ids, such as those of `generate` and `set_draft_vocabulary`
BATCH_BYTES = 64 * MEGABYTE
READING_BYTES = 256 * MEGABYTE  # of all JSON bodies that are being read
REQUEST_BYTES = 8 * MEGABYTE  # of one row of such a body
REQUESTS = 4096  # of one `generate`; rows of such a body
BODY_SILENT = 30.0  # seconds without a byte of a body
BODY_SECONDS = 60.0  # for a whole JSON body
BUCKET_SECONDS = 600.0  # for a whole bucket of weights
BUCKETS = 2  # that one update may send at the same time

# Weight updates
# seconds without a byte of the update's owner; then the update has ended unfinished
UPDATE_SILENT = 120.0
UPDATE_WAIT = 60.0  # seconds that `generate` waits for the end of an update
