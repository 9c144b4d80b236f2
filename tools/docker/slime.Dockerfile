# slime's image with this package in it. Build in the repository root (docs/gpu.md: not built yet):
#   docker build -f tools/docker/slime.Dockerfile -t rlspec-slime .
#   docker run --rm --gpus all --ipc=host --shm-size=16g --ulimit memlock=-1 --ulimit stack=67108864 -it rlspec-slime bash
# The image that slime names at this commit (docker/version.txt).
ARG IMAGE=slimerl/slime:nightly-dev-20260810a
FROM ${IMAGE}

# The commit of slime that the hooks were checked against. The image installs slime and
# Megatron-LM from checkouts, which are found by what Python would import.
ARG SLIME_COMMIT=624b824a8
RUN cd "$(python3 -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("slime").origin).parents[1])')" \
    && git fetch --quiet origin && git checkout --quiet ${SLIME_COMMIT}

WORKDIR /opt/megatron_rlspec
COPY requirements/slime-image.txt requirements/
RUN pip install --no-cache-dir --no-deps -r requirements/slime-image.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY megatron_rlspec megatron_rlspec
COPY patches patches
COPY examples examples
RUN pip install --no-cache-dir --no-deps .

# Megatron-LM's training package is not part of the distribution megatron-core: its checkout joins the import path.
RUN python3 -c 'import importlib.util as u, pathlib, site; \
pathlib.Path(site.getsitepackages()[0], "megatron-lm.pth").write_text( \
str(pathlib.Path(u.find_spec("megatron.core").origin).parents[2]))'
RUN rlspec doctor --gpu
