# phasor on a CPU:
#   docker build --file docker/cpu.Dockerfile --tag phasor .
#   docker run --rm phasor doctor
#   docker run --rm --volume "$PWD:/work" phasor train dates
#   docker run --rm --volume "$PWD:/work" --publish 8000:8000 phasor serve MODEL --host 0.0.0.0
FROM python:3.13-slim
# torch.compile and the kernels for weights in 8 and 4 bits are compiled where they run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# Alone and first: it is large, and stays in the cache while phasor changes.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch>=2.11,<2.16"
WORKDIR /opt/phasor
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[grammar,hub,lab,parquet,serve,train]"
RUN useradd --create-home phasor \
    && install --directory --owner phasor /work
USER phasor
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["phasor"]
CMD ["--help"]
