"""`pip install .` for the package; extras name what a given machine adds. Exact versions live in requirements/."""

from setuptools import find_packages, setup

setup(
    name="megatron_rlspec",
    version="0.1.0",
    description="Speculative decoding that keeps up with reinforcement learning",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rlspec*"]),
    package_data={"megatron_rlspec": ["*.j2"]},
    install_requires=[
        "torch>=2.6",
        "numpy>=1.26",
        "megatron-core>=0.16",
        "psutil",
        "pydantic>=2.7",
        "safetensors",
        "tokenizers",
        "transformers>=4.51",
        "aiohttp",
        "requests",
        "rich",
        "matplotlib",
        "tensorboard",
        "pyarrow",
        "math-verify",
    ],
    extras_require={
        "sglang": ["sglang>=0.5.23"],
        "gpu": ["sglang>=0.5.23", "transformer-engine[pytorch]>=2", "apex"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff"],
    },
    entry_points={
        "console_scripts": ["rlspec = megatron_rlspec.cli:main"],
        "sglang.srt.plugins": [
            "rlspec = megatron_rlspec.rollout.sglang.server.plugin:register",
            "rlspec-drafter-push = megatron_rlspec.rollout.sglang.server.drafter_push:register",
        ],
    },
)
