# docker build --target cpu -t fusedgpt .        docker run --rm -v "$PWD:/work" fusedgpt train config/quickstart.py
# docker build --target cuda -t fusedgpt .       docker run --rm --gpus all -v "$PWD:/work" fusedgpt train config/quickstart.py
FROM python:3.11-slim AS base
# torch.compile needs a C++ compiler, a devcontainer make and git
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
# a user without a home, as of --user="$(id -u):$(id -g)", has somewhere to cache
ENV HOME=/tmp PYTHONUNBUFFERED=1
# docker build --build-arg COMMIT="$(git rev-parse HEAD)": for the records of runs, because the image has no .git
ARG COMMIT=
ENV FUSEDGPT_COMMIT=$COMMIT
WORKDIR /work
ENTRYPOINT ["fusedgpt"]

FROM base AS cuda
COPY . /src
# PyPI's PyTorch brings CUDA along; the host needs NVIDIA's driver and container toolkit
RUN --mount=type=cache,target=/tmp/.cache/pip pip install /src

FROM base AS cpu
COPY . /src
RUN --mount=type=cache,target=/tmp/.cache/pip pip install --extra-index-url https://download.pytorch.org/whl/cpu /src
