"""A machine without GPUs, for slime: Python imports this module at its start wherever this folder is on PYTHONPATH.

slime's run is many processes, which Ray and SGLang start: none of them can be handed anything but an environment. What
each needs is done when it imports the package concerned, and nothing before.
"""

import importlib.machinery
import os
import re
import sys
import types


def _before_sglang():
    from megatron_rlspec.rollout.sglang.cpu import stand_ins as cpu_stand_ins

    cpu_stand_ins.install()


def _accelerator(module):
    """slime has backends for CUDA and MUSA; its contract is public, and `CpuAccelerator` fulfils it."""
    from slime_cpu import CpuAccelerator

    module.set_accelerator(CpuAccelerator())


def _megatron(module):
    import slime_cpu

    slime_cpu.install()


def _numpy_one(module):
    """slime's `init` refuses numpy 2, which the Megatron of its pin runs with as far as it is used here."""
    import numpy

    module.np = types.SimpleNamespace(__version__="1.26", random=numpy.random)


def _no_pinned_memory(module):
    import torch

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty_like(self, x, pin_memory=False, **kwargs):
            return torch.empty_like(x, **kwargs)

    module.torch = Torch()


def _fused_name(name):
    """Layer norms are parameters of the linear layer that follows in Transformer Engine, which slime's names assume."""
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    return name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")


def _with_fused_names(convert):
    return lambda args, name, parameter: convert(args, _fused_name(name), parameter)


def _export_names(module):
    for function in ("convert_mimo_to_hf", "convert_qwen2_to_hf", "convert_glm4moe_to_hf"):
        setattr(module, function, _with_fused_names(getattr(module, function)))


def _import_names(module):
    for family in ("mimo", "qwen2", "glm4_moe"):
        load = module._LOADERS[family]
        module._LOADERS[family] = lambda name, reader, config, load=load: load(_fused_name(name), reader, config)


def _expert_names(module):
    """slime knows experts by the names of Transformer Engine's grouped layers, with their numbers among all ranks'."""
    named = module._named_params_and_buffers_global

    def renamed(args, model):
        held = (args.num_experts or 0) // module.mpu.get_expert_model_parallel_world_size()
        first = held * module.mpu.get_expert_model_parallel_rank()
        for name, tensor in named(args, model):
            if found := re.fullmatch(r"(.+\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", name):
                name = f"{found[1]}.{found[3]}.weight{first + int(found[2])}"
            yield name, tensor

    module._named_params_and_buffers_global = renamed


def _newer_collectives(module):
    """Megatron takes `all_gather_into_tensor` before slime wraps it; torch 2.13 then calls newer methods."""

    def of_group(name):
        return lambda self, *given, **named: getattr(self.group, name)(*given, **named)

    for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
        setattr(module.ReloadableProcessGroup, name, of_group(name))


def _new_moments(module):
    import slime_cpu

    module.load_checkpoint = slime_cpu.with_new_moments(module.load_checkpoint)


def _engine(module):
    """As `rlspec serve` prepares its engine on a CPU, and starts it faster."""
    from megatron_rlspec.rollout.sglang.http import plugin, serve
    from megatron_rlspec.rollout.sglang.scheduler import versions

    versions.installed().prepare_cpu()
    serve._fork_children()
    plugin._register_models(serve._architectures(os.environ["RLSPEC_CPU_MODEL"]))


BEFORE = {"sglang": _before_sglang, "transformers": _before_sglang}  # both look for torchvision, once
AFTER = {
    "slime.utils.accelerator": _accelerator,
    "slime.utils.arguments": _megatron,
    "slime.backends.megatron_utils.actor": _megatron,
    "slime.backends.megatron_utils.initialize": _numpy_one,
    "slime.utils.tensor_backper": _no_pinned_memory,
    "slime.backends.megatron_utils.megatron_to_hf": _export_names,
    "slime.backends.megatron_utils.hf_to_megatron": _import_names,
    "slime.backends.megatron_utils.update_weight.common": _expert_names,
    "slime.backends.megatron_utils.checkpoint": _new_moments,
    "slime.utils.reloadable_process_group": _newer_collectives,
    "sglang.srt.entrypoints.http_server": _engine,
}


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name in BEFORE:
            BEFORE.pop(name)()
        if name not in AFTER:
            return None
        then = AFTER.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
