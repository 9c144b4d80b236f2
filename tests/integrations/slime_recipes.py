"""Check whether slime, Megatron and SGLang accept arguments on Hopper: `python slime_recipes.py JOBS`, without a GPU.

JOBS is JSON, {name: [arguments, environment]}. Prints JSON, {name: answer}. Each answer is {"error": line}, or the
settings that slime's train ranks and engines would have. torch reports eight GPUs of compute capability 9.0. Apart from
that, only compiled packages are replaced, and none of their functions is called. Every job has a process of its own,
forked after the imports.
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
from types import SimpleNamespace

import torch

GIB = 1 << 30
HOPPER = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB, multi_processor_count=132, uuid="0"
)


def as_on_hopper():
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (HOPPER.major, HOPPER.minor)
    torch.cuda.get_device_properties = lambda *_: HOPPER
    torch.cuda.get_device_name = lambda *_: HOPPER.name
    torch.cuda.mem_get_info = lambda *_: (79 * GIB, 80 * GIB)


as_on_hopper()
from megatron_rlspec.rollout.sglang.cpu import stand_ins  # noqa: E402

stand_ins.install()
if importlib.util.find_spec("flashinfer") is None:  # SGLang before 0.5.23 imports it wherever there is CUDA
    sys.meta_path.append(stand_ins._Finder("flashinfer", {}))
for name in stand_ins.ENVIRONMENT:
    del os.environ[name]
os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"  # of a package that is not installed
os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)

import slime.backends.megatron_utils.arguments  # noqa: E402, F401  imported before the fork
from sglang.srt.entrypoints import engine  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from slime.backends.sglang_utils.sglang_engine import _compute_server_args  # noqa: E402
from slime.ray import actor_group  # noqa: E402
from slime.ray.rollout import _resolve_sglang_config  # noqa: E402
from slime.utils.arguments import parse_args  # noqa: E402


class Recorded(Exception):
    """The options of an actor class that would have been made."""


def ranks_environment(args):
    """Return the variables that slime adds for its train ranks, by its own code up to Ray's call."""

    def remote(**options):
        raise Recorded(options["runtime_env"]["env_vars"])

    original = actor_group.ray.remote
    actor_group.ray.remote = remote
    nowhere = (None, [], [])
    group = actor_group.RayTrainGroup(args, args.actor_num_nodes, 8, nowhere, actor_cls=object)
    try:
        group._allocate_gpus_for_actor((object(), [], []), 1)
    except Recorded as recorded:
        return recorded.args[0]
    finally:
        actor_group.ray.remote = original


def engines(args):
    """Return SGLang's arguments for each group of servers, as SGLang resolves and checks them, and the environment."""
    for model in _resolve_sglang_config(args).models:
        model.resolve(args)
        for group in model.server_groups:
            given, _ = _compute_server_args(
                args,
                0,
                "127.0.0.1:7000",
                7100,
                "127.0.0.1",
                7200,
                worker_type=group.worker_type,
                disaggregation_bootstrap_port=7300,
                base_gpu_id=0,
                sglang_overrides=group.overrides,
                num_gpus_per_engine=group.num_gpus_per_engine,
            )
            server = ServerArgs(**given)
            if hasattr(server, "resolve_once"):  # before 0.5.23 the constructor resolves
                server.resolve_once()
            server.check_server_args()
            yield group.worker_type, resolved(server), engine_environment(server)


def resolved(server):
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server
    return resolving_view(server)


def engine_environment(server):
    """Return the variables that matter here, after SGLang's own function has set them for an engine's process."""
    before = dict(os.environ)
    with contextlib.suppress(Exception):  # it ends with checks of packages that are not installed
        engine._set_envs_and_config(server)
    found = {name: os.environ.get(name) for name in ("NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS")}
    os.environ.clear()
    os.environ.update(before)
    return found


def answer(arguments, environment):
    os.environ.update(environment)
    sys.argv = ["train.py", *arguments]
    args = parse_args()
    ranks = {**environment, **ranks_environment(args)}
    return {
        "mtp": args.mtp_num_layers,
        "hooks": [args.custom_megatron_init_path, args.custom_model_provider_path],
        "ranks": {name: ranks.get(name) for name in ("NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS")},
        "engines": [
            {
                "worker": worker,
                "algorithm": server.speculative_algorithm,
                "adaptive": server.speculative_adaptive,
                "steps": server.speculative_num_steps,
                "environment": set_there,
            }
            for worker, server, set_there in engines(args)
        ],
    }


def answered(arguments, environment):
    """Return the answer, or the last line of the refusal."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            return answer(arguments, environment)
    except SystemExit:
        return {"error": errors.getvalue().strip().splitlines()[-1]}
    except (AssertionError, ValueError) as error:  # how Megatron and SGLang refuse arguments; any other is a failure
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    answers = {}
    for name, (arguments, environment) in json.load(open(sys.argv[1])).items():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(writing, "w") as out:
                json.dump(answered(arguments, environment), out)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            text = told.read()
        os.waitpid(child, 0)
        if not text:
            raise RuntimeError(f"{name}: the process ended without an answer")
        answers[name] = json.loads(text)
    print("\n" + json.dumps(answers))


main()
