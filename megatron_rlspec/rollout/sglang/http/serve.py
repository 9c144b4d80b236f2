"""`rlspec serve`: SGLang's own HTTP server with our plugin, our routes and, without a GPU, our CPU operators.

Run it as a process of its own: SGLang takes over the main thread, the environment and the signal handlers. Options that
are not listed go to SGLang. `main` runs these stages in order: check the options (`checks.py`), compute SGLang's
command line (`arguments_for`), set the environment, and start SGLang's server in this process (`_launch`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rlspec import texts
from megatron_rlspec.arguments import Parser, integer
from megatron_rlspec.config import ConfigError, RolloutConfig, SpecSection
from megatron_rlspec.config.base import MOST_TOKENS
from megatron_rlspec.config.rollout import MOST_SAMPLES
from megatron_rlspec.config.spec import MOST_DRAFTS
from megatron_rlspec.engine import EngineError
from megatron_rlspec.host.loopback import is_loopback
from megatron_rlspec.models.config import sharpness_of
from megatron_rlspec.models.directory import ends_of_text
from megatron_rlspec.models.families import FAMILIES
from megatron_rlspec.rollout.sglang import scratch
from megatron_rlspec.rollout.sglang.client.connection import RefusedError
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.description import in_force
from megatron_rlspec.rollout.sglang.http import parents
from megatron_rlspec.rollout.sglang.http.checks import (
    check,
    dtype_of,
    installed_sglang,
)
from megatron_rlspec.rollout.sglang.http.launch_command import (
    PROJECTS,
    for_project,
    shell_commands,
)
from megatron_rlspec.rollout.sglang.settings import KEY, Settings, given_or_environment_key
from megatron_rlspec.speculation import graphs
from megatron_rlspec.speculation.graphs import chains
from megatron_rlspec.speculation.vocabulary import DraftVocabulary

# Set by torchrun and cluster launchers; SGLang would use them for its own process group.
_LAUNCHER_VARIABLES = {
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
}
# SGLang's options on a CPU, for every version; `versions.py` adds those of each version (`cpu_arguments`).
_CPU_ARGUMENTS = [
    "--disable-cuda-graph",
    "--grammar-backend=none",
    "--sleep-on-idle",  # An idle scheduler would otherwise spin on a core that the trainer needs.
]
# SGLang's options that are refused with drafts. `settings.why_refused` refuses the same in SGLang's own server:
# keep equal.
_REFUSED_WITH_DRAFTS = (
    "--enable-mixed-chunk",
    "--disaggregation-mode",
    "--speculative-use-rejection-sampling",
    "--enable-dp-attention",
    "--attn-dp-size",
    "--dp-size",
    "--data-parallel-size",
)
_CPU_TOKENS = 65536  # size of the KV cache in tokens on a CPU, by default
# For an engine that serves this machine only: its ranks then listen on no other interface.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def parser() -> Parser:
    """Return the parser of our own options. `parsed` leaves all others to SGLang; `checks.py` checks the values."""
    p = Parser(
        prog="rlspec serve",
        description=__doc__.split("\n")[0].partition(": ")[2],
        epilog="Any other option is SGLang's own, for example --tp 2 or --log-level info.",
        example="rlspec serve --model DIR --port 30000",
        first=("--port", "--host", "--spec", "--num-steps", "--draft-model"),
    )
    spec = SpecSection()  # has the defaults of these options
    p.add_argument(
        "--model", required=True, help="Hugging Face directory of the policy, with its MTP tensors"
    )
    p.add_argument(
        "--draft-model",
        default="",
        help="Hugging Face directory of an EAGLE-3 drafter for --model, which then needs no MTP tensors",
    )
    p.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any but loopback needs --api-key"
    )
    p.add_argument("--port", type=int, default=30000, help="port to listen on")
    p.add_argument(
        "--api-key", default="", help=f"key that every request must carry; better set in {KEY}"
    )
    p.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where there is one",
    )
    p.add_argument(
        "--dtype", default="auto", help="bfloat16, float16 or float32; auto: as config.json says"
    )
    p.add_argument(
        "--spec", choices=("adaptive", "fixed", "off"), default=spec.mode, help="use of the drafter"
    )
    p.add_argument(
        "--num-steps",
        type=integer(0, MOST_DRAFTS),
        default=spec.num_steps,
        help="drafter passes per round, at the start if adaptive",
    )
    p.add_argument(
        "--candidate-steps",
        default=",".join(map(str, spec.candidate_steps)),
        help="step counts for --spec adaptive",
    )
    p.add_argument(
        "--verifier",
        choices=("position_keyed", "target_only"),
        default=spec.verifier,
        help="position_keyed: text depends on seed, prompt and weights, not on what was drafted",
    )
    p.add_argument(
        "--drafts",
        choices=("coupled", "argmax"),
        default=spec.drafts,
        help="coupled: draft with the noise of --verifier position_keyed; argmax: draft the drafter's likeliest token",
    )
    p.add_argument(
        "--ragged",
        action="store_true",
        help="verify of each request the drafts worth it, and not the same number of all",
    )
    p.add_argument(
        "--max-running-requests",
        type=integer(1, MOST_SAMPLES),
        default=RolloutConfig().max_running_requests,
        help="decode batch limit",
    )
    p.add_argument(
        "--draft-vocabulary",
        type=integer(0, 1 << 24),
        default=0,
        help="tokens that drafts are chosen from: the size of SGLang's token map, which a run fills; 0: all tokens",
    )
    p.add_argument(
        "--print",
        action="store_true",
        help="print the shell commands that start SGLang's own server with the plugin on a GPU, and end",
    )
    p.add_argument(
        "--for",
        dest="project",
        choices=PROJECTS,
        help="print what this project needs to draft with the plugin in its engines, and end",
    )
    tokens = integer(0, MOST_TOKENS)
    p.add_argument(
        "--max-total-tokens",
        type=tokens,
        default=0,
        help="KV cache; 0: 65536 on a CPU, else what fits",
    )
    p.add_argument(
        "--stop-with-parent",
        type=integer(1, 1 << 22),
        metavar="PID",
        help="end when this process ends, which started the engine",
    )
    return p


def parsed(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return our options, and the words for SGLang. Ends the process for a mistyped option of ours.

    The API key is filled in from the environment if the command line has none.
    """
    command = parser()
    options, rest = command.parse_known_args(argv)
    # SGLang accepts abbreviated options. It would read a shortened option of ours as its own, past our checks.
    command.refuse_typos(rest)
    options.api_key = given_or_environment_key(options.api_key)
    return options, rest


def main(argv: list[str] | None = None) -> None:
    """Serve until the process ends, or print the command that would be run. Raises ConfigError."""
    options, rest = parsed(argv)
    if options.stop_with_parent:
        # Before anything slow: the launcher may be killed at any time, and would leave its directory behind.
        _scratch()
        parents.end_with(options.stop_with_parent)
    # `check` replaces the path by a local one.
    model_name = Path(options.model).name or options.model
    check(options, parser().get_default)
    for text in rest:
        if options.spec != "off" and text.startswith(_REFUSED_WITH_DRAFTS):
            raise ConfigError(
                f"{text}: not supported with drafts; remove it, or serve with --spec off"
            )
    printed = options.print or options.project
    device = _device_of_printed(options, rest) if printed else _device(options.device)
    installed_sglang()  # raises ConfigError if no SGLang fits, before anything is printed or loaded
    if options.dtype == "auto":
        options.dtype = dtype_of(options.model)
    arguments, settings, slots = arguments_for(options, device)
    if printed:
        print(_printed(options, [*arguments, *rest], settings, slots))
        return
    print(f"rlspec serve: loading {model_name} in {options.dtype}", flush=True)
    if options.draft_vocabulary and options.spec != "off":
        arguments.append(f"--speculative-token-map={_token_map(options, rest)}")
    if slots:
        adaptive = _scratch() / "adaptive.json"
        adaptive.write_text(json.dumps(slots))
        arguments.append(f"--speculative-adaptive-config={adaptive}")
    loopback = is_loopback(options.host) and not any(
        text.startswith(("--nnodes", "--dist-init-addr")) for text in rest
    )
    # From here to `_launch`: everything that SGLang and its processes read from the environment when they are imported.
    if loopback:
        for name, interface in _INTERFACES.items():
            os.environ.setdefault(name, interface)
    for name in list(os.environ):
        if name in _LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    settings = dataclasses.replace(
        settings,
        loopback=loopback,
        architectures=_architectures(options.model, options.draft_model),
    )
    # Read by `plugin.register` in every process of SGLang.
    os.environ.update(settings.to_environment())
    if settings.architectures:
        # SGLang then does not import its 250 model files; `plugin._register_models` says why.
        os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "concurrent")
    if device == "cpu":
        os.environ.update(installed_sglang().cpu_environment)
        _install_stand_ins()
    _launch(options, device, [*arguments, *rest])


def _printed(
    options: argparse.Namespace, arguments: list[str], settings: Settings, slots: dict[str, Any]
) -> str:
    """Return the text of --print or --for. `arguments` are all of SGLang's, the user's own included."""
    if options.project:
        return for_project(options.project, arguments, settings, slots)
    return shell_commands(arguments, settings, slots, has_key=bool(options.api_key))


def _device_of_printed(options: argparse.Namespace, rest: list[str]) -> str:
    """Return the device of a printed command: always "cuda", because this machine may not be the one that runs it.

    Raises ConfigError for options that a printed command cannot carry.
    """
    if options.device == "cpu":
        raise ConfigError("--print --device cpu: SGLang's own server needs a GPU for drafts")
    if options.draft_vocabulary:
        raise ConfigError("--print: SGLang's own server has no file for --draft-vocabulary")
    if rest and options.project:
        raise ConfigError(
            f"--for {options.project} prints the options of drafts only; give {rest[0]} to {options.project} itself"
        )
    return "cuda"


@cache
def _scratch() -> Path:
    """Return the directory of this engine's sockets and files. It is removed however the process ends.

    The first call forks (`scratch.remove_at_end`). `main` makes it early if a launcher started this process.
    """
    directory = scratch.current()  # made by `client/launcher.py`, if that started this process
    if directory is None:
        directory = scratch.make()
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    scratch.remove_at_end(directory)
    return directory


def arguments_for(
    options: argparse.Namespace, device: str
) -> tuple[list[str], Settings, dict[str, Any]]:
    """Return SGLang's command line, the plugin's settings, and the content of --speculative-adaptive-config.

    The last of these (`_slots`) is {} without drafts. Call it after `check`, with --dtype filled in. Raises ConfigError
    for step counts that cannot be. Writes nothing.
    """
    arguments = _engine_arguments(options, device)
    if options.spec == "off":
        return arguments, Settings(options.verifier), {}
    candidates = _candidates(options)
    # SGLang sizes its buffers by the startup value, so it may not be 0. It captures CUDA graphs of that step count at
    # every batch size, and the rule needs the smallest step count at every batch size anyway
    # (`graphs.largest_batches`).
    start = min(steps for steps in candidates if steps)
    arguments += _drafter_arguments(options, start)
    settings = Settings(
        options.verifier,
        options.num_steps if options.spec == "fixed" else None,
        off=0 in candidates,
        drafts=options.drafts,
        ragged=options.ragged,
        sharpness=sharpness_of(_hf_config(options.draft_model or options.model)),
    )
    return arguments, settings, _slots(options, candidates)


def _engine_arguments(options: argparse.Namespace, device: str) -> list[str]:
    """Return SGLang's options for plain decoding. Those of drafts are `_drafter_arguments`."""
    arguments = [
        f"--model-path={options.model}",
        f"--host={options.host}",
        f"--port={options.port}",
        f"--device={device}",
        f"--dtype={options.dtype}",
        f"--max-running-requests={options.max_running_requests}",
        # A number, which the client reads by int(); SGLang's own is "default".
        "--weight-version=0",
    ]
    total = options.max_total_tokens
    if device == "cpu":
        arguments += [*_CPU_ARGUMENTS, *installed_sglang().cpu_arguments]
        total = total or _CPU_TOKENS
    else:  # otherwise SGLang captures up to a batch size that depends on the GPU's memory and --tp
        arguments.append(f"--cuda-graph-max-bs-decode={options.max_running_requests}")
    if total:
        arguments.append(f"--max-total-tokens={total}")
    if options.verifier == "position_keyed" or device == "cpu":
        # The flashinfer sampler, SGLang's default where it is installed, fails on a seed and on a CPU.
        arguments.append("--sampling-backend=pytorch")
    folder = Path(options.model)
    files_of_tokenizer = (folder / "tokenizer.json", folder / "tokenizer_config.json")
    if not any(file.is_file() for file in files_of_tokenizer):
        arguments.append("--skip-tokenizer-init")
    return arguments


def _drafter_arguments(options: argparse.Namespace, start: int) -> list[str]:
    """Return the further options of SGLang's command line for drafts, with `start` draft steps a round at first."""
    arguments = [
        f"--speculative-algorithm={'EAGLE3' if options.draft_model else 'EAGLE'}",
        f"--speculative-num-steps={start}",
        "--speculative-eagle-topk=1",
        f"--speculative-num-draft-tokens={start + 1}",
        "--speculative-adaptive",
    ]
    if options.draft_model:
        arguments.append(f"--speculative-draft-model-path={options.draft_model}")
    return arguments


def _candidates(options: argparse.Namespace) -> list[int]:
    """Return the step counts that the engine may switch between, ascending; at least one is above 0.

    Raises ConfigError for a number out of range, and for --candidate-steps that are no numbers.
    """
    steps = {options.num_steps}
    if options.spec == "adaptive":
        try:
            steps |= {int(part) for part in options.candidate_steps.split(",") if part}
        except ValueError:
            raise ConfigError(
                f"--candidate-steps {options.candidate_steps}: expected integers and commas"
            ) from None
    if min(steps) < 0 or max(steps) > MOST_DRAFTS:
        raise ConfigError(f"step counts {sorted(steps)}: expected numbers from 0 to {MOST_DRAFTS}")
    if max(steps) == 0:
        steps.add(1)  # SGLang cannot start a drafter with 0 steps only (`arguments_for`)
    return sorted(steps)


def _slots(options: argparse.Namespace, steps: Sequence[int]) -> dict[str, Any]:
    """Return SGLang's --speculative-adaptive-config: from each batch size on, the step counts to capture graphs for.

    These are the ones that the rule can choose there, and 0. Step 0 is for `hold`, even where no rule may choose it.
    """
    max_batch = options.max_running_requests
    layers = _hf_config(options.model).get("num_hidden_layers", 1)
    # configuration -> its largest batch
    largest = graphs.largest_batches(chains(steps), max_batch, layers)
    if options.ragged:  # many drafts can pay at any batch if few of them are verified
        largest = dict.fromkeys(largest, max_batch)
    slots = {}
    for batch, slot in graphs.adaptive_config(largest, max_batch).items():
        slots[batch] = {"candidate_steps": sorted({0, *slot["candidate_steps"]})}
    return slots


def _hf_config(model: str) -> dict[str, Any]:
    """Return config.json of a local model directory; `check` has looked that there is one."""
    return json.loads((Path(model) / "config.json").read_text())


def tensor_parallel(rest: Sequence[str]) -> str:
    """Return the first tensor-parallel size among SGLang's own options, as it is written there; "1" without one.

    `commands/answer.py` also calls this, with the words of `rollout.engine_options`.
    """
    # `--tp 2` and `--tp=2` become the same two words.
    words = [word for text in rest for word in text.split("=", 1)]
    names = ("--tp", "--tp-size", "--tensor-parallel-size")
    return next((size for name, size in itertools.pairwise(words) if name in names), "1")


def _token_map(options: argparse.Namespace, rest: list[str]) -> str:
    """Write the file of SGLang's --speculative-token-map, and return its path. Raises ConfigError.

    It holds the end-of-text tokens and the lowest ids, --draft-vocabulary in all. A run replaces the tokens, not their
    number (`control/set_draft_vocabulary`).
    """
    size = tensor_parallel(rest)
    # A size that is no number is left to SGLang, which refuses it.
    if size.isdigit() and options.draft_vocabulary % max(1, int(size)):
        raise ConfigError(
            f"--draft-vocabulary {options.draft_vocabulary}: --tp {size} ranks draft from equal parts; "
            f"expected a multiple of {size}"
        )
    config = _hf_config(options.model)
    config = config.get("text_config", config)
    try:
        token_ids = DraftVocabulary(
            options.draft_vocabulary, config["vocab_size"], ends_of_text(options.model)
        ).ids()
    except ValueError as error:
        raise ConfigError(f"--draft-vocabulary: {error}") from None
    import torch

    path = _scratch() / "token_map.pt"
    torch.save(token_ids.tolist(), path)
    return str(path)


def _device(wanted: str) -> str:
    """Return "cpu" or "cuda" for --device. Raises ConfigError if the machine's GPUs cannot be used as asked."""
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("--device cuda, but torch finds no CUDA device here; use --device cpu")
    if wanted == "auto" and not available and torch.cuda.device_count():
        why = "`rlspec doctor --gpu` says why; --device cpu serves on the CPU"
        raise ConfigError(f"torch {torch.__version__} cannot use the GPUs of this machine; {why}")
    if wanted != "auto":
        return wanted
    return "cuda" if available else "cpu"


def _install_stand_ins() -> None:
    """Make SGLang importable without two packages (`cpu/stand_ins.py`). Call it before SGLang is imported."""
    from megatron_rlspec.rollout.sglang.cpu import stand_ins

    names = stand_ins.install()
    if names:
        print(
            f"rlspec serve: CPU engine with plain torch operators in place of {' and '.join(names)}",
            flush=True,
        )


def _launch(options: argparse.Namespace, device: str, arguments: list[str]) -> None:
    """Import SGLang, change what our engine needs changed, and run its server until the process ends.

    The environment must be complete (`main`): SGLang and its processes read it from here on.

    arguments  all of SGLang's options, the user's own at the end

    Raises ConfigError if SGLang cannot be imported.
    """
    try:
        from sglang.srt.entrypoints import http_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
    except ImportError as error:
        raise ConfigError(
            f"SGLang cannot be imported: {texts.first_line(error)} (no GPU: tools/setup_cpu.sh)"
        ) from None

    from megatron_rlspec.rollout.sglang.cpu import stand_ins

    if device == "cpu":
        if stand_ins.is_replaced("sgl_kernel"):
            installed_sglang().prepare_cpu()
        _fork_children()
    # Adds our routes to `http_server.app` and registers the hooks (`plugin.register`).
    load_plugins()
    _name_shared_memory(_scratch())
    client = SGLangEngine(_url(options), api_key=options.api_key, timeout=60)
    after_start: list[Callable[[], None]] = [lambda: _confirm(options, client)]
    if options.api_key:
        from megatron_rlspec.rollout.sglang.http.guard import require_key

        # First: the server must be closed to requests without a key before `_confirm` reports that it is ready.
        after_start.insert(0, require_key(http_server.app, options.api_key))
    http_server.launch_server(
        prepare_server_args(["--log-level=warning", *arguments]),
        execute_warmup_func=lambda _: _wait_until_listening(client),
        launch_callback=lambda: [act() for act in after_start],
    )


def _name_shared_memory(directory: Path) -> None:
    """Let SGLang name its shared memory after our directory: `scratch.remove` finds both by that name.

    Call it once, before SGLang's server starts.
    """
    from sglang.srt.server_args import PortArgs

    original = PortArgs.init_new

    def init_new(*arguments: Any, **named: Any) -> Any:
        ports = original(*arguments, **named)
        ports.instance_id = directory.name
        return ports

    PortArgs.init_new = staticmethod(init_new)


def _fork_children() -> None:
    """Make SGLang fork its processes. A spawned process would import SGLang again, which is half of the start-up.

    Not for a GPU: importing SGLang initialises CUDA, which a forked process cannot use.
    """
    from sglang.srt.entrypoints import engine

    original = engine._set_envs_and_config

    def then_fork(server_args: object) -> None:
        original(server_args)  # sets the method "spawn"
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = then_fork


def _architectures(*paths: str) -> tuple[str, ...]:
    """Return the architectures in these model directories, if `FAMILIES` knows their files in SGLang. "" is skipped."""
    names: set[str] = set()
    for path in filter(None, paths):
        names.update(_hf_config(path).get("architectures") or ())
    return tuple(sorted(name for name in names if name in FAMILIES and FAMILIES[name].sglang_files))


def _wait_until_listening(client: SGLangEngine) -> bool:
    """Wait until the server listens; runs in SGLang's warm-up thread. Returns True, SGLang's sign of success.

    It replaces SGLang's warm-up, which generates tokens, and marks the server as ready as that does.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    while True:
        try:
            client.post("nothing")  # a path without a route
        except RefusedError:
            break  # the route does not exist, but the server answered
        except EngineError:
            time.sleep(0.05)
    http_server._global_state.tokenizer_manager.server_status = ServerStatus.Up
    return True


def _url(options: argparse.Namespace) -> str:
    # An IPv6 address stands in brackets in a URL.
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{options.port}"


def _confirm(options: argparse.Namespace, client: SGLangEngine) -> None:
    """Print that the engine is ready, or end it if the plugin is not active; runs in SGLang's warm-up thread.

    SGLang only logs the failure of a plugin and continues without it.
    """
    try:
        answer = client.describe()
        if options.spec != "off" and not answer.get("rule"):
            raise EngineError("SGLang runs without the plugin's controller; see its log above")
    except EngineError as error:
        print(f"rlspec serve: plugin not in force: {error}", flush=True)
        from sglang.srt.utils import kill_process_tree

        # Also kills this process. So the lines below run only with an answer of an active plugin.
        kill_process_tree(os.getpid())
    _treat_interrupt_as_terminate()
    print(f"rlspec serve: {in_force(answer)}", flush=True)
    print(f"rlspec serve: ready on {client.url}", flush=True)


def _treat_interrupt_as_terminate() -> None:
    """Treat SIGINT as SIGTERM. On SIGINT, SGLang stops its HTTP server, but not its other processes.

    This runs in SGLang's warm-up thread. Python sets signal handlers in the main thread only, where the loop runs.
    """
    from sglang.srt.entrypoints import http_server

    loop = http_server._global_state.tokenizer_manager.event_loop
    loop.call_soon_threadsafe(
        loop.add_signal_handler, signal.SIGINT, os.kill, os.getpid(), signal.SIGTERM
    )
