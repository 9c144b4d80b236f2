"""The kinds of engines with those of all extensions: what the commands hand to a run as `rollout.start.engines()`."""

from megatron_rlspec.extensions.migration import builders

KINDS = builders.engines()
