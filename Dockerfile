# The images of spotune. serve-vllm is serve with vLLM, for causal models on GPUs; vLLM needs an older PyTorch.
#
#   docker build --target operator --tag spotune/operator:0.1.0 .
#   docker build --target trainer --tag spotune/trainer:0.1.0 .
#   docker build --target serve --tag spotune/serve:0.1.0 .
#   docker build --target serve-vllm --tag spotune/serve-vllm:0.1.0 .
#
# What changes least lies lowest: a change of the code makes one layer of a megabyte anew, so a node that has the last
# version's image pulls that alone. PyTorch brings CUDA; the driver is the node's, let in by NVIDIA's container toolkit.
#
# Two builds on the same base have the same bytes, so a layer that did not change keeps its digest: all files get one
# time (buildah's --timestamp, BuildKit's SOURCE_DATE_EPOCH with rewrite-timestamp), bytecode has no times in it, and
# there are no logs. `make images-reproducible` builds one twice.
#
# The bases may be any Debian with Python 3.11 and its venv module; a release names them by digest.
ARG PYTHON_BASE=python:3.11-slim-bookworm
ARG OPERATOR_BASE=${PYTHON_BASE}
ARG TRAINER_BASE=${PYTHON_BASE}

# What they are made with, and lists of what is in them, hashes included; none of the tools is in the images.
FROM ${PYTHON_BASE} AS tools
COPY constraints /constraints
RUN python3 -m venv /tools \
    && /tools/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement /constraints/build.txt
# A pin ends with the first line without a backslash. The operator does without the Kubernetes client, which is twice all
# others: it serves the commands of a terminal, the operator has its own.
RUN mkdir /packages /sbom \
    && sed '/^kubernetes==/,/[^\\]$/d' /constraints/operator.txt > /packages/operator.txt \
    && sed --quiet --regexp-extended '/^(torch|triton|nvidia-|cuda-)/,/[^\\]$/p' /constraints/serve.txt > /packages/torch.txt \
    && sed --quiet --regexp-extended '/^(torch|triton|nvidia-|cuda-)/,/[^\\]$/p' /constraints/serve-vllm.txt > /packages/torch-vllm.txt \
    && cp /constraints/serve.txt /constraints/serve-vllm.txt /constraints/trainer.txt /packages \
    && for image in operator serve serve-vllm trainer; do \
         /tools/bin/cyclonedx-py requirements /packages/$image.txt --output-reproducible --output-file /sbom/$image.cdx.json || exit 1; \
       done
COPY images /images

FROM tools AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY client client
COPY operator operator
COPY serve serve
COPY trainer trainer
RUN /tools/bin/hatchling build --target wheel --directory /wheel

FROM ${OPERATOR_BASE} AS operator
ENV PATH=/opt/spotune/bin:$PATH PYTHONDONTWRITEBYTECODE=1 UV_NO_CACHE=1
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    --mount=type=bind,from=tools,source=/packages/operator.txt,target=/tmp/packages.txt \
    python3 -m venv --without-pip /opt/spotune \
    && sh /images/install.sh --require-hashes --requirements /tmp/packages.txt
COPY --from=tools /sbom/operator.cdx.json /opt/spotune/sbom.cdx.json
COPY --from=wheel /wheel /wheel
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    sh /images/install.sh /wheel/*.whl
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="spotune operator" \
      org.opencontainers.image.description="Makes Ray clusters on spot nodes of FinetuneJobs, and keeps them training" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
CMD ["spotune", "operator"]

# What all images with PyTorch share. The day of the user's password is that of SOURCE_DATE_EPOCH.
FROM ${TRAINER_BASE} AS gpu
ARG SOURCE_DATE_EPOCH=1580601600
ENV PATH=/opt/spotune/bin:$PATH UV_NO_CACHE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Ray and PyTorch ask for the name of the user that they run as; KubeRay's probes and Ray ask for curl and ps, and
# torch.compile and Triton for a C compiler, and for Python's headers, which are part of the base.
RUN useradd --uid 1000 --create-home trainer \
    && apt-get update --quiet --quiet \
    && apt-get install --quiet --quiet --yes --no-install-recommends ca-certificates curl gcc libc6-dev procps wget > /dev/null \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/ldconfig/aux-cache \
    && python3 -m venv --without-pip /opt/spotune

# PyTorch and CUDA, nine tenths of it all, change with PyTorch alone. A node that trains and serves pulls them once.
FROM gpu AS pytorch
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    --mount=type=bind,from=tools,source=/packages/torch.txt,target=/tmp/packages.txt \
    sh /images/install.sh --require-hashes --requirements /tmp/packages.txt

FROM pytorch AS trainer
# Reads code of the user (training.codeFrom.git).
RUN apt-get update --quiet --quiet \
    && apt-get install --quiet --quiet --yes --no-install-recommends git openssh-client > /dev/null \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/ldconfig/aux-cache
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    --mount=type=bind,from=tools,source=/packages/trainer.txt,target=/tmp/packages.txt \
    sh /images/install.sh --require-hashes --requirements /tmp/packages.txt
COPY --from=tools /sbom/trainer.cdx.json /opt/spotune/sbom.cdx.json
COPY --from=wheel /wheel /wheel
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    sh /images/install.sh /wheel/*.whl
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="spotune trainer" \
      org.opencontainers.image.description="Finetunes language models with Ray and DeepSpeed, through the loss of any node" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 1000:1000
CMD ["spotune", "--help"]

FROM pytorch AS serve
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    --mount=type=bind,from=tools,source=/packages/serve.txt,target=/tmp/packages.txt \
    sh /images/install.sh --require-hashes --requirements /tmp/packages.txt
COPY --from=tools /sbom/serve.cdx.json /opt/spotune/sbom.cdx.json
COPY --from=wheel /wheel /wheel
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    sh /images/install.sh /wheel/*.whl
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="spotune serve" \
      org.opencontainers.image.description="Serves language models with OpenAI's API and Ray Serve, through the loss of any replica" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 1000:1000
CMD ["spotune", "serve", "--help"]

FROM gpu AS serve-vllm
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    --mount=type=bind,from=tools,source=/packages/torch-vllm.txt,target=/tmp/packages.txt \
    sh /images/install.sh --require-hashes --requirements /tmp/packages.txt
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    --mount=type=bind,from=tools,source=/packages/serve-vllm.txt,target=/tmp/packages.txt \
    sh /images/install.sh --require-hashes --requirements /tmp/packages.txt
COPY --from=tools /sbom/serve-vllm.cdx.json /opt/spotune/sbom.cdx.json
COPY --from=wheel /wheel /wheel
RUN --mount=type=bind,from=tools,source=/tools/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,from=tools,source=/images,target=/images \
    sh /images/install.sh /wheel/*.whl
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="spotune serve-vllm" \
      org.opencontainers.image.description="Serves language models with OpenAI's API, Ray Serve and vLLM, through the loss of any replica" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 1000:1000
CMD ["spotune", "serve", "--help"]
