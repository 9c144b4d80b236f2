"""Which engines a run generates with: the configuration's words to running `RolloutEngine`s."""

from __future__ import annotations

from pathlib import Path

from megatron_rlspec.config import Config
from megatron_rlspec.rollout.sglang.client import SGLangEngine
from megatron_rlspec.rollout.sglang.launcher import EngineProcess, launch


class StartingEngines:
    """SGLang engines that start while the trainer is built. `wait` returns them by name, once all answer."""

    def __init__(self, config: Config, run_dir: Path, spec: str | None = None, prefix: str = "engine") -> None:
        """`spec` overrides `config.spec.mode`; `prefix` names the engines and their logs."""
        self._timeout = config.rollout.timeout_seconds
        self._processes: dict[str, EngineProcess] = {}
        self._attached = {url: SGLangEngine(url, timeout=self._timeout) for url in config.rollout.urls}
        if self._attached:
            return
        for index in range(config.rollout.engines):
            name = f"{prefix}-{index}"
            log = run_dir / "logs" / f"{name}.log"
            self._processes[name] = launch(config.model.path, log, arguments=_arguments(config, spec))

    def wait(self) -> dict[str, SGLangEngine]:
        """Raises EngineError, with the log's own last word, if one of them does not come up; the others are ended."""
        try:
            started = {name: process.wait() for name, process in self._processes.items()}
        except BaseException:
            self.close()
            raise
        return self._attached | {n: SGLangEngine.of(p, timeout=self._timeout) for n, p in started.items()}

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def _arguments(config: Config, spec: str | None) -> list[str]:
    """Options of `rlspec serve` for this run."""
    options = {
        "dtype": config.model.dtype,
        "spec": spec or config.spec.mode,
        "num-steps": config.spec.num_steps,
        "candidate-steps": ",".join(map(str, config.spec.candidate_steps)),
        "verifier": config.spec.verifier,
        "max-running-requests": config.rollout.max_running_requests,
        "max-total-tokens": config.rollout.max_total_tokens,
    }
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]
