# The worker, and the fencepost command. PostgreSQL and Temporal are elsewhere: see docker-compose.yml.
#
# A worker that is told to stop (SIGTERM) hands its running work over for limits.drain_grace_seconds, 10 by default:
# give it more than that before it is killed (docker stop --timeout 30; stop_grace_period in compose;
# terminationGracePeriodSeconds in Kubernetes). A worker that is killed loses nothing; its sessions go on elsewhere
# a little later. The health file is fresh while PostgreSQL and Temporal answer: good to tell whether a worker is ready,
# and no reason to kill it, since it waits for a service that is away.

FROM python:3.13-slim-trixie AS build
WORKDIR /src
# Its packages are put there by the pip of the base image, so that neither pip nor setuptools comes along.
RUN python -m venv --without-pip /opt/fencepost
ENV PIP_PYTHON=/opt/fencepost/bin/python PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements-worker.lock ./
RUN pip install --only-binary :all: --require-hashes --requirement requirements-worker.lock
COPY pyproject.toml README.md LICENSE worker.py ./
COPY fencepost fencepost
COPY workflows workflows
COPY activities activities
RUN pip install --no-deps --no-build-isolation . && pip uninstall --yes setuptools

FROM python:3.13-slim-trixie
# git, since agents work in checkouts; tini, which clears away the processes that tools leave behind.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home fencepost \
    && install --directory --owner fencepost --group fencepost /workspace /var/lib/fencepost
COPY --from=build /opt/fencepost /opt/fencepost
# Safe path: a worker.py or a folder of the same name in the workspace must not be taken for ours.
ENV PATH=/opt/fencepost/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
    FENCEPOST_HOME=/var/lib/fencepost FENCEPOST_LOG_FORMAT=json
USER fencepost
WORKDIR /workspace
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "worker", "--health-file", "/tmp/fencepost-worker"]
