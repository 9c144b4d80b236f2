"""The kinds of engines with those of all extensions: commands hand them to a run, as `rollout.start.engine_kinds()`."""

from megatron_rlspec.extensions.migration import builders

KINDS = builders.engine_kinds()
