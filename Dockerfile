# The tutorials with everything in them, for a class on machines where nobody is root: CPU only.
#
#   podman build -t ddp-tutorials .                                   # or docker; a few minutes, once
#   podman run --rm -it --shm-size=1g -p 127.0.0.1:8888:8888 ddp-tutorials
#
# With a Slurm of four nodes to practise on (`make slurm-lab`), whose root is that of the container:
#
#   podman build --target slurm-lab -t ddp-slurm-lab .
#   podman run --rm -it --privileged ddp-slurm-lab
#
# JupyterLab then says on which address it can be opened. Students' copies are in tutorials/my-work, runs in runs/: give --volume for
# what shall outlive the container. The process in it is not root.

# The base is taken by its digest; dependabot proposes newer ones.
FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS base
# Versions of Debian's packages are those of the base's release.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git less make openssh-client procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash student
# The build of torch without CUDA: a tenth of the size.
ENV TORCH=cpu \
    PIP_NO_CACHE_DIR=1
USER 1000
WORKDIR /home/student/tutorials

FROM base AS tutorials
# What set-up needs comes first: a change of a notebook does not install everything anew.
COPY --chown=1000:1000 pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY --chown=1000:1000 ddp_common ddp_common
COPY --chown=1000:1000 dask_ranks dask_ranks
RUN make setup
COPY --chown=1000:1000 . .
EXPOSE 8888
CMD [".venv/bin/python", "tutorials/lab.py", "--no-browser", "--ip=0.0.0.0", "--port=8888"]

FROM tutorials AS slurm-lab
USER 0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends hostname iproute2 mariadb-server munge slurm-wlm slurmdbd \
    && rm -rf /var/lib/apt/lists/*
CMD ["make", "slurm-lab"]

# What is built unless a target is named
FROM tutorials
