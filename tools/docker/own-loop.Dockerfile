# SGLang's image with megatron-core, Transformer Engine and this package, for `rlspec train`. Build in the repository root
# (docs/gpu.md: not built yet):
#   docker build -f tools/docker/own-loop.Dockerfile -t rlspec .
#   docker run --rm --gpus all --ipc=host --shm-size=16g --ulimit memlock=-1 --ulimit stack=67108864 -it rlspec bash
ARG IMAGE=lmsysorg/sglang:v0.5.23
FROM ${IMAGE}

WORKDIR /opt/megatron_rlspec
COPY requirements/sglang-image.txt requirements/transformer-engine.txt requirements/
RUN pip install --no-cache-dir --no-deps -r requirements/sglang-image.txt
# pip compiles this against the image's torch, with the image's nvcc, for these GPU architectures (90: H100, H200).
ARG NVTE_CUDA_ARCHS=90
RUN NVTE_CUDA_ARCHS="${NVTE_CUDA_ARCHS}" \
    pip install --no-cache-dir --no-deps --no-build-isolation -r requirements/transformer-engine.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY megatron_rlspec megatron_rlspec
COPY patches patches
COPY examples examples
COPY benchmarks benchmarks
RUN pip install --no-cache-dir --no-deps .

RUN rlspec doctor --gpu
