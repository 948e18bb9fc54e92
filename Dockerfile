# Images with all packages, in versions that constraints.txt pins, and a user who is not root.
#
#   docker build -t farfield .                 for GPUs: PyPI's torch brings its CUDA libraries, the host the driver
#   docker build --target test .               the CPU build, with the quick tests and a SLURM of two nodes
#   docker run --gpus all -v /scratch:/scratch farfield train 125M cdape_kerple_log … save=/scratch/runs/a
#
# Clusters have Apptainer instead: apptainer.def.

FROM python:3.12.11-slim-bookworm AS base
# NCCL loads libibverbs from the image, and uses TCP between nodes without it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends git g++ make ninja-build libibverbs1 ibverbs-providers rdma-core \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 farfield
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /farfield
COPY requirements.txt constraints.txt ./

FROM base AS cpu
# requirements.txt takes any build of its torch: the one that is there stays.
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install -c constraints.txt -r requirements.txt

FROM cpu AS test
COPY requirements-dev.txt requirements-eval.txt ./
RUN pip install -c constraints.txt -r requirements-dev.txt
RUN apt-get update \
    && apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge \
    && rm -rf /var/lib/apt/lists/*
COPY --chown=farfield . .
USER farfield
RUN ruff check . && ruff format --check . && mypy
RUN OMP_NUM_THREADS=1 python -m pytest -n auto --dist worksteal -m "not slow"
# A SLURM's nodes start processes as their users, so its daemons are root's.
USER root
RUN OMP_NUM_THREADS=1 python -m pytest tests/cluster

# Last, so that `docker build .` makes it.
FROM base AS train
RUN pip install -c constraints.txt -r requirements.txt
COPY --chown=farfield . .
USER farfield
ENTRYPOINT ["python", "/farfield/deepy.py"]
CMD ["--help"]
