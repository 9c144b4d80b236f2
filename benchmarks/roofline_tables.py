"""Costs of rounds on GPUs that are rooflines: for benchmarks and tests.

    python benchmarks/roofline_tables.py [--hardware H100] [--acceptance 0.8,0.75,0.7]

prints what drafts gain over plain decoding of a 7B model, by context and running requests: an estimate by data sheets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig

# Dense bf16 by the vendors' data sheets: memory bandwidth in TB/s, TFLOPS.
HARDWARE = {
    "A40": (0.696, 150.0),
    "L40S": (0.864, 362.0),
    "A100": (2.04, 312.0),
    "H100": (3.35, 989.0),
    "H20": (4.0, 148.0),
    "H200": (4.8, 989.0),
}


def of_hardware(
    bandwidth: float,
    tflops: float,
    *,
    parameters: float = 7.6e9,
    context_bytes: float = 147_456.0,
    drafter: float = 0.1,
    host_ms: float = 1.5,
) -> Roofline:
    """Make the cost model of a GPU: `bandwidth` in TB/s, bf16 weights. Defaults: 7B, 8 KV heads, 36 layers.

    A pass reaches 80 % of the data sheet's bandwidth, or 60 % of its FLOPS. `sample_ms` is that of 151,680 words at the
    GPU's bandwidth. On an H100 (3.35 TB/s) 1,024 tokens were sampled in 2.8 ms, measured; their log-probs take 1.8 ms,
    estimated by SGLang's 5 GB of passes.
    """
    per_ms = bandwidth * 1e9 * 0.8
    return Roofline(
        weights_ms=2 * parameters / per_ms,
        token_ms=2 * parameters / (tflops * 1e9 * 0.6),
        context_ms=context_bytes / per_ms,
        drafter=drafter,
        drafter_layer=0.3,
        host_ms=host_ms,
        pass_ms=0.2,
        sample_ms=0.0045 * 3.35 / bandwidth,
    )


def best_gain(cost: Roofline, rates: Sequence[float], batch: int, length: int) -> str:
    """Format how many times as fast as plain decoding the best number of drafts is, and that number.

    rates   acceptance by depth
    length  tokens of context of each request
    """
    configs = [OFF, *(SpecConfig(k) for k in range(1, len(rates) + 1))]
    ms = cost.grid(configs, np.array(batch), np.array(batch * length)).tolist()
    tokens = [expected_tokens(config, rates) for config in configs]
    gains = [ms[0] * tokens[k] / ms[k] for k in range(len(configs))]
    best = max(range(len(configs)), key=lambda k: gains[k])
    return f"{gains[best]:.2f} ({best})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hardware", choices=HARDWARE, default="H100")
    parser.add_argument("--acceptance", default="0.8,0.75,0.7", help="of the first draft, of the second, ...")
    args = parser.parse_args()
    rates = [float(rate) for rate in args.acceptance.split(",")]
    cost = of_hardware(*HARDWARE[args.hardware])
    lengths = (130, 250, 500, 1000, 2000, 4000, 16000)
    print(f"{args.hardware}, 7B, by its data sheet: times plain decoding (drafts)")
    print("requests  context " + "".join(f"{length:>11}" for length in lengths))
    for batch in (1, 16, 64, 256, 512):
        cells = [best_gain(cost, rates, batch, length) for length in lengths]
        print(f"{batch:8}          " + "".join(f"{cell:>11}" for cell in cells))


if __name__ == "__main__":
    main()
