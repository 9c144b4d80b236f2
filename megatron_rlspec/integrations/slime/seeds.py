"""Seeds of slime's samples, for the position-keyed verifier: slime gives none but under deterministic inference.

A seed is made from `--rollout-seed` and the sample's index, which slime counts over the whole run and keeps in its
checkpoints. So a resumed run has the same seeds, and a sample that was aborted goes on with its own. The train ranks
make them again to predict the acceptance of coupled drafts.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_rlspec.integrations.slime.options import Options
from megatron_rlspec.noise import seed_of

NAME = "sampling_seed"  # in SGLang's sampling parameters


def sampling_seed(rollout_seed: int, index: int, evaluation: bool = False) -> int:
    """Return the sampling seed, below 2³¹, of a sample; those of evaluations are others."""
    return seed_of(rollout_seed, index, int(evaluation))


def seeded(generate: Callable) -> Callable:
    """Wrap slime's `generate_and_rm`: the sampling parameters get the seed of the sample, unless they have one.

    The engine chooses a seed for a sample without an index.
    """

    @functools.wraps(generate)
    async def wrapped(
        args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Any:
        keyed = Options.from_args(args).verifier == "position_keyed"
        index = getattr(sample, "index", None)  # a list of samples has none
        if keyed and index is not None and NAME not in sampling_params:
            seed = sampling_seed(args.rollout_seed, index, evaluation)
            sampling_params = {**sampling_params, NAME: seed}
        return await generate(args, sample, sampling_params, evaluation=evaluation)

    return wrapped
