# Images with all packages, in versions that constraints.txt pins, and a user who is not root.
#
#   docker build -t farfield .                 for GPUs: PyPI's torch brings its CUDA libraries, the host the driver
#   docker build --target test .               the CPU build, with the quick tests and a SLURM of two nodes
#   docker run --gpus all -v /scratch:/scratch farfield train 125M cdape_kerple_log … save=/scratch/runs/a
#
# Clusters have Apptainer instead: apptainer.def. Both share the steps of tools/install/image.sh.

FROM python:3.12.11-slim-bookworm AS base
RUN useradd --create-home --uid 1000 farfield
# WORKDIR makes a folder of root's, and runs write into it.
WORKDIR /farfield
RUN chown farfield /farfield
ENV PYTHONUNBUFFERED=1
COPY requirements.txt constraints.txt ./
COPY tools/install/image.sh tools/install/
RUN sh tools/install/image.sh system

FROM base AS test
COPY requirements-dev.txt requirements-eval.txt ./
RUN sh tools/install/image.sh cpu-torch packages test-packages slurm
COPY --chown=farfield . .
USER farfield
RUN ruff check . && ruff format --check . && mypy
RUN OMP_NUM_THREADS=1 python -m pytest -n auto --dist worksteal -m "not slow"
# A SLURM's nodes start processes as their users, so its daemons are root's.
USER root
RUN OMP_NUM_THREADS=1 python -m pytest tests/cluster

# Last, so that `docker build .` makes it.
FROM base AS train
RUN sh tools/install/image.sh packages
COPY --chown=farfield . .
USER farfield
ENTRYPOINT ["python", "/farfield/deepy.py"]
CMD ["--help"]
