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
        # pip prefers 2.13.0+cpu of this index to PyPI's 2.13.0, and the step `packages` keeps it.
        cpu-torch) install_python --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt \
            "$(grep '^torch==' requirements.txt)" ;;
        packages) install_python -c constraints.txt -r requirements.txt ;;
        test-packages) install_python -c constraints.txt -r requirements-dev.txt ;;
        slurm) install_debian slurmctld slurmd slurm-client munge ;;
        *) echo "error: image.sh: unknown step $step; steps: system, cpu-torch, packages, test-packages, slurm" >&2; exit 2 ;;
    esac
done
