"""`rlspec profile`: measure the cost of decode rounds on a real engine, and write a cost table."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatron_rlspec import arguments, files
from megatron_rlspec.commands.sweep import (
    Bench,
    MeasuredEngine,
    Sweep,
    configs_of,
    measure_grid,
    tokens_of_a_point,
)
from megatron_rlspec.config import ConfigError
from megatron_rlspec.conversion.drafter_files import read_model, weights_of, words
from megatron_rlspec.extensions.migration.embedded.led import LedEngine
from megatron_rlspec.models import hub
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import Architecture
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.http.checks import dtype_of
from megatron_rlspec.speculation.cost_table import CostTable, Provenance
from megatron_rlspec.speculation.graphs import chains
from megatron_rlspec.types import OFF, SpecConfig

NOTES = """\
Without --url the command starts an engine. --engine embedded measures the embedded engine in this process, and above
--tp 1 in further ones; set OMP_NUM_THREADS as in the run (torchrun sets 1). Options that are not listed go to
`rlspec serve`, and from there to SGLang: --device cpu --max-total-tokens 16384. The sizes of --tp run in turn."""
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")  # of the embedded engine
UNKNOWN_VOCABULARY = 128  # token ids that the prompts have for an engine whose model is not at hand
MARGIN = 64  # tokens of KV cache beyond a point's


def main(argv: Sequence[str] | None = None) -> int:
    """Measure. Returns 0. Raises what `run` raises."""
    command = parser()
    args, serve = command.parse_known_args(argv)
    command.refuse_typos(serve)
    if serve and (args.url or args.engine == "embedded"):
        command.error(
            f"unrecognized arguments: {' '.join(serve)} (no engine is started that could take them)"
        )
    run(args, serve)
    return 0


def run(args: argparse.Namespace, serve: Sequence[str]) -> CostTable:
    """Start or attach an engine for each size of --tp, measure, write the table and return it.

    The table is written after each size. Raises ConfigError, EngineError, CostTableError and FileError.
    """
    _check(args)
    vocabulary = UNKNOWN_VOCABULARY
    if args.draft_model:
        args.draft_model = hub.local(args.draft_model)
    if args.model:
        args.model = hub.local(args.model)
        vocabulary = check_model(args.model, "serve", tokenizer=False)["vocab_size"]
    if args.dtype == "auto":
        args.dtype = _served_dtype(args.url) if args.url else dtype_of(args.model)
    provenance = Provenance(
        model=Path(args.model or args.url).resolve().name,
        hardware=hardware(with_threads=args.engine == "embedded"),
        dtype=args.dtype,
        engine=args.engine,
        engine_version=_engine_version(args.engine),
        date=datetime.date.today().isoformat(),
    )
    table = None
    for tp in args.tp:
        with ExitStack() as stack:
            engine = _engine(args, tp, serve, stack)
            bench = Bench(engine, _configs(args, engine), vocabulary)
            sweep = Sweep(bench, provenance, tp)
            end = measure_grid(
                sweep, args.batches, args.lengths, args.seconds, partial(print, flush=True)
            )
        table = _joined(table, sweep.table())
        table.save(args.out)
        print(summary(table, tp))
        print(f"wrote {args.out}: {len(sweep.steady)} points, {end}")
    assert table is not None  # --tp has at least one size
    return table


def _check(args: argparse.Namespace) -> None:
    """Check paths and options before an engine starts. Raises FileError or ConfigError."""
    files.check_outputs(
        {"the cost table": args.out}, {"--model": args.model, "--draft-model": args.draft_model}
    )
    if not args.model and not args.url:
        raise ConfigError("give --model to start an engine, or --url of a running one")
    if args.engine == "embedded":
        if args.url or not args.model:
            wrong = "--url" if args.url else "no --model"
            raise ConfigError(f"{wrong}: --engine embedded measures --model in this process")
        if args.dtype not in DTYPES:
            raise ConfigError(f"--dtype {args.dtype}: expected one of {', '.join(DTYPES)}")
    if args.url and len(args.tp) > 1:
        sizes = ",".join(map(str, args.tp))
        raise ConfigError(f"--tp {sizes}: the engine at --url has one size; expected one")


def _served_dtype(url: str) -> str:
    """Return the type that the engine at `url` computes in. Raises EngineError."""
    return SGLangEngine(url).describe()["dtype"]


def _joined(earlier: CostTable | None, table: CostTable) -> CostTable:
    """Return one table of an earlier tensor-parallel size and of this one."""
    if earlier is None:
        return table
    return CostTable(
        table.provenance,
        (*earlier.rounds, *table.rounds),
        (*earlier.prefill, *table.prefill),
        max(table.switch_ms, earlier.switch_ms),
        max(table.catch_up_ms, earlier.catch_up_ms),
        (*earlier.unverified, *table.unverified),
    )


def hardware(*, with_threads: bool = False) -> str:
    """Return the name for a table: the GPU's, or the processor's with its cores and perhaps torch's threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    return f"{name}, {torch.get_num_threads()} threads" if with_threads else name


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _engine_version(engine: str) -> str:
    package = "sglang" if engine == "sglang" else "megatron_rlspec"
    return importlib.metadata.version(package)


def summary(table: CostTable, tp: int) -> str:
    """Format the medians at the longest measured context, one row per batch, and the quality of the table."""
    table = table.at(tp)
    configs = table.configs()
    length = table.lengths()[-1]
    lines = [f"ms per round at {length:.0f} tokens of context each (tp={tp})"]
    lines.append("   batch" + "".join(f"{config!s:>9}" for config in configs))
    for batch in table.batches():
        line = f"{batch:8}"
        for config in configs:
            line += f"{table.ms(config, batch, batch * length):9.3f}"
        lines.append(line)
    spread = np.median([cell.spread_ms / cell.ms for cell in table.rounds])
    lines.append(
        f"median spread {spread:.1%} (half the interquartile range), a switch costs {table.switch_ms:.3f} ms and "
        f"{1e3 * table.catch_up_ms:.3f} us for each token decoded while off, "
        f"median error of the fitted model {table.fit_error():.1%}"
    )
    return "\n".join(lines)


def _configs(args: argparse.Namespace, engine: MeasuredEngine) -> list[SpecConfig]:
    """Return the configurations to measure. Raises ConfigError if the engine does not run all of them."""
    wanted = {OFF, *chains(args.steps, real_off=args.engine == "embedded")}
    available = configs_of(engine)
    missing = wanted - set(available)
    if missing:
        names = ", ".join(map(str, sorted(missing)))
        runs = ", ".join(map(str, available))
        raise ConfigError(f"the engine does not run {names}; it runs {runs}")
    return [config for config in available if config in wanted]


def _engine(
    args: argparse.Namespace, tp: int, serve: Sequence[str], stack: ExitStack
) -> MeasuredEngine:
    """Start the engine, or attach it. `stack` ends what was started."""
    if args.engine == "embedded":
        return _embedded(args, tp, stack)
    if not args.url:
        return _start(args, tp, serve, stack)
    engine = SGLangEngine(args.url)
    size = engine.describe()["tensor_parallel"]
    if size != tp:
        raise ConfigError(f"--tp {tp}: the engine at {args.url} has tensor parallel size {size}")
    return engine


def _embedded(args: argparse.Namespace, tp: int, stack: ExitStack) -> MeasuredEngine:
    """Build the embedded engine, in this process and `tp` - 1 others. Raises ConfigError."""
    build = partial(_embedded_rank, args)
    print(
        f"rlspec profile: loading {args.model} in {args.dtype} into the embedded engine", flush=True
    )
    try:
        if tp == 1:
            return build(0, None)
        hf_config, _ = read_model(args.model, args.draft_model)
        Architecture.from_hf(hf_config).check_size(tp)
        engine = LedEngine(build, tp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    stack.callback(engine.close)
    return engine


def _embedded_rank(
    args: argparse.Namespace, rank: int, group: torch.distributed.ProcessGroup | None
) -> EmbeddedEngine:
    """Build one rank's engine, with a KV cache for the grid. Raises ValueError."""
    hf_config, tensors = read_model(args.model, args.draft_model)
    is_eagle3 = DRAFTER in hf_config
    configs = [OFF]
    if is_eagle3 or hf_config.get("num_nextn_predict_layers"):
        configs += chains([k for k in args.steps if k])
    most_requests = max(args.batches)
    longest = max(args.lengths) + tokens_of_a_point(len(configs)) + MARGIN
    return EmbeddedEngine(
        hf_config,
        weights_of(tensors),
        draft_words=words(tensors, hf_config) if is_eagle3 else None,
        dtype=getattr(torch, args.dtype),
        device=f"cuda:{rank}" if torch.cuda.is_available() else "cpu",
        candidates=configs,
        max_running_requests=most_requests,
        max_total_tokens=most_requests * longest + MARGIN,
        max_length=longest,
        group=group,
    )


def _start(
    args: argparse.Namespace, tp: int, serve: Sequence[str], stack: ExitStack
) -> SGLangEngine:
    """Start `rlspec serve` with the model and wait for it."""
    steps = sorted({0, *args.steps})  # off is step 0 without the drafter
    options = ["--dtype", args.dtype, "--spec", "adaptive", "--tp", str(tp)]
    options += ["--candidate-steps", ",".join(map(str, steps)), "--num-steps", str(steps[-1])]
    if args.draft_model:
        options += ["--draft-model", args.draft_model]
    log = args.out.with_name(f"{args.out.name}.log")
    print(
        f"rlspec profile: loading {args.model} in {args.dtype} into an engine; its log: {log}",
        flush=True,
    )
    process = stack.enter_context(launch(args.model, log, arguments=[*options, *serve]))
    return SGLangEngine.of(process.wait())


def parser() -> arguments.Parser:
    integers = arguments.distinct_integers
    p = arguments.Parser(
        prog="rlspec profile",
        description=__doc__.partition(": ")[2],
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        example="rlspec profile cost.json --model DIR",
        first=("--model", "--engine", "--tp", "--batches", "--seconds"),
    )
    add = p.add_argument
    add("out", type=Path, help="cost table to write (JSON); an existing one is replaced")
    add("--model", default="", metavar="DIR", help="Hugging Face directory; starts an engine")
    add(
        "--draft-model",
        default="",
        metavar="DIR",
        help="Hugging Face directory of an EAGLE-3 drafter for --model",
    )
    add(
        "--engine",
        choices=("sglang", "embedded"),
        default="sglang",
        help="engine to measure (default sglang)",
    )
    add("--url", default="", help="measure this running `rlspec serve` instead")
    add(
        "--tp",
        type=integers(1, 4096),
        default=[1],
        help="tensor parallel sizes to measure, such as 1,2,4 (default 1)",
    )
    add(
        "--dtype",
        default="auto",
        help="auto: as config.json says, or as the engine of --url computes",
    )
    add(
        "--steps",
        type=integers(0, 64),
        default=[0, 1, 2, 3, 5],
        help="num_steps to measure (default 0,1,2,3,5)",
    )
    add(
        "--batches",
        type=integers(1, 1 << 16),
        default=[1, 4, 16, 64],
        help="running requests (default 1,4,16,64)",
    )
    add(
        "--lengths",
        type=integers(1, 1 << 22),
        default=[64, 512],
        help="prompt tokens of each request (default 64,512)",
    )
    add(
        "--seconds",
        type=arguments.number(0, 1e7),
        default=900.0,
        help="time budget for each size of --tp (default 900)",
    )
    p.needs("--model", "--draft-model")
    p.excludes("--url", "--draft-model")
    return p
