# policygrad on a CPU: docker build -t policygrad . && docker run --rm -v "$PWD/runs:/work/runs" policygrad train
FROM python:3.11-slim-bookworm

# bubblewrap: the sandbox of programs that are rewarded for running. g++: --learner.compile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes bubblewrap g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/policygrad
COPY pyproject.toml constraints.txt MANIFEST.in README.md LICENSE ./
COPY src src
ARG EXTRAS=math,lora,data,serve,proxy,mcp
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt ".[${EXTRAS}]"

RUN useradd --create-home --uid 1000 policygrad && mkdir /work && chown policygrad /work
USER 1000
WORKDIR /work
ENTRYPOINT ["policygrad"]
CMD ["train"]
