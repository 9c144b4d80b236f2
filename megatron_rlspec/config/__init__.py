"""The run's configuration: one file a section, each option with its default and its help.

`load` takes the defaults, a TOML file over them, and dotted command-line options over both. `rlspec train --help` is
made of the fields. A wrong option raises `ConfigError`: one line with the option, its value and what was expected.
"""

from megatron_rlspec.config.algorithm import AlgorithmConfig
from megatron_rlspec.config.answer import AnswerConfig
from megatron_rlspec.config.base import ConfigError
from megatron_rlspec.config.data import DataConfig
from megatron_rlspec.config.drafter import DrafterConfig
from megatron_rlspec.config.health import HealthConfig
from megatron_rlspec.config.load import load, load_replay, options
from megatron_rlspec.config.log import LogConfig
from megatron_rlspec.config.model import ModelConfig
from megatron_rlspec.config.optimizer import OptimizerConfig
from megatron_rlspec.config.parallel import ParallelConfig
from megatron_rlspec.config.placement import PlacementConfig
from megatron_rlspec.config.push import PushConfig
from megatron_rlspec.config.replay import ReplayConfig
from megatron_rlspec.config.reward import RewardConfig
from megatron_rlspec.config.rollout import RolloutConfig
from megatron_rlspec.config.run import Command, Config
from megatron_rlspec.config.sft import SftConfig
from megatron_rlspec.config.spec import SpecSection
from megatron_rlspec.config.tail import TailConfig
from megatron_rlspec.config.train import TrainConfig
