"""`rlspec profile`: measure the cost of decode rounds on a real engine, and write a cost table."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
import urllib.parse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_rlspec import arguments, files
from megatron_rlspec.commands.sweep import (
    Bench,
    MeasuredEngine,
    Sweep,
    SweepError,
    configs_of,
    sweep,
    tokens_of_a_point,
)
from megatron_rlspec.conversion.drafter_files import read_model, weights_of, words
from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.embedded.led import LedEngine
from megatron_rlspec.models.config import DRAFTER, ModelConfigError
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import Architecture
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError, Provenance, RoundCost
from megatron_rlspec.speculation.solver import chains
from megatron_rlspec.types import OFF

NOTES = """\
Without --url the command starts an engine. --engine embedded measures the embedded engine in this process, and above
--tp 1 in further ones; set OMP_NUM_THREADS as in the run (torchrun sets 1). With several --url, each configuration is
measured on the first engine that runs it. Options that are not listed go to `rlspec serve`, and from there to SGLang:
--device cpu --max-total-tokens 16384. An interrupted sweep leaves OUT.part beside the table. The same command then
continues it. Sizes of --tp run one after the other; a later sweep adds sizes to a table of the same model, hardware and
engine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure. Returns 0, or 2 after one line about a mistake or an engine that cannot be measured."""
    own = parser()
    args, serve = own.parse_known_args(argv)
    own.refuse_typos(serve)
    if serve and (args.url or args.engine == "embedded"):
        own.error(
            f"unrecognized arguments: {' '.join(serve)} (no engine is started that could take them)"
        )
    try:
        _check(args)
        for tp in _sizes(args):
            run(argparse.Namespace(**{**vars(args), "tp": tp}), serve)
            args.fresh = False  # the next size adds to this table
    except (SweepError, EngineError, CostTableError, ModelConfigError, files.FileError) as error:
        print(f"rlspec profile: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "rlspec profile: interrupted; run the same command again to continue", file=sys.stderr
        )
        return 130
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check paths, addresses and model before an engine starts. Raises FileError, SweepError or ModelConfigError."""
    reads = {"--model": args.model, "--draft-model": args.draft_model}
    files.check_outputs({"the cost table": args.out}, reads)
    if args.engine == "embedded" and (args.url or not args.model):
        wrong = "--url" if args.url else "no --model"
        raise SweepError(f"{wrong}: --engine embedded measures --model in this process")
    if args.url and len(args.tp) > 1:
        raise SweepError(
            f"--tp {','.join(map(str, args.tp))}: the engines at --url have one size; expected one"
        )
    for url in args.url:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SweepError(f"--url {url}: expected http://HOST:PORT of a running `rlspec serve`")
    if args.model:
        check_model(args.model, "serve", tokenizer=False)
    _vocabulary(args.model)


def _sizes(args: argparse.Namespace) -> list[int]:
    """Return the tensor parallel sizes to measure. Those that the table already holds are left out.

    Raises SweepError if it holds all of them.
    """
    held = CostTable.load(args.out).tps if args.out.exists() and not args.fresh else ()
    left = [tp for tp in args.tp if tp not in held]
    if not left:
        sizes = ",".join(map(str, args.tp))
        raise SweepError(
            f"{args.out} already holds tp={sizes}; measure again with --fresh, or name another file"
        )
    return left


def run(args: argparse.Namespace, serve: Sequence[str]) -> CostTable:
    """Start or attach engines, measure, write the table and return it. Raises SweepError, EngineError and others."""
    provenance = Provenance(
        model=args.model_name or Path(args.model or "".join(args.url[:1])).resolve().name,
        hardware=args.hardware or hardware(threads=args.engine == "embedded"),
        dtype=args.dtype,
        engine=args.engine,
        engine_version=importlib.metadata.version(
            "sglang" if args.engine == "sglang" else "megatron_rlspec"
        ),
        date=datetime.date.today().isoformat(),
        note=args.note,
    )
    earlier = _earlier(args, provenance)
    part = args.out.with_name(args.out.name + ".part")
    known = CostTable.load(part) if part.exists() and not args.fresh else None
    if known is not None:
        _same(known.provenance, provenance, part)
    with ExitStack() as closing:
        benches = _benches(args, serve, closing)
        sweeping = Sweep(benches, provenance, tp=args.tp, known=known)
        if known is not None:
            print(f"continuing after {len(sweeping.cells)} points in {part}")
        with _progress() as bar:
            task = bar.add_task("profile")

            def progress(text: str, done: int, total: int) -> None:
                bar.update(task, description=text, completed=done, total=total)

            end = sweep(
                sweeping,
                args.batches,
                args.lengths,
                seconds=args.seconds,
                tolerance=args.tolerance,
                progress=progress,
                keep=lambda table: table.save(part),
            )
        table = sweeping.table()
        if earlier is not None:
            table = CostTable(
                provenance,
                (*earlier.rounds, *table.rounds),
                (*earlier.prefill, *table.prefill),
                max(table.switch_ms, earlier.switch_ms),
                max(table.catch_up_ms, earlier.catch_up_ms),
            )
        table.save(args.out)
        part.unlink(missing_ok=True)
        print(summary(table, args.tp))
        print(f"wrote {args.out}: {len(sweeping.cells)} points, {end}")
        if args.validate:
            print("\n" + validation(sweeping.validate(sweeping.off_grid(args.validate))))
    return table


def hardware(*, threads: bool = False) -> str:
    """Return the hardware's name for a table: the GPU's name, or the processor's with its number of cores.

    `threads`: with the number of torch's threads in this process.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name
        )
    except OSError:
        pass  # not Linux: the name that Python's platform module gives
    name += f", {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    return f"{name}, {torch.get_num_threads()} threads" if threads else name


def summary(table: CostTable, tp: int) -> str:
    """Format the medians at the longest measured context, one row per batch, and the quality of the table."""
    table = table.at(tp)
    configs = table.configs()
    length = table.lengths()[-1]
    lines = [f"ms per round at {length:.0f} tokens of context each (tp={tp})"]
    lines.append(f"{'batch':>8}" + "".join(f"{config!s:>9}" for config in configs))
    for batch in table.batches():
        row = [table.ms(config, batch, batch * length) for config in configs]
        lines.append(f"{batch:8}" + "".join(f"{ms:9.3f}" for ms in row))
    spread = np.median([c.spread_ms / c.ms for c in table.rounds])
    lines.append(
        f"median spread {spread:.1%} (half the interquartile range), a switch costs {table.switch_ms:.3f} ms and "
        f"{1e3 * table.catch_up_ms:.3f} us for each token decoded while off, "
        f"{len(table.repairs)} cells repaired, median error of the fitted model {table.fit_error():.1%}"
    )
    return "\n".join(lines)


def validation(again: Sequence[tuple[RoundCost, float]]) -> str:
    """Format measured and predicted costs at points off the grid."""
    if not again:
        return "no point off the grid fits into this engine, so nothing was validated"
    lines = [
        f"{'batch':>8}{'context':>9}{'config':>8}{'measured':>10}{'predicted':>10}{'error':>8}"
    ]
    errors = []
    for cell, predicted in again:
        errors.append(abs(predicted / cell.ms - 1))
        context = cell.context_tokens // cell.batch
        change = predicted / cell.ms - 1
        lines.append(
            f"{cell.batch:8}{context:9}{cell.config!s:>8}{cell.ms:10.3f}{predicted:10.3f}{change:+8.1%}"
        )
    lines.append(f"error off the grid: median {np.median(errors):.1%}, worst {np.max(errors):.1%}")
    return "\n".join(lines)


def _benches(args: argparse.Namespace, serve: Sequence[str], closing: ExitStack) -> list[Bench]:
    """Make one bench per engine; each configuration is measured on the first engine that runs it."""
    engines: list[MeasuredEngine]
    if args.engine == "embedded":
        engines = [_embedded(args, closing)]
    elif args.url:
        engines = [SGLangEngine(url, api_key=args.api_key) for url in args.url]
        for url, engine in zip(args.url, engines, strict=True):
            if (size := engine.describe()["tensor_parallel"]) != args.tp:
                raise SweepError(
                    f"--tp {args.tp}: the engine at {url} has tensor parallel size {size}"
                )
    elif args.model:
        engines = [_start(args, serve, closing)]
    else:
        raise SweepError("give --model to start an engine, or --url of a running one")
    wanted = {OFF, *chains(args.steps, real_off=args.engine == "embedded")}
    vocabulary = _vocabulary(args.model)
    benches = []
    for seed, engine in enumerate(engines):
        configs = [config for config in configs_of(engine) if config in wanted]
        wanted -= set(configs)
        if configs:
            benches.append(Bench(engine, configs, vocabulary, seed))
    if wanted:
        has = (
            ", ".join(str(config) for engine in engines for config in configs_of(engine))
            or "no configuration"
        )
        raise SweepError(
            f"no engine here runs {', '.join(map(str, sorted(wanted)))}; the engines run {has}"
        )
    return benches


def _embedded(args: argparse.Namespace, closing: ExitStack) -> MeasuredEngine:
    """Build the embedded engine, in this process and `tp` - 1 others. Raises SweepError."""
    if args.dtype not in ("auto", "float32", "bfloat16", "float16", "float64"):
        raise SweepError(
            f"--dtype {args.dtype}: expected auto, float32, bfloat16, float16 or float64"
        )
    made = partial(
        _embedded_rank,
        args.model,
        args.draft_model,
        args.dtype,
        args.steps,
        args.batches,
        args.lengths,
    )
    print(f"rlspec profile: loading {args.model} into the embedded engine", flush=True)
    try:
        if args.tp == 1:
            return made(0, None)
        Architecture.from_hf(read_model(args.model, args.draft_model)[0]).check_size(args.tp)
        led = LedEngine(made, args.tp)
    except ValueError as error:
        raise SweepError(str(error)) from None
    closing.callback(led.close)
    return led


def _embedded_rank(
    model: str,
    drafter: str,
    dtype: str,
    steps: Sequence[int],
    batches: Sequence[int],
    lengths: Sequence[int],
    rank: int,
    group: torch.distributed.ProcessGroup | None,
) -> EmbeddedEngine:
    """Build one rank's engine, with a KV cache for the coarse grid. Raises ValueError."""
    hf_config, tensors = read_model(model, drafter)
    drafts = DRAFTER in hf_config or hf_config.get("num_nextn_predict_layers")
    configs = [OFF, *chains([k for k in steps if k])] if drafts else [OFF]
    longest = max(lengths) + tokens_of_a_point(len(configs)) + 64
    return EmbeddedEngine(
        hf_config,
        weights_of(tensors),
        draft_words=words(tensors, hf_config) if DRAFTER in hf_config else None,
        dtype=tensors[next(iter(tensors))].dtype if dtype == "auto" else getattr(torch, dtype),
        device=f"cuda:{rank}" if torch.cuda.is_available() else "cpu",
        candidates=configs,
        max_running_requests=max(batches),
        max_total_tokens=max(batches) * longest + 64,
        max_length=longest,
        group=group,
    )


def _start(args: argparse.Namespace, serve: Sequence[str], closing: ExitStack) -> SGLangEngine:
    steps = sorted({0, *args.steps})  # off is step 0 without the drafter
    given = [
        "--dtype",
        args.dtype,
        "--spec",
        "adaptive",
        "--candidate-steps",
        ",".join(map(str, steps)),
    ]
    given += ["--num-steps", str(steps[-1]), *(["--tp", str(args.tp)] if args.tp > 1 else [])]
    given += [*(["--draft-model", args.draft_model] if args.draft_model else []), *serve]
    log = args.out.with_name(f"{args.out.name}.log")
    print(f"rlspec profile: loading {args.model} into an engine; its log: {log}", flush=True)
    process = closing.enter_context(launch(args.model, log, arguments=given))
    with _progress() as bar:
        task = bar.add_task("", total=None)
        process.wait(progress=lambda line: bar.update(task, description=line))
    return SGLangEngine.of(process)


def _earlier(args: argparse.Namespace, provenance: Provenance) -> CostTable | None:
    """Return the finished table of the same engine at other TPs that this sweep extends; None without one.

    Raises SweepError if it is of something else.
    """
    if not args.out.exists() or args.fresh:
        return None
    table = CostTable.load(args.out)
    _same(table.provenance, provenance, args.out)
    return table


def _same(known: Provenance, now: Provenance, path: Path) -> None:
    if replace(known, date="", note="") != replace(now, date="", note=""):
        raise SweepError(f"{path} was measured on {known}, not on {now}; start again with --fresh")


def _vocabulary(model: str) -> int:
    """Return how many token ids prompts are drawn from: the vocabulary, or 128 without a local model directory."""
    path = Path(model or "") / "config.json"
    if not model or not path.is_file():
        return 128
    config = files.read_json(path)
    size = config.get("vocab_size") if isinstance(config, dict) else None
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 1 << 24:
        raise SweepError(f"{path}: vocab_size={size!r}, expected an integer from 1 to {1 << 24}")
    return size


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, transient=True)


def parser() -> arguments.Parser:
    integer = arguments.integer
    number = arguments.number
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
    add("out", type=Path, help="cost table to write (JSON)")
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
    add(
        "--url",
        action="append",
        default=[],
        help="measure this running `rlspec serve` instead; repeatable",
    )
    add("--api-key", default="", help="key of the engines at --url; better in RLSPEC_API_KEY")
    add(
        "--tp",
        type=integers(1, 4096),
        default=[1],
        help="tensor parallel sizes to measure, such as 1,2,4 (default 1)",
    )
    add("--dtype", default="auto", help="as for `rlspec serve`; recorded in the table")
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
        help="running requests of the coarse grid (default 1,4,16,64)",
    )
    add(
        "--lengths",
        type=integers(1, 1 << 22),
        default=[64, 512],
        help="prompt tokens of each request on the coarse grid (default 64,512)",
    )
    add(
        "--seconds",
        type=number(0, 1e7),
        default=900.0,
        help="time budget of the sweep (default 900)",
    )
    add(
        "--tolerance",
        type=number(0, 10),
        default=0.03,
        help="measure until noise makes no choice lose more than this share, and add a batch where the cost deviates "
        "from a straight line by more (default 0.03)",
    )
    add(
        "--validate",
        type=integer(0, 1000),
        default=0,
        metavar="N",
        help="also measure N random points off the grid",
    )
    add("--model-name", default="", help="name recorded in the table; default: the directory's")
    add(
        "--hardware",
        default="",
        help="name recorded in the table; default: this machine's GPU or processor",
    )
    add("--note", default="", help="free text recorded in the table")
    add("--fresh", action="store_true", help="discard an interrupted sweep and an existing table")
    p.needs("--model", "--draft-model")
    p.needs("--url", "--api-key")
    p.excludes("--url", "--draft-model")
    return p
