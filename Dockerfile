# The worker, and the fencepost command. PostgreSQL and Temporal are elsewhere: see docker-compose.yml.
#
# A worker that is told to stop (SIGTERM) hands its running work over for limits.drain_grace_seconds, 10 by default:
# give it more than that before it is killed (docker stop --timeout 30; stop_grace_period in compose;
# terminationGracePeriodSeconds in Kubernetes). A worker that is killed loses nothing; its sessions go on elsewhere
# a little later. Run it with an init process (docker run --init) that clears away what tools leave behind.

FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/fencepost
ENV PATH=/opt/fencepost/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements-worker.lock ./
RUN pip install --require-hashes --requirement requirements-worker.lock
COPY pyproject.toml README.md LICENSE worker.py ./
COPY fencepost fencepost
COPY workflows workflows
COPY activities activities
RUN pip install --no-deps --no-build-isolation .

FROM python:3.13-slim
# git, since agents work in checkouts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home fencepost \
    && install --directory --owner fencepost --group fencepost /workspace
COPY --from=build /opt/fencepost /opt/fencepost
# Safe path: a worker.py or a folder of the same name in the workspace must not be taken for ours.
ENV PATH=/opt/fencepost/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 FENCEPOST_LOG_FORMAT=json
USER fencepost
WORKDIR /workspace
STOPSIGNAL SIGTERM
CMD ["python", "-m", "worker"]
