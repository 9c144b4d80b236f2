"""`pip install .` installs the package and replaces no torch, megatron-core, transformers or sglang that is there.

A machine that trains or serves usually has builds of these four that fit its driver and each other: slime's image, for
example, installs Megatron-LM from a checkout. They are therefore extras. Versions for a CPU: requirements/cpu.txt.
"""

from setuptools import find_packages, setup

TRAIN = ["torch>=2.6", "megatron-core>=0.16", "transformers>=4.51"]

setup(
    name="megatron_rlspec",
    version="0.1.0",
    description="Speculative decoding that keeps up with reinforcement learning",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rlspec*"]),
    package_data={"megatron_rlspec": ["*.j2"]},
    install_requires=[
        "numpy>=1.26",
        "psutil",
        "pydantic>=2.7",
        "msgspec",
        "safetensors",
        "tokenizers",
        "aiohttp",
        "requests",
        "rich",
        "jinja2",
        "matplotlib",
        "tensorboard",
        "pyarrow",
        "math-verify",
    ],
    extras_require={
        "train": TRAIN,
        "sglang": ["sglang>=0.5.23"],
        # NVIDIA's Apex is not on PyPI (the package of that name there is another project), and nothing here needs it.
        "gpu": [*TRAIN, "sglang>=0.5.23", "transformer-engine[pytorch]>=2"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy"],
    },
    entry_points={
        "console_scripts": ["rlspec = megatron_rlspec.cli:main"],
        "sglang.srt.plugins": [
            "rlspec = megatron_rlspec.rollout.sglang.server.plugin:register",
            "rlspec-drafter-push = megatron_rlspec.rollout.sglang.server.drafter_push:register",
        ],
    },
)
