"""The functions that slime calls by dotted path, on its train ranks. `rlspec slime` fills the paths in.

`init` runs in each train process before any model is built; `model_provider` builds the model. `init` wraps four
functions of `slime.backends.megatron_utils.model`: they load and save a checkpoint, make a micro-batch, train a step.
`push.py` wraps weight updates. Everything else of slime runs unchanged. `plan.FUNCTIONS` has the dotted paths.

With an MTP drafter, the ranks of the last pipeline stage have a drafter object (`_drafter`), and the others None. With
an EAGLE-3 drafter every rank has one. All functions here run on all train ranks in the same order, since most of them
are collective.
"""

from __future__ import annotations

import functools
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.training.checkpointing import get_checkpoint_name
from megatron.training.global_vars import get_args
from slime.backends.megatron_utils import model as slime_model
from slime.backends.megatron_utils import model_provider as slime_provider
from slime.utils.misc import load_function

from megatron_rlspec.integrations.slime import state as slime_state
from megatron_rlspec.integrations.slime.batch import micro_batch, trained_tokens
from megatron_rlspec.integrations.slime.drafter import SlimeMTP
from megatron_rlspec.integrations.slime.eagle3 import SlimeEagle3
from megatron_rlspec.integrations.slime.engines import hf_config_of
from megatron_rlspec.integrations.slime.options import Options
from megatron_rlspec.integrations.slime.refusals import HIDDEN_MTP
from megatron_rlspec.integrations.slime.seeds import sampling_seed
from megatron_rlspec.speculation.acceptance import Prediction, sum_of_predictions
from megatron_rlspec.train import checkpoint

logger = logging.getLogger(__name__)
FOLDER = "rlspec-drafter"  # within an iteration's folder of slime's checkpoints

_drafter: SlimeMTP | SlimeEagle3 | None = None  # of this rank, once the model is built
_prediction: Prediction | None = None  # sum over all steps so far on this rollout's samples


def init(args: Namespace) -> None:
    """Install our wrappers (`--custom-megatron-init-path`), after the user's own function.

    Call it once in a process: a second call would wrap the wrappers.
    """
    options = Options.from_args(args)
    # No MTP loss of slime: the drafter has a loss and a step of its own.
    args.enable_mtp_training = False
    # Before ours: functions of slime that it replaces are then wrapped below.
    if user_init := options.user_functions.get("--custom-megatron-init-path"):
        load_function(user_init)(args)
    slime_model.load_checkpoint = _after(slime_model.load_checkpoint, _thaw)
    slime_model.save_checkpoint = _after(slime_model.save_checkpoint, _save)
    slime_model.get_batch = _with_fields(slime_model.get_batch)
    slime_model.train_one_step = _around_step(slime_model.train_one_step)
    # With --debug-train-only nothing is pushed, and SGLang, which the import needs, may be missing.
    if not args.debug_train_only:
        from megatron_rlspec.integrations.slime import push as slime_push

        slime_push.wrap(args, _eagle3_tensors if options.drafter.kind == "eagle3" else None)


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> Any:
    """Build slime's model, and the drafter around its MTP layers or beside it (`--custom-model-provider-path`).

    Raises ValueError for a model on the last pipeline stage whose MTP layer cannot be found.
    """
    global _drafter
    args = get_args()
    options = Options.from_args(args)
    user_provider = options.user_functions.get("--custom-model-provider-path")
    # With our own path in it, slime's function would call this one again.
    without_ours = Namespace(**{**vars(args), "custom_model_provider_path": user_provider})
    build = slime_provider._get_model_provider_func(without_ours, "actor")
    model = build(pre_process=pre_process, post_process=post_process)
    if options.drafter.kind == "eagle3":
        _drafter = SlimeEagle3(model, options, args)
    elif getattr(model, "mtp_process", False):
        _drafter = SlimeMTP(model, options, args, hf_config_of(args.hf_checkpoint))
    elif post_process:  # the last pipeline stage must have the MTP layer; the others have none
        raise ValueError(f"{type(model).__name__} {HIDDEN_MTP}")
    return model


def _eagle3_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full tensors of the EAGLE-3 drafter, on every rank; collective. `push.py` calls it in every push."""
    assert isinstance(_drafter, SlimeEagle3)
    return _drafter.tensors()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _thaw(loaded: Any, model: Sequence[Any], *_: Any, **__: Any) -> Any:
    """Make the drafter ready once slime has loaded a checkpoint, and load what `_save` wrote; collective.

    Returns `loaded`, the result of slime's `load_checkpoint`, whose other arguments follow.
    """
    if getattr(model[0], "role", "actor") != "actor":  # slime loads a critic by the same function
        return loaded
    if _drafter is not None:
        _drafter.make_ready()
    args = get_args()
    directory = None  # with --finetune a run begins anew from a checkpoint's weights
    if not args.finetune:
        directory = Path(slime_model.get_load_checkpoint_path_by_args(args), FOLDER)
    if dist.get_rank() == 0:
        slime_state.hand_on(directory, Options.from_args(args).folder)
    if directory is not None:
        _load_drafter(directory, args)
    return loaded


def _load_drafter(directory: Path, args: Namespace) -> None:
    """Load what `_save` wrote to `directory`; collective. Without it, the drafter goes on with what it has.

    Raises ValueError if only other iterations have an EAGLE-3 drafter: going on would lose what it learnt.
    """
    is_eagle3 = isinstance(_drafter, SlimeEagle3)  # its weights are nowhere else
    if args.no_load_optim and not is_eagle3:
        return
    if not (directory / checkpoint.LAYOUT).exists():
        if is_eagle3 and any(Path(args.load).glob(f"iter_*/{FOLDER}/{checkpoint.LAYOUT}")):
            raise ValueError(
                f"{directory} is missing, and the drafter with it; give --ckpt-step of an iteration that has it, or "
                "move theirs away to begin from --drafter.path"
            )
        consequence = "the drafter begins from --drafter.path"
        if not is_eagle3:
            consequence = "the drafter's moments begin anew"
        if dist.get_rank() == 0:
            logger.warning("rlspec: no %s: %s", directory, consequence)
        return
    # A drafter that was frozen, or is from now on, has no moments there.
    learners = {}
    if _drafter is not None and any(directory.glob("drafter-*")):
        learners = _drafter.learners
    checkpoint.load(directory, learners, _layout(args), generators=False)
    if isinstance(_drafter, SlimeEagle3):
        if learners:
            _drafter.copy_weights()  # pushes read the copy
        else:
            _drafter.read(directory)  # also copies


def _save(saved: Any, iteration: int, model: Sequence[Any], *_: Any, **__: Any) -> Any:
    """Save the drafter's moments and float32 weights into the checkpoint's folder; collective.

    Runs after slime's `save_checkpoint`, whose result is `saved` and whose arguments follow.
    """
    args = get_args()
    if getattr(model[0], "role", "actor") != "actor":
        return saved
    directory = Path(get_checkpoint_name(args.save, iteration, return_base_dir=True), FOLDER)
    # slime itself saves the weights of MTP layers, so under --no-save-optim nothing is left to save for them.
    if isinstance(_drafter, SlimeEagle3) or not args.no_save_optim:
        learners = {} if _drafter is None else _drafter.learners
        checkpoint.save(directory, learners, _layout(args), generators=False)
    if isinstance(_drafter, SlimeEagle3):
        _drafter.write(directory, dist.get_rank() == 0)
    if dist.get_rank() == 0:
        slime_state.hand_on(Options.from_args(args).folder, directory)
    return saved


def _layout(args: Namespace) -> dict[str, Any]:
    """Return the settings in which a resumed run must equal the saved one; `train.checkpoint` compares them.

    The drafter is on the last pipeline stage, split over tensor-parallel ranks, its experts over expert-parallel ranks.
    """
    layout = {} if _drafter is None else _drafter.layout()
    return layout | {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "expert": args.expert_model_parallel_size,
        "expert_tensor": args.expert_tensor_parallel_size,
        "dtype": str(args.params_dtype).removeprefix("torch."),
    }


# ---- train steps ----------------------------------------------------------------------------------------------------


def _with_fields(get_batch: Callable) -> Callable:
    """Return slime's `get_batch`, which also gives the drafter what it learns from in the forward pass that follows.

    That pass must follow: the drafter takes what was added in the order of the passes (`DrafterTraining.add`).
    """

    @functools.wraps(get_batch)
    def wrapped(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = _drafter
        # Without gradients slime computes log-probs: the drafter learns from training passes only.
        if drafter is None or not (drafter.ready and torch.is_grad_enabled()):
            return get_batch(data_iterator, *args, **kwargs)
        # Before `get_batch` advances the offset.
        samples = data_iterator.micro_batch_indices[data_iterator.offset]
        batch = get_batch(data_iterator, *args, **kwargs)
        seeds = _seeds(data_iterator.rollout_data)
        sequences = micro_batch(batch, [seeds[i] for i in samples if seeds])
        drafter.add(sequences)
        return batch

    return wrapped


def _around_step(train_one_step: Callable) -> Callable:
    """Return slime's `train_one_step`, after which the drafter takes its step. Its metrics join slime's losses."""
    signature = inspect.signature(train_one_step)

    @functools.wraps(train_one_step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _drafter is None or not _drafter.ready:  # a critic's drafter is never ready (`_thaw`)
            return train_one_step(*args, **kwargs)
        step = signature.bind(*args, **kwargs).arguments
        iterator = step["data_iterator"][0]  # one: virtual pipeline stages are refused
        # The samples of the whole step: the drafter's denominators must be known before its first backward.
        samples: list[int] = []
        for indices in iterator.micro_batch_indices[iterator.offset :][: step["num_microbatches"]]:
            samples += indices
        depth = _drafter.settings.depth
        _drafter.begin_step(trained_tokens(iterator.rollout_data, samples, depth))
        losses, grad_norm = train_one_step(*args, **kwargs)
        metrics = _drafter.end_step()
        _write_prediction(step)
        return {**losses, **metrics}, grad_norm

    return wrapped


def _seeds(rollout_data: Mapping[str, Any]) -> list[int]:
    """Return the seeds of all samples of this rank's rollout data, for the prediction of coupled drafts.

    [] if the engines' drafts are not coupled, or if samples have no index. `seeds.py` gave the engines the same seeds.
    """
    assert _drafter is not None
    indices = rollout_data.get("sample_indices")
    if not _drafter.objective.coupled or indices is None or None in indices:
        return []
    return [sampling_seed(get_args().rollout_seed, int(index)) for index in indices]


def _write_prediction(step: Mapping[str, Any]) -> None:
    """Write the acceptance predicted by the steps so far on this rollout to the shared folder, for `rollout.py`.

    step  the arguments of slime's `train_one_step`, by name
    """
    global _prediction
    assert _drafter is not None
    before = _prediction if step["step_id"] else None  # step 0 begins a new rollout's samples
    _prediction = sum_of_predictions(before, _drafter.predicted)
    # One rank of the last pipeline stage writes: the other stages have no prediction, and its ranks all have the same.
    first = ps.get_data_parallel_rank(with_context_parallel=True) == 0
    first = first and ps.get_tensor_model_parallel_rank() == 0
    if _prediction is not None and first:
        folder = Options.from_args(step["args"]).folder
        slime_state.write_prediction(folder, step["rollout_id"], _prediction)


def _after(function: Callable, then: Callable) -> Callable:
    """Return a function that calls `function`, and then `then` with its result and the same arguments.

    It returns what `then` returns.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return then(function(*args, **kwargs), *args, **kwargs)

    return wrapped
