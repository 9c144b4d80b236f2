"""The run's configuration: each section a class, each option with its default and its help.

`load` takes the defaults, a TOML file over them, and dotted command-line options over both. `rlspec train --help` is
made of the fields. A wrong option raises `ConfigError`: one line with the option, its value and what was expected.

The name of an option is a format: a run writes all of them to its config.json (`run/recording.py`), from which
`rlspec replay` reads them. If you add, rename or describe one, run `tools/configuration_page.py`; other projects' names
for it are in `other_names.toml`.
"""

from megatron_rlspec.config.algorithm import AlgorithmConfig
from megatron_rlspec.config.base import ConfigError
from megatron_rlspec.config.commands import AnswerConfig, ReplayConfig, SftConfig
from megatron_rlspec.config.data import DataConfig
from megatron_rlspec.config.drafter import DrafterConfig
from megatron_rlspec.config.load import load, load_replay, options
from megatron_rlspec.config.log import LogConfig
from megatron_rlspec.config.machine import ParallelConfig, PlacementConfig, PushConfig
from megatron_rlspec.config.model import ModelConfig
from megatron_rlspec.config.reward import RewardConfig
from megatron_rlspec.config.rollout import RolloutConfig
from megatron_rlspec.config.run import Command, Config
from megatron_rlspec.config.spec import SpecSection
from megatron_rlspec.config.tail import TailConfig
from megatron_rlspec.config.training import HealthConfig, OptimizerConfig, TrainConfig
