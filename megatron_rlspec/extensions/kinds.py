"""The kinds of engines with those of all extensions, as `rollout.start.engine_kinds` returns them; for `commands/`."""

from megatron_rlspec.extensions.migration import builders

KINDS = builders.engine_kinds()
