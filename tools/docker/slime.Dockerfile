# slime's image with this package in it. Build in the repository root (docs/gpu.md: not built yet):
#   docker build -f tools/docker/slime.Dockerfile -t rlspec-slime .
#   docker run --rm --gpus all --ipc=host --shm-size=16g --ulimit memlock=-1 --ulimit stack=67108864 -it rlspec-slime bash
ARG IMAGE=slimerl/slime:latest
FROM ${IMAGE}

# The commit of slime that the hooks were checked against (megatron_rlspec/contracts.py). The image installs slime
# from this checkout, and Megatron-LM from the one beside it.
ARG SLIME_COMMIT=624b824a8
RUN git -C /root/slime fetch --quiet origin && git -C /root/slime checkout --quiet ${SLIME_COMMIT}

WORKDIR /opt/megatron_rlspec
COPY requirements/slime-image.txt requirements/
RUN pip install --no-cache-dir --no-deps -r requirements/slime-image.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY megatron_rlspec megatron_rlspec
COPY patches patches
COPY examples examples
RUN pip install --no-cache-dir --no-deps .

# Megatron-LM's training package is not part of the distribution megatron-core.
ENV PYTHONPATH=/root/Megatron-LM
RUN rlspec doctor --gpu --path /root/Megatron-LM --path /root/slime
