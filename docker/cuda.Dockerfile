# phasor on NVIDIA GPUs, of which the host has the driver and the NVIDIA Container Toolkit:
#   docker build --file docker/cuda.Dockerfile --tag phasor:cuda .
#   docker run --rm --gpus all phasor:cuda doctor
#   docker run --rm --gpus all --volume "$PWD:/work" --publish 8000:8000 phasor:cuda serve MODEL --host 0.0.0.0
FROM python:3.13-slim
# Triton compiles its launchers, and torch.compile what it leaves on the CPU, where they run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ \
    && rm -rf /var/lib/apt/lists/*
# PyPI's torch brings the libraries of CUDA and Triton along.
RUN pip install --no-cache-dir "torch>=2.11,<2.16"
WORKDIR /opt/phasor
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[grammar,hub,lab,parquet,serve,train]"
RUN useradd --create-home phasor \
    && install --directory --owner phasor /work
USER phasor
WORKDIR /work
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
ENTRYPOINT ["phasor"]
CMD ["--help"]
