"""The functions that slime calls by dotted path, on its train ranks. `rlspec slime` fills the paths in.

`init` runs in each train process before any model is built; `model_provider` builds the model. `init` wraps four
functions of `slime.backends.megatron_utils.model`: they load and save a checkpoint, make a micro-batch, train a step.
`push.py` wraps weight updates. Everything else of slime runs unchanged.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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

from megatron_rlspec.conversion import torch_dist
from megatron_rlspec.conversion.drafter_files import SLIME_FOLDER as FOLDER
from megatron_rlspec.integrations.slime import state as slime_state
from megatron_rlspec.integrations.slime.batch import drafter_fields, sample_weights, trained_tokens
from megatron_rlspec.integrations.slime.drafter import Options, SlimeDrafter, SlimeMTP
from megatron_rlspec.integrations.slime.eagle3 import SlimeEagle3
from megatron_rlspec.integrations.slime.refusals import FLOAT16, HIDDEN, outside, split_experts
from megatron_rlspec.integrations.slime.seeds import seed
from megatron_rlspec.models.families import FAMILIES
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.train import checkpoint
from megatron_rlspec.train.optimizer import Learner

logger = logging.getLogger(__name__)
_drafter: SlimeDrafter | None = None
_prediction: Prediction | None = None  # of all steps so far on this rollout's samples


def init(args: Namespace) -> None:
    """Install our wrappers (`--custom-megatron-init-path`), after the user's own `args.rlspec_inner_init_path`."""
    if inner := getattr(args, "rlspec_inner_init_path", None):
        load_function(inner)(args)
    refuse(args)
    slime_model.load_checkpoint = _after(slime_model.load_checkpoint, _thaw)
    slime_model.save_checkpoint = _after(slime_model.save_checkpoint, _save)
    slime_provider.freeze_model_params = _after(slime_provider.freeze_model_params, _freeze_drafter)
    slime_model.get_batch = _with_fields(slime_model.get_batch)
    slime_model.train_one_step = _around_step(slime_model.train_one_step)
    # then nothing is pushed, and SGLang, which updates need, may be missing
    if not args.debug_train_only:
        from megatron_rlspec.integrations.slime import push as slime_push

        slime_push.wrap(args, _beside if Options.from_args(args).kind == "eagle3" else None)


def refuse(args: Namespace) -> None:
    """Raise ValueError, in one line, for flags under which the drafter would be trained wrongly."""
    options = Options.from_args(args)
    if options.kind == "eagle3":
        if problem := outside(
            args.mtp_num_layers, args.pipeline_model_parallel_size, args.update_weight_mode
        ):
            raise ValueError(problem)
    elif not args.enable_mtp_training:
        raise ValueError(
            "--enable-mtp-training is not set: there is no drafter to train; run slime without rlspec"
        )
    elif args.mtp_num_layers != 1:
        raise ValueError(
            f"--mtp-num-layers {args.mtp_num_layers}, but rlspec repeats one layer: set 1"
        )
    if args.fp16:
        raise ValueError(FLOAT16)
    sizes = (
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size,
        args.tensor_model_parallel_size,
    )
    if args.num_experts and (problem := split_experts(*sizes)):
        raise ValueError(problem)
    if (args.virtual_pipeline_model_parallel_size or 1) > 1:
        raise ValueError("virtual pipeline stages are not supported with a drafter; set none")


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> Any:
    """Build slime's model, and the drafter around its MTP layers or beside it (`--custom-model-provider-path`)."""
    global _drafter
    args = get_args()
    inner = Namespace(
        **{
            **vars(args),
            "custom_model_provider_path": getattr(args, "rlspec_inner_provider_path", None),
        }
    )
    build = slime_provider._get_model_provider_func(inner, "actor")
    accepted = inspect.signature(build).parameters
    stage = {"vp_stage": vp_stage} if "vp_stage" in accepted else {}
    model = build(pre_process=pre_process, post_process=post_process, **stage)
    options = _options(args)
    if options.kind == "eagle3":
        _drafter = SlimeEagle3(model, options, args)
    elif getattr(model, "mtp_process", False):
        _drafter = SlimeMTP(model, options)
    elif post_process:
        raise ValueError(f"{type(model).__name__} {HIDDEN}")
    return model


def _freeze_drafter(done: Any, *_: Any, **__: Any) -> Any:
    """Freeze the MTP layers again: `--only-train-params-name-list` thaws parameters by their names."""
    if isinstance(_drafter, SlimeMTP):
        for parameter in _drafter.model.mtp.parameters():
            parameter.requires_grad_(False)
    return done


def _beside() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a drafter that is no part of slime's model, on every rank."""
    assert isinstance(_drafter, SlimeEagle3)
    return _drafter.tensors()


def _options(args: Namespace) -> Options:
    """Return the given options; unless given, `zero_first_embedding` follows from the model's family."""
    options = Options.from_args(args)
    if hasattr(args, "rlspec_zero_first_embedding"):
        return options
    architectures = json.loads(Path(args.hf_checkpoint, "config.json").read_text()).get(
        "architectures"
    ) or [""]
    facts = FAMILIES.get(architectures[0])
    return replace(options, zero_first_embedding=facts is not None and facts.zero_first_embedding)


def _thaw(loaded: Any, model: Sequence[Any], *_: Any, **__: Any) -> Any:
    if getattr(model[0], "role", "actor") != "actor":
        return loaded
    if _drafter is not None:
        _drafter.thaw()
    args = get_args()
    if getattr(args, "load", None):
        # Megatron's loader does not
        torch_dist.verify_files(args.load, dist.get_rank(), dist.get_world_size())
    outside = isinstance(_drafter, SlimeEagle3)  # its weights are nowhere else
    directory = (
        None if args.finetune else Path(slime_model.get_load_checkpoint_path_by_args(args), FOLDER)
    )
    # above 0 the run goes on
    if dist.get_rank() == 0 and not getattr(args, "update_weight_start_version", 0):
        slime_state.hand_on(directory, slime_state.folder(args))
    if directory is None or (args.no_load_optim and not outside):
        return loaded
    if (directory / checkpoint.LAYOUT).exists():
        _load(directory, args)
    elif outside and any(Path(args.load).glob(f"iter_*/{FOLDER}/{checkpoint.LAYOUT}")):
        remedy = "give --ckpt-step of an iteration that has it, or move theirs away to begin from --drafter.path"
        raise ValueError(f"{directory} is missing, and the drafter with it; {remedy}")
    elif dist.get_rank() == 0:
        begins = (
            "the drafter begins from --drafter.path"
            if outside
            else "the drafter's moments begin anew"
        )
        logger.warning("rlspec: no %s: %s", directory, begins)
    return loaded


def _load(directory: Path, args: Namespace) -> None:
    """Load what `_save` wrote; collective. A drafter that was frozen, or is from now on, has no moments there."""
    learners = _learners() if any(directory.glob("drafter-*")) else {}
    checkpoint.load(directory, learners, _layout(args), generators=False)
    if isinstance(_drafter, SlimeEagle3) and not learners:
        _drafter.read(directory)
    if _drafter is not None:
        _drafter.keep()


def _save(saved: Any, iteration: int, model: Sequence[Any], *_: Any, **__: Any) -> Any:
    """Save the drafter's moments and float32 weights into the checkpoint's folder; collective."""
    args = get_args()
    if getattr(model[0], "role", "actor") != "actor":
        return saved
    outside = isinstance(_drafter, SlimeEagle3)  # slime itself saves the MTP layers' weights
    directory = Path(get_checkpoint_name(args.save, iteration, return_base_dir=True), FOLDER)
    if outside or not args.no_save_optim:
        checkpoint.save(directory, _learners(), _layout(args), generators=False)
    if isinstance(_drafter, SlimeEagle3):
        _drafter.write(directory, dist.get_rank() == 0)
    if dist.get_rank() == 0:
        slime_state.hand_on(slime_state.folder(args), directory)
    return saved


def _learners() -> dict[str, Learner]:
    learner = _drafter.learner if _drafter is not None else None
    return {"drafter": learner} if learner is not None else {}


def _layout(args: Namespace) -> dict[str, Any]:
    """Return the settings in which a resumed run must equal the saved one.

    The drafter is on the last pipeline stage, split over tensor-parallel ranks, its experts over expert-parallel ranks.
    """
    return (_drafter.layout() if _drafter is not None else {}) | {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "expert": args.expert_model_parallel_size,
        "expert_tensor": args.expert_tensor_parallel_size,
        "dtype": str(args.params_dtype).removeprefix("torch."),
    }


def _with_fields(get_batch: Callable) -> Callable:
    @functools.wraps(get_batch)
    def wrapped(
        data_iterator: Any,
        keys: Sequence[str],
        pad_multiplier: int = 128,
        allgather_cp: bool = False,
    ) -> Any:
        learns = (
            _drafter is not None and _drafter.ready and _drafter.due and torch.is_grad_enabled()
        )
        samples = data_iterator.micro_batch_indices[data_iterator.offset] if learns else []
        batch = get_batch(data_iterator, keys, pad_multiplier, allgather_cp)
        if _drafter is not None and learns:
            weights = _weights(data_iterator.rollout_data)
            seeds = _seeds(data_iterator.rollout_data)
            _drafter.fields = drafter_fields(
                batch,
                _drafter.options.depth,
                ps.get_context_parallel_rank(),
                ps.get_context_parallel_world_size(),
                "contiguous" if allgather_cp else "zigzag",
                [weights[i] for i in samples],
                seeds and [seeds[i] for i in samples],
                _drafter.denominators,
            )
        return batch

    return wrapped


def _around_step(train_one_step: Callable) -> Callable:
    signature = inspect.signature(train_one_step)

    @functools.wraps(train_one_step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if _drafter is None or not _drafter.ready:
            done = train_one_step(*args, **kwargs)
            # a critic, whose MTP loss slime logs, too
            if _drafter is not None and get_args().enable_mtp_training:
                _fill_tracker({}, given["num_microbatches"])
            return done
        iterator = given["data_iterator"][0]
        micro_batches = given["num_microbatches"]
        ahead = iterator.micro_batch_indices[iterator.offset : iterator.offset + micro_batches]
        samples = [i for indices in ahead for i in indices]
        weights = _weights(iterator.rollout_data)
        _drafter.begin(
            trained_tokens(iterator.rollout_data, samples, _drafter.options.depth, weights)
        )
        losses, grad_norm = train_one_step(*args, **kwargs)
        metrics = _drafter.step()
        if get_args().enable_mtp_training:
            _fill_tracker(metrics, micro_batches)
        _write_prediction(given)
        return {**losses, **metrics}, grad_norm

    return wrapped


def _weights(rollout_data: Mapping[str, Any]) -> list[float]:
    assert _drafter is not None
    return sample_weights(rollout_data, _drafter.options.reward_weight)


def _seeds(rollout_data: Mapping[str, Any]) -> list[int] | None:
    """Return the seeds of all samples of this rank's rollout data; None if engines draft without their noise."""
    assert _drafter is not None
    indices = rollout_data.get("sample_indices")
    if not _drafter.coupled or indices is None or any(index is None for index in indices):
        return None
    return [seed(get_args().rollout_seed, int(index)) for index in indices]


def _write_prediction(step: Mapping[str, Any]) -> None:
    """Write the acceptance predicted by the steps so far on this rollout to the shared folder."""
    global _prediction
    assert _drafter is not None
    _prediction = slime_state.added(_drafter.predicted, _prediction if step["step_id"] else None)
    if _prediction is None:
        return
    if (
        ps.get_data_parallel_rank(with_context_parallel=True) == 0
        and ps.get_tensor_model_parallel_rank() == 0
    ):
        slime_state.write_prediction(
            slime_state.folder(step["args"]), step["rollout_id"], _prediction
        )


def _fill_tracker(metrics: dict[str, float], micro_batches: int) -> None:
    """Fill Megatron's MTP loss tracker, from which slime logs values divided by the number of micro-batches."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    assert _drafter is not None
    losses = [metrics.get(f"drafter_loss_{d}", 0.0) for d in range(1, _drafter.options.depth + 1)]
    MTPLossLoggingHelper.tracker.update(
        values=torch.tensor(losses) * micro_batches, reduce_group=None, avg_group=None
    )


def _after(function: Callable, then: Callable) -> Callable:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return then(function(*args, **kwargs), *args, **kwargs)

    return wrapped
