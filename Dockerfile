# For machines with NVIDIA GPUs and the NVIDIA container toolkit. Written with care, neither built nor run by us (docs/install.md).
#
#   docker build -t tseeds .
#   docker run --gpus all --ipc=host -v "$PWD:/work" tseeds run /work/pipeline.toml --run /work/runs/mine
FROM ubuntu:24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PATH=/opt/tseeds/bin:$PATH

# A C compiler: triton builds its launchers when a kernel is first used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/tseeds

# CUDA libraries come with the lock's wheels; the driver comes from the host. Dependencies first: they change less often.
COPY requirements/cuda.lock /tmp/cuda.lock
RUN pip install --no-deps -r /tmp/cuda.lock

COPY . /src
RUN pip install --no-deps --no-build-isolation /src && tseeds --help > /dev/null

WORKDIR /work
ENTRYPOINT ["tseeds"]
CMD ["--help"]
