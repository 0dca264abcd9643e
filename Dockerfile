# The course in a container: Python, the system's libraries and every package at a fixed version, on any machine.
#
#   docker build -t vramlab .
#   docker run --rm -it --gpus all --shm-size 8g -p 8888:8888 vramlab          (without a GPU: leave out --gpus all)
#   docker run --rm vramlab python -m pytest -q tests
#
# The driver is the host's: `--gpus` needs NVIDIA's Container Toolkit there. To fix the base image for good, give its
# digest: --build-arg BASE=python:3.11-slim@sha256:… ; NVIDIA's own images (nvcr.io/nvidia/pytorch) bring another torch.
# The Python of CI, whose package versions constraints.txt holds.
ARG BASE=python:3.11-slim
FROM ${BASE}

# git, for the set-up cells; make, for the Makefile; g++, because torch.compile needs a compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git g++ make \
    && rm -rf /var/lib/apt/lists/*

# PyPI's torch brings its CUDA libraries along. For a small image without CUDA give the address of PyTorch's CPU wheels:
# --build-arg PIP_FLAGS="--extra-index-url …"
ARG PIP_FLAGS=""
RUN useradd --create-home student
WORKDIR /home/student/course
COPY --chown=student . .
RUN pip install --no-cache-dir ${PIP_FLAGS} -c constraints.txt -e '.[course,lab,site,test]'

USER student
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "notebooks"]
