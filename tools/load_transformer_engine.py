"""Show without a GPU that Transformer Engine's library loads with the CUDA libraries that torch pins.

    python tools/load_transformer_engine.py                     # the version of requirements/transformer-engine.txt
    python tools/load_transformer_engine.py --version 2.20.2    # one that needs a newer cuBLAS: exit status 1

It downloads six wheels (1.5 GB) into a temporary folder, or into --folder to keep them, and loads the libraries
in a process of their own with every symbol resolved at once. The library opens the driver's libcuda when it runs, not
when it is loaded. Its PyTorch part, which pip compiles, is not a part of this.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGINE = "transformer_engine_cu13"
# In the order in which they are loaded: each finds the ones above it by their names.
PINNED = ("nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
LOADED = (
    "libcudart",
    "libnvrtc",
    "libnccl",
    "libcublasLt",
    "libcublas",
    "libcudnn_graph",
    "libcudnn_ops",
    "libcudnn_cnn",
    "libcudnn_adv",
    "libcudnn_heuristic",
    "libcudnn_engines_precompiled",
    "libcudnn_engines_runtime_compiled",
    "libcudnn",
    "libtransformer_engine",
)
LOAD = """
import ctypes, sys
for path in sys.argv[1:]:
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # Python adds RTLD_NOW
    except OSError as error:
        sys.exit(str(error))
"""


def pinned(name: str, file: str) -> str:
    """Return the version of a distribution in a file of `requirements/`."""
    found = re.search(rf"^{re.escape(name)}==(\S+)", (ROOT / "requirements" / file).read_text(), re.M)
    if found is None:
        sys.exit(f"requirements/{file} does not pin {name}")
    return found[1]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--version", default=pinned(ENGINE, "transformer-engine.txt"), help="of Transformer Engine")
    p.add_argument("--folder", type=Path, help="keep wheels and libraries here, for the next time")
    options = p.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        wheels = {name: pinned(name, "gpu.txt") for name in PINNED} | {ENGINE: options.version}
        asked = [f"{name}=={version}" for name, version in wheels.items()]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "-d",
                folder,
                *asked,
            ],
            check=True,
        )
        paths = []
        for name, version in wheels.items():
            (wheel,) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
            place = folder / wheel.stem
            if not place.exists():
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(place, [one for one in archive.namelist() if ".so" in one])
            paths += place.rglob("*.so*")
        ordered = [next(path for path in paths if path.name.partition(".so")[0] == name) for name in LOADED]
        done = subprocess.run([sys.executable, "-c", LOAD, *map(str, ordered)], capture_output=True, text=True)
    known = ", ".join(f"{name} {version}" for name, version in wheels.items() if name != ENGINE)
    state = "loads" if done.returncode == 0 else f"does not load: {done.stderr.strip().rpartition('/')[2]}"
    print(f"{ENGINE} {options.version} with {known}: {state}")
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
