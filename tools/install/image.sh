#!/bin/sh
# Steps that install the images, as root, in the folder of the project: sh tools/install/image.sh STEP…
# Dockerfile and apptainer.def share them, and tools/install/try_bare_roots.py runs them without either.
set -eu
cd "$(dirname "$0")/../.."

install_debian() {
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
    rm -rf /var/lib/apt/lists/*
}

install_python() {
    python3 -m pip install --quiet --no-cache-dir --disable-pip-version-check --root-user-action=ignore "$@"
}

for step in "$@"; do
    echo "image.sh: $step"
    case $step in
        # NCCL loads libibverbs from the image, and uses TCP between nodes without it.
        system) install_debian git g++ make ninja-build libibverbs1 ibverbs-providers rdma-core ;;
        # requirements.txt takes any build of its torch: the one that is there stays.
        cpu-torch) install_python --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.txt)" ;;
        packages) install_python -c constraints.txt -r requirements.txt ;;
        test-packages) install_python -c constraints.txt -r requirements-dev.txt ;;
        slurm) install_debian slurmctld slurmd slurm-client munge ;;
        *) echo "error: image.sh: unknown step $step; steps: system, cpu-torch, packages, test-packages, slurm" >&2; exit 2 ;;
    esac
done
